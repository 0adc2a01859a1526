"""Queue mode against published unrolls and a plain model: what a counting environment wrote must come out whole, in order, once."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.store.blocks import BlockLayout, UnrollRule
from seedrl.store.queue import queue_blocks
from tests.tools.counting_store import ACTIONS, SPEC
from tests.tools.counting_store import CountingStore as Bench


def test_case_10_unrolls_overlap_by_one_row() -> None:
    bench = Bench(slots=1, unroll=3, burn_in=0, length=3, batch=1)
    begins = []
    for _ in range(13):
        assert not bench.writer.held_back(np.array([0]))
        bench.append(np.array([0]))
        batch = bench.reader.sample(1, timeout_s=0)
        if batch is not None:
            begins.append(batch.obs["observation"][:, 0, 2].tolist())
    assert begins == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [9, 10, 11, 12]]


FAMILIES = json.loads((Path(__file__).parents[1] / "cases" / "algorithms.json").read_text())[
    "families"
]


@pytest.mark.parametrize("case", FAMILIES["unroll_assembly"], ids=lambda case: case["name"])
def test_unrolls_are_those_of_the_published_case(case) -> None:
    """Rows carry the case's values; what comes out after each event is compared, and the row whose state is stored."""
    given_, right = (
        case["inputs"],
        {unroll["after_event"]: unroll for unroll in case["expected"]["unrolls"]},
    )
    burn_in, unroll = given_["burn_in"], given_["unroll_length"]
    bench = Bench(given_["num_envs"], unroll, burn_in, 1, batch=1)
    values: dict[tuple[int, int, int], int] = {}  # (slot, run, number of the row in it) -> value
    runs: dict[int, int] = {}
    for number, (slot, run_id, value) in enumerate(given_["events"]):
        if runs.setdefault(slot, run_id) != run_id:
            bench.discard(np.array([slot]))
            runs[slot] = run_id
        assert not bench.writer.held_back(np.array([slot]))
        values[slot, int(bench.run[slot]), int(bench.count[slot])] = value
        bench.append(np.array([slot]))
        batch = bench.reader.sample(1, timeout_s=0)
        assert (batch is not None) == (number in right), number
        if batch is None:
            continue
        rows = batch.obs["observation"][:, 0].long().tolist()
        expected = right[number]
        padding = (
            burn_in - expected["burn_in_rows"]
        )  # the run's first row, again and again, before there are enough
        assert rows[:padding] == [rows[padding]] * padding
        assert [values[tuple(row)] for row in rows[padding:]] == expected["rows"]
        assert int(batch.state[0][0, 0]) == rows[0][2] == expected["first_row_index_in_run"]
        assert rows[0][0] == expected["env"]


def test_case_11_the_stored_state_is_that_of_the_unrolls_own_first_row() -> None:
    bench = Bench(slots=1, unroll=100, burn_in=40, length=20, batch=1)
    states = []
    for _ in range(301):
        assert not bench.writer.held_back(np.array([0]))
        bench.append(np.array([0]))
        batch = bench.reader.sample(1, timeout_s=0)
        if batch is not None:
            bench.check(batch)
            states.append(batch.state[0][0, 0].item())
    assert states == [0, 60, 160]


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(1, 7), st.integers(0, 9), st.integers(1, 9), st.integers(1, 7)),
    st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.integers(0, 1 << 30), st.integers(0, 4),
)  # fmt: skip
def test_nothing_is_lost_doubled_or_mixed_whatever_the_order_of_appends_and_deaths(
    rule, slots, batch, extra, seed, history
) -> None:
    random = Random(seed)
    unroll, burn_in, length, stride = rule
    stride = min(stride, unroll)
    bench = Bench(
        slots, unroll, burn_in, length, batch, extra, stride=stride, history=history, episode=random.choice([None, 1, 3, 8])
    )  # fmt: skip
    acted = stored = dropped = 0
    seen: list[tuple[int, int, int]] = []
    for _ in range(200):
        some = np.array(sorted(random.sample(range(slots), random.randint(1, slots))))
        if random.random() < 0.1:
            dropped += bench.discard(some)
        elif not bench.writer.held_back(some):
            stored += bench.append(some)
            acted += some.size
        else:  # back-pressure: the learner must be able to go on
            sampled = bench.reader.sample(batch, timeout_s=0)
            assert sampled is not None, "engine and learner wait for each other"
            seen += bench.check(sampled)
            continue
        if random.random() < 0.3 and (sampled := bench.reader.sample(batch, timeout_s=0)):
            seen += bench.check(sampled)
    dropped += bench.discard(np.arange(slots))
    while (sampled := bench.reader.sample(1, timeout_s=0)) is not None:
        seen += bench.check(sampled)
    assert acted == stored + dropped
    assert len(seen) * stride == stored
    assert len(set(seen)) == len(seen)
    for slot, run, begin in seen:  # contiguous per slot and run
        assert begin == 0 or (slot, run, begin - stride) in set(seen)
    bench.writer._collect()
    assert sorted(bench.writer._appender.free) == list(range(bench.writer._layout.num_blocks)), (
        "every block came back"
    )


