"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347): epochs of minibatches over one batch of unrolls.

Synchronous: a batch is one unroll of each slot, acted by one version, and the advantages are GAE's (Schulman et al. 2015, arXiv
1506.02438, eq. 16) from the values of acting. Each unroll's first row was the bootstrap row of the one before, for which the older
version acted already: it is left out of the losses, so that every ratio is 1 at first. Asynchronous (APPO): batches of mixed versions,
advantages corrected by V-trace, whose lambda-weighted error is GAE's where the versions agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from csrc_free_kernels.build import run
from csrc_free_kernels.returns import vtrace_rows
from seedrl.config import Algorithm as AlgorithmSection
from seedrl.config import Config
from seedrl.learn.algorithm import Loss, Network
from seedrl.store.batch import Batch

_EPS = 1e-8


@dataclass
class Targets:
    """What an iteration aims at, computed once: float32 [T, B] each; mask is 0 where nothing is learnt, None where all counts."""

    log_probs: Tensor
    values: Tensor
    returns: Tensor
    advantages: Tensor
    mask: Tensor | None

    def mean(self, x: Tensor) -> Tensor:
        """Of what counts."""
        if self.mask is None:
            return x.mean()
        return (x * self.mask).sum() / self.mask.sum().clamp_min(1.0)

    def map(self, over: Callable[[Tensor], Tensor]) -> Targets:
        mask = None if self.mask is None else over(self.mask)
        log_probs, values, returns, advantages = map(
            over, (self.log_probs, self.values, self.returns, self.advantages)
        )
        return Targets(log_probs, values, returns, advantages, mask)


class PPO:
    """See the module. `losses` yields one loss for each minibatch; none further once the policy has moved by `target_kl`."""

    def __init__(self, network: Network, config: Config) -> None:
        self.network, self.section = network, config.algorithm

    def losses(self, batch: Batch) -> Iterator[Loss]:
        targets = self.targets(batch)
        explained = explained_variance(targets)
        minibatches = self._of_unrolls if self.network.recurrent else self._of_rows
        first = True
        for inputs, values, actions, masks, part in minibatches(batch, targets):
            log_probs, entropies = self.network.heads.evaluate(inputs, actions, masks)
            losses, kl = ppo_loss(log_probs, entropies, values, part, self.section)
            target_kl = self.section.target_kl
            if not first and target_kl is not None and float(kl) > 1.5 * target_kl:
                return
            first = False
            losses.metrics["explained_variance"] = explained
            yield losses

    @torch.no_grad()
    def targets(self, batch: Batch) -> Targets:
        """Returns and advantages of a batch, with the network as it is now (synchronous: as it acted)."""
        section, rows = self.section, slice(self.network.burn_in, None)
        behaviour, values = batch.log_prob[rows], batch.value[rows]
        current = behaviour
        if not section.synchronous:
            inputs, values = self.network.over_unrolls(batch)
            actions = {name: action[rows] for name, action in batch.actions.items()}
            masks = None if batch.mask is None else batch.mask[rows]
            current, _ = self.network.heads.evaluate(inputs, actions, masks)
        returns, _, mask = run(
            vtrace_rows, behaviour, current, batch.reward[rows], values, batch.terminated[rows], batch.first[rows], section.gamma,
            rho_bar=section.rho_bar, c_bar=section.c_bar, lambda_=section.lambda_or_default,
        )  # fmt: skip
        if section.synchronous:
            mask = mask * (batch.version[rows][:-1] == batch.version.max())
        values = values[:-1]
        return Targets(behaviour[:-1], values, returns, returns - values, mask)

    def _of_rows(self, batch: Batch, targets: Targets) -> Iterator[_Minibatch]:
        """Transitions in any order: those that the mask counts."""
        acted = slice(self.network.burn_in, -1)
        assert targets.mask is not None
        valid = targets.mask.flatten().nonzero().squeeze(-1)

        def flat(leaf: Tensor) -> Tensor:
            return leaf.flatten(0, 1)

        obs = {name: flat(leaf[acted]) for name, leaf in batch.obs.items()}
        actions = {name: flat(leaf[acted]) for name, leaf in batch.actions.items()}
        masks = None if batch.mask is None else flat(batch.mask[acted])
        whole = targets.map(flat)
        whole.mask = None  # only those are taken
        for index in self._shuffled(valid):
            part = whole.map(partial(torch.index_select, dim=0, index=index))
            inputs, values = self.network.over_rows({name: leaf.index_select(0, index) for name, leaf in obs.items()})  # fmt: skip
            chosen = {name: leaf.index_select(0, index) for name, leaf in actions.items()}
            legal = None if masks is None else masks.index_select(0, index)
            yield inputs, values, chosen, legal, part

    def _of_unrolls(self, batch: Batch, targets: Targets) -> Iterator[_Minibatch]:
        """Whole unrolls, from their stored states."""
        acted = slice(self.network.burn_in, -1)
        everything = torch.arange(targets.values.shape[1], device=targets.values.device)
        for index in self._shuffled(everything):
            part = targets.map(partial(torch.index_select, dim=1, index=index))
            some = batch.columns(index)
            inputs, values = self.network.over_unrolls(some)
            actions = {name: leaf[acted] for name, leaf in some.actions.items()}
            legal = None if some.mask is None else some.mask[acted]
            yield inputs[:-1], values[:-1], actions, legal, part

    def _shuffled(self, index: Tensor) -> Iterator[Tensor]:
        """`epochs` times the entries in a new order, in `minibatches` parts as even as can be; an empty batch is one part."""
        for _ in range(self.section.epochs):
            order = torch.randperm(index.numel(), device=index.device)
            parts = max(1, min(self.section.minibatches, index.numel()))
            yield from index[order].tensor_split(parts)


