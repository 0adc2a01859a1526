"""The sum tree: published probabilities and weights, draws by chi-square, sums that stay right, priorities that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.errors import ConfigError
from seedrl.store.sum_tree import SumTree, importance_weights

FAMILIES = json.loads((Path(__file__).parents[1] / "cases" / "algorithms.json").read_text())["families"]  # fmt: skip
UPDATES = int(os.environ.get("SEEDRL_TREE_UPDATES", "300000"))


@pytest.mark.parametrize("case", FAMILIES["prioritized_sampling"], ids=lambda case: case["name"])
def test_probabilities_and_weights_equal_the_published_ones(case: dict[str, Any]) -> None:
    given, right = case["inputs"], case["expected"]
    raw = np.array(given["priorities"])
    count = raw.size
    tree = SumTree(count)
    tree.set(np.arange(count), raw ** given["alpha"])
    probabilities = tree.priorities(np.arange(count)) / tree.total
    np.testing.assert_allclose(probabilities, right["probabilities"], rtol=1e-12)
    drawn = probabilities[given["sampled_indices"]]
    for largest, name in (
        (1.0, "weights_of_sampled_unnormalised"),
        (None, "weights_of_sampled_over_batch_max"),
        ((count * probabilities[probabilities > 0].min()) ** -given["beta"], "weights_of_sampled_over_buffer_max"),
    ):  # fmt: skip
        np.testing.assert_allclose(
            importance_weights(drawn, count, given["beta"], largest), right[name], rtol=1e-12, err_msg=name
        )  # fmt: skip


@pytest.mark.parametrize("capacity", [1, 2, 3, 100, 257, 5000])
def test_draws_follow_the_priorities(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    tree, priorities = SumTree(capacity), rng.random(capacity) ** 3
    priorities[rng.random(capacity) < 0.2] = 0
    priorities[0] = 1.0
    tree.set(np.arange(capacity), priorities)
    drawn = np.zeros(capacity, np.int64)
    for _ in range(100):
        drawn += np.bincount(tree.draw(rng.random(10_000)), minlength=capacity)
    assert not drawn[priorities == 0].any() and drawn.size == capacity
    expected = 1e6 * priorities / priorities.sum()
    enough = expected > 20
    chi2 = ((drawn - expected)[enough] ** 2 / expected[enough]).sum()
    freedom = max(1, enough.sum() - 1)
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 10  # five deviations


@given(
    capacity=st.one_of(st.integers(1, 40), st.integers(60, 300)), seed=st.integers(0, 10_000), batches=st.integers(1, 20),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_a_naive_list_draws_the_same_places(capacity: int, seed: int, batches: int) -> None:
    rng = np.random.default_rng(seed)
    tree, naive = SumTree(capacity), [0.0] * capacity
    for _ in range(batches):
        places = rng.integers(0, capacity, rng.integers(1, 9))
        priorities = rng.integers(0, 5, places.size).astype(float)
        tree.set(places, priorities)
        for place, priority in zip(places.tolist(), priorities.tolist(), strict=True):
            naive[place] = priority
    assert tree.total == sum(naive) and tree.priorities(np.arange(capacity)).tolist() == naive
    if not sum(naive):
        with pytest.raises(ConfigError, match="above 0"):
            tree.draw(rng.random(3))
        return
    uniform = rng.random(50)
    right = []
    for u in uniform.tolist():
        left, place = u * sum(naive), 0
        while left >= naive[place]:
            left, place = left - naive[place], place + 1
        right.append(place)
    assert tree.draw(uniform).tolist() == right


def test_sums_are_right_after_any_number_of_updates() -> None:
    rng = np.random.default_rng(5)
    tree = SumTree(50_000)
    done = 0
    while done < UPDATES:
        places = rng.integers(0, 50_000, 1000)
        tree.set(places, rng.random(1000) * 10.0 ** rng.integers(-6, 7, 1000))
        done += 1000
    right = tree.priorities(np.arange(50_000)).sum()
    assert tree.total == pytest.approx(right, rel=1e-12)
    tree.set(np.arange(50_000), np.zeros(50_000))
    assert tree.total == 0, "what has no priority leaves nothing behind"


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_priority_that_cannot_be_is_named_and_changes_nothing(wrong: float) -> None:
    tree = SumTree(4)
    tree.set(np.arange(4), np.ones(4))
    with pytest.raises(ConfigError, match=f"place 2 is {wrong}"):
        tree.set(np.array([1, 2]), np.array([5.0, wrong]))
    assert tree.total == 4
