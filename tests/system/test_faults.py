"""Of the troublesome cases: faults of the simulator, stopping and waiting. Whole commands, as a user runs them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import SEEDRL, Command, newest, overrides, records, seedrl
from seedrl.store.checkpoint import load_checkpoint

INSTANTS = int(os.environ.get("SEEDRL_INSTANTS", "2"))  # `make truths` tries more


def test_RaisesInStep_once_rebuilds_the_seat_and_counts_one_fault(tmp_path: Path) -> None:
    kwargs = {"at": 37, "flag": str(tmp_path / "flag")}
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("envs:RaisesInStep", kwargs, "workers.num=2"),
        "--run-dir",
        "run",
        cwd=tmp_path,
    )
    assert code == 0, text
    log = (tmp_path / "run/log.txt").read_text()
    (line,) = [line for line in log.splitlines() if "simulator lost its licence" in line]
    assert "RaisesInStep" in line and "seat" in line and "worker" in line
    last = records(tmp_path / "run")[-1]
    assert last["environment_faults"] == 1 and last["interrupted_episodes"] == 1
    assert last["return_mean"] == 10 and last["length_mean"] == 10, (
        "the broken episode is in no mean"
    )
    assert last["live_slots"] == 16


def test_RaisesInStep_always_ends_the_run_with_the_first_traceback_last_on_the_screen(
    tmp_path: Path,
) -> None:
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("envs:RaisesInStep", {"at": 12}),
        "--run-dir",
        "run",
        cwd=tmp_path,
    )
    assert code == 1
    lines = text.strip().splitlines()
    assert any("simulator lost its licence" in line for line in lines[-3:]), text
    assert "faults" in "\n".join(lines[-3:])
    assert 'raise ValueError("simulator lost its licence")' in "\n".join(lines[-20:])
    assert "simulator lost its licence" in (tmp_path / "run/log.txt").read_text()


def test_RaisesInInit_says_the_loaders_message(tmp_path: Path) -> None:
    begin = time.monotonic()
    code, text = seedrl(
        "train", "cartpole", *overrides("envs:RaisesInInit"), "--run-dir", "run", cwd=tmp_path
    )
    assert code in (1, 2) and time.monotonic() - begin < 30
    assert "libsim.so.3: cannot open shared object file" in "\n".join(
        text.strip().splitlines()[-3:]
    )


def test_few_environments_one_of_one_worker_acts_at_once_below_min_batch(tmp_path: Path) -> None:
    more = ("workers.envs_per_worker=1", "workers.groups=1", "batching.min_batch=64", "batching.max_wait_us=200000", "batching.max_slots=64",
            "batching.hard_deadline_us=400000", "learner.batch_size=1", "run.max_seconds=3")  # fmt: skip
    code, text = seedrl(
        "train", "cartpole", *overrides("CartPole-v1", {}, *more), "--run-dir", "run", cwd=tmp_path
    )
    assert code == 0, text
    last = records(tmp_path / "run")[-1]
    # rows and batches are read one after the other while the engine goes on
    assert newest(tmp_path / "run", "batch_rows_mean") == pytest.approx(1, abs=0.01)
    assert last["env_steps"] > 1000


def test_few_environments_an_evaluation_seat_alone_acts_at_once(tmp_path: Path) -> None:
    code, text = seedrl("train", "cartpole", *overrides("CartPole-v1", {}, "batching.min_batch=64", "batching.max_slots=64", "run.max_seconds=1", "evaluation.episodes=0"), "--run-dir", "run", cwd=tmp_path)  # fmt: skip
    assert code == 0, text
    begin = time.monotonic()
    code, text = seedrl("eval", "run", "--episodes", 1, "--envs", 1, "--json", cwd=tmp_path)
    assert code == 0 and time.monotonic() - begin < 30, text
    assert json.loads(text.strip().splitlines()[-1])["episodes"] == 1


@pytest.mark.parametrize("how", ["ctrl-c", pytest.param("max-seconds", marks=pytest.mark.long)])
def test_stop_with_a_backlog_is_done_within_ten_seconds(tmp_path: Path, how: str) -> None:
    more = (
        "policy.name=system_policies:slow_to_learn",
        f"run.max_seconds={600 if how == 'ctrl-c' else 6}",
        "evaluation.episodes=0",
    )
    with Command(
        "train", "cartpole", *overrides("CartPole-v1", {}, *more), "--run-dir", "run", cwd=tmp_path
    ) as command:
        command.until("run  ")
        time.sleep(4 if how == "ctrl-c" else 6)
        if how == "ctrl-c":
            command.signal(signal.SIGINT)
        begin = time.monotonic()
        code = command.wait(15)
        assert time.monotonic() - begin < 10
        assert code == (130 if how == "ctrl-c" else 0), command.text()
        assert command.all_gone_within(10)
    assert load_checkpoint(tmp_path / "run").path is not None


@pytest.mark.parametrize("group", [False, True], ids=["parent", "group"])
def test_ctrl_c_at_any_instant_leaves_a_whole_checkpoint_and_nothing_running(
    tmp_path: Path, group: bool
) -> None:
    chance = random.Random(7 + group)
    for instant in range(INSTANTS):
        run = f"run-{instant}"
        more = ("run.checkpoint_every_s=0.3", "run.max_seconds=600", "evaluation.episodes=0")
        with Command(
            "train",
            "cartpole",
            *overrides("CartPole-v1", {}, *more),
            "--run-dir",
            run,
            cwd=tmp_path,
        ) as command:
            time.sleep(chance.uniform(0.4, 8.0))
            command.signal(signal.SIGINT, group=group)
            begin = time.monotonic()
            code = command.wait(15)
            assert code == 130, command.text()
            assert "Traceback" not in command.text()
            assert command.all_gone_within(10 - (time.monotonic() - begin))
        if "run  " in command.text():  # it had begun to act
            load_checkpoint(tmp_path / run)


def test_an_exception_in_the_supervisor_ends_everything_with_exit_1(tmp_path: Path) -> None:
    program = (
        "import seedrl.cli, seedrl.supervise as s, time\n"
        "plain, begin = s.Supervisor.pump, time.monotonic()\n"
        "def pump(self, *a):\n"
        "    plain(self, *a)\n"
        "    if self.board.get('env_steps') > 2000: raise RuntimeError('out of luck')\n"
        "s.Supervisor.pump = pump\n"
        "seedrl.cli.main()\n"
    )
    arguments = [
        "train",
        "cartpole",
        *overrides("CartPole-v1", {}, "run.max_seconds=600"),
        "--run-dir",
        "run",
    ]
    with Command(*arguments, cwd=tmp_path, prefix=[sys.executable, "-c", program]) as command:
        assert command.wait(60) == 1
        assert "out of luck" in command.text().strip().splitlines()[-1]
        assert command.all_gone_within(10)


@pytest.mark.parametrize(
    ("end", "stubborn"),
    [
        pytest.param("itself", False, marks=pytest.mark.long),
        ("ctrl-c", True),
        ("kill supervisor", True),
        ("kill worker", True),
    ],
)
def test_SpawnsChild_no_process_of_the_run_is_left(
    tmp_path: Path, stubborn: bool, end: str
) -> None:
    more = (
        "workers.envs_per_worker=2",
        f"run.max_seconds={3 if end == 'itself' else 600}",
        "evaluation.episodes=0",
        "learner.batch_size=1",
    )
    with Command(
        "train",
        "cartpole",
        *overrides("envs:SpawnsChild", {"stubborn": stubborn}, *more),
        "--run-dir",
        "run",
        cwd=tmp_path,
    ) as command:
        command.until("run  ")
        time.sleep(0 if end == "itself" else 2)
        if end == "itself":
            assert command.wait(30) == 0, command.text()
        elif end == "ctrl-c":
            command.signal(signal.SIGINT)
            assert command.wait(15) == 130, command.text()
        elif end == "kill supervisor":
            command.signal(signal.SIGKILL)
        else:
            (worker,) = command.named("seedrl.worker.loop")
            before = set(command.named("multiprocessing"))
            assert before
            os.kill(worker, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while before & set(command.pids()):
                assert time.monotonic() < deadline, "children of the killed worker live on"
                time.sleep(0.05)
            command.signal(signal.SIGINT)
            assert command.wait(15) == 130, command.text()
        assert command.all_gone_within(10), command.text()


def test_kill_9_of_the_whole_group_leaves_nothing_on_disk_but_the_run(tmp_path: Path) -> None:
    places = [Path("/dev/shm"), Path("/tmp"), Path("/var/tmp")]
    before = {place: set(os.listdir(place)) for place in places}
    with Command(
        "train",
        "cartpole",
        *overrides("CartPole-v1", {}, "run.max_seconds=600"),
        "--run-dir",
        "run",
        cwd=tmp_path,
    ) as command:
        command.until("run  ")
        time.sleep(1)
        for pid in command.pids():
            open_files = [
                os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
            ]
            assert not [name for name in open_files if name.startswith("/dev/shm")]
        for pid in command.pids():
            os.kill(pid, signal.SIGKILL)
        assert command.all_gone_within(5)
    mine = {
        place: {name for name in set(os.listdir(place)) - before[place] if "seedrl" in name}
        for place in places
    }
    assert not any(mine.values())


def test_kill_9_of_the_supervisor_alone_ends_all_its_processes(tmp_path: Path) -> None:
    with Command(
        "train",
        "cartpole",
        *overrides("CartPole-v1", {}, "run.max_seconds=600"),
        "--run-dir",
        "run",
        cwd=tmp_path,
    ) as command:
        command.until("run  ")
        time.sleep(1)
        assert len(command.pids()) >= 4
        command.signal(signal.SIGKILL)
        assert command.all_gone_within(10)
        assert not (tmp_path / "run/door.sock").exists()


def test_CountsThreads_a_worker_has_at_most_four(tmp_path: Path) -> None:
    code, text = seedrl(
        "train", "cartpole", *overrides("envs:CountsThreads"), "--run-dir", "run", cwd=tmp_path
    )
    assert code == 0, text
    assert records(tmp_path / "run")[-1]["return_mean"] / 10 <= 4


def test_small_dev_shm_is_no_obstacle_and_holds_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "frames.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "from envs import Case\n"
        "class Frames(Case):\n"
        "    def __init__(self, render_mode=None):\n"
        "        super().__init__(render_mode)\n"
        "        self.observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)\n"
        "    def observe(self):\n"
        "        return np.full((4, 84, 84), self.t, np.uint8)\n"
    )
    more = (
        "workers.num=2",
        "workers.envs_per_worker=32",
        "learner.batch_size=2",
        "policy.encoder=auto",
        "evaluation.episodes=0",
        "run.max_seconds=4",
    )
    arguments = ["train", "cartpole", *overrides("frames:Frames", {}, *more), "--run-dir", "run"]
    prefix = None
    if (
        subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    ):  # where mounting is allowed: 64 KB of it
        mounted = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && "$@"; code=$?; ls -A /dev/shm | sed "s/^/left: /"; exit $code'
        prefix = ["unshare", "-m", "sh", "-c", mounted, "sh", *SEEDRL]
    with Command(*arguments, cwd=tmp_path, prefix=prefix) as command:
        command.until("run  ")
        for pid in command.named("seedrl"):
            open_files = [
                os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
            ]
            assert not [name for name in open_files if name.startswith("/dev/shm")]
        assert command.wait(60) == 0, command.text()
        assert "left: " not in command.text()
    assert records(tmp_path / "run")[-1]["env_steps"] > 64
