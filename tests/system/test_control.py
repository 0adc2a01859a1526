"""A running server looked at, paused, resumed, drained, and a worker cut off, from another terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from harness import Harness
from ledger import Ledger, config_of
from runs import Command, seedrl, settings
from seedrl.control import Pace
from seedrl.errors import AddressError, ConfigError, LeaseRefused
from seedrl.listen import Listen
from seedrl.transport.slab import Phase

SERVE = (
    "run.max_seconds=600",
    "batching.max_slots=16",
    "learner.batch_size=4",
    "run.log_every_s=0.2",
)


def ctl(tmp_path: Path, *arguments: object) -> dict:
    code, text = seedrl("ctl", "run", *arguments, "--json", cwd=tmp_path)
    assert code == 0, text
    return json.loads(text.splitlines()[-1])


def _echo(tmp_path: Path):
    (tmp_path / "ids").mkdir()
    env = {
        "id": "system_envs:Echo",
        "kwargs": {"folder": str(tmp_path / "ids"), "lengths": [1, 3, 7, 20, 33]},
    }
    return config_of(env, "answer", {"num": 2, "envs_per_worker": 8, "groups": 2})


def _steps(run: Harness) -> int:
    return run.board.get("env_steps")


def _still(run: Harness) -> bool:
    before = _steps(run)
    for _ in range(20):
        run.pump(0.01)
    return _steps(run) == before


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_stops_acting_and_loses_only_what_it_says(tmp_path: Path, mode: str) -> None:
    with Harness(_echo(tmp_path), tmp_path, num_slots=16) as run:
        run.begin()
        run.running = True
        ledger = Ledger(20)
        for _ in range(3):
            for _ in range(20):
                ledger.check(run.sample(8))
            run.controls.pause(mode)
            assert run.controls.pace() in (Pace.PAUSING, Pace.PAUSED)
            while run.controls.pace() is Pace.PAUSING:
                run.pump(0.01)
                run.controls.tick()
                while (batch := run.reader.sample(1, timeout_s=0)) is not None:
                    ledger.check(batch)
            run.wait_for(lambda: run.board.get("acting") == run.phase)
            assert _still(run)
            get = run.board.get
            if mode == "abort":  # the next unroll begins with the next row
                while (batch := run.reader.sample(1, timeout_s=0)) is not None:
                    ledger.check(batch)
                ledger.last.clear()
            if (
                mode == "wait"
            ):  # the row that each slot has beyond its full unrolls is the last one's bootstrap row
                assert get("rows_acted") - get("rows_stored") - get("dropped_shutdown") == 16
            if mode == "keep":
                assert get("dropped_shutdown") == 0
            run.controls.resume()
        for _ in range(20):
            ledger.check(run.sample(8))
        acted, _ = run.finish()
        while (batch := run.reader.sample(1, timeout_s=0)) is not None:
            ledger.check(batch)
    assert acted["acted"] == acted["stored"] + acted["shutdown"]
    assert acted["stored"] == ledger.rows
    assert acted["shutdown"] <= (4 if mode == "abort" else 1) * 16 * 20


def test_verbs_from_another_terminal(tmp_path: Path) -> None:
    with (
        Command("serve", "cartpole", *SERVE, "--run-dir", "run", "--listen", "tcp://127.0.0.1:0", cwd=tmp_path) as server,
        Command(cwd=tmp_path, prefix=["true"]) as _,
    ):  # fmt: skip
        server.until("workers may attach: seedrl attach tcp")
        tcp = ctl(tmp_path, "status")["listen"]
        attach = ("--env", "CartPole-v1", "--envs-per-worker", "4")
        with (
            Command("attach", "unix://run/door.sock", *attach, cwd=tmp_path) as local,
            Command("attach", tcp, *attach, cwd=tmp_path) as remote,
        ):
            deadline = time.monotonic() + 30
            while (
                len((status := ctl(tmp_path, "status"))["workers"]) < 2 or not status["env_steps"]
            ):
                assert time.monotonic() < deadline, server.text()
            assert status["pace"] == "acting" and status["free_slots"] == 8
            assert sorted(worker["remote"] for worker in status["workers"]) == [False, True]
            assert ctl(tmp_path, "pause", "--mode", "wait")["pace"] == "paused"
            steps = ctl(tmp_path, "status")["env_steps"]
            assert ctl(tmp_path, "status")["env_steps"] == steps > 0
            assert ctl(tmp_path, "resume")["pace"] == "acting"
            while ctl(tmp_path, "status")["env_steps"] == steps:
                assert time.monotonic() < deadline
            for worker in status["workers"]:
                ctl(tmp_path, "kick", worker["worker"])
            for command in (local, remote):
                assert (
                    command.wait(20) == 2 and "cut off by the server's operator" in command.text()
                )
            code, text = seedrl("ctl", "run", "kick", 7, cwd=tmp_path)
            assert code == 2 and "no worker 7" in text and "nobody" in text
        code, text = seedrl("ctl", "run", "drain", cwd=tmp_path)
        assert code == 0, text
        assert server.wait(30) == 0 and "drained after" in server.text()
    code, text = seedrl("ctl", "run", "status", cwd=tmp_path)
    assert code == 2 and "no server answers" in text
    code, text = seedrl("ctl", tcp, "status", cwd=tmp_path)
    assert code == 2 and "Unix socket" in text and len(text.strip().splitlines()) <= 3


def test_nobody_comes_in_while_the_server_drains_and_own_workers_are_not_cut_off(
    tmp_path: Path,
) -> None:
    config = settings("CartPole-v1", learner={"unroll_length": 8, "batch_size": 4})
    with Harness(config, tmp_path, num_slots=16, listen=Listen("tcp://127.0.0.1:0")) as run:
        run.begin()
        run.running = True
        with pytest.raises(LeaseRefused, match="run's own"):
            run.controls.kick(0)
        with pytest.raises(ConfigError, match="attached: 0"):
            run.controls.kick(5)
        run.controls.drain()
        assert run.door.refusing and run.phase == Phase.FINISH
        while run.done is None:
            run.pump(0.01)
            run.controls.tick()
            run.reader.sample(4, timeout_s=0)
        assert run.done == "drained"


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:5", "ipc:///tmp/x"])
def test_no_verb_is_taken_over_the_network(where: str) -> None:
    from seedrl.control import address_of

    with pytest.raises(AddressError, match="Unix socket"):
        address_of(where)
