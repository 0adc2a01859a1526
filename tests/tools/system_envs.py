"""Environments that check the engine from inside, used as `env.id: system_envs:NAME` in tests of whole processes."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class WrongAnswer(RuntimeError):
    pass


class Echo(gym.Env):
    """The observation is an id no other instance has, [id, episode, step]; anything but the answer 3 * id + 1 raises.

    Reward: 1000 * id + step. Episodes go round `lengths`, ended in turn by termination and truncation.
    """

    made = 0

    def __init__(self, folder: str, lengths=(7,), jitter_us: float = 0.0, actions: int = 256):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self.id, self.actions = self._claim(folder), actions
        self.lengths, self.jitter_us = list(lengths), jitter_us
        self.episode, self.t = -1, 0
        self.rng = np.random.default_rng(self.id)

    @staticmethod
    def _claim(folder: str) -> int:
        number = 0
        while True:
            try:
                os.close(
                    os.open(
                        os.path.join(folder, f"id-{number}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY
                    )
                )
                return number
            except FileExistsError:
                number += 1

    def _observe(self):
        return np.array([self.id, self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action):
        if int(action) != (3 * self.id + 1) % self.actions:
            raise WrongAnswer(
                f"environment {self.id} got {action}, not {(3 * self.id + 1) % self.actions}"
            )
        if self.jitter_us:
            time.sleep(self.rng.uniform(0, self.jitter_us) * 1e-6)
        self.t += 1
        over = self.t >= self.lengths[self.episode % len(self.lengths)]
        ends = (over and self.episode % 2 == 0, over and self.episode % 2 == 1)
        return self._observe(), 1000.0 * self.id + self.t, *ends, {}


class Counted(gym.Env):
    """Five steps; the action must equal the step (a counting policy's state): 0, 1, 2, 3, 4, ended in both ways in turn.

    `reset_at`: {instance: step at which its first episode ends instead}.
    """

    made = 0

    def __init__(self, length: int = 5, reset_at: dict | None = None, strict: bool = True):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(512)
        self.length, self.strict = length, strict
        self.first_length = (reset_at or {}).get(str(Counted.made), length)
        self.episode, self.t = -1, 0
        Counted.made += 1

    def _observe(self):
        return np.array([self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action):
        if self.strict and int(action) != self.t:
            raise WrongAnswer(f"episode {self.episode}, step {self.t}: action {action}")
        self.t += 1
        over = self.t >= (self.first_length if self.episode == 0 else self.length)
        return (
            self._observe(),
            float(action),
            over and self.episode % 2 == 0,
            over and self.episode % 2 == 1,
            {},
        )


class Paced(gym.Env):
    """Never ends; `sleep_s` before each answer; every step is logged with its monotonic time if `log` is a folder."""

    def __init__(
        self,
        sleep_s: float = 0.0,
        slow: int = 0,
        slow_s: float = 1.0,
        log: str | None = None,
        folder: str | None = None,
    ):
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Discrete(256)
        number = Echo._claim(folder) if folder else 0
        self.sleep_s = slow_s if number < slow else sleep_s
        self.log = open(os.path.join(log, f"{number}.txt"), "a") if log else None  # noqa: SIM115

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        asked = time.monotonic()
        time.sleep(self.sleep_s)
        if self.log is not None:
            print(f"{asked:.6f}", file=self.log, flush=True)
        return np.zeros(3, np.float32), 0.0, False, False, {}


class Big(gym.Env):
    """uint8 [64, 64]: entry (r, c) of step t is (r + c + t) mod 256, as a step counter that weighs 4 KiB."""

    def __init__(self):
        self.observation_space = spaces.Box(0, 255, (64, 64), np.uint8)
        self.action_space = spaces.Discrete(2)
        self.base, self.t = np.add.outer(np.arange(64), np.arange(64)), 0

    def _observe(self):
        return ((self.base + self.t) % 256).astype(np.uint8)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        return self._observe(), float(self.t), self.t == 50, False, {}
