"""Q-learning on sequences: the loss against a naive loop over rows, weights, priorities, masks, the target network, and learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from batches import ACTIONS, a_batch
from seedrl.config import Config
from seedrl.learn.algorithm import Network
from seedrl.learn.r2d2 import QLearning
from seedrl.policy.agent import make_agent
from seedrl.spec import spec_from_spaces
from seedrl.store.batch import Batch

SPEC = spec_from_spaces(spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(ACTIONS), stats=(), env_id="none")  # fmt: skip


def an_algorithm(core: str = "none", burn_in: int = 0, **fields: Any) -> QLearning:
    config = Config.model_validate({
        "policy": {"hidden": [8], "core": core, "core_size": 6}, "learner": {"burn_in": burn_in},
        "algorithm": {"name": "r2d2", "gamma": 0.9, **fields}, "replay": {"mode": "prioritized", "capacity": 9999},
    })  # fmt: skip
    torch.manual_seed(1)
    policy, heads = make_agent(config, SPEC)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5).add_(torch.randn_like(parameter) * 0.3)
    return QLearning(Network(policy, heads, config, SPEC), config)


def moved(algorithm: QLearning) -> None:
    """The network that learns is another than the target."""
    with torch.no_grad():
        for parameter in algorithm.network.policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)


def h(x: float, eps: float) -> float:
    return float(np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + eps * x)


def h_inverse(y: float, eps: float) -> float:
    """By bisection: the function rises."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle, eps) < y else (low, middle)
    return low


def naive(
    algorithm: QLearning, batch: Batch, burn_in: int, n: int, eps: float | None, double: bool
) -> tuple[float, list[float]]:
    """Row by row, in float64: the loss, and the priorities."""
    tables = []
    for network in (algorithm.network.policy, algorithm.target.policy):
        with torch.no_grad():
            obs = batch.obs["observation"]
            state = batch.state
            if burn_in:
                _, _, state = network(obs[:burn_in], state, batch.first[:burn_in])
            q, _, _ = network(obs[burn_in:], state, batch.first[burn_in:])
        tables.append(q.double().numpy())
    online, target = tables
    legal = np.ones_like(online, bool) if batch.mask is None else batch.mask[burn_in:].numpy() > 0
    rows, columns, _ = online.shape
    losses, count, priorities = 0.0, 0, []
    for b in range(columns):
        first, terminated, truncated, reward = (
            leaf[burn_in:, b].numpy() for leaf in (batch.first, batch.terminated, batch.truncated, batch.reward)
        )  # fmt: skip
        errors = []
        for t in range(rows - 1):
            if first[t + 1]:
                continue
            total, discount, at = 0.0, 1.0, t
            while True:
                at += 1
                total += discount * float(reward[at])
                discount *= 0.9
                if terminated[at] or truncated[at] or at + 1 == rows or first[at + 1] or at - t == n:  # fmt: skip
                    break
            if not terminated[at]:
                choose = online if double else target
                best = max(range(ACTIONS), key=lambda a: choose[at, b, a] if legal[at, b, a] else -np.inf)  # fmt: skip
                value = target[at, b, best]
                total += discount * (value if eps is None else h_inverse(value, eps))
            goal = total if eps is None else h(total, eps)
            errors.append(goal - online[t, b, int(batch.actions["action"][burn_in + t, b])])
        weight = 1.0 if batch.weights is None else float(batch.weights[b])
        losses += weight * sum(0.5 * error**2 for error in errors)
        count += len(errors)
        sizes = np.abs(errors) if errors else np.zeros(1)
        priorities.append(0.9 * sizes.max() + 0.1 * sizes.mean())
    return losses / count, priorities


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize(("core", "burn_in", "n"), [("none", 0, 1), ("lstm", 3, 3), ("gru", 2, 5)])
def test_the_loss_and_the_priorities_are_those_of_a_naive_loop(
    core: str, burn_in: int, n: int, eps: float | None, double: bool
) -> None:
    algorithm = an_algorithm(core, burn_in, n_step=n, value_rescale=eps, double=double)
    states = tuple(torch.randn(5, 6) for _ in range({"none": 0, "gru": 1, "lstm": 2}[core]))
    batch = a_batch(12, 5, seed=n, state=states)
    mask = torch.ones(12, 5, ACTIONS, dtype=torch.uint8)
    mask[..., 0] = torch.rand(12, 5) < 0.5
    batch = batch._replace(mask=mask, weights=torch.rand(5) + 0.1)
    next(algorithm.losses(batch))  # the target network is the one that learns
    moved(algorithm)
    loss = next(algorithm.losses(batch))
    right, priorities = naive(algorithm, batch, burn_in, n, eps, double)
    assert float(loss.total.detach()) == pytest.approx(right, rel=2e-4)
    assert loss.priorities is not None
    np.testing.assert_allclose(loss.priorities.numpy(), priorities, rtol=2e-4)


