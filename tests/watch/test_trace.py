"""The trace of a window: it loads as JSON, begins and ends match, and it tells what happened."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from harness import Harness
from runs import Command, overrides, seedrl, settings
from seedrl.errors import ConfigError, RunError

SLACK_US = 0.5  # microseconds as doubles, of a clock in nanoseconds


def by_track(path: Path) -> tuple[dict[tuple[int, int], str], dict[tuple[int, int], list[dict]]]:
    trace = json.loads(path.read_text())
    names, spans = {}, defaultdict(list)
    for event in trace["traceEvents"]:
        track = event["pid"], event["tid"]
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[track] = event["args"]["name"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            spans[track].append(event)
    return names, spans


def test_a_window_of_a_run_as_a_trace(tmp_path: Path) -> None:
    config = settings(
        "seedrl.synthetic:flat", {"step_us": 100}, policy={"hidden": [16]}, learner={"unroll_length": 8, "batch_size": 4},
        workers={"num": 2, "envs_per_worker": 4, "groups": 2},
    )  # fmt: skip
    with Harness(config, tmp_path, num_slots=8) as run:
        run.begin()
        run.running = True

        def act(until) -> None:
            while not until():
                run.pump(0.01)
                while run.reader.sample(4, timeout_s=0) is not None:
                    pass

        end = time.monotonic() + 0.5
        act(lambda: time.monotonic() > end)
        with pytest.raises(ConfigError, match="is not a window"):
            run.controls.trace(0)
        before = run.board.get("batches")
        path = run.controls.trace(1.0)
        assert run.controls.status()["tracing"]
        with pytest.raises(RunError, match="under way"):
            run.controls.trace()
        act(lambda: not run.controls.tracing)
        after = run.board.get("batches")
    names, spans = by_track(path)
    assert (
        set(names) == {(1, 1), *((2, track) for track in (1, 2, 3, 4))} and names[1, 1] == "batches"
    )
    assert set(names.values()) == {
        "batches",
        *(f"worker {w}, group {g}" for w in (0, 1) for g in (0, 1)),
    }  # seats: by who came first
    assert set(spans) == set(names)
    engine = spans[1, 1]
    batches = [span for span in engine if span["name"].startswith("batch of ")]
    assert 0.3 * (after - before) < len(batches) <= after - before
    assert sum(batch["args"]["rows"] for batch in batches) == 2 * sum(batch["args"]["groups"] for batch in batches)  # fmt: skip
    for one, other in pairwise(batches):
        assert one["ts"] + one["dur"] <= other["ts"] + SLACK_US
    stages = [span for span in engine if not span["name"].startswith("batch of ")]
    assert [span["name"] for span in stages] == ["ingest", "forward", "answer", "append"] * len(batches)  # fmt: skip
    for number, batch in enumerate(batches):
        own = stages[4 * number : 4 * number + 4]
        assert sum(span["dur"] for span in own) == pytest.approx(batch["dur"], abs=SLACK_US)
        assert own[0]["ts"] == batch["ts"]
    for track, worker in spans.items():
        if track == (1, 1):
            continue
        worker.sort(key=lambda span: span["ts"])
        for one, other in pairwise(worker):
            assert one["ts"] + one["dur"] <= other["ts"] + SLACK_US, names[track]
        steps = [span["dur"] for span in worker if span["name"] == "environments"]
        assert min(steps) >= 200, "two environments of 100 us"


def test_a_trace_from_another_terminal(tmp_path: Path) -> None:
    more = overrides("CartPole-v1", {}, "run.max_seconds=600", "evaluation.episodes=0")
    with Command("train", "cartpole", *more, "--run-dir", "run", cwd=tmp_path) as command:
        command.until("processes ")
        time.sleep(1.0)
        code, text = seedrl("ctl", "run", "trace", "--seconds", 0.5, cwd=tmp_path)
        assert code == 0 and "trace.json" in text, text
        code, text = seedrl("ctl", "run", "trace", "--seconds", 1e9, cwd=tmp_path)
        assert code == 2 and "--seconds" in text
    names, spans = by_track(tmp_path / "run/trace.json")
    assert len(spans[1, 1]) > 10 and "worker 0, group 1" in names.values()