def test_no_sampled_row_is_older_than_max_lag_and_the_others_are_counted() -> None:
    bench = Bench(slots=2, unroll=2, burn_in=0, length=2, batch=1, extra=20, max_lag=4)
    both = np.array([0, 1])
    for version in range(10):
        bench.version = version
        for _ in range(2):
            assert not bench.writer.held_back(both)
            bench.append(both)
    bench.reader.publish_version(9)
    lags = []
    while (batch := bench.reader.sample(1, timeout_s=0)) is not None:
        lags.append(int(9 - batch.version.min()))
    accounts = bench.reader.accounts()
    assert lags and max(lags) <= 4
    assert accounts["stale_rows"] + accounts["learned_rows"] == 2 * 9 * 2
    assert accounts["stale_rows"] == 2 * 5 * 2  # unrolls begun at versions 0 to 4


@settings(deadline=None, max_examples=60)
@given(
    unroll=st.integers(1, 6),
    groups=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    steps=st.integers(0, 40),
    seed=st.integers(0, 1 << 20),
)
def test_unrolls_come_to_their_end_although_a_worker_serves_its_groups_in_turn(
    unroll: int, groups: list[int], steps: int, seed: int
) -> None:
    """`groups`: how many each worker has. A worker waits for the answer to one group before it goes to its next."""
    random, worker = Random(seed), np.repeat(np.arange(len(groups)), groups)
    bench = Bench(slots=worker.size, unroll=unroll, burn_in=0, length=unroll, batch=1, extra=400)
    slots = np.arange(worker.size)
    asking = np.ones(worker.size, bool)
    turn = np.array([np.flatnonzero(worker == w)[0] for w in range(len(groups))])

    def move(may_be_answered: np.ndarray) -> bool:
        """An engine that answers some of those that ask, a worker that goes on where it can."""
        ready = slots[asking & may_be_answered]
        for slot in ready[[random.random() < 0.7 for _ in ready]].tolist():
            bench.append(np.array([slot]))
            asking[slot] = False
        stuck = not ready.size
        for w in range(len(groups)):
            if not asking[turn[w]]:
                stuck, asking[turn[w]] = False, True
                mine = slots[worker == w]
                turn[w] = mine[(np.searchsorted(mine, turn[w]) + 1) % mine.size]
        return not stuck

    everyone = np.ones(worker.size, bool)
    for _ in range(steps):
        move(everyone)
    while (left := bench.writer.unfinished(slots, worker)).any():
        assert move(left), (bench.count, asking, turn)
    assert (((bench.count - 1) % unroll == 0) | (bench.count == 0)).all()
    assert bench.count.sum() <= steps * worker.size + 2 * unroll * worker.size


def test_no_room_until_the_learner_has_consumed() -> None:
    bench = Bench(slots=1, unroll=4, burn_in=0, length=4, batch=1)
    slot = np.array([0])
    appended = 0
    while not bench.writer.held_back(slot):
        bench.append(slot)
        appended += 1
    assert appended == bench.writer._layout.num_blocks * 4
    assert bench.reader.sample(1, timeout_s=0) is not None
    assert not bench.writer.held_back(slot)


@pytest.mark.parametrize("burn_in", [0, 4])
def test_the_memory_is_what_the_formula_says(burn_in: int) -> None:
    rule = UnrollRule(8, burn_in, 4, 8)
    layout = BlockLayout.of(SPEC, ACTIONS, [torch.zeros(1, 2)], queue_blocks(rule, 3, 2), rule)
    per_row = (
        3 * 8 + 8 + 4 + 4 + 4 + 4 + 8
    )  # observation, action, reward, flags, log_prob, value, version
    blocks = 3 * ((8 + burn_in) // 4 + 1) + 2 * (2 + burn_in // 4 + 1)
    assert sum(layout.bytes_by_leaf().values()) == blocks * (4 * per_row + 2 * 4)
