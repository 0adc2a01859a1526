"""Doorbells: eventfds that wake one sleeper, and a wait whose deadline is counted in microseconds."""

from __future__ import annotations

import os
import select


def make() -> int:
    """A new doorbell: a non-blocking eventfd. Whoever holds a duplicate may ring; one party listens."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


ring = os.eventfd_write  # ring(fd, 1): never blocks before 2**64 - 2 unheard rings


def hush(fd: int) -> None:
    """Takes back every ring so far; a bell that nobody rang is no error."""
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        pass


def wait(fd: int, timeout_us: float | None) -> bool:
    """Sleeps until the bell rings (True) or the time is up (False); None waits without end.

    select, not epoll: epoll counts in milliseconds, and a deadline of 200 us would become one of 1 ms.
    """
    heard, _, _ = select.select((fd,), (), (), None if timeout_us is None else timeout_us * 1e-6)
    if heard:
        hush(fd)
        return True
    return False
