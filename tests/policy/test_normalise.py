"""Running moments against NumPy's over all that was seen; the policy behind them; and that they travel with the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import a_batch
from seedrl.config import Config
from seedrl.errors import ConfigError
from seedrl.learn.algorithm import Network
from seedrl.policy.agent import make_agent
from seedrl.policy.normalise import LIMIT, Moments
from seedrl.spec import EnvSpec, spec_from_spaces

BOX = spaces.Box(np.float32([-1, 0, -500, 0]), np.float32([1, 9, 500, 1]))


def a_spec(observation: spaces.Space[Any] = BOX) -> EnvSpec:
    return spec_from_spaces(observation, spaces.Discrete(3), action_mask=None, stats=(), env_id="none")  # fmt: skip


def a_config(**sections: Any) -> Config:
    more = {"policy": {"normalise_observations": True}, "algorithm": {"normalise_returns": True}}
    return Config.model_validate(more | sections)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([(), (3,), (2, 2)]), st.integers(0, 999), st.floats(-1e5, 1e5))  # fmt: skip
def test_moments_of_batches_are_those_of_all_together(
    sizes: list[int], shape: tuple[int, ...], seed: int, offset: float
) -> None:
    rng, moments = np.random.default_rng(seed), Moments(shape)
    parts = [rng.normal(offset, 3, (size, *shape)).astype(np.float32) for size in sizes]
    for part in parts:
        moments.update(torch.from_numpy(part))
    whole = np.concatenate(parts).astype(np.float64)
    if len(whole):
        np.testing.assert_allclose(moments.centre, whole.mean(0), rtol=1e-6)
        deviation = np.maximum(whole.std(0), 1e-4)
        np.testing.assert_allclose(moments.scale, deviation, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(moments.inverse, 1 / moments.scale.numpy(), rtol=1e-5)
    else:
        assert (moments.scale == 1).all() and (moments.centre == 0).all()


def test_the_policy_sees_normalised_observations_and_gives_values_in_the_rewards_unit() -> None:
    torch.manual_seed(0)
    policy, _ = make_agent(a_config(), a_spec())
    seen = torch.randn(1000, 4) * torch.tensor([1.0, 5.0, 100.0, 0.0]) + torch.tensor([0.0, 3.0, -7.0, 2.0])  # fmt: skip
    returns = torch.randn(1000) * 40 + 300
    policy.observe({"observation": seen}, returns)  # type: ignore[operator]
    inner: Any = policy.policy
    obs = torch.stack([seen.mean(0), seen.mean(0) + 2 * seen.std(0, correction=0), seen.mean(0) + 1e6]).unsqueeze(0)  # fmt: skip
    first = torch.zeros(1, 3, dtype=torch.bool)
    expected = torch.tensor([[0.0, 0, 0, 0], [2, 2, 2, 0], [LIMIT] * 4]).unsqueeze(0)
    inputs, value, _ = policy(obs, (), first)
    plain, raw, _ = inner(expected, (), first)  # as it was rescaled
    torch.testing.assert_close(inputs, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(value, raw * returns.std(correction=0) + returns.mean(), rtol=1e-4, atol=1e-2)  # fmt: skip


def test_the_learner_sees_rewards_and_values_in_the_unit_of_the_deviation() -> None:
    torch.manual_seed(0)
    config = a_config(learner={"batch_size": 16, "burn_in": 2})
    policy, heads = make_agent(config, a_spec())
    network, batch = Network(policy, heads, config, a_spec()), a_batch(9, 16)
    batch = batch._replace(reward=batch.reward * 50)
    _, before = network.over_unrolls(batch)
    assert torch.equal(network.normalised(batch).reward, batch.reward)  # nothing was seen yet
    network.observe(batch)
    moments: Any = policy.returns
    rows = batch.obs["observation"][2:-1].reshape(-1, 4)
    torch.testing.assert_close(policy.moments["observation"].centre, rows.mean(0))  # type: ignore[union-attr]
    returns = []  # lambda-returns with lambda 1, by a loop
    for b in range(16):
        after, part = batch.value[8, b].item(), []
        for t in reversed(range(2, 8)):
            if batch.first[t + 1, b]:
                after = batch.value[t, b].item()
                continue
            keep = 0.0 if batch.terminated[t + 1, b] else 0.99
            after = batch.reward[t + 1, b].item() + keep * after
            part.append(after)
        returns += part
    assert moments.count.item() == len(returns)
    assert moments.centre.item() == pytest.approx(np.mean(returns), rel=1e-4)
    assert moments.scale.item() == pytest.approx(np.std(returns), rel=1e-4)
    seen = network.normalised(batch)
    torch.testing.assert_close(seen.reward, batch.reward / moments.scale)
    torch.testing.assert_close(seen.value, batch.value / moments.scale)
    inner: Any = policy.policy
    warmed = (batch.obs["observation"][2:] - policy.moments["observation"].centre) * policy.moments["observation"].inverse  # type: ignore[union-attr]  # fmt: skip
    raw = inner(warmed.clamp(-LIMIT, LIMIT), (), batch.first[2:])[1]
    _, values = network.over_unrolls(batch)
    torch.testing.assert_close(values, raw + moments.centre / moments.scale, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, values)


@pytest.mark.parametrize("separate", [False, True])
def test_values_stay_what_they_were_when_the_moments_of_returns_move(separate: bool) -> None:
    torch.manual_seed(1)
    config = a_config(policy={"separate_value": separate})
    policy, _ = make_agent(config, a_spec())
    obs, first = torch.randn(1, 7, 4), torch.zeros(1, 7, dtype=torch.bool)
    inputs, value, _ = policy(obs, (), first)
    for offset in (100.0, -5.0):
        policy.observe({}, torch.randn(50) * 30 + offset)  # type: ignore[operator]
        now = policy(obs, (), first)
        assert torch.equal(now[0], inputs)
        torch.testing.assert_close(now[1], value, rtol=1e-4, atol=1e-3)
    assert policy.returns.scale > 20  # type: ignore[union-attr]


def test_moments_lie_in_the_weights() -> None:
    config = a_config()
    (one, _), (other, _) = (make_agent(config, a_spec()) for _ in range(2))
    one.observe({"observation": torch.randn(100, 4) * 9}, torch.randn(100) * 5 + 2)  # type: ignore[operator]
    other.load_state_dict(one.state_dict())
    obs, first = torch.randn(1, 5, 4), torch.zeros(1, 5, dtype=torch.bool)
    for mine, theirs in zip(one(obs, (), first)[:2], other(obs, (), first)[:2], strict=True):
        assert torch.equal(mine, theirs)
    assert not [name for name, _ in one.named_parameters() if "moments" in name]


@pytest.mark.parametrize(("config", "observation", "said"), [
    ({"policy": {"normalise_observations": True}}, spaces.Box(0, 255, (9, 9), np.uint8), "no leaf of the observation is a box of floats"),
    ({"policy": {"normalise_observations": True}}, spaces.Discrete(4), "no leaf of the observation is a box of floats"),
])  # fmt: skip
def test_nothing_to_normalise_is_refused(
    config: dict[str, Any], observation: spaces.Space[Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_agent(Config.model_validate(config), a_spec(observation))


def test_returns_of_q_learning_are_refused() -> None:
    with pytest.raises(ConfigError, match="target network of dqn"):
        Config.model_validate({"algorithm": {"name": "dqn", "normalise_returns": True}, "replay": {"mode": "uniform", "capacity": 100}})  # fmt: skip


def test_only_boxes_of_floats_of_several_leaves_are_normalised() -> None:
    space = spaces.Dict({"x": BOX, "image": spaces.Box(0, 255, (3,), np.uint8), "kind": spaces.Discrete(3)})  # fmt: skip
    policy, _ = make_agent(a_config(), a_spec(space))
    assert list(policy.moments) == ["observation/x"]  # type: ignore[union-attr]
    obs = {"observation.x": torch.randn(1, 2, 4), "observation.image": torch.zeros(1, 2, 3, dtype=torch.uint8), "observation.kind": torch.ones(1, 2, dtype=torch.int64)}  # fmt: skip
    before = policy(obs, (), torch.zeros(1, 2, dtype=torch.bool))[0]
    policy.observe({name: leaf[0] for name, leaf in obs.items()}, torch.zeros(2))  # type: ignore[operator]
    assert not torch.allclose(before, policy(obs, (), torch.zeros(1, 2, dtype=torch.bool))[0])
