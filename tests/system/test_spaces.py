"""Of the troublesome cases: spaces and types, through whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from harness import Harness
from runs import newest, overrides, play, policy_of, records, seedrl, settings
from seedrl.store.checkpoint import load_checkpoint


def test_NestedSpaces_every_leaf_arrives_in_its_place(tmp_path: Path) -> None:
    result = play(
        tmp_path, "envs:NestedSpaces", workers={"num": 2}, run={"max_seconds": 60.0, "stop_at_return": 19.0}, evaluation={"episodes": 50},
        learner={"learning_rate": 3e-3}, algorithm={"gamma": 0.5},
    )  # fmt: skip
    assert result.evaluation is not None and result.evaluation.returns.mean() >= 18
    assert records(result.run_dir)[-1]["environment_faults"] == 0


def test_Blackjack_a_tuple_of_discretes_trains(tmp_path: Path) -> None:
    result = play(tmp_path, "Blackjack-v1", run={"max_seconds": 4.0}, evaluation={"episodes": 200})
    assert result.evaluation is not None and -0.6 < result.evaluation.returns.mean() < 0.3


def test_ScalarSpaces_actions_are_of_shape_nothing(tmp_path: Path) -> None:
    result = play(
        tmp_path, "envs:ScalarSpaces", workers={"num": 2}, algorithm={"entropy_cost": 1e-3, "gamma": 0.5}, run={"max_seconds": 45.0, "stop_at_return": -0.3},
        learner={"learning_rate": 1e-3, "max_grad_norm": 0.5}, evaluation={"episodes": 50},
    )  # fmt: skip
    assert result.evaluation is not None and result.evaluation.returns.mean() / 10 > -0.05
    assert records(result.run_dir)[-1]["environment_faults"] == 0


@pytest.mark.parametrize(
    "distribution", ["squashed", pytest.param("clipped", marks=pytest.mark.long)]
)
def test_TightBox_never_leaves_the_box_and_reaches_its_far_end(
    tmp_path: Path, distribution: str
) -> None:
    result = play(
        tmp_path, "envs:TightBox", workers={"num": 2}, policy={"action_distribution": distribution}, algorithm={"entropy_cost": 1e-3, "gamma": 0.5},
        run={"max_seconds": 90.0, "stop_at_return": 9.3}, learner={"learning_rate": 1e-3, "max_grad_norm": 0.5}, evaluation={"episodes": 50},
    )  # fmt: skip
    assert result.evaluation is not None and result.evaluation.returns.mean() / 10 >= 0.9
    assert records(result.run_dir)[-1]["environment_faults"] == 0


@pytest.mark.parametrize("kind", ["text", "sequence", "graph"])
def test_UnsupportedSpaces_are_refused_by_leaf_and_type(tmp_path: Path, kind: str) -> None:
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("envs:UnsupportedSpaces", {"kind": kind}),
        "--run-dir",
        "run",
        cwd=tmp_path,
    )
    assert code == 2
    assert "observation.note" in text and kind.capitalize() in text and "Traceback" not in text
    assert len(text.strip().splitlines()) <= 3
    assert not (tmp_path / "run").exists()


def test_ShapeChanges_names_leaf_both_shapes_and_seat(tmp_path: Path) -> None:
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("envs:ShapeChanges", {"at": 200}),
        "--run-dir",
        "run",
        cwd=tmp_path,
    )
    assert code == 1
    last = "\n".join(text.strip().splitlines()[-3:])
    assert "observation" in last and "[5]" in last and "[4]" in last and "seat" in last


def test_ShapeChanges_within_one_worker_is_refused_before_any_step(tmp_path: Path) -> None:
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("envs:ShapeChanges", {"per_instance": True}),
        "--run-dir",
        "run",
        cwd=tmp_path,
    )
    assert code == 2
    assert "[6]" in text and "[4]" in text and "Traceback" not in text


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("python", marks=pytest.mark.long),
        "int",
        pytest.param("bool", marks=pytest.mark.long),
        pytest.param("float64", marks=pytest.mark.long),
        "zero_d",
        "one_element",
    ],
)
def test_RewardTypes_pay_ten_an_episode(tmp_path: Path, kind: str) -> None:
    config = settings(
        "envs:RewardTypes",
        {"kind": kind},
        workers={"envs_per_worker": 32},
        learner={"unroll_length": 8},
    )
    with Harness(config, tmp_path, num_slots=32) as run:
        run.begin()
        for _ in range(8):
            batch = run.sample(16)
            assert batch.reward.shape == (9, 16)
            assert (batch.reward == 1 - batch.first.float()).all()
        episodes = run.board.episodes[: run.board.get("episodes_head")]
    assert len(episodes) and (episodes[:, 2] == 10).all()


def test_RewardTypes_two_elements_are_refused_by_shape(tmp_path: Path) -> None:
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("envs:RewardTypes", {"kind": "two_elements"}),
        "--run-dir",
        "run",
        cwd=tmp_path,
    )
    assert code in (1, 2) and "(2,)" in text and "reward" in text


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("nan", "observation"),
        ("inf", "reward"),
        pytest.param("nan", "reward", marks=pytest.mark.long),
        pytest.param("inf", "observation", marks=pytest.mark.long),
    ],
)
def test_NotFinite_drops_the_episode_and_the_weights_stay_finite(
    tmp_path: Path, where: str, value: str
) -> None:
    kwargs = {"where": where, "value": value, "at": 505, "flag": str(tmp_path / "flag")}
    result = play(tmp_path, "envs:NotFinite", kwargs, env={"on_nan": "drop_episode"})
    policy_of(result.run_dir)  # looks at every weight
    last, log = records(result.run_dir)[-1], (result.run_dir / "log.txt").read_text()
    assert (tmp_path / "flag").exists()
    assert last["environment_faults"] == 1 and last["interrupted_episodes"] == 1
    assert last["return_mean"] == 10
    (line,) = [line for line in log.splitlines() if "NotFinite fault" in line]
    assert where in line and "seat" in line and "episode" in line and "step" in line


def test_NotFinite_is_an_error_by_default(tmp_path: Path) -> None:
    kwargs = {"where": "observation", "at": 505, "flag": str(tmp_path / "flag")}
    code, text = seedrl(
        "train", "cartpole", *overrides("envs:NotFinite", kwargs), "--run-dir", "run", cwd=tmp_path
    )
    last = "\n".join(text.strip().splitlines()[-3:])
    assert (
        code == 1
        and "'observation'" in last
        and "worker 0" in last
        and "seat" in last
        and "on_nan" in last
    )


@pytest.mark.parametrize("where", ["observation", "info"])
def test_MaskedActions_no_illegal_action_in_any_mode(tmp_path: Path, where: str) -> None:
    mask = "observation.action_mask" if where == "observation" else None
    for greedy in (True, False):
        result = play(
            tmp_path / str(greedy), "envs:MaskedActions", {"where": where}, env={"action_mask": mask}, evaluation={"greedy": greedy},
            run={"max_seconds": 2.0},
        )  # fmt: skip
        last = records(result.run_dir)[-1]
        assert result.evaluation is not None and (result.evaluation.returns == 10).all()
        assert last["environment_faults"] == 0 and last["return_mean"] == 10
        assert 0 < newest(result.run_dir, "entropy") < np.log(3)


@pytest.mark.parametrize("kind", ["mirrored", "transposed", "unit_axis", "inplace"])
def test_case_12_FlippedViews_are_stored_as_they_were_at_their_step(
    tmp_path: Path, kind: str
) -> None:
    config = settings("envs:FlippedViews", {"kind": kind}, learner={"unroll_length": 8})
    with Harness(config, tmp_path, num_slots=8) as run:
        run.begin()
        row, column = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
        picture, steps = torch.from_numpy((10 * row + column).astype(np.int64)), {}
        for _ in range(6):
            batch = run.sample(8)
            seen = batch.obs["observation"]
            assert seen.dtype == torch.uint8 and seen.shape == (9, 8, 1, 8, 8)
            for b, slot in enumerate(batch.slots.tolist()):
                t = steps.get(slot, 0)
                for r in range(9):
                    t = 0 if batch.first[r, b] else (t if r == 0 else t + 1)
                    assert torch.equal(seen[r, b, 0].long(), (picture + t) % 256)
                steps[slot] = t


@pytest.mark.long
def test_TwoImages_uint8_and_float32_learn_alike(tmp_path: Path) -> None:
    steps = {}
    for kind in ("uint8", "float32"):
        result = play(
            tmp_path / kind, "envs:TwoImages", {"kind": kind}, run={"max_seconds": 60.0, "stop_at_return": 0.98},
            learner={"learning_rate": 1e-3}, evaluation={"episodes": 100},
        )  # fmt: skip
        assert result.evaluation is not None and result.evaluation.returns.mean() >= 0.95
        steps[kind] = records(result.run_dir)[-1]["env_steps"]
        leaf = load_checkpoint(result.run_dir).spec["observation"][0]
        assert leaf["dtype"] == kind
    assert max(steps.values()) <= 1.5 * min(steps.values())
