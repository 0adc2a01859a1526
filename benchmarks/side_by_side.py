"""seedrl and the plain loop, one after the other, on the same machine: seconds until 475 over the last 100 training episodes.

python benchmarks/side_by_side.py --seeds 1 2 3 --step-us 0
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def loop_seconds(seed: int, step_us: float, sleep: bool) -> float:
    command = [
        sys.executable,
        str(HERE / "vtrace_loop.py"),
        "--seed",
        str(seed),
        "--step-us",
        str(step_us),
        "--json",
        "--episodes",
        "1",
    ]
    done = subprocess.run(
        [*command, *(["--sleep"] if sleep else [])], check=True, capture_output=True, text=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def product_seconds(seed: int, step_us: float, sleep: bool, more: list[str]) -> float:
    """From the first step to the record in which the mean reached the goal, as the run's own metrics.jsonl has it."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        kwargs = json.dumps({"step_us": step_us, "sleep": sleep})
        subprocess.run(
            [
                sys.executable, "-m", "seedrl", "train", "cartpole", "--run-dir", str(run), "--seed", str(seed), "env.id=slow_cartpole:make",
                f"env.kwargs={kwargs}", "evaluation.episodes=0", "run.max_seconds=300", "run.log_every_s=0.25", *more,
            ],
            check=True, capture_output=True, env=env,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reached = [line["time_s"] for line in lines if line.get("return_mean", 0) >= 475]
    return float(reached[0]) if reached else float("inf")


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parse.add_argument("--step-us", type=float, default=0.0)
    parse.add_argument("--sleep", action="store_true")
    parse.add_argument("more", nargs="*", help="key=value for seedrl train")
    arguments = parse.parse_intermixed_args()
    ratios = []
    for seed in arguments.seeds:
        plain = loop_seconds(seed, arguments.step_us, arguments.sleep)
        ours = product_seconds(seed, arguments.step_us, arguments.sleep, arguments.more)
        ratios.append(ours / plain)
        print(
            f"seed {seed}: loop {plain:6.1f} s   seedrl {ours:6.1f} s   ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
