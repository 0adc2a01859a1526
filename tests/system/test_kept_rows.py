"""Rows that are kept, through whole processes: every draw whole while workers die and the engine writes, and a run resumed with them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from harness import Harness
from ledger import check_rows, config_of
from runs import Command, overrides, records

ROWS = int(os.environ.get("SEEDRL_TRUTH_ROWS", "30000"))


@pytest.mark.parametrize("lengths", [[1], [1, 3, 7, 20, 33], [500]], ids=["one step", "mixed", "longer than the store"])  # fmt: skip
@pytest.mark.parametrize("mode", ["uniform", "prioritized", "recent", "behind"])
def test_every_draw_is_whole_while_workers_die_and_rows_are_overwritten(
    mode: str, lengths: list[int], tmp_path: Path
) -> None:
    (tmp_path / "ids").mkdir()
    env = {"id": "system_envs:Echo", "kwargs": {"folder": str(tmp_path / "ids"), "lengths": lengths}}  # fmt: skip
    behind = {"host_gib": 2e-4, "file_gib": 2e-4, "compress": True} if mode == "behind" else {}
    mode = "uniform" if behind else mode
    config = config_of(
        env, "answer", {"num": 2, "envs_per_worker": 8, "groups": 2}, algorithm={"name": "an:own"},
        replay={"mode": mode, "capacity": 256, "block_length": 5, **behind}, learner={"unroll_length": 8, "stride": 3, "batch_size": 8},
    )  # fmt: skip
    rng, drawn, killed = np.random.default_rng(0), 0, False
    with Harness(config, tmp_path, num_slots=16) as run:
        run.begin()
        # slow draws may leave little time after the kill: it goes on until the death is counted
        while (rows := run.board.get("rows_acted")) < ROWS or not run.board.get("dropped_worker_died"):  # fmt: skip
            batch = run.sample(8)
            check_rows(batch)
            drawn += 8
            if mode == "prioritized":
                run.reader.update_priorities(batch.items, rng.random(8) * 3)
            if rows > ROWS // 2 and not killed:
                run.kill_worker(0)
                killed = True
        acted, read = run.finish()
        if mode != "recent":
            for _ in range(20):
                check_rows(run.reader.sample(8, timeout_s=0))
        redrawn = run.reader.redrawn
    assert acted["acted"] == acted["stored"] + acted["worker_died"] + acted["detached"] + acted["shutdown"]  # fmt: skip
    assert acted["stored"] == read["inserted_rows"] and read["drawn_rows"] == 3 * drawn
    assert killed and acted["worker_died"] > 0 and redrawn >= 0


@pytest.mark.parametrize("mode", ["queue", "uniform"])
def test_what_the_policy_adds_comes_back_beside_its_row(mode: str, tmp_path: Path) -> None:
    (tmp_path / "ids").mkdir()
    env = {"id": "system_envs:Echo", "kwargs": {"folder": str(tmp_path / "ids"), "lengths": [1, 3, 9]}}  # fmt: skip
    kept = {} if mode == "queue" else {"algorithm": {"name": "an:own"}, "replay": {"mode": mode, "capacity": 300}}  # fmt: skip
    config = config_of(env, "noted", {"num": 2, "envs_per_worker": 4, "groups": 2}, **kept)
    with Harness(config, tmp_path, num_slots=8) as run:
        run.begin()
        for _ in range(40):
            batch = run.sample(8)
            check_rows(batch)
            obs = batch.obs["observation"].double()
            assert (batch.extras["again"] == obs[..., :3]).all()
            assert (batch.extras["count"] == obs[..., 2].long()).all()


def test_a_resumed_run_goes_on_with_its_kept_rows_and_the_ratio(tmp_path: Path) -> None:
    more = overrides(
        "CartPole-v1", {}, "evaluation.episodes=0", "replay.capacity=5000", "replay.min_fill=1000", "learner.batch_size=16",
        "run.max_seconds=60",
    )  # fmt: skip
    before = 0
    for steps, flags in ((8000, ()), (14_000, ("--resume",))):
        with Command("train", "cartpole_dqn", *more, f"run.max_steps={steps}", "--run-dir", "run", *flags, cwd=tmp_path) as command:  # fmt: skip
            assert command.process.wait(60) == 0, command.text()
            text = command.text()
        if not flags:
            before = len(records(tmp_path / "run"))
    found = re.search(r"resumed from \S+: (\d+) steps, (\d+) updates, (\d+) kept unrolls", text)
    assert found is not None and 5000 / 8 <= int(found[3]) <= 5000 / 8 + 16 * 3, text
    lines = records(tmp_path / "run")
    assert lines[before]["replay_rows"] >= 5000, "the first figures of the resumed run"
    inserts = (lines[-1]["env_steps"] - 1000) / 8
    assert lines[-1]["samples_per_insert"] * inserts == pytest.approx(4 * inserts, rel=0.15)


def test_a_run_is_resumed_after_kill_9_with_what_was_kept(tmp_path: Path) -> None:
    more = overrides("CartPole-v1", {}, "evaluation.episodes=0", "replay.capacity=5000", "run.checkpoint_every_s=0.3", "run.max_seconds=60")  # fmt: skip
    with Command("train", "cartpole_dqn", *more, "--run-dir", "run", cwd=tmp_path) as command:
        index = tmp_path / "run/replay/index.npz"
        deadline = time.monotonic() + 40
        while not index.exists():
            assert time.monotonic() < deadline, command.text()
            time.sleep(0.05)
        time.sleep(1.0)
        command.process.kill()
    with Command("train", "cartpole_dqn", *more, "run.max_seconds=2", "--run-dir", "run", "--resume", cwd=tmp_path) as command:  # fmt: skip
        assert command.process.wait(60) == 0, command.text()
        assert re.search(r"resumed from .* [1-9]\d+ kept unrolls", command.text()), command.text()
