"""A run's directory, and its figures as JSON lines and TensorBoard scalars.

    RUN_DIR/config.yaml      complete and resolved
            metrics.jsonl    one object a line, at least time_s, env_steps, updates, policy_version
            tb/              TensorBoard events, a step being one environment step
            checkpoints/     see store/checkpoint.py
            log.txt          messages with their time, tracebacks

A line of metrics.jsonl is written by one call, so that a reader sees it whole or not at all; what a
crash of the machine left half is removed before the next line. `time_s` is the time of the run
without its pauses: a resumed run goes on from its last line. What is not finite becomes null.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from seedrl.errors import ConfigError

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
        RecordWriter,
    )

REQUIRED = ("env_steps", "updates", "policy_version")
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RunDir:
    """The files of one run."""

    path: Path

    @staticmethod
    def create(
        path: Path | None, config_yaml: str, *, name: str = "run", resume: bool = False
    ) -> RunDir:
        """Makes the directory (runs/NAME-TIME when `path` is None) and writes config.yaml.

        Raises: ConfigError when another run is there already and `resume` is not set, when there is
        none to resume, or when it cannot be written.
        """
        if path is None:
            path = _fresh_path(name)
        run_dir = RunDir(path)
        try:
            if resume and not run_dir.checkpoints.is_dir():
                raise ConfigError(
                    what="there is no run to resume",
                    where=str(path),
                    do="name the directory of the run with --run-dir",
                )
            if not resume and (run_dir.metrics.exists() or run_dir.config.exists()):
                raise ConfigError(
                    what="this directory holds a run already",
                    where=str(path),
                    do="continue it with --resume, or name another --run-dir",
                )
            run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
            run_dir.tb.mkdir(exist_ok=True)
            unfinished = path / ".config.yaml"
            unfinished.write_text(config_yaml)
            unfinished.replace(run_dir.config)
            run_dir.log.touch()
        except OSError as error:
            raise ConfigError(
                what=f"the run directory cannot be written: {error.strerror}",
                where=str(path),
                do="name another one with --run-dir",
            ) from error
        return run_dir

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tb(self) -> Path:
        return self.path / "tb"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    def write_log(self, text: str) -> None:
        """Adds a message, or a traceback, to log.txt under the time of day."""
        with self.log.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")


class MetricsWriter:
    """Writes records of figures; a context manager.

    Args:
        run_dir: the run's; a metrics.jsonl in it is continued. tensorboard: also write scalars.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        tensorboard: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fd = os.open(
            run_dir.metrics, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._tb = run_dir.tb if tensorboard else None
        self._events: RecordWriter | None = None
        self._clock = clock
        self._last_s = _mend(self._fd)
        self._start_s = clock() - self._last_s

    def write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Adds one record, a flat or nested mapping of figures; returns what was written.

        Raises: KeyError when one of `REQUIRED` is missing.
        """
        for name in REQUIRED:
            record[name]
        self._last_s = max(self._last_s, round(self._clock() - self._start_s, 6))
        line: dict[str, Any] = {"time_s": self._last_s}
        line |= {name: _finite(value) for name, value in record.items() if name != "time_s"}
        os.write(self._fd, json.dumps(line, allow_nan=False).encode() + b"\n")
        if self._tb is not None:
            self._write_events(line, int(line["env_steps"]))
        return line

    def close(self) -> None:
        os.close(self._fd)
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write_events(self, line: Mapping[str, Any], step: int) -> None:
        # Not torch's SummaryWriter: that one brings torch and a thread.
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        wall_s = time.time()
        if self._events is None:
            self._events = self._open_events(wall_s)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(line)]
        event = Event(wall_time=wall_s, step=step, summary=Summary(value=values))
        self._events.write(event.SerializeToString())
        self._events.flush()

    def _open_events(self, wall_s: float) -> RecordWriter:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._tb is not None
        name = f"events.out.tfevents.{time.time_ns()}.{os.uname().nodename}.{os.getpid()}"
        writer = RecordWriter((self._tb / name).open("wb"))
        first = Event(wall_time=wall_s, file_version="brain.Event:2")
        writer.write(first.SerializeToString())
        return writer


def last_record(metrics: Path) -> dict[str, Any] | None:
    """The last whole record of a metrics.jsonl; None when there is none."""
    try:
        fd = os.open(metrics, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _last_of(fd)[0]
    finally:
        os.close(fd)


def _last_of(fd: int) -> tuple[dict[str, Any] | None, int]:
    """The last whole record, and how many bytes of the file are whole lines."""
    size, span = os.fstat(fd).st_size, _TAIL_BYTES
    while True:
        start = max(0, size - span)
        tail = os.pread(fd, size - start, start)
        whole = tail.rfind(b"\n") + 1
        for line in reversed(tail[:whole].split(b"\n")[0 if start == 0 else 1 :]):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # an empty rest, or blocks that a crash of the machine left as zeros
            if isinstance(record, dict):
                return record, start + whole
        if start == 0:
            return None, whole
        span *= 4


def _mend(fd: int) -> float:
    """Cuts off a half line; returns the last record's time."""
    record, whole_bytes = _last_of(fd)
    if whole_bytes != os.fstat(fd).st_size:
        os.ftruncate(fd, whole_bytes)
    return float(record.get("time_s") or 0.0) if record else 0.0


def _finite(value: Any) -> Any:
    """A value as JSON has it: numpy's scalars as numbers, nan and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, float(value)


def _fresh_path(name: str) -> Path:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, repeated = Path("runs") / stem, 1
    while path.exists():
        repeated += 1
        path = Path("runs") / f"{stem}-{repeated}"
    return path
