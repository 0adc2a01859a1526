"""Of the troublesome cases: seeds, figures, files; and two runs that must be the same."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import psutil
import pytest

from harness import Harness
from runs import Command, overrides, play, records, seedrl, settings
from seedrl.errors import CheckpointError
from seedrl.store.checkpoint import load_checkpoint


def _observations(folder: Path) -> list[list[str]]:
    """Lines of each seat, in order."""
    return [file.read_text().splitlines() for file in sorted(folder.iterdir())]


def test_SeedEcho_seeds_are_the_runs_and_no_two_seats_share_one(tmp_path: Path) -> None:
    firsts = {}
    for name, seed, workers in (("a", 7, 2), ("b", 7, 2), ("c", 8, 2), ("d", 7, 3)):
        log = tmp_path / f"log-{name}"
        log.mkdir()
        play(
            tmp_path / name, "envs:SeedEcho", {"log": str(log)}, env={"check": "off"}, workers={"num": workers, "envs_per_worker": 4},
            run={"seed": seed, "max_seconds": 1.5}, evaluation={"episodes": 0},
        )  # fmt: skip
        seats = [lines for lines in _observations(log) if lines]
        assert len(seats) == 4 * workers + 1, "each seat's, and the probe's one reset"
        for lines in seats:
            assert len(set(lines)) == len(lines), "the seed goes to the first reset only"
        assert sum(len(lines) > 3 for lines in seats) == 4 * workers
        firsts[name] = {lines[0] for lines in seats}
        assert len(firsts[name]) == 4 * workers + 1
    assert firsts["a"] == firsts["b"]
    assert not firsts["a"] & firsts["c"]
    assert firsts["a"] <= firsts["d"]


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.long), 1.0])
def test_RawReturn_is_what_the_environment_paid(tmp_path: Path, clip: float | None) -> None:
    result = play(tmp_path, "envs:RawReturn", env={"reward_clip": clip})
    assert result.evaluation is not None
    assert (result.evaluation.returns == 24).all() and (result.evaluation.lengths == 9).all()
    last = records(result.run_dir)[-1]
    assert last["return_mean"] == 24 and last["length_mean"] == 9


@pytest.mark.parametrize("encoder", ["mlp", pytest.param("nested", marks=pytest.mark.long)])
def test_SameAnswer_greedy_is_greedy_and_sampling_is_not(tmp_path: Path, encoder: str) -> None:
    more = (
        "run.max_seconds=1",
        "evaluation.episodes=0",
        f"policy.encoder={encoder}",
        "learner.learning_rate=1e-9",
    )
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("envs:SameAnswer", {}, *more),
        "--run-dir",
        "run",
        cwd=tmp_path,
    )
    assert code == 0, text
    figures = {}
    for how in ("--greedy", "--sample"):
        code, text = seedrl("eval", "run", "--episodes", 20, how, "--json", cwd=tmp_path)
        assert code == 0, text
        figures[how] = json.loads(text.strip().splitlines()[-1])
    assert figures["--greedy"]["mean_return"] == figures["--greedy"]["min_return"] == 10
    assert figures["--sample"]["mean_return"] < 10
    assert set(figures["--greedy"]) == {
        "episodes",
        "mean_return",
        "std_return",
        "min_return",
        "max_return",
        "mean_length",
    }


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # imageio_ffmpeg's reader leaves its pipes to the garbage collector
def test_Renders_two_films_of_six_frames(tmp_path: Path) -> None:
    more = (
        "run.max_seconds=1",
        "evaluation.episodes=4",
    )  # it raises when rendered without a render mode
    code, text = seedrl(
        "train", "cartpole", *overrides("envs:Renders", {}, *more), "--run-dir", "run", cwd=tmp_path
    )
    assert code == 0, text
    code, text = seedrl("eval", "run", "--episodes", 2, "--video", "films", cwd=tmp_path)
    assert code == 0, text
    films = sorted((tmp_path / "films").iterdir())
    assert len(films) == 2
    for film in films:
        frames = imageio_ffmpeg.read_frames(str(film))
        width, height = next(frames)["size"]
        grey = [float(np.frombuffer(frame, np.uint8).mean()) for frame in frames]
        assert (width, height) == (64, 64)
        assert grey == pytest.approx([0, 40, 80, 120, 160, 200], abs=4)


def test_FatInfos_memory_is_flat_and_unknown_keys_make_no_metric(tmp_path: Path) -> None:
    with Harness(settings("envs:FatInfos"), tmp_path, num_slots=8) as run:
        run.begin()
        worker, resident = psutil.Process(run._workers[0].child.pid), []
        for _ in range(int(os.environ.get("SEEDRL_FAT_SECONDS", "6")) * 10):
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                run.sample(4)
            resident.append(worker.memory_info().rss)
    assert resident[-1] - resident[len(resident) // 2] < 1 << 20
    result = play(tmp_path, "envs:FatInfos", run={"max_seconds": 1.0})
    assert not [key for key in records(result.run_dir)[-1] if "key-" in key or "array" in key]


def test_statistics_named_in_the_configuration_arrive(tmp_path: Path) -> None:
    result = play(tmp_path, "envs:RawReturn", env={"stats": ["lives"]})
    assert records(result.run_dir)[-1]["stat_lives"] == 0, "as the final info of an episode has it"


def _without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("_s", "_us", "_fraction", "_per_s")
    return [
        {key: value for key, value in line.items() if not key.endswith(timed)} for line in lines
    ]


@pytest.mark.parametrize("core", [pytest.param("none", marks=pytest.mark.long), "gru"])
def test_two_deterministic_runs_write_the_same_metrics(tmp_path: Path, core: str) -> None:
    written = []
    for name in ("a", "b"):
        more = (
            "run.deterministic=true",
            "run.max_steps=12000",
            "run.max_seconds=null",
            "learner.batch_size=4",
            f"policy.core={core}",
        )
        code, text = seedrl(
            "train",
            "cartpole",
            *overrides("CartPole-v1", {}, *more),
            "--run-dir",
            name,
            cwd=tmp_path,
        )
        assert code == 0, text
        written.append(_without_times(records(tmp_path / name)))
    assert len(written[0]) >= 5
    assert written[0] == written[1]
    assert len({line["policy_loss"] for line in written[0]}) > 1


def test_resume_goes_on_after_kill_9(tmp_path: Path) -> None:
    more = (
        "run.max_seconds=600",
        "run.checkpoint_every_s=0.5",
        "evaluation.episodes=0",
        "workers.num=2",
        "learner.schedule=linear",
        "run.max_steps=4000000",
    )
    with Command(
        "train", "cartpole", *overrides("CartPole-v1", {}, *more), "--run-dir", "run", cwd=tmp_path
    ) as command:
        deadline = time.monotonic() + 60
        while True:
            time.sleep(0.2)
            lines = records(tmp_path / "run") if (tmp_path / "run/metrics.jsonl").exists() else []
            if lines and lines[-1].get("return_mean", 0) > 120:
                break
            assert time.monotonic() < deadline, command.text()
        command.signal(signal.SIGKILL)
        assert command.all_gone_within(10)
    before = records(tmp_path / "run")
    saved = load_checkpoint(tmp_path / "run")
    assert saved.counters["updates"] > 0 and saved.optimizer
    again = tuple(
        "run.max_seconds=8" if item.startswith("run.max_seconds") else item for item in more
    )
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("CartPole-v1", {}, *again),
        "--run-dir",
        "run",
        "--resume",
        cwd=tmp_path,
    )
    assert code == 0, text
    after = records(tmp_path / "run")[len(before) :]
    assert all(line["env_steps"] >= saved.counters["env_steps"] for line in after)
    assert (
        after[0]["updates"] > saved.counters["updates"]
        and after[0]["policy_version"] == after[0]["updates"]
    )
    times = [line["time_s"] for line in records(tmp_path / "run")]
    assert times == sorted(times)
    total = 4_000_000 // (8 * 16)
    for line in after:  # the schedule counts from the first start
        assert line["learning_rate"] == pytest.approx(
            3e-3 * (1 - line["updates"] / total), rel=0.02
        )
    later = [
        line for line in after if line["episodes"] >= saved.counters["episodes"] + 100
    ]  # fewer: the shortest alone
    print([line["return_mean"] for line in before[-3:]], [line["return_mean"] for line in later])
    first = [line["return_mean"] for line in later if line["time_s"] < later[0]["time_s"] + 2]
    assert max(first) >= 0.8 * before[-1]["return_mean"], "untrained weights: about 25"


def test_a_truncated_newest_checkpoint_is_skipped_and_named(tmp_path: Path) -> None:
    more = ("run.checkpoint_every_s=0.3", "evaluation.episodes=0", "run.max_seconds=2")
    code, text = seedrl(
        "train", "cartpole", *overrides("CartPole-v1", {}, *more), "--run-dir", "run", cwd=tmp_path
    )
    assert code == 0, text
    folders = sorted((tmp_path / "run/checkpoints").iterdir(), key=lambda folder: folder.name)
    assert len(folders) == 3, "the last `keep`"
    newest = folders[-1]
    torn = newest / "weights.safetensors"
    os.truncate(torn, torn.stat().st_size // 2)
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("CartPole-v1", {}, *more),
        "--run-dir",
        "run",
        "--resume",
        cwd=tmp_path,
    )
    assert code == 0, text
    assert (
        newest.name in text
        and f"resumed from {(tmp_path / 'run/checkpoints' / folders[-2].name).relative_to(tmp_path)}"
        in text.replace(str(tmp_path) + "/", "")
    )
    for folder in (tmp_path / "run/checkpoints").iterdir():
        os.truncate(folder / "weights.safetensors", 10)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "run")


def test_evaluations_at_intervals_are_whole_rounds_beside_the_training(tmp_path: Path) -> None:
    play(
        tmp_path, "envs:SameAnswer", evaluation={"slots": 4, "episodes": 8, "every_s": 1.0},
        run={"max_seconds": 10.0},
    )  # fmt: skip
    rounds = (tmp_path / "run/log.txt").read_text().count("evaluation: 8 episodes, mean return")
    assert rounds >= 2
    with_figure = [
        record for record in records(tmp_path / "run") if "evaluation_return_mean" in record
    ]
    assert with_figure and with_figure[0] is not records(tmp_path / "run")[0]
