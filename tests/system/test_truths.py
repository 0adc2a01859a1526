"""Off-by-one truths through whole processes: BEHAVIOUR cases 1, 6, 7, 8, 9, 11 and a million rows with deaths in between."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from harness import Harness
from ledger import Ledger, config_of

ROWS = int(os.environ.get("SEEDRL_TRUTH_ROWS", "60000"))  # `make truths` runs the million


def test_case_1_no_mixing_and_no_row_lost_or_doubled_while_workers_die_and_come(
    tmp_path: Path,
) -> None:
    (tmp_path / "ids").mkdir()
    env = {
        "id": "system_envs:Echo",
        "kwargs": {"folder": str(tmp_path / "ids"), "lengths": [1, 3, 7, 20, 33], "jitter_us": 20},
    }
    config = config_of(
        env,
        "answer",
        {"num": 4, "envs_per_worker": 16, "groups": 2},
        batching={"min_batch": 8, "max_wait_us": 300},
    )
    with Harness(config, tmp_path, num_slots=64) as run:
        run.begin()
        ledger, kills = Ledger(20), 0
        while ledger.rows < ROWS:
            ledger.check(run.sample(8))
            if ledger.rows > (kills + 1) * ROWS // 4:
                run.kill_worker(kills % 4)
                kills += 1
        acted, read = run.finish()
        while (batch := run.reader.sample(1, timeout_s=0)) is not None:
            ledger.check(batch)
        read = run.reader.accounts()
    assert kills >= 3
    assert (
        acted["acted"]
        == acted["stored"] + acted["worker_died"] + acted["detached"] + acted["shutdown"]
    )
    assert acted["stored"] == read["learned_rows"] == ledger.rows
    assert acted["worker_died"] > 0
    for (
        env_id,
        rows,
    ) in ledger.seen.items():  # contiguous from the first episode on: nothing lost within a run
        episodes = sorted({episode for episode, _ in rows})
        assert episodes == list(range(int(episodes[0]), int(episodes[-1]) + 1)), env_id
    assert not [text for text in run.said if "WrongAnswer" in text]


@pytest.mark.parametrize("groups", [1, 2])
def test_cases_6_and_11_the_state_resets_at_first_and_is_stored_as_it_entered_the_row(
    tmp_path: Path, groups: int
) -> None:
    config = config_of(
        {"id": "system_envs:Counted"}, "count", {"num": 2, "envs_per_worker": 4, "groups": groups},
        learner={"unroll_length": 12, "burn_in": 4, "batch_size": 4},
    )  # fmt: skip
    with Harness(config, tmp_path, num_slots=8) as run:
        run.begin()
        for _ in range(40):
            batch = run.sample(4)
            step = batch.obs["observation"][..., 1]
            assert (batch.actions["action"] == step.long()).all()  # 0 1 2 3 4 (final row 5) 0 ...
            assert (batch.value == step).all()
            entered = torch.where(batch.first[0], torch.zeros(()), step[0])
            assert (batch.state[0][:, 0] == entered).all()
            with (
                torch.inference_mode()
            ):  # the net run again from the stored state acts as it acted, bit for bit
                inputs, value, _ = run.policy(batch.obs["observation"], batch.state, batch.first)
            assert (inputs.argmax(-1) == batch.actions["action"]).all() and torch.equal(
                value, batch.value
            )
    assert not [text for text in run.said if "WrongAnswer" in text]


def test_case_7_the_states_of_the_other_slots_go_on_counting_when_one_resets(
    tmp_path: Path,
) -> None:
    env = {"id": "system_envs:Counted", "kwargs": {"length": 400, "reset_at": {"3": 7}}}
    config = config_of(
        env,
        "count",
        {"num": 1, "envs_per_worker": 8, "groups": 1},
        learner={"unroll_length": 10, "batch_size": 8},
    )
    with Harness(config, tmp_path, num_slots=8) as run:
        run.begin()
        values: dict[int, list[float]] = defaultdict(list)
        for _ in range(4):
            batch = run.sample(8)
            for b, slot in enumerate(batch.slots.tolist()):
                values[slot] += batch.value[:-1, b].tolist()
    for slot, counted in values.items():
        assert counted == ([*range(8), *range(32)] if slot == 3 else [*range(40)]), slot


def test_cases_8_and_9_a_killed_worker_takes_only_its_open_rows_and_its_successor_starts_anew(
    tmp_path: Path,
) -> None:
    (tmp_path / "ids").mkdir()
    env = {"id": "system_envs:Echo", "kwargs": {"folder": str(tmp_path / "ids"), "lengths": [1000]}}
    config = config_of(
        env,
        "answer",
        {"num": 4, "envs_per_worker": 8, "groups": 1},
        batching={"min_batch": 32, "max_wait_us": 2000, "hard_deadline_us": 50000},
    )
    with Harness(config, tmp_path, num_slots=32) as run:
        run.begin()
        ledger = Ledger(20)
        for round_ in range(3):
            for _ in range(12):
                ledger.check(run.sample(8))
            run.kill_worker(1)
            run.wait_for(
                lambda want=round_ + 1: sum("started again" in text for text in run.said) == want
            )
        run.wait_for(lambda: run.seats_taken == 32)
        before = set(ledger.seen)
        for _ in range(200):
            ledger.check(run.sample(8))
            if len(set(ledger.seen) - before) >= 8:
                break
        else:
            pytest.fail("the new instances never acted")
        acted, _ = run.finish()
    for env_id, rows in ledger.seen.items():
        steps = sorted(step for _, step in rows)
        assert steps == list(range(int(steps[0]), int(steps[0]) + len(steps))), env_id
        assert steps[0] == 0, "the first row of a run is a first row"
    assert acted["acted"] == acted["stored"] + acted["worker_died"] + acted["shutdown"]
    assert 0 < acted["worker_died"] <= 3 * 8 * 20
    assert np.isfinite(list(acted.values())).all()
