"""What the shipped configurations come to: each trained to its end with several seeds, one after the other; a table for docs/results.md.

python benchmarks/results.py [CONFIG ...] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIGS = (
    "cartpole",
    "cartpole_ppo",
    "cartpole_dqn",
    "pendulum_ppo",
    "repeat_previous_r2d2",
    "minatar_breakout_ppo",
)
EVALUATED = re.compile(r"greedy evaluation: \d+ episodes, mean return (-?[\d.]+)")


def run(config: str, seed: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "run"
        command = [
            sys.executable,
            "-m",
            "seedrl",
            "train",
            config,
            "--run-dir",
            str(folder),
            f"run.seed={seed}",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = EVALUATED.search(ran.stdout + ran.stderr)
    last = max(records, key=lambda record: record["time_s"])
    greedy = found[1] if found else f"none (exit code {ran.returncode})"
    return f"| {config} | {seed} | {last['env_steps']:,} | {last['time_s']:.1f} | {last.get('return_mean', float('nan')):.2f} | {greedy} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", default=CONFIGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    print(
        "| configuration | seed | environment steps | seconds of training | mean return of the last 100 episodes | greedy, 100 episodes |"
    )
    print("|---|---|---|---|---|---|")
    for config in given.configs:
        for seed in given.seeds:
            print(run(config, seed), flush=True)


if __name__ == "__main__":
    main()
