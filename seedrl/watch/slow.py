"""Slow batches, said with all their stages: the worst one at most every ten seconds, and how many there were."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from seedrl.store.board import APPENDED_NS, BEGIN_NS, CPU_NS, ENGINE_STAGES, ROWS, STAGES

_EVERY_S = 10.0


class SlowBatches:
    """Args: limit_ms: what is longer is slow. say: takes a line. clock: monotonic, in seconds."""

    def __init__(
        self, limit_ms: float, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._limit_ns, self._say, self._clock = limit_ms * 1e6, say, clock
        self._said_s, self._count = -_EVERY_S, 0
        self._worst: np.ndarray | None = None

    def look(self, lines: np.ndarray) -> None:
        """Lines of batches, int64 [n, 16], as of the board."""
        took = lines[:, APPENDED_NS] - lines[:, BEGIN_NS]
        slow = int(np.count_nonzero(took > self._limit_ns))
        if slow:
            worst = lines[int(took.argmax())]
            self._count += slow
            if self._worst is None or _took(worst) > _took(self._worst):
                self._worst = worst
        if self._worst is not None and self._clock() - self._said_s >= _EVERY_S:
            stages = ", ".join(f"{name} {(self._worst[end] - self._worst[begin]) * 1e-6:.1f}" for name, (begin, end) in STAGES.items() if name in ENGINE_STAGES)  # fmt: skip
            away = max(0, _took(self._worst) - int(self._worst[CPU_NS])) * 1e-6
            more = f"; the worst of {self._count}" if self._count > 1 else ""
            self._say(
                f"slow batch: {_took(self._worst) * 1e-6:.1f} ms for {self._worst[ROWS]} rows: {stages} ms, of which descheduled {away:.1f} ms{more}"
            )
            self._said_s, self._count, self._worst = self._clock(), 0, None


def _took(line: np.ndarray) -> int:
    return int(line[APPENDED_NS] - line[BEGIN_NS])
