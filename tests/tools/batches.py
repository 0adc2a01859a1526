"""Batches of random rows, and a PPO over a small network for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from seedrl.config import Config
from seedrl.learn.algorithm import Network
from seedrl.learn.ppo import PPO
from seedrl.policy.base import Heads, make_policy
from seedrl.spec import EnvSpec, Leaf
from seedrl.store.batch import Batch

ACTIONS = 3


def _spec() -> EnvSpec:
    observation = Leaf("observation", "float32", (4,), "box", low=None, high=None, n=(), start=())
    action = Leaf("action", "int64", (), "discrete", n=(ACTIONS,), start=(0,))
    return EnvSpec(observation=(observation,), action=(action,), action_mask=None, mask_size=0, stats=(), env_id="none")  # fmt: skip


def a_ppo(core: str = "none", burn_in: int = 0, **section: Any) -> PPO:
    torch.manual_seed(3)
    config = Config.model_validate({
        "policy": {"hidden": [16], "core": core, "core_size": 8}, "algorithm": {"name": "ppo", **section},
        "learner": {"batch_size": 32, "burn_in": burn_in},
    })  # fmt: skip
    policy = make_policy(config.policy, _spec())
    return PPO(Network(policy, Heads(_spec().action), config, _spec()), config)


def a_batch(rows: int, unrolls: int, seed: int = 0, state: Any = ()) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, unrolls, generator=generator)

    def rare() -> Tensor:
        return torch.rand(rows, unrolls, generator=generator) < 0.15

    terminated, truncated = rare(), rare()
    ended = terminated | truncated
    first = torch.cat([torch.zeros(1, unrolls, dtype=torch.bool), ended[:-1]])
    nothing = torch.zeros(rows, unrolls, dtype=torch.bool)
    return Batch(
        obs={"observation": torch.randn(rows, unrolls, 4, generator=generator)}, mask=None,
        actions={"action": torch.randint(ACTIONS, (rows, unrolls), generator=generator)}, reward=normal(),
        terminated=terminated & ~first, truncated=truncated & ~first, first=first, interrupted=nothing,
        log_prob=-torch.rand(rows, unrolls, generator=generator) - 0.7, value=normal(),
        version=torch.full((rows, unrolls), 5), state=state, slots=torch.arange(unrolls),
        items=np.arange(unrolls), weights=None, extras={},
    )  # fmt: skip
