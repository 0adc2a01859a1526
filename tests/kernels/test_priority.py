"""Draws by priority: kernel, twin, the store's sum tree and a model of the kernel's steps give the same places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csrc_free_kernels import build, priority
from csrc_free_kernels.philox import random_words
from csrc_free_kernels.priority import (
    CHUNK,
    MAX_CHUNKS,
    draw_places,
    empty,
    launch_draw_places,
    launch_set_priorities,
    set_priorities,
)
from seedrl.errors import ShapeError
from seedrl.store.sum_tree import SumTree, importance_weights

CPU = torch.device("cpu")
CAPACITIES = st.sampled_from([1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17, 9 * CHUNK])
SEED = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def few_threads(on_host: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a block's threads are real ones: fewer of them suffice."""
    monkeypatch.setattr(priority, "THREADS", 4)


def _model_tree(leaves: np.ndarray, width: int) -> list[float]:
    """The kernel's heap, node by node."""
    nodes = [0.0] * width + [*map(float, leaves)] + [0.0] * (width - len(leaves))
    for i in range(width - 1, 0, -1):
        nodes[i] = nodes[2 * i] + nodes[2 * i + 1]
    return nodes


def _model_descend(nodes: list[float], width: int, left: float) -> tuple[int, float]:
    at = 1
    while at < width:
        at *= 2
        if left >= nodes[at] and nodes[at + 1] > 0:
            left -= nodes[at]
            at += 1
    return at - width, left


def _model_draw(priorities: np.ndarray, uniform: np.ndarray) -> list[int]:
    """The kernel's steps, one after the other."""
    chunks = [priorities[i : i + CHUNK] for i in range(0, len(priorities), CHUNK)]
    sums = np.array([_model_tree(chunk, CHUNK)[1] for chunk in chunks])
    width, places = 1 << (len(chunks) - 1).bit_length(), []
    top = _model_tree(sums, width)
    for i, u in enumerate(uniform):
        chunk, left = _model_descend(top, width, (i + u) / len(uniform) * top[1])
        within, _ = _model_descend(_model_tree(chunks[chunk], CHUNK), CHUNK, left)
        places.append(chunk * CHUNK + within)
    return places


def _uniform(count: int, seed: int, step: int) -> np.ndarray:
    counters = torch.tensor(
        [[i, 2**31, step, step >> 32] for i in range(count)], dtype=torch.int64
    ).view(-1, 4)
    words = random_words(counters, seed).numpy()
    return ((words[:, 0] >> 5) * 2.0**26 + (words[:, 1] >> 6)) / 2.0**53


def _filled(capacity: int, seed: int) -> tuple[Tensor, Tensor, np.random.Generator]:
    """Priorities over six orders of magnitude, many of them 0."""
    rng = np.random.default_rng(seed)
    priorities, sums = empty(capacity, CPU)
    values = 10 ** rng.uniform(-3, 3, capacity) * (rng.random(capacity) < 0.7)
    set_priorities(priorities, sums, torch.arange(capacity), torch.from_numpy(values).float())
    return priorities, sums, rng


@settings(max_examples=12)
@given(capacity=CAPACITIES, count=st.integers(0, 8), seed=SEED)
def test_kernel_twin_tree_and_model_draw_the_same_places(
    capacity: int, count: int, seed: int
) -> None:
    priorities, sums, rng = _filled(capacity, seed)
    priorities[int(rng.integers(capacity))] += 1.0  # at least one can be drawn
    set_priorities(priorities, sums, torch.arange(capacity), priorities.clone())
    step, key = int(rng.integers(2**40)), int(rng.integers(2**63))
    given = (priorities, sums, count, key, torch.tensor([step]), capacity, 0.6)
    ours, theirs = launch_draw_places(*given), draw_places(*given)
    assert torch.equal(ours.places, theirs.places)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-6, atol=0)
    uniform = _uniform(count, key, step)
    assert ours.places.tolist() == _model_draw(priorities.numpy(), uniform)
    if count:
        tree = SumTree(capacity)
        tree.set(np.arange(capacity), priorities.double().numpy())
        right = tree.draw((np.arange(count) + uniform) / count)
        assert ours.places.tolist() == right.tolist()
        assert (priorities[ours.places] > 0).all()
        weights = importance_weights(tree.priorities(right) / tree.total, capacity, 0.6)
        np.testing.assert_allclose(ours.weights, weights, rtol=1e-6)
        raw = launch_draw_places(*given, over_batch=False).weights
        np.testing.assert_allclose(raw, importance_weights(tree.priorities(right) / tree.total, capacity, 0.6, 1.0), rtol=1e-6)  # fmt: skip


