"""The policy step: rows of the slab in, actions and everything that is worth storing out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seedrl.store.blocks import torch_dtype
from seedrl.store.state import State, StateStore, leaves
from seedrl.transport.slab import Slab

if TYPE_CHECKING:
    from seedrl.policy.base import Heads, Policy

_FIRST = 2  # column of `flags`


class PolicyStep:
    """Gathers ready rows, runs the policy once, samples; the same step for acting, evaluation and `seedrl eval`.

    Everything is allocated here, for `max_rows`; after that a step makes only the policy's own tensors.
    """

    def __init__(
        self, policy: Policy, heads: Heads, slab: Slab, max_rows: int, seed: int, greedy: bool
    ) -> None:
        self.policy, self.heads, self._slab, self._greedy = policy, heads, slab, greedy
        self.states = StateStore(
            policy.initial_state(1), slab.layout.num_slots, torch.device("cpu")
        )
        self._generator = torch.Generator().manual_seed(seed)
        self._stage: dict[str, np.ndarray] = {}
        self._obs: dict[str, Tensor] = {}  # [1, max_rows, ...] of the same memory: time first
        for name, source in slab.obs.items():
            self._obs[name] = self._staged(f"obs/{name}", source, max_rows).unsqueeze(0)
        self._staged("reward", slab.reward, max_rows)
        self._staged("flags", slab.flags, max_rows)
        self._mask = self._staged("mask", slab.mask, max_rows) if slab.mask.shape[1] else None
        self._sources = {name: self._source(name) for name in self._stage}
        # what the store gets is the stage under the dtype that it stores (uint16 as int16, say)
        self._columns = {
            name: torch.from_numpy(stage).view(torch_dtype(stage.dtype.name)).numpy()
            for name, stage in self._stage.items()
        }
        self._columns["version"] = np.zeros(max_rows, np.int64)
        self._first_host = np.zeros(max_rows, bool)
        self._first = torch.from_numpy(self._first_host).unsqueeze(0)
        self.flags = self._stage["flags"]

    def _staged(self, name: str, source: np.ndarray, max_rows: int) -> Tensor:
        """A buffer of `max_rows` rows that `ingest` fills; the same memory as a tensor."""
        self._stage[name] = np.zeros((max_rows, *source.shape[1:]), source.dtype)
        return torch.from_numpy(self._stage[name])

    def _source(self, name: str) -> np.ndarray:
        if name.startswith("obs/"):
            return self._slab.obs[name[4:]]
        source: np.ndarray = getattr(self._slab, name)
        return source

    def ingest(self, rows: np.ndarray) -> None:
        """Copies the rows `rows` int64 [B] of every leaf out of the slab: one copy a leaf."""
        count = rows.size
        for name, source in self._sources.items():
            np.take(source, rows, axis=0, out=self._stage[name][:count], mode="clip")
        np.not_equal(self.flags[:count, _FIRST], 0, out=self._first_host[:count])

    @torch.inference_mode()
    def forward(self, rows: np.ndarray, evaluation: np.ndarray | None) -> None:
        """Runs the policy on the ingested rows; keeps actions and state.

        Args: rows int64 [B]; evaluation: positions in the batch that are evaluation slots, or None.
        """
        count = rows.size
        state, self._state_in = self.states.gather(rows, self._first_host[:count])
        obs: dict[str, Tensor] | Tensor
        if len(self._obs) == 1:
            (leaf,) = self._obs.values()
            obs = leaf[:, :count]
        else:
            obs = {name: leaf[:, :count] for name, leaf in self._obs.items()}
        inputs, value, new = self.policy(obs, state, self._first[:, :count])
        mask = None if self._mask is None else self._mask[:count]
        inputs = inputs[0]
        actions, log_prob = self.heads.sample(inputs, mask, self._generator)
        if evaluation is not None and self._greedy:
            at = torch.from_numpy(evaluation)
            best = self.heads.mode(
                inputs.index_select(0, at), None if mask is None else mask.index_select(0, at)
            )
            for name, action in actions.items():
                action.index_copy_(0, at, best[name])
        self.states.scatter(rows, new)
        self.actions, self._log_prob, self._value = actions, log_prob, value[0]

    @torch.inference_mode()
    def answer(self, rows: np.ndarray) -> None:
        """Writes the actions, as the environments want them, into the slab."""
        for name, action in self.heads.to_env(self.actions).items():
            self._slab.action[name][rows] = action.numpy()

    @torch.inference_mode()
    def columns(
        self, count: int, version: int, keep: np.ndarray | None
    ) -> tuple[dict[str, np.ndarray], list[Tensor]]:
        """What the store appends: all row leaves [B, ...] and the leaves of the state entering the rows.

        Args: keep: positions of the batch to store (the others are evaluation rows), or None for all `count`.
        """
        columns = {name: column[:count] for name, column in self._columns.items()}
        columns["version"].fill(version)
        for name, action in self.actions.items():
            columns[f"action/{name}"] = action.numpy()
        columns["log_prob"], columns["value"] = self._log_prob.numpy(), self._value.numpy()
        states = self._state_in
        if keep is not None:
            at = torch.from_numpy(keep)
            columns = {name: column[keep] for name, column in columns.items()}
            states = [leaf.index_select(0, at) for leaf in states]
        return columns, states


def state_leaves(policy: Policy) -> list[Tensor]:
    """The leaves of the policy's initial state for one slot."""
    state: State = policy.initial_state(1)
    return leaves(state)
