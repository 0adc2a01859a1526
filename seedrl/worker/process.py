"""What a worker's process asks of the kernel: to die with its parent, and to leave no child behind."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Asks for `sig` when the parent dies, and sends it at once when that has happened already."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on, deepest first."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children = [int(child) for child in file.read().split()]
        except OSError:
            continue
        for child in children:
            yield from descendants(child)
            yield child


def kill_descendants() -> int:
    """Ends every process that this one started, directly or not (simulators in children of their own); how many there were."""
    found = list(descendants(os.getpid()))
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return len(found)
