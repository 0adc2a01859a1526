"""Figures of the last seconds, and what limits throughput in them: from the board's counters and histograms, by the supervisor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from seedrl.metrics import Histogram
from seedrl.store.board import BLOCKED, COUNTERS, ENGINE_STAGES, STAGES, Board

_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p999": 99.9}
_EVERY_S, _KEPT = 1.0, 5
_HELD, _BUSY, _AWAY = 0.25, 0.7, 0.5  # shares from which one thing is said to be the limit


class _Mark(NamedTuple):
    time_s: float
    counters: dict[str, int]
    histograms: dict[str, Histogram]


class Shares(NamedTuple):
    """What `verdict` weighs, each a share of the window (`transport`: of a group's round from step to step)."""

    held: float  # acting is held by the learner
    engine: float  # the engine's thread is at a batch
    workers: float  # the workers are inside environments, on average
    transport: float  # between worker and engine, neither of them at work


def verdict(shares: Shares) -> tuple[str, str]:
    """(what limits throughput: learner, engine, environments, transport or nothing; the same in words)."""
    held, engine, workers, transport = shares
    if held >= _HELD:
        return (
            "learner",
            f"acting is held {held:.0%} of the time: rows come faster than they are learnt from",
        )
    if max(engine, workers) >= _BUSY:
        if engine > workers:
            return (
                "engine",
                f"the engine is at work {engine:.0%} of the time, the environments {workers:.0%}",
            )
        return (
            "environments",
            f"the workers are inside environments {workers:.0%} of the time, the engine is at work {engine:.0%}",
        )
    if transport >= _AWAY:
        return "transport", f"{transport:.0%} of a step's round is spent between worker and engine"
    if engine == workers == 0:
        return "nothing", "no batch was asked for"
    name = "engine" if engine > workers else "environments"
    return name, f"nothing is full: the engine is at work {engine:.0%} of the time, the environments {workers:.0%}"  # fmt: skip


class Window:
    """Args: board: whose histograms this process counts. clock: monotonic, in seconds."""

    def __init__(self, board: Board, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._marks: deque[_Mark] = deque([self._mark()], maxlen=_KEPT)

    def _mark(self) -> _Mark:
        board = self._board
        counters = {name: board.get(name) for name in COUNTERS}
        histograms = {name: histogram.copy() for name, histogram in board.histograms.items()}
        return _Mark(self._clock(), counters, histograms)

    def tick(self) -> None:
        """To be called often: remembers where the figures stood a second ago, and some seconds more."""
        if self._clock() - self._marks[-1].time_s >= _EVERY_S:
            self._marks.append(self._mark())

    def figures(self, workers: int) -> dict[str, Any]:
        """Of the last five seconds at most; `workers` are attached. Times in us, None where there are none."""
        before, now = self._marks[0], self._mark()
        seconds = max(now.time_s - before.time_s, 1e-9)
        count = {name: now.counters[name] - before.counters[name] for name in now.counters}
        seen = {name: now.histograms[name].since(before.histograms[name]) for name in now.histograms}  # fmt: skip
        shares = self._shares(seconds, count, seen, workers)
        limit, why = verdict(shares)
        return {
            "window_s": seconds, "steps_per_s": count["env_steps"] / seconds, "batches_per_s": count["batches"] / seconds,
            "stage_us": {stage: _microseconds(seen[f"{stage}_ns"]) for stage in STAGES},
            "rtt_us": _microseconds(seen["rtt_ns"]), "env_step_us": _microseconds(seen["env_step_ns"]),
            "deschedule_us": _microseconds(seen["deschedule_ns"]), "batch_rows": _by_size(seen["batch_rows"]),
            "fired": {name.removeprefix("fired_"): count[name] for name in count if name.startswith("fired_")},
            "shares": shares._asdict(), "limited_by": limit, "why": why,
        }  # fmt: skip

    @staticmethod
    def _shares(
        seconds: float, count: dict[str, int], seen: dict[str, Histogram], workers: int
    ) -> Shares:
        window_ns, means = seconds * 1e9, {name: seen[name].mean if seen[name].count else 0.0 for name in seen}  # fmt: skip
        engine = sum(seen[f"{stage}_ns"].total for stage in ENGINE_STAGES) / window_ns
        inside = seen["env_step_ns"].total / window_ns / max(workers, 1)
        in_engine = sum(means[f"{stage}_ns"] for stage in STAGES if stage != "append")
        around = means["rtt_ns"] + means["env_step_ns"]
        transport = max(0.0, means["rtt_ns"] - in_engine) / around if around else 0.0
        held = sum(count[name] for name in BLOCKED) / window_ns
        return Shares(min(held, 1.0), min(engine, 1.0), min(inside, 1.0), transport)


def _microseconds(histogram: Histogram) -> dict[str, float | None]:
    if not histogram.count:
        return {**dict.fromkeys(_PERCENTILES), "max": None}
    found = {name: histogram.percentile(q) * 1e-3 for name, q in _PERCENTILES.items()}
    return {**found, "max": histogram.max * 1e-3}


def _by_size(histogram: Histogram) -> dict[str, int]:
    """How many batches had up to 1, 2, 4, ... rows, from the first to the last that any had."""
    edges = [1 << power for power in range(17)]
    upto, count, _ = histogram.cumulative(edges)
    sizes = {str(edge): n - m for edge, n, m in zip(edges, upto, [0, *upto], strict=False)}
    used = [edge for edge, n in sizes.items() if n]
    if not count or not used:
        return {}
    keys = list(sizes)
    return {key: sizes[key] for key in keys[keys.index(used[0]) : keys.index(used[-1]) + 1]}
