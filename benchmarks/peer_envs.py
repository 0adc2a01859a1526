"""Environments that cost nothing, one object each, as all of the peers take them: workloads S and L, A, C."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from seedrl.synthetic import EPISODE_STEPS, burn, pictures


class Single(gymnasium.Env):  # type: ignore[misc]
    """Rows out of a small pool, six actions, the action as reward, episodes of 200 steps. Args: step_us: processor time a step burns."""

    def __init__(
        self, space: spaces.Box, step_us: float = 0.0, render_mode: str | None = None
    ) -> None:
        self.observation_space, self.action_space, self.render_mode = space, spaces.Discrete(6), render_mode  # fmt: skip
        self._pool, self._busy_ns, self._t = pictures(space), int(step_us * 1e3), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._t = 0
        return self._pool[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._busy_ns:
            burn(self._busy_ns)
        self._t += 1
        return (
            self._pool[self._t % len(self._pool)],
            float(action),
            False,
            self._t >= EPISODE_STEPS,
            {},
        )


def flat(step_us: float = 0.0) -> Single:
    """float32 [8]: workloads S and L."""
    return Single(spaces.Box(-np.inf, np.inf, (8,), np.float32), step_us)


def frames(step_us: float = 0.0) -> Single:
    """uint8 [4, 84, 84]: workload A."""
    return Single(spaces.Box(0, 255, (4, 84, 84), np.uint8), step_us)


def cartpole(step_us: float = 0.0) -> gymnasium.Env:
    """Workload C."""
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


MAKE = {"S": flat, "L": flat, "A": frames, "C": cartpole}
