"""The V-trace actor-critic (Espeholt et al. 2018, arXiv 1802.01561), learning rates and optimisers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from csrc_free_kernels.build import run
from csrc_free_kernels.returns import vtrace_rows
from csrc_free_kernels.shapes import check_shapes
from seedrl.learn.algorithm import Loss, Network
from seedrl.policy.base import Heads
from seedrl.store.batch import Batch

if TYPE_CHECKING:
    from seedrl.config import Algorithm, Config
    from seedrl.config import Learner as LearnerSection

_ADVANTAGE_EPS = 1e-8


class VTrace:
    """One step of the optimiser for each batch of unrolls, each unroll learnt from once."""

    def __init__(self, network: Network, config: Config) -> None:
        self.network, self.section = network, config.algorithm

    def losses(self, batch: Batch) -> Iterator[Loss]:
        rows = slice(self.network.burn_in, None)
        inputs, values = self.network.over_unrolls(batch)
        losses = actor_critic_loss(
            heads=self.network.heads,
            inputs=inputs,
            values=values,
            actions={name: action[rows] for name, action in batch.actions.items()},
            masks=None if batch.mask is None else batch.mask[rows],
            behaviour_log_probs=batch.log_prob[rows],
            rewards=batch.reward[rows],
            terminated=batch.terminated[rows],
            truncated=batch.truncated[rows],
            first=batch.first[rows],
            algorithm=self.section,
        )
        metrics = {name: value.detach() for name, value in losses._asdict().items()}
        yield Loss(losses.total, metrics)


class Losses(NamedTuple):
    """Scalars. All but `total` carry no gradient.

    total: what is minimised. policy_loss, value_loss, entropy: means over the transitions, without their costs.
    clipped_ratio_fraction: transitions whose ratio was above `rho_bar`. explained_variance: of the targets by the values.
    """

    total: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    clipped_ratio_fraction: Tensor
    explained_variance: Tensor


def actor_critic_sums(
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    vs: Tensor,
    pg_advantages: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three plain sums of the loss, over the transitions that `mask` counts.

    Args: float32 [T, B] each; `vs` and `pg_advantages` without gradient; mask 1 where there is a transition.
    Returns: policy loss (-sum log pi(a) A), value loss (1/2 sum (vs - V)^2), and the sum of entropies.
    """
    policy_loss = -(log_probs * pg_advantages * mask).sum()
    value_loss = 0.5 * ((vs - values).square() * mask).sum()
    return policy_loss, value_loss, (entropies * mask).sum()


def actor_critic_loss(
    *,
    heads: Heads,
    inputs: Tensor,
    values: Tensor,
    actions: dict[str, Tensor],
    masks: Tensor | None,
    behaviour_log_probs: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    first: Tensor,
    algorithm: Algorithm,
) -> Losses:
    """The loss of a batch of unrolls, stored rows in Gymnasium's next-step order; a mean over its transitions.

    Args:
        inputs: float32 [R, B, P]; values: float32 [R, B]: the target policy's, with gradient.
        actions: stored form, [R, B, ...] a leaf. masks: uint8 [R, B, M] or None.
        behaviour_log_probs: float32 [R, B]. rewards: float32 [R, B], of the step that led to the row.
        terminated, truncated, first: bool [R, B].
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    check_shapes(
        values=(values, "R B"),
        behaviour_log_probs=(behaviour_log_probs, "R B"),
        rewards=(rewards, "R B"),
        terminated=(terminated, "R B"),
        truncated=(truncated, "R B"),
        first=(first, "R B"),
        inputs=(inputs, "R B P"),
    )
    acted = slice(None, -1)  # nothing is learnt from the action of the bootstrap row
    log_probs, entropies = heads.evaluate(
        inputs[acted],
        {name: action[acted] for name, action in actions.items()},
        None if masks is None else masks[acted],
    )
    with torch.no_grad():
        vs, advantages, mask = run(
            vtrace_rows,
            behaviour_log_probs,
            log_probs,
            rewards,
            values,
            terminated,
            first,
            algorithm.gamma,
            rho_bar=algorithm.rho_bar,
            c_bar=algorithm.c_bar,
            rho_pg_bar=algorithm.rho_pg_bar,
            lambda_=algorithm.lambda_or_default,
        )
        count = mask.sum().clamp_min(1.0)
        if algorithm.normalises_advantages:
            mean = advantages.sum() / count
            deviation = (((advantages - mean) * mask).square().sum() / count).sqrt()
            advantages = (advantages - mean) * mask / (deviation + _ADVANTAGE_EPS)
    sums = actor_critic_sums(log_probs, entropies, values[acted], vs, advantages, mask)
    policy_loss, value_loss, entropy = (total / count for total in sums)
    total = policy_loss + algorithm.value_cost * value_loss - algorithm.entropy_cost * entropy
    with torch.no_grad():
        ratios = log_probs - behaviour_log_probs[acted]
        clipped = ((ratios > math.log(algorithm.rho_bar)) * mask).sum() / count
        explained = 1 - _variance(vs - values[acted], mask, count) / _variance(
            vs, mask, count
        ).clamp_min(1e-8)
    return Losses(
        total, policy_loss.detach(), value_loss.detach(), entropy.detach(), clipped, explained
    )


def _variance(x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    mean = (x * mask).sum() / count
    return ((x - mean).square() * mask).sum() / count


def learning_rate(update: int, learner: LearnerSection, total_updates: int | None) -> float:
    """The rate of update number `update` (from 0): warm-up, then constant, or falling to 0 at `total_updates`."""
    if update < learner.warmup_updates:
        return learner.learning_rate * (update + 1) / learner.warmup_updates
    if learner.schedule == "constant" or total_updates is None:
        return learner.learning_rate
    done = min(1.0, update / total_updates)
    share = 1 - done if learner.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return learner.learning_rate * share


def make_optimizer(
    parameters: Iterable[nn.Parameter], learner: LearnerSection
) -> torch.optim.Optimizer:
    """Adam or RMSProp as configured."""
    if learner.optimizer == "rmsprop":
        return torch.optim.RMSprop(
            parameters, learner.learning_rate, learner.rmsprop_alpha, learner.rmsprop_eps
        )
    return torch.optim.Adam(parameters, learner.learning_rate, eps=learner.adam_eps, fused=True)
