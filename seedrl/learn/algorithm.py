"""What the learner's loop asks of an algorithm, and what it gives it: the network over stored rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from csrc_free_kernels.build import run
from csrc_free_kernels.returns import vtrace_rows
from seedrl.config import Config
from seedrl.policy.base import Heads, Observation, Policy
from seedrl.policy.normalise import Normalised
from seedrl.policy.values import ActionValues
from seedrl.spec import EnvSpec
from seedrl.store.batch import Batch
from seedrl.store.state import leaves


class Loss(NamedTuple):
    """total: the scalar that one step of the optimiser lowers. metrics: scalars without gradient, for the records.

    priorities: of the batch's unrolls, float [B], for a store that draws by them; None: they stay.
    """

    total: Tensor
    metrics: dict[str, Tensor]
    priorities: Tensor | None = None


class Algorithm(Protocol):
    """One module of `seedrl.learn`, found by `algorithm.name`."""

    def losses(self, batch: Batch) -> Iterator[Loss]:
        """The losses of a batch: each is asked for once the optimiser's step for the one before is done. At least one."""
        ...

    # What it wants of the store it may declare: `modes`, those of `replay.mode` that it can learn from, and `extras`, names of leaves that
    # the policy must store beside each row; a run that has others is refused before it starts.
    # An algorithm that keeps tensors beside the policy has them in `tensors() -> dict[str, Tensor]`; they go into checkpoints, and a run
    # that is resumed writes them in place.


class Network:
    """The policy that learns, over stored rows.

    Args: policy, heads: those of the run. config: burn-in and precision are the learner's.
    """

    def __init__(self, policy: Policy, heads: Heads, config: Config, spec: EnvSpec) -> None:
        self.policy, self.heads, self.burn_in = policy, heads, config.learner.burn_in
        self.spec = spec
        self.recurrent = bool(leaves(policy.initial_state(1)))
        self._bfloat16 = config.learner.precision == "bfloat16"
        inner = policy.policy if isinstance(policy, ActionValues) else policy
        self._normalised = inner if isinstance(inner, Normalised) else None
        self._section = config.algorithm
        self._dtypes = {leaf.name: getattr(torch, leaf.dtype) for leaf in spec.observation}

    def over_unrolls(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(inputs float32 [R, B, P], values float32 [R, B]) of the rows behind the burn-in, which warms the state without gradient."""
        return self.over_unrolls_with_extras(batch)[:2]

    def over_unrolls_with_extras(self, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The same, and the policy's extra leaves as they are now, [R, B, ...] each; `batch.extras` has those of acting, burn-in included."""
        state, burn_in = batch.state, self.burn_in
        with torch.autocast(batch.reward.device.type, torch.bfloat16, enabled=self._bfloat16):
            if burn_in:
                warm = {name: leaf[:burn_in] for name, leaf in batch.obs.items()}
                with torch.no_grad():
                    state = self.policy(self._obs(warm), state, batch.first[:burn_in])[2]
            rows = {name: leaf[burn_in:] for name, leaf in batch.obs.items()}
            inputs, values, _, *extras = self.policy(self._obs(rows), state, batch.first[burn_in:])
        return inputs.float(), self._scaled(values.float()), extras[0] if extras else {}

    def over_rows(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(inputs [M, P], values [M]) of rows [M, ...] in any order, of a policy without state."""
        some = next(iter(obs.values()))
        lead = {name: leaf.unsqueeze(0) for name, leaf in obs.items()}
        first = torch.zeros(1, len(some), dtype=torch.bool, device=some.device)
        with torch.autocast(some.device.type, torch.bfloat16, enabled=self._bfloat16):
            state = self.policy.initial_state(len(some))
            inputs, values = self.policy(self._obs(lead), state, first)[:2]
        return inputs[0].float(), self._scaled(values[0].float())

    def normalised(self, batch: Batch) -> Batch:
        """The batch with rewards and values in the unit in which values are learnt: `over_unrolls` gives them so."""
        return batch._replace(reward=self._scaled(batch.reward), value=self._scaled(batch.value))

    def _scaled(self, values: Tensor) -> Tensor:
        if self._normalised is None or self._normalised.returns is None:
            return values
        return values * self._normalised.returns.inverse

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        """Takes the batch, whose rewards and values are in their own units, into the moments: after it was learnt from."""
        if self._normalised is None:
            return
        rows = slice(self.burn_in, -1)  # the last is the next unroll's first
        obs = {name: leaf[rows].flatten(0, 1) for name, leaf in batch.obs.items()}
        returns = None
        if self._normalised.returns is not None:
            behind, section = slice(self.burn_in, None), self._section
            log_prob = batch.log_prob[behind]
            found = run(
                vtrace_rows, log_prob, log_prob, batch.reward[behind], batch.value[behind], batch.terminated[behind], batch.first[behind], section.gamma,
                lambda_=section.lambda_or_default,
            )  # fmt: skip
            returns = found.vs[found.mask > 0]
        self._normalised.observe(obs, returns)

    def _obs(self, obs: dict[str, Tensor]) -> Observation:
        typed = {
            name: leaf if leaf.dtype == self._dtypes[name] else leaf.view(self._dtypes[name])
            for name, leaf in obs.items()
        }
        return typed if len(typed) > 1 else next(iter(typed.values()))


def rewarded(batch: Batch, scale: float, clip: float | None) -> Batch:
    """The batch with its rewards times `scale`, then cut to [-clip, clip] (None: not cut)."""
    reward = batch.reward
    if scale != 1:
        reward = reward * scale
    if clip is not None:
        reward = reward.clamp(-clip, clip)
    return batch if reward is batch.reward else batch._replace(reward=reward)
