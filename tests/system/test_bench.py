"""`seedrl bench` and the table beside the bare loop: the figures fit together, and are of what was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runs import seedrl
from seedrl import synthetic

ROOT = Path(__file__).parents[2]
KEYS = {
    "workload", "transport", "policy", "workers", "envs_per_worker", "seconds", "steps_per_s", "mean_batch", "batches", "rtt_us", "stage_us",
    "deschedule_us", "replay", "device", "versions",
}  # fmt: skip


def bench(tmp_path: Path, *arguments: object) -> dict:
    code, text = seedrl("bench", "--json", "--seconds", 1, *arguments, cwd=tmp_path)
    assert code == 0, text
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workload", "S", "--workers", 2, "--envs-per-worker", 16),
        pytest.param(("--workload", "L", "--workers", 2, "--envs-per-worker", 8, "--transport", "zmq-ipc"), marks=pytest.mark.long),
        pytest.param(("--workload", "A", "--workers", 1, "--envs-per-worker", 2), marks=pytest.mark.long),
        ("--workload", "C", "--workers", 1, "--envs-per-worker", 8, "--transport", "zmq-tcp-curve", "workers.groups=2"),
        ("--policy", "none", "--workers", 1, "--envs-per-worker", 4, "--transport", "zmq-tcp", "batching.max_batch=4"),
    ],
)  # fmt: skip
def test_the_figures_fit_together(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    found = bench(tmp_path, *arguments)
    assert set(found) >= KEYS
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    for flag, key in (("--workload", "workload"), ("--transport", "transport"), ("--workers", "workers"), ("--policy", "policy")):  # fmt: skip
        assert flag not in given or found[key] == given[flag]
    acted = found["mean_batch"] * found["batches"] / found["seconds"]
    assert found["steps_per_s"] == pytest.approx(acted, rel=0.01) and found["batches"] > 10
    assert found["mean_batch"] <= found["workers"] * found["envs_per_worker"]
    for row in (found["rtt_us"], found["deschedule_us"], *found["stage_us"].values()):
        assert 0 <= row["p50"] <= row["p99"] <= row["p999"]
    stages = found["stage_us"]
    assert set(stages) == {"wait", "ingest", "forward", "answer", "append"}
    # a row is answered in a round trip, and every stage but the last lies within it
    assert found["rtt_us"]["p50"] >= 0.5 * (stages["ingest"]["p50"] + stages["forward"]["p50"])
    assert found["replay"] is True


def test_a_step_that_costs_something_is_what_limits(tmp_path: Path) -> None:
    """One worker, 1 ms a step: at most 1000 steps a second, and not much less."""
    one = bench(tmp_path, "--workers", 1, "--envs-per-worker", 8, "--step-us", 1000)
    assert 500 < one["steps_per_s"] < 1050


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--workload", "X"), "--workload"), (("--transport", "carrier-pigeon"), "--transport"), (("--policy", "best"), "--policy"),
        (("worker.num=3",), "did you mean workers.num"), (("--workload", "C", "--step-us", 5), "--step-us"),
        (("workers.groups=5",), "workers.groups"),
    ],
)  # fmt: skip
def test_a_wrong_request_starts_nothing(
    tmp_path: Path, arguments: tuple[object, ...], named: str
) -> None:
    code, text = seedrl("bench", *arguments, cwd=tmp_path)
    assert code == 2 and named in text and len(text.splitlines()) <= 3, text


def test_the_page_for_people_has_every_stage(tmp_path: Path) -> None:
    code, text = seedrl("bench", "--seconds", 0.3, "--workers", 1, "--envs-per-worker", 4, cwd=tmp_path)  # fmt: skip
    assert code == 0 and "steps/s: S, 1 workers of 4, shm" in text
    assert all(f"{name} " in text for name in ("round trip", "wait", "forward", "append"))


def test_synthetic_environments_keep_the_next_step_order() -> None:
    env, length = synthetic.flat(num_envs=3), synthetic.EPISODE_STEPS
    env.reset(seed=0)
    actions = np.array([1, 2, 3])
    for t in range(1, 2 * length + 3):
        obs, reward, terminated, truncated, _ = env.step(actions)
        row = t % (length + 1)  # 0 is the reset that follows a last row
        assert obs.shape == (3, 8) and obs.dtype == np.float32 and not terminated.any()
        assert truncated.all() == truncated.any() == (row == length)
        np.testing.assert_array_equal(reward, actions if row else 0)
    assert synthetic.frames(num_envs=2).reset()[0].shape == (2, 4, 84, 84)


@pytest.mark.parametrize(
    "case", [pytest.param("S:2x4:shm", marks=pytest.mark.long), "L:1x4:zmq-tcp"]
)
def test_the_table_puts_the_bare_loop_beside_it(tmp_path: Path, case: str) -> None:
    out = tmp_path / "table.json"
    command = [sys.executable, str(ROOT / "benchmarks/table.py"), "--cases", case, "--repeats", "1", "--seconds", "0.5", "--json", str(out)]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    (row,) = (line for line in ran.stdout.splitlines() if line.startswith(f"| {case[0]} "))
    (pair,) = json.loads(out.read_text())
    ratio = pair["seedrl"][0]["steps_per_s"] / pair["floor"][0]["steps_per_s"]
    assert f"| {ratio:.2f} |" in row and ratio > 0.05
