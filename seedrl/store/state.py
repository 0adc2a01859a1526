"""The policy's recurrent state by slot, on the device; it never visits the host.

A state is any nest (tuples, lists, dicts) of tensors whose first dimension is the slot, or an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csrc_free_kernels.build import run
from csrc_free_kernels.state import gather_state, scatter_rows

_IN_NUMPY = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool)
State = Any  # a tensor, or a tuple, list or dict of states


def leaves(state: State) -> list[Any]:
    """The tensors (or arrays) of a nest, in a fixed order (dicts by sorted key)."""
    if isinstance(state, Tensor | np.ndarray):
        return [state]
    if isinstance(state, dict):
        return [leaf for key in sorted(state) for leaf in leaves(state[key])]
    return [leaf for part in state for leaf in leaves(part)]


def rebuild(like: State, tensors: list[Tensor]) -> State:
    """A nest of the shape of `like` with `tensors` in the order of `leaves`."""
    return _rebuild(like, iter(tensors))


def _rebuild(like: State, tensors: Iterator[Tensor]) -> State:
    if isinstance(like, Tensor | np.ndarray):
        return next(tensors)
    if isinstance(like, dict):
        return {key: _rebuild(like[key], tensors) for key in sorted(like)}
    if hasattr(like, "_fields"):
        return type(like)(*(_rebuild(part, tensors) for part in like))
    return type(like)(_rebuild(part, tensors) for part in like)


class StateStore:
    """One state a slot: gathered for a batch, the initial one where a row is `first`, scattered back after the step.

    Args:
        initial: the policy's initial state for one slot, each leaf [1, ...].
    """

    def __init__(self, initial: State, num_slots: int, device: torch.device) -> None:
        self.like, self._device = initial, device
        self._initial = [leaf.detach().to(device) for leaf in leaves(initial)]
        self._store = [
            leaf.repeat(num_slots, *(1 for _ in leaf.shape[1:])) for leaf in self._initial
        ]
        self._batch = [torch.empty_like(leaf) for leaf in self._store]
        # on the CPU, NumPy's calls cost a third of torch's
        host = device.type == "cpu" and all(leaf.dtype in _IN_NUMPY for leaf in self._store)
        self._arrays = [leaf.numpy() for leaf in self._store] if host else []
        self.nbytes = sum(leaf.numel() * leaf.element_size() for leaf in self._store)

    def gather(self, slots: np.ndarray, first: np.ndarray) -> tuple[State, list[Tensor]]:
        """The states entering the rows of `slots`.

        Args: slots int64 [B]; first bool [B], where the row begins an episode: both of the host.
        Returns: the nest, each leaf [B, ...], and its leaves; valid until the next call.
        """
        if not self._store:
            return self.like, []
        count = slots.size
        taken = [batch[:count] for batch in self._batch]
        if not self._arrays:
            return self.gather_on_device(*(torch.from_numpy(x).to(self._device) for x in (slots, first)))  # fmt: skip
        for array, batch in zip(self._arrays, taken, strict=True):
            array.take(slots, 0, batch.numpy(), "clip")
        if first.any():
            at = torch.from_numpy(first)
            for into, initial in zip(taken, self._initial, strict=True):
                into[at] = initial
        return rebuild(self.like, taken), taken

    def scatter(self, slots: np.ndarray, state: State) -> None:
        """Keeps the states that left the rows of `slots`: int64 [B], each leaf [B, ...]."""
        if not self._store:
            return
        if self._arrays:
            for array, new in zip(self._arrays, leaves(state), strict=True):
                array[slots] = new.numpy()
            return
        self.scatter_on_device(torch.from_numpy(slots).to(self._device), leaves(state))

    def gather_on_device(self, slots: Tensor, first: Tensor) -> tuple[State, list[Tensor]]:
        """`gather` of slots int64 [B] and first bool [B] that lie on the device: a slot below 0 has the initial state."""
        if not self._store:
            return self.like, []
        taken = [batch[: slots.numel()] for batch in self._batch]
        run(gather_state, self._store, self._initial, slots, first, taken)
        return rebuild(self.like, taken), taken

    def scatter_on_device(self, slots: Tensor, new: list[Tensor]) -> None:
        """`scatter` of slots int64 [B] that lie on the device, below 0 for nowhere, and leaves [B, ...]."""
        if self._store:
            run(scatter_rows, self._store, slots, new)
