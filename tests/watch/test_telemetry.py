from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
    EventFileLoader,
)

from seedrl.errors import ConfigError
from seedrl.watch.telemetry import MetricsWriter, RunDir, last_record

STEP = {"env_steps": 10, "updates": 1, "policy_version": 1}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def lines_of(run_dir: RunDir) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = run_dir.metrics.read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def scalars_of(run_dir: RunDir) -> list[tuple[int, dict[str, float]]]:
    events = []
    for path in sorted(run_dir.tb.iterdir()):
        for event in EventFileLoader(str(path)).Load():
            values = {value.tag: value.tensor.float_val[0] for value in event.summary.value}
            if values:
                events.append((event.step, values))
    return events


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "env: {id: Test-v0}\n")


def test_a_run_directory_holds_what_the_command_line_promises(run_dir: RunDir) -> None:
    with MetricsWriter(run_dir) as writer:
        writer.write(STEP)
    run_dir.write_log("started\n")
    names = {path.name for path in run_dir.path.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "tb", "checkpoints", "log.txt"}
    assert run_dir.config.read_text() == "env: {id: Test-v0}\n"
    assert run_dir.log.read_text().endswith(" started\n")


def test_runs_without_a_name_never_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {RunDir.create(None, "", name="cartpole").path for _ in range(3)}
    assert len(paths) == 3
    assert all(path.parent == Path("runs") and path.name.startswith("cartpole-") for path in paths)


def test_a_directory_with_a_run_is_only_taken_to_resume_it(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match="holds a run already"):
        RunDir.create(run_dir.path, "new")
    assert run_dir.config.read_text() != "new"
    RunDir.create(run_dir.path, "new", resume=True)
    assert run_dir.config.read_text() == "new"


def test_a_run_that_is_not_there_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDir.create(tmp_path / "missing", "", resume=True)
    assert not (tmp_path / "missing").exists()


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDir.create(tmp_path / "file" / "run", "")


def test_each_record_is_a_line_with_the_time_of_the_run(run_dir: RunDir) -> None:
    clock = Clock()
    with MetricsWriter(run_dir, clock=clock) as writer:
        clock.now_s += 1.5
        writer.write(STEP)
        clock.now_s += 0.25
        writer.write({**STEP, "updates": 2, "loss": np.float32(0.5), "rtt_us": {"p99": 7}})
    assert lines_of(run_dir) == [
        {"time_s": 1.5, **STEP},
        {"time_s": 1.75, **STEP, "updates": 2, "loss": 0.5, "rtt_us": {"p99": 7}},
    ]


def test_what_every_line_must_hold_is_demanded(run_dir: RunDir) -> None:
    with MetricsWriter(run_dir) as writer, pytest.raises(KeyError, match="policy_version"):
        writer.write({"env_steps": 1, "updates": 1})


def test_what_is_not_finite_is_null_and_no_scalar(run_dir: RunDir) -> None:
    bad = {"a": float("nan"), "b": np.float64("inf"), "c": None, "d": [1.0, -float("inf")]}
    with MetricsWriter(run_dir) as writer:
        written = writer.write({**STEP, **bad, "name": "text", "fine": 2})
    assert lines_of(run_dir) == [written]
    assert {name: written[name] for name in bad} == {
        "a": None,
        "b": None,
        "c": None,
        "d": [1.0, None],
    }
    (_, scalars), *_ = scalars_of(run_dir)
    assert scalars.keys() == {"time_s", "env_steps", "updates", "policy_version", "fine"}


def test_tensorboard_reads_the_scalars_at_their_environment_step(run_dir: RunDir) -> None:
    with MetricsWriter(run_dir) as writer:
        for steps in (10, 20):
            writer.write({**STEP, "env_steps": steps, "rtt_us": {"p99": 2 * steps}})
    assert [(step, values["rtt_us/p99"]) for step, values in scalars_of(run_dir)] == [
        (10, 20.0),
        (20, 40.0),
    ]


def test_time_goes_on_after_a_resume_and_never_falls(run_dir: RunDir) -> None:
    clock = Clock()
    with MetricsWriter(run_dir, clock=clock) as writer:
        clock.now_s += 3
        writer.write(STEP)
    clock = Clock()  # of another process, perhaps another machine
    clock.now_s = 5.0
    with MetricsWriter(run_dir, clock=clock) as writer:
        clock.now_s += 2
        writer.write(STEP)
        clock.now_s -= 100
        writer.write(STEP)
    assert [line["time_s"] for line in lines_of(run_dir)] == [3, 5, 5]
    assert len(list(run_dir.tb.iterdir())) == 2


@pytest.mark.parametrize("rest", ['{"time_s": 9.0, "env_st', "\0\0\0\0", "{}"])
def test_a_half_line_is_removed_before_the_next(run_dir: RunDir, rest: str) -> None:
    with MetricsWriter(run_dir) as writer:
        written = writer.write(STEP)
    with run_dir.metrics.open("a") as file:
        file.write(rest)
    assert last_record(run_dir.metrics) == written
    with MetricsWriter(run_dir) as writer:
        writer.write(STEP)
    assert [line["updates"] for line in lines_of(run_dir)] == [1, 1]


def test_the_last_record_is_found_behind_a_long_one(run_dir: RunDir) -> None:
    assert last_record(run_dir.metrics) is None
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        writer.write(STEP)
        long = writer.write({**STEP, "updates": 2, "names": ["x"] * 100_000})
    assert last_record(run_dir.metrics) == long


def test_writing_scalars_needs_no_torch_and_starts_no_thread(tmp_path: Path) -> None:
    code = (
        "import sys, threading; from pathlib import Path\n"
        "from seedrl.watch.telemetry import MetricsWriter, RunDir\n"
        "assert 'tensorboard' not in sys.modules\n"
        "writer = MetricsWriter(RunDir.create(Path(sys.argv[1]), ''))\n"
        "writer.write({'env_steps': 1, 'updates': 1, 'policy_version': 1})\n"
        "print('torch' in sys.modules, threading.active_count())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1"]
