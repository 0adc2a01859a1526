"""A batch of unrolls, and how it is gathered from the rows that the store keeps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from csrc_free_kernels.build import run
from csrc_free_kernels.unroll import gather_frames, gather_rows
from seedrl.errors import ConfigError
from seedrl.store.blocks import BlockStorage
from seedrl.store.state import State, leaves, rebuild

FIRST = 2  # column of `flags`
_LARGE_BYTES = 1 << 18  # beyond which memory is not the allocator's own
_SIZES = 8  # of arrays that are kept
_POOLED = 4  # batches that somebody may hold at a time and still find memory
_UNHELD = 2  # references to an array in the pool's list that nobody else holds, its own as an argument included


class Batch(NamedTuple):
    """`B` unrolls of `R = burn_in + T + 1` rows, time first, on the store's device. Row k's reward and flags are of the step
    that led to it.

    obs[leaf] [R, B, ...] in the environment's dtype, [R, B, F, ...] of stacks of F frames, the newest last; mask uint8 [R, B, M] or None; actions[leaf] [R, B, ...] as stored;
    reward, log_prob, value float32 [R, B]; terminated, truncated, first, interrupted bool [R, B]; version int64 [R, B];
    state: the policy's, each leaf [B, ...], entering row 0; slots int64 [B].
    items: int64 [B] of the host, by which priorities are given back; weights float32 [B], that correct for drawing by priority, or None.
    extras[name] [R, B, ...]: what the policy stored beside each row.
    """

    obs: dict[str, Tensor]
    mask: Tensor | None
    actions: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    first: Tensor
    interrupted: Tensor
    log_prob: Tensor
    value: Tensor
    version: Tensor
    state: State
    slots: Tensor
    items: np.ndarray
    weights: Tensor | None
    extras: dict[str, Tensor]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; itself where it lies there already."""
        if self.reward.device == device:
            return self
        return self._map(lambda leaf, _: leaf.to(device))

    def columns(self, index: Tensor) -> Batch:
        """The unrolls `index`, int64 [b]."""
        some = self._map(lambda leaf, axis: leaf.index_select(axis, index))
        return some._replace(items=self.items[index.cpu().numpy()])

    def to_tensordict(self) -> Any:
        """The same tensors, not copied, as a TensorDict of batch size [R, B] (`seedrl[tensordict]`).

        Names are those of the fields, ("obs", leaf) below them; what an unroll has one of (slots, items, weights, ("state", leaf number)) is
        the same in every row.

        Raises: ConfigError when tensordict is not installed.
        """
        try:
            from tensordict import TensorDict
        except ModuleNotFoundError:
            raise ConfigError(what="there is no module 'tensordict'", where="Batch.to_tensordict", do="pip install 'seedrl[tensordict]'") from None  # fmt: skip
        lead = self.reward.shape
        names: dict[str, Any] = self._asdict()
        names["items"] = torch.from_numpy(self.items).to(self.reward.device)
        names["state"] = {str(i): leaf for i, leaf in enumerate(leaves(self.state))}
        for name in ("slots", "items", "weights", "state"):
            names[name] = _in_every_row(names[name], lead[0])
        return TensorDict({name: part for name, part in names.items() if part is not None and part != {}}, lead)  # fmt: skip

    def _map(self, over: Callable[[Tensor, int], Tensor]) -> Batch:
        """`over(leaf, axis of the unrolls)` in the place of every tensor."""

        def mapped(part: Any) -> Any:
            if isinstance(part, Tensor):
                return over(part, min(part.dim() - 1, 1))
            if isinstance(part, dict):
                return {name: over(leaf, 1) for name, leaf in part.items()}
            return part

        state = rebuild(self.state, [over(leaf, 0) for leaf in leaves(self.state)])
        return Batch(*map(mapped, self._replace(state=None)))._replace(state=state)


def _in_every_row(part: Any, rows: int) -> Any:
    if isinstance(part, dict):
        return {name: _in_every_row(leaf, rows) for name, leaf in part.items()}
    return None if part is None else part.unsqueeze(0).expand(rows, *part.shape)


def joined(batches: list[Batch]) -> Batch:
    """One batch of the unrolls of all, in their order."""
    if len(batches) == 1:
        return batches[0]

    def together(parts: tuple[Any, ...]) -> Any:
        if isinstance(parts[0], Tensor):
            return torch.cat(parts, 0 if parts[0].dim() == 1 else 1)
        if isinstance(parts[0], dict):
            return {name: together(tuple(part[name] for part in parts)) for name in parts[0]}
        return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else None

    states = zip(*(leaves(batch.state) for batch in batches), strict=True)
    state = rebuild(batches[0].state, [torch.cat(leaf) for leaf in states])
    bare = [batch._replace(state=None) for batch in batches]
    return Batch(*map(together, zip(*bare, strict=True)))._replace(state=state)


