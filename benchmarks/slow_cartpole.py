"""CartPole whose step costs more: what a simulator does to both sides of a comparison."""

from __future__ import annotations

import time
from typing import Any

import gymnasium


class SlowCartPole(gymnasium.Wrapper):
    """`step_us` microseconds of a core more for each step, or of sleep with `sleep` (a simulator elsewhere)."""

    def __init__(self, env: gymnasium.Env, step_us: float, sleep: bool) -> None:
        super().__init__(env)
        self._step_s, self._sleep = step_us * 1e-6, sleep

    def step(self, action: Any) -> Any:
        if self._sleep:
            time.sleep(self._step_s)
        else:
            end = time.perf_counter() + self._step_s
            while time.perf_counter() < end:
                pass
        return self.env.step(action)


def make(step_us: float = 200.0, sleep: bool = False) -> gymnasium.Env:
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    return SlowCartPole(env, step_us, sleep) if step_us else env
