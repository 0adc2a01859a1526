"""Acting beside what a user would pick instead, turn by turn in the same minutes: medians and ratios, on an idle machine.

python benchmarks/peers.py [--workloads S L C A] [--envs 32] [--repeats 3] [--seconds 3] [--json FILE]

Every peer lives in an environment of its own, build/peers/NAME, which this makes when it is not there; one that cannot be installed, or
fails, is said and left out. The same environments (one object each, `peer_envs.py`), the same network; seedrl's rows go into replay.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VENVS = HERE.parent / "build/peers"
CONSTRAINTS = HERE.parent / "constraints.txt"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # fmt: skip
NEEDS = {
    "sb3": ("-c", str(CONSTRAINTS), "stable-baselines3", "gymnasium", "minatar"),
    "torchrl": ("-c", str(CONSTRAINTS), "torchrl", "gymnasium", "minatar"),
    "reverb": ("dm-reverb[tensorflow]",),
    # brings an older Gymnasium and NumPy of its own choice, and imports pkg_resources
    "sf": ("sample-factory", "torch==2.13.0", "setuptools<81", "minatar", "pandas<3"),
}
# (what it is called, whose interpreter, its arguments)
PEERS = (
    ("one process (SyncVectorEnv)", None, ("loop",)),
    ("gymnasium AsyncVectorEnv", None, ("async",)),
    ("stable-baselines3 SubprocVecEnv", "sb3", ("subproc",)),
    ("TorchRL inference server, threads", "torchrl", ("torchrl", "--variant", "threads")),
    ("TorchRL inference server, processes", "torchrl", ("torchrl", "--variant", "processes")),
    ("TorchRL inference server, 16 to a process", "torchrl", ("torchrl", "--variant", "grouped")),
)  # fmt: skip


def interpreter(name: str | None) -> Path | None:
    """That of a peer's own environment, made if need be; None when it cannot be."""
    if name is None:
        return Path(sys.executable)
    python = VENVS / name / "bin/python"
    if not python.exists():
        print(f"installing what it needs into {VENVS / name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENVS / name)], check=True)
        command = [str(python), "-m", "pip", "install", "-q", *NEEDS[name]]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            return None
    return python


def run(command: list[str]) -> float | None:
    """The figure that a command prints, None when it prints none."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=ENVIRONMENT)  # fmt: skip
    except subprocess.TimeoutExpired:
        print("  no figure in 120 s", file=sys.stderr)
        return None
    for line in ran.stdout.splitlines():
        if line.startswith("{"):
            figure: float = json.loads(line)["steps_per_s"]
            return figure
    print(f"  no figure: {(ran.stderr.strip().splitlines() or ['no output'])[-1]}", file=sys.stderr)
    return None


def seedrl(workload: str, envs: int, seconds: float, workers: int) -> float | None:
    """The best of one group a worker and two: what `seedrl tune` would find at once."""
    env = {"S": "flat", "L": "flat", "A": "frames", "C": "cartpole"}[workload]
    command = [
        sys.executable, "-m", "seedrl", "bench", "--json", "--workload", workload, "--workers", str(workers),
        "--envs-per-worker", str(envs // workers), "--seconds", str(seconds), f"env.id=peer_envs:{env}",
    ]  # fmt: skip
    found = [figure for groups in (1, 2) if (figure := run([*command, f"workers.groups={groups}"])) is not None]  # fmt: skip
    return max(found, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=("S", "L", "C", "A"), default=["S", "L", "C", "A"])  # fmt: skip
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    workers = len(os.sched_getaffinity(0))
    sides: dict[str, Callable[[str], float | None]] = {
        "seedrl": lambda workload: seedrl(workload, given.envs, given.seconds, workers)
    }
    for name, where, arguments in PEERS:
        python = interpreter(where)
        if python is not None:
            command = [str(python), str(HERE / "peer.py"), *arguments, "--envs", str(given.envs), "--seconds", str(given.seconds)]  # fmt: skip
            sides[name] = partial(lambda command, workload: run([*command, "--workload", workload]), command)  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for number in range(given.repeats):
        for workload in given.workloads:
            for name, measure in sides.items():
                if workload == "L" and name.startswith("TorchRL") and not name.endswith("threads"):
                    continue  # with a state that travels its processes give no figure in 90 s, or end (0.14.1)
                figure = measure(workload)
                print(f"{number + 1} of {given.repeats}: {workload}: {name}: {figure}", file=sys.stderr, flush=True)  # fmt: skip
                if figure is not None:
                    found[name].setdefault(workload, []).append(figure)
    print(f"| {given.envs} environments, {workers} cores: steps/s (seedrl's as a multiple) | {' | '.join(given.workloads)} |")  # fmt: skip
    print("|---|" + "---|" * len(given.workloads))
    for name, by_workload in found.items():
        print(f"| {name} | {' | '.join(_cell(name, by_workload.get(w), found['seedrl'].get(w)) for w in given.workloads)} |")  # fmt: skip
    if given.json is not None:
        given.json.write_text(json.dumps(found))


def _cell(name: str, figures: list[float] | None, ours: list[float] | None) -> str:
    if not figures:
        return "-"
    middle = statistics.median(figures)
    multiple: Any = "" if name == "seedrl" or not ours else f" ({statistics.median(ours) / middle:.1f})"  # fmt: skip
    return f"{middle:,.0f}{multiple}"


if __name__ == "__main__":
    main()
