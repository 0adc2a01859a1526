"""Q-learning on stored sequences: R2D2 (Kapturowski et al. 2019, openreview r1lyTjAqYX), and DQN, its case without memory.

One step of the optimiser for each batch of unrolls. The recurrent state comes from the store and is warmed over the burn-in, for each of
the two networks by its own weights. Targets are double, of n steps, rescaled if wished (`csrc_free_kernels/q_targets.py`); what is
drawn by priority is weighted for it, and gets the priority of its errors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from csrc_free_kernels.q_targets import q_targets, sequence_priority
from seedrl.config import Config
from seedrl.learn.algorithm import Loss, Network
from seedrl.policy.values import masked
from seedrl.store.batch import Batch


class QLearning:
    """See the module. The target network is that of `target_period` updates ago at most, and lies in the checkpoint."""

    def __init__(self, network: Network, config: Config) -> None:
        self.network, self.section = network, config.algorithm
        target = copy.deepcopy(network.policy).requires_grad_(False)
        self.target = Network(target, network.heads, config, network.spec)
        self.updates = torch.zeros((), dtype=torch.int64)
        (leaf,) = network.heads.leaves
        self._action = leaf.name

    def tensors(self) -> dict[str, Tensor]:
        state = {f"target.{name}": tensor for name, tensor in self.target.policy.state_dict().items()}  # fmt: skip
        return state | {"updates": self.updates}

    def losses(self, batch: Batch) -> Iterator[Loss]:
        section, rows = self.section, slice(self.network.burn_in, None)
        if int(self.updates) % section.target_period == 0:
            self.target.policy.load_state_dict(self.network.policy.state_dict())
        self.updates += 1
        q, _ = self.network.over_unrolls(batch)
        mask = None if batch.mask is None else batch.mask[rows]
        with torch.no_grad():
            q_target, _ = self.target.over_unrolls(batch)
        found = q_targets(
            masked(q.detach(), mask), masked(q_target, mask), batch.reward[rows], batch.terminated[rows], batch.truncated[rows],
            batch.first[rows], section.gamma, n=section.n_step, eps=section.value_rescale, double=section.double,
        )  # fmt: skip
        actions = batch.actions[self._action][rows][:-1]
        chosen = q[:-1].gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        errors = (found.targets - chosen) * found.mask
        count = found.mask.sum().clamp_min(1.0)
        squares = 0.5 * errors.square()
        if batch.weights is not None:
            squares = squares * batch.weights
        loss = squares.sum() / count
        with torch.no_grad():
            metrics = {
                "td_error": errors.abs().sum() / count, "q_mean": (chosen * found.mask).sum() / count,
                "target_mean": found.targets.sum() / count, "loss": loss.detach(),
            }  # fmt: skip
            priorities = sequence_priority(errors, found.mask, section.priority_mix)
        yield Loss(loss, metrics, priorities)
