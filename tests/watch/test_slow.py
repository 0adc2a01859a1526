"""Slow batches are said with their stages, the worst of them, and not too often."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness import Harness
from runs import settings
from seedrl.watch.slow import SlowBatches


def line(ingest: float, forward: float, answer: float, append: float, cpu: float, rows: int) -> np.ndarray:  # fmt: skip
    """A line of the board; milliseconds."""
    times = 10**9 + np.cumsum([0, ingest, forward, answer, append]) * 1e6
    found = np.zeros(16, np.int64)
    found[:9] = 10**9 - 1, *times, cpu * 1e6, rows, 1
    return found


def test_the_worst_is_said_and_others_are_counted() -> None:
    said, now = [], 100.0
    slow = SlowBatches(50, said.append, lambda: now)
    slow.look(np.stack([line(1, 20, 1, 1, 23, 8)] * 5))
    slow.look(np.zeros((0, 16), np.int64))
    assert said == []
    slow.look(np.stack([line(1, 20, 1, 1, 23, 8), line(2, 80, 3, 15, 60, 64)]))
    assert said == ["slow batch: 100.0 ms for 64 rows: ingest 2.0, forward 80.0, answer 3.0, append 15.0 ms, of which descheduled 40.0 ms"]  # fmt: skip
    now = 105.0
    slow.look(np.stack([line(1, 60, 1, 1, 63, 8), line(1, 70, 1, 1, 73, 16), line(1, 90, 1, 1, 93, 24)]))  # fmt: skip
    assert len(said) == 1
    now = 110.5
    slow.look(np.stack([line(1, 65, 1, 1, 68, 8)]))
    assert len(said) == 2 and "93.0 ms for 24 rows" in said[1] and said[1].endswith("the worst of 4")  # fmt: skip


def test_a_run_says_it(tmp_path: Path) -> None:
    config = settings("CartPole-v1", policy={"name": "system_policies:slow_to_act"}, engine={"slow_batch_ms": 9.0}, learner={"batch_size": 4})  # fmt: skip
    with Harness(config, tmp_path, num_slots=8) as run:
        run.begin()
        run.sample(4)
        run.wait_for(lambda: any(text.startswith("slow batch: ") for text in run.said))
        assert sum(text.startswith("slow batch: ") for text in run.said) == 1
