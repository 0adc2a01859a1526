"""Values of actions: the ladder of exploration against published ones, dueling against the paper's formula, draws against their shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from seedrl.config import Config
from seedrl.errors import ConfigError
from seedrl.policy.agent import make_agent
from seedrl.policy.numpy_step import NumpyChoice
from seedrl.policy.values import ValueHeads, epsilon_ladder, spread
from seedrl.spec import EnvSpec, spec_from_spaces

FAMILIES = json.loads((Path(__file__).parents[1] / "cases" / "algorithms.json").read_text())["families"]  # fmt: skip


def a_spec(action: spaces.Space[Any]) -> EnvSpec:
    return spec_from_spaces(spaces.Box(-1, 1, (3,)), action, action_mask=None, stats=(), env_id="none")  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES["epsilon_ladder"], ids=lambda case: case["name"])
def test_the_ladder_is_the_published_one(case: dict[str, Any]) -> None:
    given = case["inputs"]
    found = epsilon_ladder(given["base"], given["alpha"], given["num_envs"])
    np.testing.assert_allclose(found, case["expected"]["epsilons"], rtol=1e-5)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 32, 100, 256])
def test_the_first_few_slots_lie_all_over_the_ladder(num_slots: int) -> None:
    places = spread(num_slots)
    assert sorted(places.tolist()) == list(range(num_slots))
    for few in (4, 16, 64):
        if few < num_slots / 2:
            gaps = np.diff(np.sort(np.r_[places[:few], num_slots]))
            assert gaps.max() <= 3 * num_slots / few, (few, gaps)


@pytest.mark.parametrize("dueling", [False, True])
def test_values_are_those_of_the_dueling_formula(dueling: bool) -> None:
    config = Config.model_validate({
        "algorithm": {"name": "r2d2", "dueling": dueling}, "replay": {"mode": "uniform", "capacity": 999},
    })  # fmt: skip
    policy, heads = make_agent(config, a_spec(spaces.Discrete(4)), 8)
    assert isinstance(heads, ValueHeads) and heads.epsilon.shape == (8,)
    policy = policy.eval()
    obs, first = torch.randn(5, 2, 3), torch.zeros(5, 2, dtype=torch.bool)
    with torch.no_grad():
        q, best, _ = policy(obs, policy.initial_state(2), first)
        advantages, value, _ = policy.policy(obs, (), first)  # type: ignore[operator]
    right = advantages.numpy().copy()
    if dueling:
        for t in range(5):
            for b in range(2):
                right[t, b] = float(value[t, b]) + right[t, b] - right[t, b].mean()
    np.testing.assert_allclose(q.numpy(), right, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(best.numpy(), right.max(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("numpy", [False, True])
def test_a_slots_share_of_actions_is_random_and_its_probability_is_recorded(
    numpy: bool, masked: bool
) -> None:
    rows, epsilon = 40_000, np.array([0.0, 0.3, 1.0], np.float32)
    heads = ValueHeads(a_spec(spaces.Discrete(4)).action, epsilon, "dqn")
    q = np.tile(np.float32([0.1, 0.9, 0.3, 2.0]), (rows, 1))
    mask = np.tile(np.uint8([1, 1, 1, 0]), (rows, 1)) if masked else None
    legal, best = (3, 1) if masked else (4, 3)
    for slot, share in enumerate(epsilon):
        slots = np.full(rows, slot)
        if numpy:
            choice = NumpyChoice.of(heads, rows, 5)
            assert choice is not None
            action, log_prob = choice.sample(q, mask, None, slots)
        else:
            generator = torch.Generator().manual_seed(5)
            drawn, found = heads.sample(
                torch.from_numpy(q), None if mask is None else torch.from_numpy(mask), generator, torch.from_numpy(slots),
            )  # fmt: skip
            action, log_prob = drawn["action"].numpy(), found.numpy()
        right = np.zeros(4)
        right[:legal] = share / legal
        right[best] += 1 - share
        counts = np.bincount(action, minlength=4)
        assert not counts[right == 0].any()
        spread = np.sqrt(rows * right * (1 - right))
        assert (np.abs(counts - rows * right) <= 4 * spread + 1e-6 * rows).all(), (counts, right)
        np.testing.assert_allclose(np.exp(log_prob), right[action], rtol=1e-5)


def test_what_is_evaluated_is_played_by_the_best_action() -> None:
    heads = ValueHeads(a_spec(spaces.Discrete(3)).action, np.ones(10, np.float32), "dqn")
    choice = NumpyChoice.of(heads, 10, 0)
    assert choice is not None
    q = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    action, log_prob = choice.sample(q, None, np.arange(10), np.arange(10))
    assert action.tolist() == q.argmax(1).tolist() and not log_prob.any()


def test_another_action_than_one_choice_is_refused_by_name() -> None:
    config = Config.model_validate({"algorithm": {"name": "dqn"}, "replay": {"mode": "uniform", "capacity": 999}})  # fmt: skip
    with pytest.raises(ConfigError, match="dqn values one choice among n.*float32"):
        make_agent(config, a_spec(spaces.Box(-1, 1, (2,))))
