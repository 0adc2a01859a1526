"""What Linux is asked for: sealed memory, death with the parent, timer slack, thread counts, process groups.

Standard library only: a worker imports it before anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from seedrl.errors import ConfigError, RunError

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36
_SYS_SCHED_SETATTR = 314  # of x86-64, the only machine that `require_ordered_stores` lets in
_SCHED_ATTR_BYTES = 48
_SCHED_FLAG_RESET_ON_FORK = 1
_SEALS = (
    0x2 | 0x4 | 0x1
)  # F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL: fcntl has the names only from Python 3.12 on


def memfd(name: str, size_bytes: int) -> int:
    """A descriptor of `size_bytes` of zeroed memory that no holder can shrink, grow or seal further.

    It has no name in any file system, so nothing is left behind however its holders die. `name` is for /proc only.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def allow_descriptors(needed: int) -> None:
    """Raises this process's limit of open descriptors to at least `needed`, for its children too.

    Raises: ConfigError when the system's own limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            what=f"{needed} descriptors are needed, and {hard} allowed",
            where="the limit of open files (ulimit -Hn)",
            do=f"ulimit -n {needed}, or fewer batching.max_slots",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def map_shared(fd: int, size_bytes: int) -> mmap.mmap:
    """The first `size_bytes` of a shared descriptor, readable and writable.

    Raises: RunError when the descriptor holds less, as touching the rest would end the process with SIGBUS.
    """
    held_bytes = os.fstat(fd).st_size
    if held_bytes < size_bytes:
        raise RunError(
            what=f"shared memory of {held_bytes} bytes where {size_bytes} were announced",
            do="start both sides from the same version of seedrl",
        )
    return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """The kernel sends `signum` to this process when its parent ends, however it ends; call it first in the child.

    `parent_pid` is what the parent said its pid is: were it gone before this call, no signal would come any more, so
    this process ends at once. The kernel looks at the parent's thread: start children from one that lasts.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def set_timer_slack_us(slack_us: int = 1) -> None:
    """How late the kernel may wake this thread; 50 us unless set, which a wait of 200 us overshoots by a quarter."""
    _prctl(_PR_SET_TIMERSLACK, slack_us * 1000)


def set_slice_us(slice_us: int) -> bool:
    """Asks for shorter turns of this thread on a core (Linux 6.12 and later); whether the kernel took it. Children get the usual ones.

    A thread with shorter turns than those of who runs goes first when it wakes, instead of at the next tick, up to 4 ms later.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:  # somebody chose another policy on purpose
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack(
        "<IIQiIQQQ",
        _SCHED_ATTR_BYTES,
        os.SCHED_OTHER,
        _SCHED_FLAG_RESET_ON_FORK,
        nice,
        0,
        slice_us * 1000,
        0,
        0,
    )
    return ctypes.CDLL(None).syscall(_SYS_SCHED_SETATTR, 0, attributes, 0) == 0


def lower_priority(nice: int = 5) -> None:
    """Lets others go before this thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def set_child_subreaper() -> None:
    """Orphans among this process's descendants become its children, so that it can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def require_ordered_stores(machine: str | None = None, system: str | None = None) -> None:
    """Refuses every machine other than Linux on x86-64.

    The control words of shared memory are plain stores: payload first, sequence number last. x86-64 shows stores to
    other cores in program order, and so do loads; ARM and POWER do not without barriers, which numpy cannot issue.

    Raises: ConfigError, naming the machine.
    """
    machine = machine or platform.machine()
    system = system or sys.platform
    if system != "linux" or machine not in ("x86_64", "AMD64"):
        raise ConfigError(
            what=f"this machine is {machine} ({system}); seedrl's shared memory needs Linux on x86_64",
            where="store order of the processor",
            do="run on an x86_64 Linux host",
        )


def env_for_threads(num_threads: int) -> dict[str, str]:
    """Environment variables that hold every numeric library of a new process to `num_threads` threads.

    They count only when set before the library is loaded, so they belong in the environment of the exec.
    """
    names = (
        "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "BLIS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS",
    )  # fmt: skip
    return dict.fromkeys(names, str(num_threads))


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * mmap.PAGESIZE


def live_in_groups(pgids: Iterable[int]) -> list[int]:
    """Pids of the processes in these process groups that still run; one that waits to be reaped does not."""
    wanted = set(pgids)
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(entry.path, "stat").read_text(errors="replace")
            state, _, group = stat[stat.rindex(")") + 2 :].split()[
                :3
            ]  # the name before may hold blanks
            if int(group) in wanted and state not in "ZX":
                found.append(int(entry.name))
    return found


def kill_process_groups(pgids: Iterable[int], grace_s: float) -> None:
    """Asks process groups to end (SIGTERM), and after `grace_s` makes them (SIGKILL); returns when none runs.

    Children of our own are left to be reaped by whoever started them. This process's own group is never touched.
    """
    groups = {pgid for pgid in pgids if pgid > 1 and pgid != os.getpgrp()}
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for pgid in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pgid, signum)
        deadline = time.monotonic() + wait_s
        while live_in_groups(groups):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        else:
            return


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    unused = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(argument), unused, unused, unused) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {argument}): {os.strerror(number)}")


def memory_bytes() -> int:
    """Of this machine, or of the limit that this process is under, where that is less."""
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return has
    return has if limit == "max" else min(has, int(limit))
