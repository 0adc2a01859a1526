"""A window of seconds as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: batches and their stages, workers as tracks.

The format is the Trace Event Format's JSON: complete events ("X") with a begin and a duration in microseconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seedrl.store.board import (
    APPENDED_NS,
    ASK_GROUP,
    BEGIN_NS,
    ENGINE_STAGES,
    GROUPS,
    OLDEST_NS,
    ROWS,
    STAGES,
)

MOST_BATCHES = 50_000  # a trace that a browser still shows
_ENGINE, _WORKERS = 1, 2  # process numbers of the tracks


class Recorder:
    """Keeps the lines of batches until `end_s` (monotonic), at most `MOST_BATCHES` of them, and makes the file of them then.

    Args: names: of groups, by number.
    """

    def __init__(self, path: Path, end_s: float, names: Mapping[int, str]) -> None:
        self._path, self._end_s, self._names = path, end_s, dict(names)
        self._lines: list[np.ndarray] = []
        self._asks: list[np.ndarray] = []
        self._count = 0
        self._thread: threading.Thread | None = None

    def add(self, lines: np.ndarray, asks: np.ndarray) -> None:
        """Lines of batches [n, 16], and those of their groups [m, 4]; to be called often, also without any."""
        if self._thread is not None:
            return
        if self._count < MOST_BATCHES:
            self._lines.append(lines)
            self._asks.append(asks)
            self._count += len(lines)
        if time.monotonic() >= self._end_s:  # in a thread of its own: it may be long
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether the file is not there yet."""
        return self._thread is None or self._thread.is_alive()

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".unfinished")
        with unfinished.open("w") as file:
            file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
            for number, event in enumerate(self.events()):
                file.write(f"{',' if number else ''}{json.dumps(event)}\n")
            file.write("]}\n")
        unfinished.replace(self._path)

    def events(self) -> Iterator[dict[str, Any]]:
        yield _named("process_name", _ENGINE, 0, "engine")
        yield _named("thread_name", _ENGINE, 1, "batches")
        yield _named("process_name", _WORKERS, 0, "workers")
        for group, name in sorted(self._names.items()):
            yield _named("thread_name", _WORKERS, group + 1, name)
        for lines, asks in zip(self._lines, self._asks, strict=True):
            at = 0
            for line in lines.tolist():
                groups = line[GROUPS]
                about = {"rows": line[ROWS], "groups": groups, "oldest_waited_us": (line[BEGIN_NS] - line[OLDEST_NS]) * 1e-3}  # fmt: skip
                yield _span(f"batch of {line[ROWS]}", _ENGINE, 1, line[BEGIN_NS], line[APPENDED_NS], about)  # fmt: skip
                for name in ENGINE_STAGES:
                    begin, end = STAGES[name]
                    yield _span(name, _ENGINE, 1, line[begin], line[end])
                for ask in asks[at : at + groups].tolist():
                    _, published, rtt, step = ask
                    track, answered = ask[ASK_GROUP] + 1, published - step
                    if step:
                        yield _span("waits", _WORKERS, track, answered - rtt, answered)
                        yield _span("environments", _WORKERS, track, answered, published)
                at += groups


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _span(
    name: str, process: int, track: int, begin_ns: int, end_ns: int, about: dict[str, Any] | None = None
) -> dict[str, Any]:  # fmt: skip
    return {
        "ph": "X", "name": name, "pid": process, "tid": track, "ts": begin_ns * 1e-3, "dur": (end_ns - begin_ns) * 1e-3,
        **({} if about is None else {"args": about}),
    }  # fmt: skip
