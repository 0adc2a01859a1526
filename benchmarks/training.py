"""Training beside what a user would pick instead: time and environment steps until the last 100 episodes' mean return is the goal.

python benchmarks/training.py [--task cartpole|cartpole32|dqn|minatar] [--repeats 3] [--limit-s 180] [--step-us 0]

CartPole to 475, or MinAtar's Breakout to 10. `cartpole32` has 32 environments and the same settings of PPO on both sides, stable-baselines3's in one
process; `dqn` is DQN's turn. --step-us lets each step of CartPole cost more. From the start of the command, imports and start-up included, one after the other in the same minutes, one seed a repeat. Each peer is
installed as in `peers.py` and trains as `train_peer.py` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from peers import ENVIRONMENT, interpreter

HERE = Path(__file__).parent
GOALS = {"cartpole": 475.0, "cartpole32": 475.0, "dqn": 475.0, "minatar": 10.0}
# of a task: configurations and what is changed in them, by what they are called
OURS: dict[str, dict[str, tuple[str, ...]]] = {
    "cartpole": {"V-trace": ("cartpole",), "PPO": ("cartpole_ppo",)},
    "cartpole32": {"PPO": ("cartpole_ppo", "algorithm.epochs=20", "algorithm.minibatches=4", "learner.learning_rate=1e-3")},
    "dqn": {"DQN": ("cartpole_dqn",)},
    "minatar": {"V-trace": ("minatar_breakout",), "PPO": ("minatar_breakout_ppo",)},
}  # fmt: skip
THEIRS = {"cartpole32": ("sb3",), "dqn": ("sb3-dqn",)}


class Result(NamedTuple):
    seconds: float
    env_steps: int
    reached: bool


def first_line(command: list[str], goal: str, progress: str, limit_s: float) -> tuple[float, str, bool]:  # fmt: skip
    """When a command prints a line that holds the goal, and the line; else the last one that holds `progress`. It is left to end by itself."""
    begin, last, reached = time.monotonic(), (0.0, ""), False
    with subprocess.Popen(
        ["timeout", "--signal=INT", "--kill-after=10", str(limit_s), *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if not reached and (goal in line or progress in line):
                last, reached = (time.monotonic() - begin, line), goal in line
    return *last, reached


def seedrl(settings: tuple[str, ...], goal: float, limit_s: float, seed: int) -> Result | None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [
            sys.executable, "-u", "-m", "seedrl", "train", *settings, "--run-dir", str(run_dir),
            f"run.seed={seed}", f"run.stop_at_return={goal}", f"run.max_seconds={limit_s:.0f}",
        ]  # fmt: skip
        seconds, _, reached = first_line(command, f" reached {goal}; evaluating", "", limit_s + 60)
        records = (run_dir / "metrics.jsonl").read_text().splitlines()
        return Result(seconds if reached else limit_s, json.loads(records[-1])["env_steps"], reached)  # fmt: skip


def peer(python: Path, name: str, task: str, step_us: float, limit_s: float, seed: int) -> Result | None:  # fmt: skip
    command = [str(python), "-u", str(HERE / "train_peer.py"), name, "--task", task, "--step-us", str(step_us), "--seed", str(seed)]  # fmt: skip
    seconds, line, reached = first_line(command, '{"env_steps"', '{"so_far"', limit_s)
    if not line:
        return None  # it failed
    return Result(seconds, json.loads(line)["env_steps" if reached else "so_far"], reached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--task", choices=sorted(OURS), default="cartpole")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=180.0)
    parser.add_argument("--step-us", type=float, default=0.0)
    given = parser.parse_args()
    task, limit_s = given.task, given.limit_s
    slower = ("env.id=slow_cartpole:make", f"env.kwargs={{step_us: {given.step_us}}}") if given.step_us else ()  # fmt: skip
    sides: dict[str, Callable[[int], Result | None]] = {
        f"seedrl ({title})": partial(seedrl, (*settings, *slower), GOALS[task], limit_s)
        for title, settings in OURS[task].items()
    }
    for title, where, name in (
        ("stable-baselines3 PPO", "sb3", "sb3"),
        ("stable-baselines3 DQN", "sb3", "sb3-dqn"),
        ("Sample Factory APPO", "sf", "sample-factory"),
        ("TorchRL PPO", "torchrl", "torchrl"),
    ):
        if name not in THEIRS.get(task, ("sb3", "sample-factory", "torchrl")):
            continue
        python = interpreter(where)
        if python is not None:
            sides[title] = partial(peer, python, name, task, given.step_us, limit_s)
    found: dict[str, list[Result | None]] = {title: [] for title in sides}
    for seed in range(given.repeats):
        for title, run in sides.items():
            found[title].append(run(seed))
            print(f"seed {seed}: {title}: {found[title][-1]}", file=sys.stderr, flush=True)
    print(f"| {task} to {GOALS[task]:.0f} | s, median (each) | environment steps | steps/s, start-up included |\n|---|---|---|---|")  # fmt: skip
    for title, results in found.items():
        ran = [result for result in results if result is not None]
        if not ran:
            print(f"| {title} | failed | - | - |")
            continue
        took = sorted(result.seconds if result.reached else float("inf") for result in ran)
        each = ", ".join(f"over {limit_s:.0f}" if s == float("inf") else f"{s:.1f}" for s in took)
        middle = statistics.median_low(took)
        median = "not reached" if middle == float("inf") else f"{middle:.1f}"
        steps = statistics.median(result.env_steps for result in ran)
        rate = statistics.median(result.env_steps / result.seconds for result in ran)
        print(f"| {title} | {median} ({each}) | {steps:,.0f} | {rate:,.0f} |")


if __name__ == "__main__":
    main()
