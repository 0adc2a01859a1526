"""Sweeps that answer one question each, turn by turn in the same minutes, medians: for an idle machine.

python benchmarks/sweeps.py breakeven [--draw docs/breakeven.png]  # from what cost of a step on is seedrl faster than one process?
python benchmarks/sweeps.py slots                                  # does throughput fall as slots grow?
python benchmarks/sweeps.py telemetry                              # what does measuring cost?

[--repeats 3] [--seconds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedrl.alone import in_own_process
from seedrl.bench import Unlearnt, configuration, measure
from seedrl.config import Config
from seedrl.supervise import probe

HERE = Path(__file__).parent
STEPS_US = (0, 5, 10, 20, 50, 200)
ENVS = 32
SHAPES = (
    (2, 1),
    (2, 2),
    (1, 2),
)  # workers and groups: the best of them is what `seedrl tune` would find
SLOTS = (8, 32, 128, 512, 2048)


def engine(config: Config, seconds: float) -> dict[str, Any]:
    return measure(config, "shm", seconds)


def medians(cases: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[Any]]:
    """What every case gives in `repeats` rounds over all of them."""
    found: dict[Any, list[Any]] = {case: [] for case in cases}
    for number in range(repeats):
        turn = list(cases.items())
        for case, run in (
            turn if number % 2 == 0 else reversed(turn)
        ):  # so that nobody always comes second
            found[case].append(run())
            print(
                f"{number + 1} of {repeats}: {case}: {found[case][-1]}", file=sys.stderr, flush=True
            )
    return found


def breakeven(repeats: int, seconds: float, draw: Path | None) -> None:
    def config(step_us: float, workers: int = 1, groups: int = 1) -> Config:
        return configuration("S", "shm", "default", workers, ENVS // workers, step_us, [f"workers.groups={groups}"])  # fmt: skip

    cases: dict[Any, Callable[[], Any]] = {}
    for us in STEPS_US:
        cases[us, "alone"] = lambda us=us: in_own_process(config(us), ENVS, seconds)
        for workers, groups in SHAPES:
            cases[us, workers, groups] = lambda us=us, w=workers, g=groups: engine(config(us, w, g), seconds)["steps_per_s"]  # fmt: skip
    found = {case: statistics.median(values) for case, values in medians(cases, repeats).items()}
    print(f"| a step costs, us | one process, {ENVS} environments | seedrl | of workers x groups | ratio |\n|---|---|---|---|---|")  # fmt: skip
    curves: dict[str, list[float]] = {"one process": [], "seedrl": []}
    for us in STEPS_US:
        shape = max(SHAPES, key=lambda s, us=us: found[us, *s])
        one, many = found[us, "alone"], found[us, *shape]
        curves["one process"].append(one)
        curves["seedrl"].append(many)
        print(f"| {us} | {one:,.0f} | {many:,.0f} | {shape[0]} x {shape[1]} | {many / one:.2f} |")
    print(f"break-even: {crossing(STEPS_US, curves['seedrl'], curves['one process'])}")
    if draw is not None:
        picture(curves, draw)


def crossing(steps_us: tuple[float, ...], many: list[float], one: list[float]) -> str:
    """The cost from which `many` is the faster: interpolated, in time per step, between the last cost at which it is not and the next."""
    last = max((i for i in range(len(steps_us)) if many[i] < one[i]), default=-1)
    if last == -1:
        return "everywhere"
    if last == len(steps_us) - 1:
        return "nowhere"
    # time lost per step falls to 0 in between
    before, after = (1 / many[i] - 1 / one[i] for i in (last, last + 1))
    share = before / (before - after)
    return f"{steps_us[last] + share * (steps_us[last + 1] - steps_us[last]):.0f} us a step"


def picture(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, values in curves.items():
        axes.plot(STEPS_US, values, marker="o", label=name)
    axes.set(xscale="symlog", yscale="log", xlabel="processor time of one environment's step, us", ylabel="environment steps a second")  # fmt: skip
    axes.set_xticks(STEPS_US, [str(us) for us in STEPS_US])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def slots(repeats: int, seconds: float) -> None:
    cases = {n: lambda n=n: engine(configuration("S", "shm", "default", 4, n // 4, 0, []), seconds) for n in SLOTS}  # fmt: skip
    print(
        "| environments in 4 workers | steps/s | batches/s | rows a batch | engine, us a batch |\n|---|---|---|---|---|"
    )
    for n, runs in medians(cases, repeats).items():
        median = sorted(runs, key=lambda run: run["steps_per_s"])[len(runs) // 2]
        engine_us = sum(median["stage_us"][stage]["p50"] for stage in ("ingest", "forward", "answer", "append"))  # fmt: skip
        print(f"| {n} | {median['steps_per_s']:,.0f} | {median['batches'] / median['seconds']:,.0f} | {median['mean_batch']:.1f} | {engine_us:,.0f} |")  # fmt: skip


class _InTurns(Unlearnt):
    """A run whose engine measures every other quarter of a second."""

    def _start_process(self, name: str, module: str, *rest: Any) -> Any:
        return super()._start_process(name, "dark_engine" if name == "engine" else module, *rest)


def cost_of_measuring(envs: int, seconds: float) -> float:
    """The share of throughput that measuring takes, within one run."""
    config = configuration("S", "shm", "default", 4, envs, 0, [])
    with (
        tempfile.TemporaryDirectory(prefix="seedrl-bench-") as name,
        _InTurns(config, probe(config), Path(name), num_slots=4 * envs) as run,
    ):
        run.begin()
        log = Path(name) / "logs/engine.txt"
        run.act(1.0)
        before = json.loads(log.read_text().splitlines()[-1])
        run.act(seconds)
        after = json.loads(log.read_text().splitlines()[-1])
    lit, dark = ((after["rows"][i] - before["rows"][i]) / (after["ns"][i] - before["ns"][i]) for i in (0, 1))  # fmt: skip
    return float(1 - lit / dark)


def telemetry(repeats: int, seconds: float) -> None:
    os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    found = medians({envs: lambda e=envs: cost_of_measuring(e, seconds) for envs in (8, 32)}, repeats)  # fmt: skip
    for envs, costs in found.items():
        print(f"S 4x{envs}: measuring takes {statistics.median(costs):.1%} of the steps ({', '.join(f'{cost:.1%}' for cost in sorted(costs))})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("what", choices=("breakeven", "slots", "telemetry"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--draw", type=Path, default=None)
    given = parser.parse_args()
    if given.what == "breakeven":
        breakeven(given.repeats, given.seconds, given.draw)
    else:
        {"slots": slots, "telemetry": telemetry}[given.what](given.repeats, given.seconds)


if __name__ == "__main__":
    main()
