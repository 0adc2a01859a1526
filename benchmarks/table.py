"""`seedrl bench` beside the bare loop (`floor.py`), turn by turn in the same minutes: medians and ratios.

python benchmarks/table.py [--cases S:4x32:shm ...] [--repeats 3] [--seconds 5] [--json FILE]

A case is WORKLOAD:WORKERSxENVIRONMENTS:TRANSPORT. Run it on an idle machine: it takes 20 s a case and repeat. The bare loop does not encrypt,
so CURVE is compared with its plain tcp.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

CASES = ("S:4x32:shm", "S:4x8:shm", "L:4x32:shm", "A:4x8:shm", "C:4x32:shm", "S:4x32:zmq-ipc", "S:4x32:zmq-tcp", "S:4x32:zmq-tcp-curve")  # fmt: skip
FLOOR = Path(__file__).with_name("floor.py")


class Case(NamedTuple):
    workload: str
    workers: int
    envs: int
    transport: str

    @staticmethod
    def of(text: str) -> Case:
        found = re.fullmatch(r"([SALC]):(\d+)x(\d+):(shm|zmq-ipc|zmq-tcp(?:-curve)?)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"'{text}' is no case such as S:4x32:shm")
        return Case(found[1], int(found[2]), int(found[3]), found[4])

    def arguments(self, seconds: float, transport: str) -> list[str]:
        return [
            "--workload", self.workload, "--workers", str(self.workers), "--envs-per-worker", str(self.envs), "--transport", transport,
            "--seconds", str(seconds),
        ]  # fmt: skip


def run(command: list[str]) -> dict[str, Any]:
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--cases", nargs="+", type=Case.of, default=[Case.of(text) for text in CASES])  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--floor", type=Path, default=FLOOR)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    bare: dict[Case, list[dict[str, Any]]] = {case: [] for case in given.cases}
    ours: dict[Case, list[dict[str, Any]]] = {case: [] for case in given.cases}
    for repeat in range(given.repeats):
        for case in given.cases:
            plain = case.transport.removesuffix("-curve")
            bare[case].append(run([sys.executable, str(given.floor), *case.arguments(given.seconds, plain)]))  # fmt: skip
            ours[case].append(run([sys.executable, "-m", "seedrl", "bench", "--json", *case.arguments(given.seconds, case.transport)]))  # fmt: skip
            print(
                f"{repeat + 1} of {given.repeats}: {case.workload} {case.workers}x{case.envs} {case.transport}: "
                f"{ours[case][-1]['steps_per_s']:,.0f} of {bare[case][-1]['steps_per_s']:,.0f} steps/s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    print("| workload | transport | bare loop | seedrl | ratio | round trip p50, p99, p99.9 |")
    print("|---|---|---|---|---|---|")
    for case in given.cases:
        floor, product = (statistics.median(one["steps_per_s"] for one in all_[case]) for all_ in (bare, ours))  # fmt: skip
        ratio = statistics.median(
            one["steps_per_s"] / other["steps_per_s"]
            for one, other in zip(ours[case], bare[case], strict=True)
        )
        rtt = ", ".join(f"{statistics.median(one['rtt_us'][name] for one in ours[case]):,.0f}" for name in ("p50", "p99", "p999"))  # fmt: skip
        print(f"| {case.workload} {case.workers}x{case.envs} | {case.transport} | {floor:,.0f} | {product:,.0f} | {ratio:.2f} | {rtt} us |")  # fmt: skip
    if given.json is not None:
        given.json.write_text(json.dumps([{"floor": bare[case], "seedrl": ours[case]} for case in given.cases]))  # fmt: skip


if __name__ == "__main__":
    main()
