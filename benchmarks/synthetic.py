"""Environments that cost nothing, for measuring everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


class Still(VectorEnv):
    """`num_envs` seats with the observation float32 [8] and six actions; an episode has 200 steps, and all end together."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 32) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-1, 1, (8,), np.float32)
        self.single_action_space = spaces.Discrete(6)
        self.observation_space = spaces.Box(-1, 1, (num_envs, 8), np.float32)
        self.action_space = spaces.MultiDiscrete([6] * num_envs)
        self._obs = np.full((num_envs, 8), 0.5, np.float32)
        self._zeros, self._nobody = np.zeros(num_envs, np.float32), np.zeros(num_envs, bool)
        self._all, self._t = np.ones(num_envs, bool), 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._t = 0
        return self._obs, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._t += 1
        if self._t == 201:
            self._t = 0
        over = self._all if self._t == 200 else self._nobody
        return self._obs, self._zeros, over, self._nobody, {}
