"""Values of actions instead of a distribution over them, acted greedily but for a share of random actions (dqn, r2d2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seedrl.errors import ConfigError
from seedrl.policy.base import Observation, Policy, State, extra_leaves_of
from seedrl.policy.heads import ILLEGAL, Heads
from seedrl.spec import BEST_VALUE, TAKEN_VALUE, Leaf, RowSpecs

# what first priorities are made of: the value of the best legal action, and of the one taken
ACTING_VALUES: RowSpecs = {BEST_VALUE: (torch.float32, ()), TAKEN_VALUE: (torch.float32, ())}


def epsilon_ladder(base: float, exponent: float, num_slots: int) -> np.ndarray:
    """Share of random actions of each slot: base^(1 + exponent * i / (N - 1)), float32 [N] (Horgan et al. 2018, arXiv 1803.00933, section 4)."""
    share = np.arange(num_slots) / max(num_slots - 1, 1)
    ladder: np.ndarray = np.power(base, 1 + exponent * share).astype(np.float32)
    return ladder


def spread(num_slots: int) -> np.ndarray:
    """A place on the ladder for each slot, int64 [N], each once: any first few slots lie all over it, as environments come and go.

    The order is that of the bits reversed: the first, the middle, the quarters, the eighths.
    """
    bits = max(num_slots - 1, 1).bit_length()
    reverse = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)]
    return np.array([place for place in reverse if place < num_slots])


class ActionValues(Policy):
    """A policy whose numbers are values of actions: Q = V + A - mean A (Wang et al. 2016, arXiv 1511.06581, eq. 9), or the numbers as they are.

    Args: policy: gives (A [T, B, n], V [T, B], state). dueling: False leaves V out.
    """

    def __init__(self, policy: Policy, dueling: bool) -> None:
        super().__init__()
        self.policy, self.dueling = policy, dueling

    def initial_state(self, batch: int) -> State:
        return self.policy.initial_state(batch)

    def extra_leaves(self) -> RowSpecs:
        return extra_leaves_of(self.policy)

    def forward(self, obs: Observation, state: State, first: Tensor) -> Any:
        """Returns: values of the actions float32 [T, B, n], the largest of them [T, B], and the rest as it is."""
        q, value, *rest = self.policy(obs, state, first)
        if self.dueling:
            q = q + (value - q.mean(-1)).unsqueeze(-1)
        return q, q.amax(-1), *rest


class ValueHeads(Heads):
    """The head of one choice by its values. `sample` explores: what it draws at random is uniform over the legal actions.

    Args: action: the spec's action leaves. epsilon: share of random actions by slot, float32 [N].
    Raises: ConfigError when the action is another than one choice among n.
    """

    def __init__(self, action: Sequence[Leaf], epsilon: np.ndarray, algorithm: str) -> None:
        if len(action) != 1 or action[0].kind != "discrete":
            kinds = ", ".join(leaf.text() for leaf in action)
            raise ConfigError(
                what=f"{algorithm} values one choice among n; this environment's action is {kinds}",
                where="algorithm.name", do="use ppo or vtrace, or an environment with a Discrete action",
            )  # fmt: skip
        super().__init__(action)
        self.epsilon, self._name = torch.from_numpy(epsilon), action[0].name

    @property
    def branches(self) -> tuple[int, ...]:
        """None: what is drawn does not follow the numbers."""
        return ()

    def sample(
        self, inputs: Tensor, mask: Tensor | None, generator: torch.Generator | None = None, slots: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
        """Values float32 [..., B, n], mask uint8 or None, slots int64 [B] -> (actions, and the log-probability with which each was drawn).

        Without slots every action is the best one.
        """
        best = self.mode(inputs, mask)[self._name]
        legal = torch.ones_like(inputs) if mask is None else mask.to(inputs.dtype)
        epsilon = torch.zeros_like(best, dtype=inputs.dtype)
        if slots is not None:
            self.epsilon = self.epsilon.to(inputs.device)
            epsilon = epsilon + self.epsilon.index_select(0, slots)
        draws = torch.empty_like(inputs).uniform_(generator=generator)
        explores = torch.empty_like(epsilon).uniform_(generator=generator) < epsilon
        random = (draws + 1).mul(legal).argmax(-1)
        action = torch.where(explores, random, best)
        share = epsilon / legal.sum(-1).clamp_min(1) + (1 - epsilon) * (action == best)
        return {self._name: action}, share.log()


def masked(q: Tensor, mask: Tensor | None) -> Tensor:
    """Values with those of illegal actions so low that none is ever the largest; mask uint8, as `q`, or None."""
    return q if mask is None else q.masked_fill(mask == 0, ILLEGAL)
