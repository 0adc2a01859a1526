"""Serve and attach: workers come and go while the learner goes on; BEHAVIOUR case 20 in its queue form."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from harness import Harness
from runs import Command, overrides, records, seedrl, settings
from seedrl.transport.slab import Phase

FLAT_S = int(os.environ.get("SEEDRL_FLAT_SECONDS", "0"))  # `make truths` sleeps a second an update
ROUNDS = int(os.environ.get("SEEDRL_LEFTOVER_ROUNDS", "2"))
SERVE = (
    "run.max_seconds=600",
    "evaluation.episodes=0",
    "batching.max_slots=64",
    "run.checkpoint_every_s=0.5",
)


def _serve(
    tmp_path: Path, *more: str, env: str = "CartPole-v1", flags: tuple[object, ...] = ()
) -> Command:
    command = Command(
        "serve",
        "cartpole",
        *overrides(env, {}, *SERVE, *more),
        "--bind",
        "unix://door",
        "--run-dir",
        "run",
        *flags,
        cwd=tmp_path,
    )
    command.until("workers may attach")
    return command


def _attach(tmp_path: Path, *more: object, env: str = "CartPole-v1") -> Command:
    return Command(
        "attach", "unix://door", "--env", env, "--envs-per-worker", 4, *more, cwd=tmp_path
    )


def _steps(tmp_path: Path) -> int:
    path = tmp_path / "run/metrics.jsonl"
    lines = records(tmp_path / "run") if path.exists() else []
    return lines[-1]["env_steps"] if lines else 0


def _wait(reached, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_workers_attach_and_detach_while_the_learner_goes_on(tmp_path: Path) -> None:
    with _serve(tmp_path) as server, _attach(tmp_path, "--workers", 2) as first:
        _wait(lambda: _steps(tmp_path) > 2000)
        with _attach(tmp_path) as second:
            server.until("52 free")  # of 64, once twelve are taken
            _wait(lambda: records(tmp_path / "run")[-1]["live_slots"] == 12)
            second.signal(signal.SIGINT)
            assert second.wait(5) == 130
        _wait(lambda: records(tmp_path / "run")[-1]["live_slots"] == 8)
        before = _steps(tmp_path)
        _wait(lambda: _steps(tmp_path) > before + 2000)
        server.signal(signal.SIGINT)
        assert server.wait(15) == 130
        assert "rows acted" in server.text() and "BALANCE" not in server.text()
        assert first.wait(5) == 0, "the server ended in good order"
        assert server.all_gone_within(5) and first.all_gone_within(5)


def test_a_different_environment_is_refused_leaf_by_leaf(tmp_path: Path) -> None:
    with _serve(tmp_path) as server, _attach(tmp_path, env="Acrobot-v1") as other:
        assert other.wait(30) == 2
        assert "observation" in other.text() and "[6]" in other.text() and "[4]" in other.text()
        assert "Traceback" not in other.text()
        assert server.process.poll() is None


def test_more_environments_than_slots_are_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    with (
        _serve(tmp_path, "batching.max_slots=8") as server,
        _attach(tmp_path, "--envs-per-worker", 16) as greedy,
    ):
        assert greedy.wait(30) == 2
        assert "16 environments do not fit" in greedy.text() and "8" in greedy.text()
        assert server.process.poll() is None


def test_an_address_in_use_is_refused_with_the_owners_pid_and_a_dead_ones_is_taken(
    tmp_path: Path,
) -> None:
    arguments = (
        "serve",
        "cartpole",
        *overrides("CartPole-v1", {}, *SERVE),
        "--bind",
        "unix://door",
    )
    with _serve(tmp_path) as server:
        code, text = seedrl(*arguments, "--run-dir", "other", cwd=tmp_path)
        assert code == 2 and str(server.process.pid) in text and len(text.strip().splitlines()) <= 3
        with _attach(tmp_path) as worker:
            _wait(lambda: _steps(tmp_path) > 500)
            worker.signal(signal.SIGINT)
            worker.wait(5)
        for pid in server.pids():
            os.kill(pid, signal.SIGKILL)
        server.all_gone_within(5)
    begin = time.monotonic()
    with Command(*arguments, "--run-dir", "third", cwd=tmp_path) as again:
        again.until("workers may attach", 30)
        assert time.monotonic() - begin < 30


def test_attach_to_nobody_says_so_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    with Command("attach", "unix://nobody", "--env", "CartPole-v1", cwd=tmp_path) as worker:
        worker.until("nobody answers", 10)
        assert worker.process.poll() is None, "it goes on trying"
        worker.signal(signal.SIGINT)
        assert worker.wait(4) == 130


def test_leftovers_kill_9_in_any_order_takes_nobody_else_along(tmp_path: Path) -> None:
    chance, before = random.Random(3), set(os.listdir("/dev/shm"))
    for number in range(ROUNDS):
        folder = tmp_path / f"round-{number}"
        folder.mkdir()
        with _serve(folder) as server, _attach(folder) as one, _attach(folder) as two:
            _wait(lambda folder=folder: _steps(folder) > 500)
            victim, other = chance.sample([one, two], 2)
            for pid in victim.pids():
                os.kill(pid, signal.SIGKILL)
            reached = _steps(folder)
            _wait(lambda folder=folder, reached=reached: _steps(folder) > reached + 500)
            assert other.process.poll() is None and server.process.poll() is None
            for pid in server.pids():
                os.kill(pid, signal.SIGKILL)
            assert server.all_gone_within(5)
            other.signal(signal.SIGINT)
            assert other.wait(5) == 130
    assert set(os.listdir("/dev/shm")) == before


def test_case_20_the_engine_is_killed_the_run_resumed_and_workers_reattach_by_themselves(
    tmp_path: Path,
) -> None:
    with _serve(tmp_path) as server, _attach(tmp_path, "--workers", 2) as workers:
        _wait(lambda: _steps(tmp_path) > 3000)
        _wait(lambda: any((tmp_path / "run/checkpoints").glob("step-*")))
        (engine,) = server.named("seedrl.engine.loop")
        os.kill(engine, signal.SIGKILL)
        assert server.wait(15) == 1
        assert "engine" in server.text().strip().splitlines()[-1] or "engine" in "\n".join(
            server.text().strip().splitlines()[-3:]
        )
        assert server.all_gone_within(10)
        before = records(tmp_path / "run")
        with _serve(tmp_path, flags=("--resume",)) as again:
            _wait(lambda: len(records(tmp_path / "run")) > len(before) + 2)
            after = records(tmp_path / "run")[len(before) :]
            assert workers.process.poll() is None
            assert after[-1]["live_slots"] == 8
            assert after[0]["env_steps"] > 0 and after[-1]["updates"] > after[0]["updates"]
            resumed = next(line for line in again.text().splitlines() if "resumed from" in line)
            steps = int(resumed.split(": ")[-1].split(" steps")[0])
            assert steps > 0 and after[0]["env_steps"] >= steps


@pytest.mark.parametrize("max_lag", [1, 4])
def test_case_20_a_slow_learner_slows_acting_and_no_sampled_row_is_older_than_max_lag(
    tmp_path: Path, max_lag: int
) -> None:
    config = settings(
        "CartPole-v1",
        {},
        replay={"max_lag": max_lag},
        learner={"unroll_length": 8, "batch_size": 4},
    )
    with Harness(config, tmp_path, num_slots=8) as run:
        run.begin()
        engine = psutil.Process(run._engine.pid)
        resident = []
        for version in range(1, max(25, FLAT_S)):
            time.sleep(1.0 if FLAT_S else 0.1)
            batch = run.sample(4)
            assert int((version - 1 - batch.version).max()) <= max_lag
            run.publish(version)
            resident.append(engine.memory_info().rss)
        acted, read = run.finish()
        stale = read["stale_rows"]
    assert resident[-1] - resident[8] < 4 << 20
    assert acted["acted"] < version * 4 * 8 * (max_lag + 3) + stale, "acting waits"
    assert run.board.get("blocked_lag_ns") + run.board.get("blocked_room_ns") > 1e9, (
        "and says what for"
    )


def test_a_worker_costs_little_above_its_environment(tmp_path: Path) -> None:
    plain = Command(cwd=tmp_path, prefix=[_python(), "-c", "import gymnasium, time; e = [gymnasium.make('CartPole-v1') for _ in range(8)]; [x.reset() for x in e]; print('up', flush=True); time.sleep(60)"])  # fmt: skip
    config = settings("CartPole-v1", workers={"num": 1})
    with plain, Harness(config, tmp_path, num_slots=8) as run:
        plain.until("up")
        own = psutil.Process(plain.process.pid).memory_info().rss
        run.begin()
        run.sample(8)
        worker = psutil.Process(run._workers[0].child.pid).memory_info().rss
        run.enter(Phase.EXIT)
    assert worker - own <= 60 << 20


def _python() -> str:
    import sys

    return sys.executable


def test_a_checkpoint_is_served_without_a_learner(tmp_path: Path) -> None:
    more = overrides("envs:SameAnswer", {}, "evaluation.episodes=0", "run.max_seconds=1")
    code, text = seedrl("train", "cartpole", *more, "--run-dir", "run", cwd=tmp_path)
    assert code == 0, text
    for how in ("--greedy", "--sample"):
        served = f"served{how}"
        with Command("serve", "cartpole", "env.id=envs:SameAnswer", "run.max_steps=3000", "--checkpoint", "run", how,
                     "--run-dir", served, "--listen", "tcp://127.0.0.1:0", cwd=tmp_path) as server:  # fmt: skip
            server.until("attach tcp")
            tcp = re.search(r"attach (tcp://\S+)", server.text())[1]
            code, text = seedrl(
                "attach",
                tcp,
                "--env",
                "envs:SameAnswer",
                "--envs-per-worker",
                "4",
                "--check",
                "off",
                cwd=tmp_path,
            )
            assert code == 0, text
            assert server.wait(20) == 0
        last = re.findall(r"mean return ([\d.]+) \(min ([\d.]+)", server.text())[-1]
        assert (float(last[1]) == 10.0) == (how == "--greedy"), server.text()
        assert "max_steps 3000 reached" in server.text() and not list(
            (tmp_path / served).glob("checkpoints/*")
        )
    code, text = seedrl("serve", "cartpole", "--checkpoint", "nowhere", cwd=tmp_path)
    assert code == 2 and "nowhere" in text
    code, text = seedrl("serve", "cartpole", "--checkpoint", "run", cwd=tmp_path)
    assert code == 2 and "another environment" in text
