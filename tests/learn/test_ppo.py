"""PPO: advantages against published ones, the loss against a naive one, minibatches that take each transition once an epoch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batches import a_batch, a_ppo
from seedrl.config import Algorithm
from seedrl.learn.ppo import PPO, Targets, ppo_loss
from seedrl.store.batch import Batch

CASES = json.loads((Path(__file__).parents[1] / "cases" / "algorithms.json").read_text())
GAE = {case["name"]: case for case in CASES["families"]["gae"]}


def _rows_of(case: dict[str, Any], column: int) -> tuple[Batch, list[int]]:
    """A column of a case of transitions as stored rows, and the row of each transition.

    The real next observation of a transition that ends an episode is a row of its own, the next transition's is the one after it.
    """
    given = case["inputs"]
    rewards, values, next_values, terminated, truncated = (
        [row[column] for row in given[name]] for name in ("rewards", "values", "next_values", "terminated", "truncated")
    )  # fmt: skip
    value, reward, ends, cut, first, at = [values[0]], [0.0], [False], [False], [False], []
    for t, r in enumerate(rewards):
        at.append(len(value) - 1)
        ended, last = terminated[t] or truncated[t], t + 1 == len(rewards)
        value.append(next_values[t])
        reward.append(r)
        ends.append(terminated[t])
        cut.append(truncated[t])
        first.append(False)
        if not last and (ended or next_values[t] != values[t + 1]):
            assert ended, "the cases' values go on where no episode ends"
            for column_, entry in ((value, values[t + 1]), (reward, 0.0), (ends, False), (cut, False), (first, True)):  # fmt: skip
                column_.append(entry)

    def row(entries: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(entries, dtype=dtype).unsqueeze(1)

    rows = len(value)
    batch = a_batch(rows, 1)._replace(
        reward=row(reward, torch.float64), value=row(value, torch.float64), terminated=row(ends, torch.bool),
        truncated=row(cut, torch.bool), first=row(first, torch.bool), log_prob=torch.zeros(rows, 1, dtype=torch.float64),
    )  # fmt: skip
    return batch, at


@pytest.mark.parametrize("name", list(GAE))
def test_advantages_and_returns_equal_the_published_ones(name: str) -> None:
    case = GAE[name]
    given, right = case["inputs"], case["expected"]
    ppo = a_ppo(gamma=given["gamma"], **{"lambda": given["lambda_"]})
    for column in range(len(given["rewards"][0])):
        batch, at = _rows_of(case, column)
        targets = ppo.targets(batch)
        for got, wanted in ((targets.advantages, "advantages"), (targets.returns, "returns")):
            np.testing.assert_allclose(
                got[at, 0].numpy(), [row[column] for row in right[wanted]], rtol=1e-9, atol=1e-9, err_msg=wanted
            )  # fmt: skip
        assert targets.mask[at, 0].all() and targets.mask.sum() == len(at)


def _naive_loss(
    log_probs: np.ndarray, entropies: np.ndarray, values: np.ndarray, targets: dict[str, np.ndarray], section: Algorithm
) -> dict[str, float]:  # fmt: skip
    """One transition after the other."""
    counted = [i for i in range(len(log_probs)) if targets["mask"][i]]
    advantages = [targets["advantages"][i] for i in counted]
    if section.normalises_advantages:
        mean = sum(advantages) / len(advantages)
        deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages) / len(advantages))
        advantages = [(a - mean) / (deviation + 1e-8) for a in advantages]
    policy = value = entropy = outside = kl = 0.0
    for i, advantage in zip(counted, advantages, strict=True):
        ratio = math.exp(log_probs[i] - targets["log_probs"][i])
        low, high = 1 - section.clip_range, 1 + section.clip_range
        policy -= min(ratio * advantage, min(max(ratio, low), high) * advantage)
        error = (values[i] - targets["returns"][i]) ** 2
        if section.value_clip_range is not None:
            move = values[i] - targets["values"][i]
            limit = section.value_clip_range
            clipped = targets["values"][i] + min(max(move, -limit), limit)
            error = max(error, (clipped - targets["returns"][i]) ** 2)
        value += 0.5 * error
        entropy += entropies[i]
        outside += not low <= ratio <= high
        kl += ratio - 1 - math.log(ratio)
    count = len(counted)
    means = {"policy_loss": policy / count, "value_loss": value / count, "entropy": entropy / count}
    total = means["policy_loss"] + section.value_cost * means["value_loss"] - section.entropy_cost * means["entropy"]  # fmt: skip
    return means | {"total": total, "clipped_ratio_fraction": outside / count, "kl": kl / count}


@pytest.mark.parametrize("value_clip_range", [None, 0.3])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_loss_equals_a_naive_one(value_clip_range: float | None, normalise: bool) -> None:
    rng = np.random.default_rng(7)
    section = Algorithm(
        name="ppo",
        value_clip_range=value_clip_range,
        normalise_advantages=normalise,
        entropy_cost=0.03,
    )
    entries = {name: rng.normal(size=40) for name in ("log_probs", "values", "returns", "advantages")}  # fmt: skip
    entries["mask"] = (rng.random(40) < 0.8).astype(float)
    log_probs, entropies, values = (rng.normal(size=40) for _ in range(3))
    log_probs = entries["log_probs"] + 0.3 * log_probs
    targets = Targets(**{name: torch.from_numpy(entry) for name, entry in entries.items()})
    losses, kl = ppo_loss(*(torch.from_numpy(x) for x in (log_probs, entropies, values)), targets, section)  # fmt: skip
    right = _naive_loss(log_probs, entropies, values, entries, section)
    assert {name: float(value) for name, value in losses.metrics.items()} == pytest.approx(right)
    assert float(losses.total) == pytest.approx(right["total"]) and float(kl) == pytest.approx(right["kl"])  # fmt: skip


def _acted(ppo: PPO, batch: Batch) -> Batch:
    """The batch as if the network had acted in it."""
    with torch.no_grad():
        inputs, values = ppo.network.over_unrolls(batch)
        rows = slice(ppo.network.burn_in, None)
        log_probs, _ = ppo.network.heads.evaluate(inputs, {"action": batch.actions["action"][rows]}, None)  # fmt: skip
    log_prob, value = batch.log_prob.clone(), batch.value.clone()
    log_prob[rows], value[rows] = log_probs, values
    return batch._replace(log_prob=log_prob, value=value)


def test_where_the_network_acted_itself_both_ways_agree_and_nothing_is_clipped() -> None:
    batch = _acted(a_ppo(), a_batch(9, 6))
    synchronous, corrected = a_ppo(), a_ppo(synchronous=False)
    for a, b in zip(vars(synchronous.targets(batch)).values(), vars(corrected.targets(batch)).values(), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    first = next(iter(synchronous.losses(batch)))
    assert first.metrics["clipped_ratio_fraction"] == 0 and abs(first.metrics["kl"]) < 1e-6


def test_rows_of_an_older_version_are_not_learnt_from() -> None:
    ppo, batch = a_ppo(), a_batch(9, 6)
    batch.version[0] = 4
    mask = ppo.targets(batch).mask
    assert not mask[0].any()
    assert torch.equal(mask[1:], (~batch.first[2:]).float())


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("burn_in", [0, 4])
def test_one_minibatch_of_rows_or_of_unrolls_is_the_wholea_batch(core: str, burn_in: int) -> None:
    ppo = a_ppo(core, burn_in, minibatches=1, epochs=1)
    batch = a_batch(9 + burn_in, 6, state=ppo.network.policy.initial_state(6))
    targets = ppo.targets(batch)
    (loss,) = ppo.losses(batch)
    inputs, values = ppo.network.over_unrolls(batch)
    actions = {"action": batch.actions["action"][burn_in:-1]}
    log_probs, entropies = ppo.network.heads.evaluate(inputs[:-1], actions, None)
    whole, _ = ppo_loss(log_probs, entropies, values[:-1], targets, ppo.section)
    torch.testing.assert_close(loss.total, whole.total)


def test_each_epoch_takes_every_transition_once_in_another_order() -> None:
    ppo = a_ppo(minibatches=3, epochs=2)
    batch = a_batch(9, 6)
    targets = ppo.targets(batch)
    targets.returns = torch.arange(48.0).view(8, 6)  # their own numbers
    parts = [part.returns for *_, part in ppo._of_rows(batch, targets)]
    valid = targets.returns[targets.mask > 0].tolist()
    epochs = [torch.cat(parts[:3]).tolist(), torch.cat(parts[3:]).tolist()]
    assert [sorted(epoch) for epoch in epochs] == [valid, valid] and epochs[0] != epochs[1] != valid  # fmt: skip
    assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1


def test_minibatches_of_a_recurrent_policy_are_whole_unrolls_with_their_states() -> None:
    ppo = a_ppo("lstm", minibatches=2, epochs=1)
    states = tuple(torch.randn(6, 8) for _ in range(2))
    batch = _acted(ppo, a_batch(9, 6, state=states))
    for _, values, _, _, part in ppo._of_unrolls(batch, ppo.targets(batch)):
        assert values.shape == (8, 3)
        torch.testing.assert_close(values, part.values, rtol=1e-5, atol=1e-5)
    some = batch.columns(torch.tensor([4, 1]))
    torch.testing.assert_close(some.state[1], states[1][[4, 1]])
    assert torch.equal(some.reward, batch.reward[:, [4, 1]]) and some.slots.tolist() == [4, 1]


def test_an_iteration_ends_once_the_policy_has_moved_far_enough() -> None:
    ppo = a_ppo(target_kl=0.01, epochs=50, minibatches=1)
    batch = _acted(ppo, a_batch(17, 8))
    optimizer = torch.optim.SGD(ppo.network.policy.parameters(), lr=1.0)
    steps, kl = 0, torch.zeros(())
    for loss in ppo.losses(batch):
        assert loss.metrics["kl"] <= 0.015
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        steps, kl = steps + 1, loss.metrics["kl"]
    assert 1 <= steps < 50 and kl >= 0
    unbounded = a_ppo(target_kl=None, epochs=3, minibatches=2)
    assert sum(1 for _ in unbounded.losses(batch)) == 6