def test_the_target_network_is_renewed_after_so_many_updates_and_has_no_gradient() -> None:
    algorithm = an_algorithm(target_period=3)
    batch, gaps = a_batch(6, 4), []
    for _ in range(7):
        loss = next(algorithm.losses(batch))
        loss.total.backward()
        moved(algorithm)
        pairs = zip(algorithm.network.policy.parameters(), algorithm.target.policy.parameters(), strict=True)  # fmt: skip
        gaps.append(sum(float((one - other).detach().abs().sum()) for one, other in pairs))
    assert gaps[0] < gaps[1] < gaps[2] and gaps[3] < gaps[2] and gaps[6] < gaps[5]
    assert all(parameter.grad is None for parameter in algorithm.target.policy.parameters())


def test_the_target_network_and_its_age_go_into_the_checkpoint() -> None:
    one, other = an_algorithm(), an_algorithm()
    next(one.losses(a_batch(6, 4)))
    moved(one)
    next(one.losses(a_batch(6, 4)))
    for name, tensor in other.tensors().items():
        tensor.copy_(one.tensors()[name])
    assert int(other.updates) == 2
    for mine, its in zip(one.target.policy.parameters(), other.target.policy.parameters(), strict=True):  # fmt: skip
        assert torch.equal(mine, its)


def _chain(rng: np.random.Generator, rows: int = 9, unrolls: int = 32) -> Batch:
    """Rows of four states in a row: action 1 goes on, 0 ends with nothing, at the end 1 gives 1; a third one is never legal."""
    obs, reward = torch.zeros(rows, unrolls, 4), torch.zeros(rows, unrolls)
    terminated, first = (torch.zeros(rows, unrolls, dtype=torch.bool) for _ in range(2))
    action = torch.from_numpy(rng.integers(2, size=(rows, unrolls)))
    for b in range(unrolls):
        state, ended = int(rng.integers(4)), False
        for t in range(rows):
            if ended:
                state, ended, first[t, b] = int(rng.integers(4)), False, True
            elif t:
                went_on = int(action[t - 1, b]) == 1
                reward[t, b] = float(went_on and state == 3)
                ended = terminated[t, b] = not went_on or state == 3
                state = state + 1 if went_on and state < 3 else state
            obs[t, b, state] = 1.0
    mask = torch.tensor([1, 1, 0], dtype=torch.uint8).expand(rows, unrolls, ACTIONS)
    return a_batch(rows, unrolls)._replace(
        obs={"observation": obs}, actions={"action": action}, reward=reward, terminated=terminated, mask=mask,
        truncated=torch.zeros_like(terminated), first=first,
    )  # fmt: skip


def test_a_chains_values_are_learnt() -> None:
    """Q(s, 1) = 0.9^(3 - s) and Q(s, 0) = 0, whatever the illegal action's value came to."""
    algorithm = an_algorithm(n_step=1, target_period=20)
    optimizer = torch.optim.Adam(algorithm.network.policy.parameters(), lr=3e-3)
    rng = np.random.default_rng(0)
    batches = [_chain(rng) for _ in range(30)]
    for number in range(900):
        optimizer.zero_grad()
        next(algorithm.losses(batches[number % 30])).total.backward()
        optimizer.step()
    with torch.no_grad():
        q, _, _ = algorithm.network.policy(torch.eye(4).unsqueeze(1), (), torch.zeros(4, 1, dtype=torch.bool))  # fmt: skip
    right = [0.9 ** (3 - state) for state in range(4)]
    np.testing.assert_allclose(q[:, 0, 1].numpy(), right, atol=0.02)
    np.testing.assert_allclose(q[:, 0, 0].numpy(), 0.0, atol=0.02)
