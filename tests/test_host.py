from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from seedrl import host
from seedrl.errors import ConfigError, RunError


def wait_until(fact: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_live(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_nobody_can_shrink_grow_or_seal_the_memory() -> None:
    fd = host.memfd("test", 4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    memory = host.map_shared(fd, 4096)
    memory[0:4] = b"abcd"
    assert host.map_shared(fd, 4096)[0:4] == b"abcd"
    os.close(fd)


def test_memory_that_is_shorter_than_announced_is_refused() -> None:
    fd = host.memfd("test", 4096)
    with pytest.raises(RunError, match="4096 bytes where 8192"):
        host.map_shared(fd, 8192)
    os.close(fd)


def test_a_child_ends_when_its_parent_is_killed() -> None:
    child = "import sys, time; from seedrl.host import die_with_parent; die_with_parent(int(sys.argv[1]))\n"
    child += "print('ready', flush=True); time.sleep(100)"
    parent = (
        "import subprocess, sys, os, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(100)"
    )
    with python(parent) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_live(pid)
        process.kill()
        assert wait_until(lambda: not is_live(pid))


def test_a_child_whose_parent_is_already_gone_ends_at_once() -> None:
    code = "from seedrl.host import die_with_parent; die_with_parent(1 << 22); print('still here')"
    with python(code) as process:
        assert process.communicate()[0] == ""
        assert process.returncode == -signal.SIGKILL


def test_timer_slack_reaches_the_kernel() -> None:
    code = (
        "from seedrl.host import set_timer_slack_us; set_timer_slack_us(3)\n"
        "print(open('/proc/self/timerslack_ns').read())"
    )
    with python(code) as process:
        assert int(process.communicate()[0]) == 3000


def test_an_orphan_becomes_the_subreapers_child() -> None:
    code = (
        "import os, time\n"
        "from seedrl.host import set_child_subreaper\n"
        "set_child_subreaper()\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        "        while os.getppid() == int(os.environ.setdefault('MIDDLE', str(os.getppid()))): time.sleep(0.01)\n"
        "        os.write(write, str(os.getppid()).encode())\n"
        "    else: time.sleep(0.3)\n"
        "    os._exit(0)\n"
        "print(int(os.read(read, 20)) == os.getpid())"
    )
    with python(code) as process:
        assert process.communicate()[0].strip() == "True"


@pytest.mark.parametrize(("machine", "system"), [("aarch64", "linux"), ("x86_64", "darwin")])
def test_a_machine_with_another_store_order_is_refused(machine: str, system: str) -> None:
    with pytest.raises(ConfigError, match=f"this machine is {machine}"):
        host.require_ordered_stores(machine, system)


def test_this_kind_of_machine_is_accepted() -> None:
    host.require_ordered_stores("x86_64", "linux")


def test_thread_variables_hold_a_new_process_to_one_thread() -> None:
    variables = host.env_for_threads(1)
    assert variables["OMP_NUM_THREADS"] == variables["OPENBLAS_NUM_THREADS"] == "1"
    code = "import os, numpy as np; a = np.ones((300, 300)); a @ a; print(len(os.listdir('/proc/self/task')))"
    with python(code, env={**os.environ, **variables}) as process:
        assert int(process.communicate()[0]) == 1


def test_resident_memory_is_that_of_the_process() -> None:
    with python(
        "x = b'1' * 50_000_000; print('ready', flush=True); input()", stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 50_000_000 < host.rss_bytes(process.pid) < 120_000_000
        process.communicate("\n")
    assert host.rss_bytes(process.pid) == 0


def test_a_stubborn_group_and_its_children_are_killed_after_the_grace() -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pid = os.fork()\n"
        "if pid: print(pid, flush=True)\n"
        "time.sleep(100)"
    )
    with python(code, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        host.kill_process_groups([process.pid], grace_s=0.2)
        assert not is_live(child) and not is_live(process.pid)
        assert process.wait() == -signal.SIGKILL


def test_a_group_that_obeys_is_not_killed_and_not_waited_for() -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(1, flush=True); time.sleep(99)"
    with python(code, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before_s = time.monotonic()
        host.kill_process_groups([process.pid, 0, os.getpgrp()], grace_s=60)
        assert time.monotonic() - before_s < 30
        assert process.wait() == 7


def test_a_wait_of_200_us_still_waits_with_little_slack() -> None:
    host.set_timer_slack_us(1)
    before_ns = time.perf_counter_ns()
    select.select([], [], [], 200e-6)
    assert time.perf_counter_ns() - before_ns >= 200_000


def test_a_shorter_turn_is_asked_of_the_kernel_and_the_rest_left_as_it_was() -> None:
    code = """
import ctypes, os, struct, subprocess, sys
from seedrl import host
def attributes(pid):
    buffer = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(315, pid, buffer, 56, 0) == 0
    _, policy, _, nice, _, runtime = struct.unpack_from("<IIQiIQ", buffer)
    return policy, nice, runtime
os.nice(5)
before = attributes(0)
taken = host.set_slice_us(300)
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(*before, taken, *attributes(0), *attributes(child.pid))
child.communicate(b"\\n")
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
print(host.set_slice_us(300), os.sched_getscheduler(0) == os.SCHED_BATCH)
"""
    process = python(code)
    lines = [line.split() for line in process.communicate(timeout=30)[0].splitlines()]
    policy, nice, default, taken, *now = lines[0]
    assert (policy, nice, taken) == (str(os.SCHED_OTHER), "5", "True")
    tells = default != "0"  # Linux 6.12 and later tell the slice
    assert now[:2] == [policy, nice] and now[3:5] == [policy, nice]
    if tells:
        assert now[2] == "300000" and now[5] == default
    assert lines[1] == ["False", "True"]
