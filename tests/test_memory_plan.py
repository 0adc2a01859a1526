"""The memory that is told beforehand, against what is allocated and what the system then counts."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from runs import overrides, seedrl
from seedrl.config import load_config
from seedrl.memory_plan import rows_of
from seedrl.replay import ReplayStore
from seedrl.spec import spec_from_spaces


@pytest.mark.parametrize("config", ["cartpole", "cartpole_dqn", "repeat_previous_r2d2", "atari"])
def test_the_formulas_come_to_the_bytes_that_are_told(config: str) -> None:
    import re

    space = spaces.Box(0, 255, (4, 84, 84), np.uint8) if config == "atari" else spaces.Box(-1, 1, (4,))  # fmt: skip
    spec = spec_from_spaces(space, spaces.Discrete(6), stats=(), env_id="none")
    found, _ = rows_of(load_config(config, []), spec, 32)
    for what, formula, nbytes in found:
        if formula and "(" not in formula:
            numbers = [int(number) for number in re.findall(r"\d+", formula)]
            assert np.prod(numbers, dtype=object) == nbytes, what


def test_the_memory_of_a_full_store_is_that_of_the_formula_within_2_percent() -> None:
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    store = ReplayStore(
        spaces.Box(0, 255, (84, 84), np.uint8), spaces.Discrete(6), num_slots=16, capacity=40_000, unroll_length=20,
    )  # fmt: skip
    frames = np.ones((16, 84, 84), np.uint8)
    sizes = []
    for _ in range(10):  # flat over ten times its capacity
        for _ in range(2600):
            store.append(obs=frames, action=0, reward=0.0, terminated=False, truncated=False, first=False)  # fmt: skip
        sizes.append(process.memory_info().rss - before)
    told = store.stats()["nbytes"]
    assert abs(sizes[-1] - told) < 0.02 * told, (sizes, told)
    assert sizes[-1] - sizes[1] < 0.005 * told


def test_plan_tells_what_a_run_then_allocates(tmp_path: Path) -> None:
    more = overrides("CartPole-v1", {}, "evaluation.episodes=0", "run.max_seconds=1", "replay.capacity=5000", "replay.min_fill=500")  # fmt: skip
    code, told = seedrl("plan", "cartpole_dqn", *more, cwd=tmp_path)
    assert code == 0, told
    code, text = seedrl("train", "cartpole_dqn", *more, "--run-dir", "run", cwd=tmp_path)
    assert code == 0, text
    line = next(line for line in text.splitlines() if line.startswith("memory "))
    for leaf in ("obs/observation", "action/action", "reward", "version"):
        size = line.split(f"{leaf} ")[1].split(",")[0].rstrip(")")
        row = next(row for row in told.splitlines() if row.startswith(f"replay {leaf} "))
        assert row.endswith(size), (row, size)
    slab = next(row for row in told.splitlines() if row.startswith("slab"))
    assert slab.endswith(line.split("slab ")[1].split(",")[0])
