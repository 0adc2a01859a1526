"""Normalised observations and returns through whole processes: moments in the checkpoint, gone on with, and used by an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from runs import overrides, records, seedrl

BOTH = ("policy.normalise_observations=true", "algorithm.normalise_returns=true")


def _moments(run: Path) -> dict[str, float]:
    newest = max((run / "checkpoints").iterdir())
    weights = load_file(newest / "weights.safetensors")
    return {name: float(leaf.max()) for name, leaf in weights.items() if "count" in name}


def test_moments_are_in_the_checkpoint_and_go_on(tmp_path: Path) -> None:
    more = overrides("CartPole-v1", {}, *BOTH, "evaluation.episodes=5", "run.max_seconds=30")
    counts = []
    for steps, flags in ((8_000, ()), (16_000, ("--resume",))):
        code, text = seedrl("train", "cartpole", *more, f"run.max_steps={steps}", "--run-dir", "run", *flags, cwd=tmp_path)  # fmt: skip
        assert code == 0, text
        counts.append(_moments(tmp_path / "run"))
    assert sorted(counts[0]) == ["moments.observation.count", "returns.count"]
    for name, count in counts[0].items():
        assert 4_000 < count <= 16_000 and count + 4_000 < counts[1][name] <= 24_000, name
    assert "greedy evaluation: 5 episodes" in text


@pytest.mark.long
def test_rewards_of_a_thousand_are_learnt_from(tmp_path: Path) -> None:
    more = (BOTH[1], "env.reward_scale=1000.0", "evaluation.episodes=0", "run.stop_at_return=400", "run.max_seconds=120")  # fmt: skip
    code, text = seedrl("train", "cartpole_ppo", *more, "--run-dir", "run", cwd=tmp_path, timeout_s=150)  # fmt: skip
    assert code == 0 and records(tmp_path / "run")[-1]["return_mean"] >= 400, text
