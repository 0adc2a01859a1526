"""Environments that cost nothing, or as much as they are told to, for measuring everything else: `seedrl bench`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

EPISODE_STEPS = 200
_PICTURES = 4  # that a seat's observations go round in


def pictures(space: spaces.Box, *lead: int) -> np.ndarray:
    """Observations to go round in: [4, *lead, ...]."""
    rng, shape = np.random.default_rng(0), (_PICTURES, *lead, *space.shape)
    whole = space.dtype == np.uint8
    pool = rng.integers(0, 256, shape) if whole else rng.standard_normal(shape)
    return pool.astype(space.dtype)


def burn(busy_ns: int) -> None:
    """This thread's own time: workers that share a core do not step at once."""
    end = time.thread_time_ns() + busy_ns
    while time.thread_time_ns() < end:
        pass


class Synthetic(VectorEnv[Any, Any, Any]):
    """Rows out of a small pool, six actions, the action as reward; all episodes have 200 steps and end together.

    Args: space: of one seat's observation. step_us: processor time that one seat's step burns.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, space: spaces.Box, num_envs: int, step_us: float) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = space, spaces.Discrete(6)
        self.observation_space = batch_space(space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._pool = pictures(space, num_envs)
        self._nobody, self._all = np.zeros(num_envs, bool), np.ones(num_envs, bool)
        self._nothing = np.zeros(num_envs)
        self._busy_ns, self._t = int(step_us * 1e3) * num_envs, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._t = 0
        return self._pool[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._busy_ns:
            burn(self._busy_ns)
        self._t = (self._t + 1) % (EPISODE_STEPS + 1)
        over = self._all if self._t == EPISODE_STEPS else self._nobody
        reward = actions if self._t else self._nothing  # the row after the last one is a reset
        return self._pool[self._t % _PICTURES], reward, self._nobody, over, {}


def flat(num_envs: int = 1, step_us: float = 0.0) -> Synthetic:
    """float32 [8]: workloads S and L."""
    return Synthetic(spaces.Box(-np.inf, np.inf, (8,), np.float32), num_envs, step_us)


def frames(num_envs: int = 1, step_us: float = 0.0) -> Synthetic:
    """uint8 [4, 84, 84]: workload A."""
    return Synthetic(spaces.Box(0, 255, (4, 84, 84), np.uint8), num_envs, step_us)
