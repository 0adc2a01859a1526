"""The firing rule as a function of numbers (BEHAVIOUR cases 2 to 5); `tests/system` shows it in whole processes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedrl.engine.batcher import Reason, Rule, choose, reason_to_fire, us_until_fire

RULE = Rule(max_batch=32, min_batch=4, max_wait_us=2000, hard_deadline_us=20_000)


@pytest.mark.parametrize(
    ("ready", "live", "waited_us", "reason"),
    [
        (0, 8, 1e9, None),
        (5, 8, 1999, None),
        (5, 8, 2000, Reason.WAIT),  # case 2: enough rows, the oldest waited long enough
        (3, 8, 2000, None),
        (3, 8, 19_999, None),
        (3, 8, 20_000, Reason.HARD_DEADLINE),  # fewer than min_batch are answered all the same
        (5, 5, 0, Reason.ALL_READY),  # case 3: waiting cannot help
        (1, 1, 0, Reason.ALL_READY),
        (32, 64, 0, Reason.FULL),
    ],
)
def test_fires_for_the_right_reason(
    ready: int, live: int, waited_us: float, reason: Reason | None
) -> None:
    assert reason_to_fire(ready, live, waited_us, RULE) == reason


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.floats(0, 30_000),
    st.integers(1, 40),
    st.integers(0, 30_000),
)
def test_what_is_ready_always_fires_by_the_time_announced(
    ready: int, live: int, waited_us: float, min_batch: int, max_wait_us: int
) -> None:
    rule = Rule(40, min_batch, max_wait_us, 20_000)
    left_us = us_until_fire(ready, waited_us, rule)
    assert left_us is not None and left_us <= 20_000
    assert reason_to_fire(ready, live, waited_us + left_us + 1e-6, rule) is not None


def test_a_whole_rule_waits_for_every_live_slot_without_end() -> None:
    rule = Rule(32, 1, 0, 0, whole=True)
    assert reason_to_fire(7, 8, 1e9, rule) is None
    assert us_until_fire(7, 1e9, rule) is None
    assert reason_to_fire(8, 8, 0, rule) == Reason.ALL_READY


def test_case_5_batches_of_at_most_max_batch_oldest_first_nobody_twice() -> None:
    published, sizes = np.array([50, 10, 30, 20, 40]), np.ones(5, np.int64)
    left, batches = np.arange(5), []
    while left.size:
        chosen = choose(published[left], sizes[left], 2)
        batches.append(sorted(published[left[chosen]].tolist()))
        left = np.delete(left, chosen)
    assert batches == [[10, 20], [30, 40], [50]]


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 8)), min_size=1, max_size=12),
    st.integers(8, 30),
)
def test_whole_groups_within_the_maximum_and_the_oldest_is_among_them(
    groups: list[tuple[int, int]], max_batch: int
) -> None:
    published, sizes = (np.array(column) for column in zip(*groups, strict=True))
    chosen = choose(published, sizes, max_batch)
    assert 1 <= chosen.size == np.unique(chosen).size
    assert sizes[chosen].sum() <= max_batch
    assert published[chosen].min() == published.min()
    passed_over = np.delete(np.arange(len(groups)), chosen)
    if passed_over.size:  # nobody younger went before somebody older
        assert published[chosen].max() <= published[passed_over].min()
