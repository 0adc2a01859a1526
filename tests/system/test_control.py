"""A running server looked at, paused, resumed, drained, and a worker cut off, from another terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import zmq

from harness import Harness
from ledger import Ledger, config_of
from runs import Command, seedrl, settings
from seedrl.control import Pace, asker
from seedrl.errors import AddressError, ConfigError, LeaseRefused
from seedrl.listen import Listen
from seedrl.transport import wire
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
    assert code == 2 and "admin's key" in text and len(text.strip().splitlines()) <= 3


def test_an_admin_controls_the_server_from_another_host_and_nobody_else_does(
    tmp_path: Path,
) -> None:
    for who in (("--worker", "env"), ("--admin", "ops")):
        code, text = seedrl("keys", "keys", *who, cwd=tmp_path)
        assert code == 0 and f"keys/{who[1]}.key" in text
    assert "seedrl ctl tcp://" in text
    served = ("--run-dir", "run", "--listen", "tcp://127.0.0.1:0", "--keys", "keys")
    with Command("serve", "cartpole", *SERVE, *served, cwd=tmp_path) as server:
        server.until("workers may attach: seedrl attach tcp")
        tcp = ctl(tmp_path, "status")["listen"]

        def remotely(*arguments: object, key: str = "ops") -> tuple[int, str]:
            return seedrl("ctl", tcp, *arguments, "--key", f"keys/{key}.key", cwd=tmp_path)

        attach = ("--env", "CartPole-v1", "--envs-per-worker", "4", "--key", "keys/env.key")
        with Command("attach", tcp, *attach, cwd=tmp_path) as worker:
            worker.until("slots in 2 groups")
            code, text = remotely("status", "--json")
            assert code == 0, text
            status = json.loads(text.splitlines()[-1])
            assert status["pace"] == "acting" and status["free_slots"] == 12
            assert remotely("pause", "--mode", "wait")[0] == 0
            assert ctl(tmp_path, "status")["pace"] == "paused"
            began = time.monotonic()
            for verb in ("status", "drain"):
                code, text = remotely(verb, key="env")
                assert code == 2 and "control verbs need an admin's key" in text
            code, text = remotely("kick", 7)
            assert code == 2 and "no worker 7" in text
            assert time.monotonic() - began < 15
            assert remotely("resume")[0] == 0
            assert ctl(tmp_path, "status")["pace"] == "acting"
            code, text = remotely("kick", status["workers"][0]["worker"])
            assert code == 0 and "cut off worker" in text
            assert worker.wait(20) == 2
        code, text = seedrl("ctl", "run", "status", "--key", "keys/ops.key", cwd=tmp_path)
        assert code == 2 and "needs no key" in text
        allowed = tmp_path / "keys/allowed.txt"
        allowed.write_text(allowed.read_text().replace(" admin", ""))  # the right is taken away
        code, text = remotely("drain")
        assert code == 2 and "admin's key" in text
        assert ctl(tmp_path, "drain")["pace"] == "draining"
        assert server.wait(30) == 0
    code, text = remotely("status")
    assert code == 2 and "no server answers" in text


def test_an_open_port_takes_no_verbs(tmp_path: Path) -> None:
    served = ("--run-dir", "run", "--listen", "tcp://127.0.0.1:0")
    with Command("serve", "cartpole", *SERVE, *served, cwd=tmp_path) as server:
        server.until("workers may attach: seedrl attach tcp")
        tcp = ctl(tmp_path, "status")["listen"]
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(tcp)
            stranger.send(wire.pack("ctl", verb="drain"))
            assert stranger.poll(5000)
            kind, header = wire.unpack(stranger.recv())
        assert kind == "refused" and "admin's key" in header["error"]["what"]
        assert ctl(tmp_path, "status")["pace"] == "acting"


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
def test_no_verb_is_asked_for_over_the_network_without_a_key(where: str) -> None:
    with pytest.raises(AddressError, match="admin's key"):
        asker(where, None)