class _Buffers:
    """Memory for what is copied out, used again once nobody holds the tensor that was over it.

    What the system maps anew costs as much as the copy: a page fault every 4 KiB.
    """

    def __init__(self) -> None:
        self._pool: dict[int, list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        pool = self._pool.pop(nbytes, [])
        self._pool[nbytes] = pool  # the last one asked for
        if len(self._pool) > _SIZES:
            del self._pool[next(iter(self._pool))]
        at = next((i for i in range(len(pool)) if sys.getrefcount(pool[i]) == _UNHELD), None)
        if at is None:
            if len(pool) == _POOLED:
                return torch.empty(shape, dtype=dtype)
            at = len(pool)
            pool.append(np.empty(nbytes, np.uint8))
        # the tensor, and every view of it, holds the array
        return torch.from_numpy(pool[at]).view(dtype).view(shape)


class Gather:
    """Copies unrolls out of the storage, once.

    Args: state_like: a state of batch 1, for the nest of `Batch.state`.
        cross_episodes: False marks all rows behind an unroll's first end of an episode as `first`, so that nothing is learnt from them.
    """

    def __init__(
        self, storage: BlockStorage, state_like: State, cross_episodes: bool = True
    ) -> None:
        self._storage, self._like, self._cross = storage, state_like, cross_episodes
        self._buffers = _Buffers()
        self._history = storage.layout.rule.history
        self._obs = [name for name in storage.rows if name.startswith("obs/")]
        self._actions = [name for name in storage.rows if name.startswith("action/")]
        self._extras = [name for name in storage.rows if name.startswith("extra/")]

    def __call__(
        self, rows: np.ndarray, state_at: np.ndarray, slots: np.ndarray, items: np.ndarray
    ) -> Batch:
        """The unrolls of rows int64 [B, history + R], with their states' places, slots and numbers: int64 [B] each."""
        device, stored = self._storage.device, self._storage.rows
        stacks = self._stacks(rows) if self._history else {}
        rows = rows[:, self._history :]
        columns, length = rows.shape
        by_unroll = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1)).to(device)
        by_time = by_unroll.view(columns, length).t().reshape(-1)

        at_once: dict[str, Tensor] = {}
        if self._storage.arrays is None:  # on a device all leaves are copied in one launch
            single = {name: leaf for name, leaf in stored.items() if name not in stacks}
            at_once = {name: leaf.new_empty(length, columns, *leaf.shape[1:]) for name, leaf in single.items()}  # fmt: skip
            run(gather_rows, list(single.values()), by_time.view(length, columns), list(at_once.values()))  # fmt: skip

        def take(name: str) -> Tensor:
            if at_once:
                return at_once[name]
            leaf = stored[name]
            if leaf[0].nbytes * columns * length < _LARGE_BYTES:
                return leaf.index_select(0, by_time).view(length, columns, *leaf.shape[1:])
            # an unroll's rows lie side by side: read in this order, they come faster
            return self._copied(leaf, by_unroll.view(columns, length)).transpose(0, 1)

        places = torch.from_numpy(state_at).to(device)
        state = rebuild(self._like, [leaf.index_select(0, places) for leaf in self._storage.states])
        # a plane of its own each, as kernels want them
        terminated, truncated, first, interrupted = take("flags").bool().movedim(-1, 0).contiguous()
        if not self._cross:
            first = first.clone()
            first[1:] |= first[1:].cumsum(0) > 0
        batch = Batch(
            obs={name[4:]: stacks[name] if stacks else take(name) for name in self._obs},
            mask=take("mask") if "mask" in stored else None,
            actions={name[7:]: take(name) for name in self._actions},
            reward=take("reward"),
            terminated=terminated, truncated=truncated, first=first, interrupted=interrupted,
            log_prob=take("log_prob"), value=take("value"), version=take("version"),
            state=state, slots=torch.from_numpy(slots).to(device), items=items, weights=None,
            extras={name[6:]: take(name) for name in self._extras},
        )  # fmt: skip
        self._storage.finish()
        return batch

    def _copied(self, leaf: Tensor, index: Tensor) -> Tensor:
        """The rows `index` of a leaf, [*index.shape, ...]."""
        if index.numel() * leaf[0].nbytes < _LARGE_BYTES:
            return leaf.index_select(0, index.reshape(-1)).view(*index.shape, *leaf.shape[1:])
        shape = (index.numel(), *leaf.shape[1:])
        into = self._buffers.take(shape, leaf.dtype) if leaf.device.type == "cpu" else leaf.new_empty(shape)  # fmt: skip
        torch.index_select(leaf, 0, index.reshape(-1), out=into)
        return into.view(*index.shape, *leaf.shape[1:])

    def _stacks(self, rows: np.ndarray) -> dict[str, Tensor]:
        """Observations [R, B, F, ...] of rows int64 [B, history + R], whose frames are stored once each."""
        stored, history = self._storage.rows, self._history
        by_unroll = torch.from_numpy(np.ascontiguousarray(rows)).to(self._storage.device)
        first = stored["flags"][:, FIRST].index_select(0, by_unroll.reshape(-1)).view(by_unroll.shape) != 0  # fmt: skip
        found: dict[str, Tensor] = {}
        index: Tensor | None = None
        for name in self._obs:
            leaf = stored[name]
            if self._storage.arrays is None and leaf.dtype == torch.uint8:
                shape = (rows.shape[1] - history, len(rows), history + 1, *leaf.shape[1:])
                found[name] = leaf.new_empty(shape)
                run(gather_frames, leaf, by_unroll.t().contiguous(), first.t().contiguous(), found[name])  # fmt: skip
            else:
                index = stacked_rows(by_unroll, first, history) if index is None else index
                found[name] = self._copied(leaf, index).transpose(0, 1)
        return found


def stacked_rows(rows: Tensor, first: Tensor, history: int) -> Tensor:
    """Rows of the frames of each stack, int64 [B, R, history + 1], out of rows int64 [B, history + R].

    As Gymnasium's FrameStackObservation does with padding "reset", the episode's first frame stands for those before it.

    Args: first: bool [B, history + R], the row begins an episode; none is before the first of `rows`.
    """
    number = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    begin = number.masked_fill(~first, 0).cummax(1).values[:, history:]
    back = torch.arange(-history, 1, device=rows.device)
    at = torch.maximum(number[:, history:].unsqueeze(2) + back, begin.unsqueeze(2))
    return rows.gather(1, at.flatten(1)).view(at.shape)