@settings(max_examples=20)
@given(capacity=CAPACITIES, count=st.integers(0, 12), seed=SEED)
def test_kernel_and_twin_leave_the_same_priorities_and_sums(
    capacity: int, count: int, seed: int
) -> None:
    priorities, sums, rng = _filled(capacity, seed)
    # twice the same places, and some that are not there
    places = torch.from_numpy(rng.choice([-1, capacity, *rng.integers(0, capacity, 3)], count))
    values = torch.from_numpy(rng.normal(1, 1, count)).float()
    right = priorities.clone()
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        if 0 <= place < capacity:
            right[place] = max(value, 0.0)
    twin, twin_sums = priorities.clone(), sums.clone()
    launch_set_priorities(priorities, sums, places, values)
    set_priorities(twin, twin_sums, places, values)
    assert torch.equal(priorities, right) and torch.equal(twin, right)
    model = [_model_tree(right[i : i + CHUNK].numpy(), CHUNK)[1] for i in range(0, capacity, CHUNK)]
    assert sums.tolist() == model and twin_sums.tolist() == model


def test_what_is_no_priority_poisons_no_sum() -> None:
    values = torch.tensor([np.nan, -1.0, np.inf, 2.0])
    for set_them in (launch_set_priorities, set_priorities):
        priorities, sums = empty(5, CPU)
        set_them(priorities, sums, torch.arange(4), values)
        assert priorities.tolist() == [0, 0, torch.finfo(torch.float32).max, 2, 0]
        assert sums.isfinite().all()


def test_draws_are_stratified_and_in_proportion() -> None:
    priorities, sums = empty(4, CPU)
    set_priorities(priorities, sums, torch.arange(4), torch.tensor([1.0, 0.0, 2.0, 5.0]))
    for draw in (launch_draw_places, draw_places):
        got = draw(priorities, sums, 80, 1, torch.tensor([0]), 3, 1.0)
        assert torch.bincount(got.places, minlength=4).tolist() == [10, 0, 20, 50]
        assert got.weights.unique().tolist() == pytest.approx([0.2, 0.5, 1.0])


def test_nothing_to_draw_has_no_weight() -> None:
    for draw in (launch_draw_places, draw_places):
        got = draw(*empty(2000, CPU), 3, 1, torch.tensor([0]), 3, 0.5)
        assert got.places.tolist() == [0, 0, 0] and got.weights.tolist() == [0, 0, 0]


def test_a_whole_block_of_threads_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    priorities, sums, _ = _filled(2 * CHUNK, 0)
    given = (priorities, sums, 2, 1, torch.tensor([3]), 5, 0.5)
    few = launch_draw_places(*given)
    monkeypatch.setattr(priority, "THREADS", 256)
    whole = launch_draw_places(*given)
    assert torch.equal(few.places, whole.places) and torch.equal(few.weights, whole.weights)


def test_sums_do_not_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    priorities, sums, rng = _filled(CHUNK + 7, 1)
    for _ in range(300):
        places = torch.from_numpy(rng.integers(0, CHUNK + 7, 16))
        set_priorities(priorities, sums, places, torch.from_numpy(10 ** rng.uniform(-3, 3, 16)).float())  # fmt: skip
    fresh, right = empty(CHUNK + 7, CPU)
    set_priorities(fresh, right, torch.arange(CHUNK + 7), priorities)
    assert torch.equal(sums, right)


def test_arguments_that_do_not_fit_are_named() -> None:
    priorities, sums = empty(10, CPU)
    one = torch.zeros(1, dtype=torch.int64)
    for set_them in (launch_set_priorities, set_priorities):
        with pytest.raises(ShapeError, match="sums"):
            set_them(priorities, sums[:0], one, torch.ones(1))
        with pytest.raises(ShapeError, match="values"):
            set_them(priorities, sums, one, torch.ones(2))
        with pytest.raises(ShapeError, match="priorities has 2097153 places; it must have 1 to 2097152"):  # fmt: skip
            set_them(*empty(CHUNK * MAX_CHUNKS + 1, CPU), one, torch.ones(1))
        with pytest.raises(ShapeError, match="priorities has 0 places"):
            set_them(*empty(0, CPU), one, torch.ones(1))
    with pytest.raises(build.ArgumentError, match="values is float64; it must be float32"):
        launch_set_priorities(priorities, sums, one, torch.ones(1).double())
    with pytest.raises(build.ArgumentError, match="step is int32"):
        launch_draw_places(priorities, sums, 1, 0, one.int(), 1, 1.0)
