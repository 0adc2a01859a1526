"""The example of docs/write-an-algorithm.md against naive loops, and through whole processes; algorithms that are none."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from batches import a_batch, a_ppo
from runs import newest, seedrl

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_examples_loss_equals_naive_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from awr import AWR

    ppo = a_ppo(gamma=0.9)
    network, config = ppo.network, ppo.section.model_copy(update={"kwargs": {"beta": 0.5}})
    awr = AWR(network, type("Config", (), {"algorithm": config}))
    batch = a_batch(9, 4)
    (loss,) = awr.losses(batch)
    with torch.no_grad():
        inputs, values = network.over_unrolls(batch)
    logits, v = inputs.double().numpy(), values.double().numpy()
    policy = value = entropy = count = 0.0
    for b in range(4):
        after = v[8, b]  # the lambda-return of the row after
        for t in reversed(range(8)):
            if batch.first[t + 1, b]:
                after = v[t, b]
                continue
            keep = 0.0 if batch.terminated[t + 1, b] else 0.9
            target = batch.reward[t + 1, b].item() + keep * (0.05 * v[t + 1, b] + 0.95 * after)
            log_probs = logits[t, b] - np.log(np.exp(logits[t, b]).sum())
            weight = min(math.exp((target - v[t, b]) / 0.5), 20.0)
            policy -= weight * log_probs[batch.actions["action"][t, b]]
            value += 0.5 * (v[t, b] - target) ** 2
            entropy -= (np.exp(log_probs) * log_probs).sum()
            count, after = count + 1, target
    assert loss.metrics["policy_loss"].item() == pytest.approx(policy / count, rel=1e-4)
    assert loss.metrics["value_loss"].item() == pytest.approx(value / count, rel=1e-4)
    assert loss.metrics["entropy"].item() == pytest.approx(entropy / count, rel=1e-4)
    total = (
        policy / count + config.value_cost * value / count - config.entropy_cost * entropy / count
    )
    assert loss.total.item() == pytest.approx(total, rel=1e-4)


def test_the_example_learns(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "awr.py", tmp_path)
    code, text = seedrl(
        "train", "cartpole", "algorithm.name=awr:AWR", "run.max_seconds=8", "evaluation.episodes=0", "--run-dir", "run", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, text
    assert newest(tmp_path / "run", "return_mean") > 60, "a random policy's is 22"
    assert newest(tmp_path / "run", "optimizer_steps") == 1


@pytest.mark.parametrize("clip", ["1", "null"])
def test_its_rewards_are_clipped_too(tmp_path: Path, clip: str) -> None:
    shutil.copy(EXAMPLES / "awr.py", tmp_path)
    (tmp_path / "mine.py").write_text(
        "from awr import AWR\nclass Picky(AWR):\n    def losses(self, batch):\n"
        "        assert batch.reward.abs().max() <= 1, 'too large'\n        return super().losses(batch)\n"
    )
    code, text = seedrl(
        "train", "cartpole", "algorithm.name=mine:Picky", "env.id=envs:RawReturn", f"env.reward_clip={clip}", "run.max_seconds=3",
        "run.stop_at_return=null", "evaluation.episodes=0", "--run-dir", "run", cwd=tmp_path,
    )  # fmt: skip
    assert (code == 0) == (clip == "1") and ("too large" in text) == (clip == "null"), text


@pytest.mark.parametrize(
    ("name", "body", "code", "words"),
    [
        ("mine:Nobody", "class Nobodies: ...", 2, ["no callable 'Nobody'", "Nobodies"]),
        ("nowhere:Algorithm", "", 2, ["no module 'nowhere'"]),
        ("mine:make", "def make(network, config): return 3", 2, ["int", "losses"]),
        (
            "mine:Idle",
            "class Idle:\n    def __init__(self, n, c): ...\n    def losses(self, batch): return iter(())",
            1,
            ["mine:Idle", "no loss"],
        ),
        (
            "mine:Kept",
            "from awr import AWR\nclass Kept(AWR):\n    modes = ('prioritized', 'uniform')",
            2,
            ["Kept learns from replay of mode prioritized or uniform, not queue", "set replay.mode to prioritized"],
        ),
        (
            "mine:Taught",
            "from awr import AWR\nclass Taught(AWR):\n    extras = ('teacher',)",
            2,
            ["Taught wants the extra 'teacher'", "extra_leaves"],
        ),
    ],
)  # fmt: skip
def test_what_is_no_algorithm_is_named(
    tmp_path: Path, name: str, body: str, code: int, words: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(body)
    shutil.copy(EXAMPLES / "awr.py", tmp_path)
    ended, text = seedrl(
        "train", "cartpole", f"algorithm.name={name}", "run.max_seconds=5", "--run-dir", "run", cwd=tmp_path
    )  # fmt: skip
    assert ended == code and all(word in text for word in words), text
    assert "Traceback" not in text
