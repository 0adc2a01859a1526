"""Processes that a supervisor starts: each in a session of its own, dead with its parent, gone with its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from seedrl import host


@dataclass
class Child:
    """One running process. `pidfd` becomes readable when it ends."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    log: Path | None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        return self.process.pid

    def how_it_ended(self) -> str:
        code = self.process.poll()
        if code is None:
            return "still runs"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Children:
    """Starts processes under a warden (`warden.py`), ends them with everything that they started."""

    def __init__(self) -> None:
        self._living: dict[int, Child] = {}
        self._warden = subprocess.Popen(
            [sys.executable, "-m", "seedrl.warden"], stdin=subprocess.PIPE, start_new_session=True, env=self._env(1),
        )  # fmt: skip

    @staticmethod
    def _env(threads: int) -> dict[str, str]:
        # -m finds the package where this one lies, and the user's modules in the folder where the command was given
        here = str(Path(__file__).resolve().parent.parent)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, **host.env_for_threads(threads), "PYTHONPATH": os.pathsep.join(paths)}

    def _tell_warden(self, line: str) -> None:
        assert self._warden.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._warden.stdin.write(line.encode() + b"\n")
            self._warden.stdin.flush()

    def forget_at_death(self, path: Path) -> None:
        """`path` is unlinked when this process is gone, killed or not."""
        self._tell_warden(f"!{path.absolute()}")

    def start(
        self, name: str, module: str, arguments: Sequence[str], *, threads: int = 1, fds: Sequence[int] = (),
        log: Path | None = None,
    ) -> Child:  # fmt: skip
        """Starts `python -m module arguments`, its output appended to `log`, or on this process's own."""
        sink: IO[bytes] | None = log.open("ab") if log is not None else None
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                pass_fds=fds, start_new_session=True, env=self._env(threads),
            )  # fmt: skip
        finally:
            if sink is not None:
                sink.close()
        self._tell_warden(f"+{process.pid}")
        child = Child(name, process, os.pidfd_open(process.pid), log)
        self._living[process.pid] = child
        return child

    def living(self) -> list[Child]:
        return list(self._living.values())

    def bury(self, child: Child) -> None:
        """Reaps a child that has ended and kills what is left of its group."""
        child.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        if self._living.pop(child.pid, None) is not None:
            os.close(child.pidfd)
            self._tell_warden(f"-{child.pid}")

    def end(self, children: Sequence[Child], grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`, for these children and their groups."""
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        deadline = time.monotonic() + grace_s
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
            self.bury(child)

    def close(self, grace_s: float = 2.0) -> None:
        """Ends everything, the warden last."""
        self.end(self.living(), grace_s)
        assert self._warden.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._warden.stdin.close()
        self._warden.wait()
