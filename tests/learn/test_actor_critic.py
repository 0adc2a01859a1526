"""The loss against the published case, gradients included, and what must not leak into it; schedules."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from batches import a_batch, a_ppo
from csrc_free_kernels.returns import vtrace
from seedrl.config import Algorithm, Config, Learner
from seedrl.learn.actor_critic import (
    VTrace,
    actor_critic_loss,
    actor_critic_sums,
    learning_rate,
    make_optimizer,
)
from seedrl.learn.algorithm import rewarded
from seedrl.policy.heads import Heads
from seedrl.spec import Leaf

CASES = json.loads((Path(__file__).parents[1] / "cases" / "algorithms.json").read_text())
(CASE,) = CASES["families"]["actor_critic_loss"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def heads(num_actions: int) -> Heads:
    return Heads((Leaf("action", "int64", (), "discrete", n=(num_actions,), start=(0,)),))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_loss_and_gradients_equal_the_published_case(dtype: torch.dtype) -> None:
    given, right = CASE["inputs"], CASE["expected"]

    def tensor(name: str) -> torch.Tensor:
        return torch.tensor(given[name], dtype=dtype)

    def near(got: torch.Tensor, name: str) -> None:
        np.testing.assert_allclose(
            got.detach().numpy(), right[name], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=name
        )  # fmt: skip

    logits = tensor("target_logits").requires_grad_()
    values = tensor("values").requires_grad_()
    actions = {"action": torch.tensor(given["actions"])}
    head = heads(logits.shape[-1])
    behaviour = head.log_prob(tensor("behaviour_logits"), actions, None)
    log_probs, entropies = head.evaluate(logits, actions, None)
    near(behaviour, "behaviour_log_probs")
    near(log_probs, "target_log_probs")
    near(entropies, "entropy")
    clips = {name: given[name] for name in ("rho_bar", "c_bar", "rho_pg_bar", "lambda_")}
    out = vtrace(
        behaviour, log_probs, tensor("discounts"), tensor("rewards"), values, tensor("bootstrap_value"), **clips
    )  # fmt: skip
    near(out.vs, "vs")
    near(out.pg_advantages, "pg_advantages")
    policy_loss, value_loss, entropy = actor_critic_sums(
        log_probs, entropies, values, out.vs, out.pg_advantages, torch.ones_like(values)
    )
    near(policy_loss, "policy_loss")
    near(value_loss, "value_loss")
    near(-entropy, "neg_entropy")
    for loss, variable, name in (
        (policy_loss, logits, "d_policy_loss_d_target_logits"),
        (value_loss, values, "d_value_loss_d_values"),
        (-entropy, logits, "d_neg_entropy_d_target_logits"),
    ):
        near(torch.autograd.grad(loss, variable, retain_graph=True)[0], name)


def _batch(rows: int = 6, columns: int = 3, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "heads": heads(4),
        "inputs": torch.randn(rows, columns, 4, generator=generator),
        "values": torch.randn(rows, columns, generator=generator),
        "actions": {"action": torch.randint(4, (rows, columns), generator=generator)},
        "masks": None,
        "behaviour_log_probs": -torch.rand(rows, columns, generator=generator) - 1,
        "rewards": torch.randn(rows, columns, generator=generator),
        "terminated": torch.zeros(rows, columns, dtype=torch.bool),
        "truncated": torch.zeros(rows, columns, dtype=torch.bool),
        "first": torch.zeros(rows, columns, dtype=torch.bool),
        "algorithm": Algorithm(),
    }


def test_the_total_is_the_mean_over_transitions_with_its_costs() -> None:
    batch = _batch()
    losses = actor_critic_loss(**batch)
    expected = losses.policy_loss + 0.5 * losses.value_loss - 0.01 * losses.entropy
    torch.testing.assert_close(losses.total, expected)
    doubled = {
        name: torch.cat([value, value], 1) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    doubled["actions"] = {"action": torch.cat([batch["actions"]["action"]] * 2, 1)}
    torch.testing.assert_close(actor_critic_loss(**doubled).total, losses.total)


@pytest.mark.parametrize("ended", ["terminated", "truncated", "interrupted"])
def test_nothing_of_the_next_episode_reaches_the_gradients_of_this_one(ended: str) -> None:
    """Row 3 begins a new episode: changing it changes no gradient of rows 0 to 2."""
    gradients = []
    for shift in (0.0, 50.0):
        batch = _batch()
        batch["first"][3] = True
        if ended != "interrupted":
            batch[ended][2] = True
        batch["rewards"][3:] += shift
        batch["values"][3:] += shift
        batch["inputs"].requires_grad_()
        batch["values"].requires_grad_()
        losses = actor_critic_loss(**batch)
        losses.total.backward()
        gradients.append((batch["inputs"].grad[:3], batch["values"].grad[:3]))
    for before, after in zip(*gradients, strict=True):
        torch.testing.assert_close(before, after)
    assert not gradients[0][0][2].any(), "the final row's action was never taken"
    assert gradients[0][0][1].any()


def test_a_truncated_step_bootstraps_from_its_last_value_and_a_terminated_one_does_not() -> None:
    moved = {}
    for ended in ("terminated", "truncated"):
        sums = []
        for last_value in (0.0, 10.0):
            batch = _batch(rows=3, columns=1)
            batch["first"][2] = True
            batch[ended][1] = True
            batch["values"][1] = last_value
            batch["values"].requires_grad_()
            actor_critic_loss(**batch).total.backward()
            sums.append(float(batch["values"].grad[0]))
        moved[ended] = abs(sums[0] - sums[1])
    assert moved["terminated"] == 0 and moved["truncated"] > 1


def test_rewards_are_scaled_and_then_clipped_for_the_learner_alone() -> None:
    ppo, batch = a_ppo(), a_batch(9, 6)
    batch = batch._replace(reward=batch.reward * 100)
    by_hand = batch._replace(reward=(batch.reward * 0.02).clamp(-1, 1))
    assert 0 < int((by_hand.reward.abs() < 1).sum()) < by_hand.reward.numel()
    vtrace = VTrace(ppo.network, Config())
    loss, right, unclipped = (next(vtrace.losses(given)).total for given in (rewarded(batch, 0.02, 1.0), by_hand, batch))  # fmt: skip
    torch.testing.assert_close(loss, right)
    assert loss != unclipped and batch.reward.abs().max() > 1
    assert rewarded(batch, 1.0, None) is batch


def test_masked_choices_get_no_gradient_and_entropy_is_the_masked_distributions() -> None:
    batch = _batch(columns=2)
    batch["masks"] = torch.ones(6, 2, 4, dtype=torch.uint8)
    batch["masks"][..., 3] = 0
    batch["actions"]["action"] %= 3
    batch["inputs"].requires_grad_()
    losses = actor_critic_loss(**batch)
    losses.total.backward()
    assert not batch["inputs"].grad[..., 3].any()
    reference = torch.distributions.Categorical(logits=batch["inputs"][:-1, :, :3]).entropy().mean()
    torch.testing.assert_close(losses.entropy, reference.detach())


def test_figures_of_ratios_and_values() -> None:
    batch = _batch()
    log_probs = batch["heads"].log_prob(batch["inputs"], batch["actions"], None)
    batch["behaviour_log_probs"] = log_probs - math.log(2)  # every ratio is 2
    assert actor_critic_loss(**batch).clipped_ratio_fraction == 1
    batch["behaviour_log_probs"] = log_probs + math.log(2)
    assert actor_critic_loss(**batch).clipped_ratio_fraction == 0


def test_normalised_advantages_do_not_depend_on_the_rewards_scale() -> None:
    batch = _batch()
    batch["algorithm"] = Algorithm(normalise_advantages=True)
    batch["values"] *= 0
    small = actor_critic_loss(**batch).policy_loss
    batch["rewards"] = batch["rewards"] * 1000
    torch.testing.assert_close(actor_critic_loss(**batch).policy_loss, small, rtol=1e-3, atol=1e-4)


def test_learning_rates() -> None:
    plain = Learner(learning_rate=1.0)
    assert [learning_rate(u, plain, None) for u in (0, 10**9)] == [1.0, 1.0]
    warm = Learner(learning_rate=1.0, warmup_updates=4)
    assert [learning_rate(u, warm, None) for u in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = Learner(learning_rate=1.0, schedule="linear")
    assert [learning_rate(u, linear, 4) for u in range(6)] == [1, 0.75, 0.5, 0.25, 0, 0]
    cosine = Learner(learning_rate=1.0, schedule="cosine")
    assert [learning_rate(u, cosine, 4) for u in (0, 2, 4)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_optimisers_are_configured(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make_optimizer([parameter], Learner(optimizer=name, learning_rate=0.1))
    for _ in range(100):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()
    assert parameter.detach().abs().max() < 0.1
    assert optimizer.param_groups[0]["eps"] == (1e-5 if name == "adam" else 0.01)
