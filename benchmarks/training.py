"""Training on CartPole beside what a user would pick instead: time and environment steps until the last 100 episodes' mean return is 475.

python benchmarks/training.py [--repeats 3]

From the start of the command, imports and start-up included, one after the other in the same minutes, one seed a repeat. Each peer is
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

from peers import ENVIRONMENT, interpreter

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs/cartpole.yaml"
LIMIT_S = 180.0
Result = tuple[float, int]  # seconds, environment steps


def first_line(command: list[str], holds: str) -> tuple[float, str] | None:
    """When a command prints a line that holds this, and the line; it is left to end by itself. None when it does not."""
    begin, found = time.monotonic(), None
    with subprocess.Popen(
        ["timeout", "--signal=INT", "--kill-after=10", str(LIMIT_S), *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if found is None and holds in line:
                found = time.monotonic() - begin, line
    return found


def seedrl(seed: int) -> Result | None:
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        command = [sys.executable, "-u", "-m", "seedrl", "train", str(CONFIG), "--run-dir", str(run_dir), f"run.seed={seed}"]  # fmt: skip
        found = first_line(
            [*command, f"run.max_seconds={LIMIT_S:.0f}"], " reached 475.0; evaluating"
        )
        if found is None:
            return None
        last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        return found[0], last["env_steps"]


def peer(python: Path, name: str, seed: int) -> Result | None:
    command = [str(python), "-u", str(HERE / "train_peer.py"), name, "--seed", str(seed)]
    found = first_line(command, '{"env_steps"')
    return None if found is None else (found[0], json.loads(found[1])["env_steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    sides: dict[str, Callable[[int], Result | None]] = {"seedrl (V-trace)": seedrl}
    for title, where, name in (
        ("stable-baselines3 PPO", "sb3", "sb3"),
        ("Sample Factory APPO", "sf", "sample-factory"),
    ):
        python = interpreter(where)
        if python is not None:
            sides[title] = partial(peer, python, name)
    found: dict[str, list[Result | None]] = {title: [] for title in sides}
    for seed in range(given.repeats):
        for title, run in sides.items():
            found[title].append(run(seed))
            print(f"seed {seed}: {title}: {found[title][-1]}", file=sys.stderr, flush=True)
    print("| CartPole to 475 | s, median (each) | environment steps | steps/s, start-up included |\n|---|---|---|---|")  # fmt: skip
    for title, results in found.items():
        reached = sorted(result for result in results if result is not None)
        if len(reached) < len(results):
            print(f"| {title} | {len(results) - len(reached)} of {len(results)} not within {LIMIT_S:.0f} s | - | - |")  # fmt: skip
            continue
        each = ", ".join(f"{seconds:.1f}" for seconds, _ in reached)
        steps = statistics.median(steps for _, steps in reached)
        rate = statistics.median(steps / seconds for seconds, steps in reached)
        print(f"| {title} | {statistics.median(s for s, _ in reached):.1f} ({each}) | {steps:,.0f} | {rate:,.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
