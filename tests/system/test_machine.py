"""CASES.md, "The machine underneath" and the waiting part of "Faults of the simulator": with workers of this host and of others."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runs import Command, newest, overrides, records, seedrl


def _wait(reached: Callable[[], bool], limit_s: float = 40.0) -> None:
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _records(tmp_path: Path) -> list[dict]:
    return records(tmp_path / "run") if (tmp_path / "run/metrics.jsonl").exists() else []


def test_Hangs_a_workers_seats_are_taken_and_it_is_named_and_replaced(tmp_path: Path) -> None:
    flag = str(tmp_path / "flag")
    more = overrides(
        "envs:Hangs",
        {"flag": flag, "after": 4000},
        "workers.num=2",
        "workers.lease_s=2",
        "run.max_seconds=600",
        "env.check_steps=0",
        "evaluation.episodes=0",
    )
    with Command("train", "cartpole", *more, "--run-dir", "run", cwd=tmp_path) as run:
        run.until("has not come back from its step for 2 s", 90)
        assert re.search(r"worker \d, envs:Hangs: group \d, seat \d has not come back", run.text())
        run.until("started again")
        rates = {
            line["time_s"]: line["steps_per_s"]
            for line in _records(tmp_path)
            if "steps_per_s" in line
        }
        _wait(lambda: _records(tmp_path)[-1]["live_slots"] == 16)
        (hung,) = (line for line in run.text().splitlines() if "has not come back" in line)
        assert hung and len(rates) > 5
        run.signal(signal.SIGINT)
        begin = time.monotonic()
        assert run.wait(10) == 130 and time.monotonic() - begin < 10
        assert run.all_gone_within(2)
    before = [line["env_steps"] for line in _records(tmp_path)]
    assert before == sorted(before)


def test_Hangs_over_the_network_the_others_keep_their_throughput(tmp_path: Path) -> None:
    flag = str(tmp_path / "flag")
    serve = (
        "serve",
        "cartpole",
        "env.id=envs:Hangs",
        "workers.lease_s=3",
        "run.max_seconds=600",
        "run.log_every_s=0.2",
        "--listen",
        "tcp://127.0.0.1:0",
        "--run-dir",
        "run",
    )
    with Command(*serve, cwd=tmp_path) as server:
        server.until("attach tcp")
        address = re.search(r"attach (tcp://\S+)", server.text())[1]
        attach = (
            "attach",
            address,
            "--env",
            "envs:Hangs",
            "--envs-per-worker",
            "4",
            "--check",
            "off",
        )
        with (
            Command(*attach, "--env-kwargs", f'{{"flag": "{flag}", "after": 1500}}', cwd=tmp_path),
            Command(*attach, cwd=tmp_path),
        ):
            server.until("attached: 4 slots, 248 free")
            _wait(lambda: Path(flag).exists())
            time.sleep(0.5)
            hung_at = _records(tmp_path)[-1]["env_steps"]
            server.until("nothing was heard of it for 3 s", 20)
            assert _records(tmp_path)[-1]["env_steps"] - hung_at > 500, (
                "the other worker goes on meanwhile"
            )
            _wait(lambda: newest(tmp_path / "run", "live_slots") == 4)


@pytest.mark.parametrize("scheme", [pytest.param("unix", marks=pytest.mark.long), "tcp"])
def test_SometimesSlow_nobody_is_declared_dead_and_the_others_do_not_wait(
    tmp_path: Path, scheme: str
) -> None:
    serve = (
        "serve",
        "cartpole",
        "env.id=envs:SometimesSlow",
        "run.max_seconds=14",
        "run.log_every_s=0.2",
        "--listen",
        "tcp://127.0.0.1:0",
        "--run-dir",
        "run",
    )
    with Command(*serve, cwd=tmp_path) as server:
        server.until("attach tcp")
        address = re.search(rf"attach ({scheme}://\S+)", server.text())[1]
        attach = (
            "attach",
            address,
            "--env",
            "envs:SometimesSlow",
            "--envs-per-worker",
            "2",
            "--check",
            "off",
        )
        quick = ("--env-kwargs", '{"step_s": 0.0, "reset_s": 0.0}')
        with Command(*attach, cwd=tmp_path), Command(*attach, *quick, cwd=tmp_path):
            assert server.wait(60) == 0
    assert "nothing was heard" not in server.text() and "has not come back" not in server.text()
    assert "died: its slots" not in server.text() and "DO NOT BALANCE" not in server.text()
    p99 = [line["rtt_p99_us"] for line in _records(tmp_path)[5:] if "rtt_p99_us" in line]
    assert np.median(p99) < 20_000  # batching.hard_deadline_us


def test_ClockJumps_no_timeout_fires_and_time_only_grows(tmp_path: Path) -> None:
    more = overrides(
        "envs:ClockJumps", {}, "run.max_seconds=4", "workers.lease_s=2", "evaluation.episodes=0"
    )
    code, text = seedrl("train", "cartpole", *more, "--run-dir", "run", cwd=tmp_path)
    assert code == 0 and "has not come back" not in text and "started again" not in text, text
    times = [line["time_s"] for line in _records(tmp_path)]
    assert times == sorted(times) and times[-1] < 60
    assert newest(tmp_path / "run", "interrupted_episodes") == 0


@pytest.mark.parametrize("scheme", [pytest.param("unix", marks=pytest.mark.long), "tcp"])
def test_a_registered_id_is_found_by_every_worker_and_a_misspelt_one_named(
    tmp_path: Path, scheme: str
) -> None:
    name = "envs:CasesRegistered-v0"
    serve = (
        "serve",
        "cartpole",
        f"env.id={name}",
        "run.max_steps=400",
        "run.max_seconds=60",
        "--listen",
        "tcp://127.0.0.1:0",
        "--run-dir",
        "run",
    )
    with Command(*serve, cwd=tmp_path) as server:
        server.until("attach tcp")
        address = re.search(rf"attach ({scheme}://\S+)", server.text())[1]
        code, text = seedrl("attach", address, "--env", "envs:CasesRegisterd-v0", cwd=tmp_path)
        assert code == 2 and "CasesRegistered-v0" in text and "envs" in text, text
        code, text = seedrl("attach", address, "--env", name, "--workers", 2, cwd=tmp_path)
        assert code == 0 and server.wait(20) == 0, text


def test_address_busy_both_addresses_are_had_again_at_once_after_kill_9(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = ("--bind", f"unix://{tmp_path}/door", "--listen", f"tcp://127.0.0.1:{port}")
    serve = ("serve", "cartpole", "run.max_seconds=600", *places)
    with Command(*serve, "--run-dir", "first", cwd=tmp_path) as first:
        first.until("attach tcp")
        code, text = seedrl(*serve, "--run-dir", "other", cwd=tmp_path)
        assert code == 2 and f"pid {first.process.pid}" in text and first.process.poll() is None, (
            text
        )
        assert (tmp_path / "door").exists()
        first.signal(signal.SIGKILL)
        first.process.wait()
        begin = time.monotonic()
        with Command(*serve, "--run-dir", "second", cwd=tmp_path) as second:
            second.until("attach tcp", 30)
            assert time.monotonic() - begin < 5 + 10  # of which imports take most on a slow machine
