"""Of the troublesome cases: episodes and the arithmetic on them, through whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runs import play, policy_of, records


def test_GhostStep_no_step_after_the_end_and_seven_env_steps_an_episode(tmp_path: Path) -> None:
    result = play(tmp_path, "envs:GhostStep")
    assert result.evaluation is not None
    assert (
        result.evaluation.summary()["mean_return"] == 7
        and result.evaluation.summary()["mean_length"] == 7
    )
    last = records(result.run_dir)[-1]
    assert last["return_mean"] == 7 and last["length_mean"] == 7
    assert last["environment_faults"] == 0
    assert 7 * last["episodes"] <= last["env_steps"] <= 7 * (last["episodes"] + 8)
    assert "WrongUse" not in (result.run_dir / "log.txt").read_text()


@pytest.mark.parametrize(("end", "right"), [("truncated", 10.0), ("terminated", 4.14)])
def test_ConstantReward_a_time_limit_is_bootstrapped_and_an_end_is_not(
    tmp_path: Path, end: str, right: float
) -> None:
    result = play(
            # 64 steps: an unroll that ends within an episode bootstraps from the mean over its steps, as they all look alike
        # 64 steps: an unroll that ends within an episode bootstraps from the mean over all steps, as they look alike (16: 4.37)
        tmp_path, "envs:ConstantReward", {"end": end}, algorithm={"gamma": 0.9}, run={"max_seconds": 20.0, "max_steps": 60_000},
        learner={"learning_rate": 5e-3, "schedule": "linear", "unroll_length": 64, "batch_size": 4}, evaluation={"episodes": 0},
    )  # fmt: skip
    policy = policy_of(result.run_dir)
    with torch.inference_mode():
        _, value, _ = policy(
            torch.zeros(1, 1, 4), policy.initial_state(1), torch.ones(1, 1, dtype=torch.bool)
        )
    assert value.item() == pytest.approx(right, rel=0.05)


@pytest.mark.parametrize("end", ["truncated", pytest.param("terminated", marks=pytest.mark.long)])
def test_FirstStepJackpot_a_return_stops_at_the_end_of_its_episode(
    tmp_path: Path, end: str
) -> None:
    # a table: V of the last observation, which nothing is learnt from, is what every value before it would follow in a network
    result = play(
        tmp_path, "envs:FirstStepJackpot", {"end": end}, algorithm={"gamma": 0.9}, policy={"name": "system_policies:tabular"},
        run={"max_seconds": 20.0, "max_steps": 40_000}, evaluation={"episodes": 0},
        learner={"learning_rate": 1.0, "schedule": "linear", "max_grad_norm": None, "batch_size": 4},
    )  # fmt: skip
    policy = policy_of(result.run_dir)
    with torch.inference_mode():
        _, value, _ = policy(torch.eye(4)[:3].unsqueeze(0), (), torch.ones(1, 3, dtype=torch.bool))
    assert value[0].tolist() == pytest.approx([100.0, 0.0, 0.0], abs=5)


@pytest.mark.parametrize("core", [pytest.param("none", marks=pytest.mark.long), "lstm"])
def test_OneStep_episodes_of_one_step_are_learnt_with_bounded_lag(
    tmp_path: Path, core: str
) -> None:
    result = play(
        tmp_path, "envs:OneStep", policy={"core": core, "core_size": 32}, run={"max_seconds": 30.0, "stop_at_return": 0.98},
        evaluation={"episodes": 100},
    )  # fmt: skip
    assert result.evaluation is not None and result.evaluation.returns.mean() >= 0.95
    lines = records(result.run_dir)
    assert lines[-1]["episodes"] <= lines[-1]["env_steps"] <= lines[-1]["episodes"] + 8
    assert max(line.get("lag_max", 0) for line in lines) <= 8


def test_CueRecall_is_solved_with_a_core(tmp_path: Path) -> None:
    result = play(
        tmp_path, "envs:CueRecall", policy={"core": "lstm", "core_size": 32, "hidden": [32]}, workers={"num": 2},
        run={"max_seconds": 60.0, "stop_at_return": 0.97}, evaluation={"episodes": 100},
    )  # fmt: skip
    assert result.evaluation is not None and result.evaluation.returns.mean() >= 0.95


def test_CueRecall_cannot_be_solved_without_one(tmp_path: Path) -> None:
    result = play(
        tmp_path, "envs:CueRecall", run={"max_seconds": 6.0}, evaluation={"episodes": 200}
    )
    assert result.evaluation is not None and result.evaluation.returns.mean() <= 0.65