_Minibatch = tuple[Tensor, Tensor, dict[str, Tensor], Tensor | None, Targets]


def ppo_loss(
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    targets: Targets,
    section: AlgorithmSection,
) -> tuple[Loss, Tensor]:
    """The clipped objective (eq. 7 and 9), a mean over the transitions that the mask counts; and the KL divergence from acting.

    Args: log_probs, entropies, values: float32 [...], the network's now, with gradient; `targets` of the same shape.
    Returns: the losses, and the estimate E[(r - 1) - log r] of the KL divergence, without gradient.
    """
    mean, advantages = targets.mean, targets.advantages
    if section.normalises_advantages:
        centred = advantages - mean(advantages)
        advantages = centred / (mean(centred.square()).sqrt() + _EPS)
    log_ratios = log_probs - targets.log_probs
    ratios = log_ratios.exp()
    near = ratios.clamp(1 - section.clip_range, 1 + section.clip_range)
    policy_loss = -mean(torch.minimum(ratios * advantages, near * advantages))
    errors = (values - targets.returns).square()
    if section.value_clip_range is not None:
        moved = (values - targets.values).clamp(-section.value_clip_range, section.value_clip_range)
        errors = torch.maximum(errors, (targets.values + moved - targets.returns).square())
    value_loss, entropy = 0.5 * mean(errors), mean(entropies)
    total = policy_loss + section.value_cost * value_loss - section.entropy_cost * entropy
    with torch.no_grad():
        kl = mean(ratios - 1 - log_ratios)
        outside = (ratios - 1).abs() > section.clip_range
        metrics = {
            "total": total.detach(), "policy_loss": policy_loss.detach(), "value_loss": value_loss.detach(), "entropy": entropy.detach(),
            "clipped_ratio_fraction": mean(outside.to(ratios.dtype)), "kl": kl,
        }  # fmt: skip
    return Loss(total, metrics), kl


@torch.no_grad()
def explained_variance(targets: Targets) -> Tensor:
    """1 - Var(returns - values) / Var(returns), over the transitions that the mask counts."""

    def variance(x: Tensor) -> Tensor:
        return targets.mean((x - targets.mean(x)).square())

    return 1 - variance(targets.advantages) / variance(targets.returns).clamp_min(_EPS)
