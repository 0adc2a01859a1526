"""First priorities from the values that acted: against a loop over one row after the other; exponents that move over the run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.config import Config
from seedrl.spec import BEST_VALUE, TAKEN_VALUE
from seedrl.store.blocks import BlockLayout, BlockStorage, UnrollRule
from seedrl.store.initial import ActingPriorities
from seedrl.store.selectors import Prioritized, Schedule
from tests.tools.counting_store import ACTIONS, SPEC

SETTINGS = {"replay": {"mode": "prioritized", "capacity": 1000, "initial_priority": "acting"}}


def naive(best, taken, reward, terminated, truncated, first, gamma, n, eta) -> float:
    """One unroll, rows in Gymnasium's order; targets of at most n rewards."""
    errors, count = [], len(best) - 1
    for t in range(count):
        if first[t + 1]:
            continue  # row t was an episode's last
        target, k = 0.0, t
        while True:
            target += gamma ** (k - t) * reward[k + 1]
            over = terminated[k + 1] or truncated[k + 1] or (k + 2 <= count and first[k + 2])
            if over or k + 1 - t == n or k + 1 == count:
                break
            k += 1
        if not terminated[k + 1]:
            target += gamma ** (k + 1 - t) * best[k + 1]
        errors.append(abs(target - taken[t]))
    return eta * max(errors) + (1 - eta) * sum(errors) / len(errors) if errors else 0.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 4), st.integers(0, 3))
def test_a_first_priority_is_the_error_of_the_values_that_acted(
    seed: int, n: int, burn_in: int
) -> None:
    rng, rule = np.random.default_rng(seed), UnrollRule(6, burn_in, 5, 6)
    extras = {BEST_VALUE: (torch.float32, ()), TAKEN_VALUE: (torch.float32, ())}
    layout = BlockLayout.of(SPEC, ACTIONS, [], 12, rule, extras)
    storage = BlockStorage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    rows = layout.num_rows
    flags = np.zeros((rows, 4), np.uint8)
    ended = rng.random(rows) < 0.2
    which = rng.random(rows) < 0.5
    flags[:, 2] = np.r_[False, ended[:-1]]
    flags[:, 0], flags[:, 1] = ended & which & (flags[:, 2] == 0), ended & ~which & (flags[:, 2] == 0)  # fmt: skip
    columns = {
        "obs/observation": np.zeros((rows, 3)), "action/action": np.zeros(rows, np.int64), "reward": rng.normal(size=rows) * 3,
        "flags": flags, "log_prob": np.zeros(rows), "value": np.zeros(rows), "version": np.zeros(rows, np.int64),
        f"extra/{BEST_VALUE}": rng.normal(size=rows), f"extra/{TAKEN_VALUE}": rng.normal(size=rows),
    }  # fmt: skip
    storage.write(np.arange(rows), columns)
    config = Config.model_validate(SETTINGS | {
        "algorithm": {"name": "dqn", "gamma": 0.9, "n_step": n}, "learner": {"unroll_length": 6, "burn_in": burn_in},
        "env": {"reward_scale": 0.5, "reward_clip": 1.0},
    })  # fmt: skip
    index = rng.integers(0, rows - rule.num_rows, 5)[:, None] + np.arange(rule.num_rows)
    found = ActingPriorities(storage, config)(index)
    reward = np.clip(columns["reward"].astype(np.float32) * 0.5, -1, 1)
    for priority, at in zip(found, index[:, burn_in:], strict=True):
        parts = (columns[f"extra/{BEST_VALUE}"], columns[f"extra/{TAKEN_VALUE}"], reward, *flags.T[:3])  # fmt: skip
        expected = naive(*(part[at] for part in parts), 0.9, n, config.algorithm.priority_mix)
        assert priority == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_exponents_move_evenly_over_the_run() -> None:
    selector = Prioritized(8, 0, Schedule(0.4, 0.8), Schedule(0.4, 1.0), False)
    numbers, priorities = np.arange(4), np.array([1.0, 2.0, 4.0, 8.0])
    selector.insert(numbers, priorities)
    selector.remove(np.array([2]))
    for share, alpha, beta in ((0.0, 0.4, 0.4), (0.5, 0.6, 0.7), (1.0, 0.8, 1.0), (2.0, 0.8, 1.0)):
        selector.set_progress(share)
        assert (selector.alpha, selector.beta) == pytest.approx((alpha, beta))
        expected = priorities**alpha * (numbers != 2)
        assert selector.tree.priorities(numbers) == pytest.approx(expected)
        assert selector.tree.total == pytest.approx(expected.sum())
    other = Prioritized(8, 1, Schedule(0.4, 0.8), Schedule(0.4, 1.0), False)
    other.load_state(selector.state())
    other.set_progress(2.0)  # the learner says how far it is before it draws
    for mine, theirs in zip(selector.draw(16, 0, 4), other.draw(16, 0, 4), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_an_exponent_that_began_at_nothing_still_knows_the_priorities() -> None:
    selector = Prioritized(4, 0, Schedule(0.0, 1.0), Schedule(0.0), False)
    selector.insert(np.arange(3), np.array([1.0, 5.0, 2.0]))
    assert selector.tree.priorities(np.arange(4)).tolist() == [1.0, 1.0, 1.0, 0.0]
    selector.set_progress(1.0)
    assert selector.tree.priorities(np.arange(4)).tolist() == [1.0, 5.0, 2.0, 0.0]
