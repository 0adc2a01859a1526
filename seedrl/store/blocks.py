"""Paged rows: storage `[K, L, ...]` per leaf in which each slot fills an open block, row by row.

A full block is followed by the slot's next one, so that an unroll, its burn-in rows and its bootstrap row are row numbers
(`block * L + offset`), never copies: each observation is stored once. The recurrent state is kept of every row at which an
unroll may begin. `BlockStorage` is the memory, which the learner maps too; `Appender` is the engine's side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from csrc_free_kernels.build import run
from csrc_free_kernels.state import scatter_rows
from seedrl.spec import EnvSpec, RowSpecs
from seedrl.store import memory as store_memory

Columns = dict[str, Any]  # arrays where the store is on the host, tensors on its device elsewhere
_ALIGN_BYTES = 128
# torch indexes no unsigned integers but uint8: their bytes are kept under the signed type of the same width
_STORED_AS = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
DROP_REASONS = ("worker_died", "detached", "shutdown", "stale")


@dataclass(frozen=True)
class RowLeaf:
    """One column of the store: `shape` is that of a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def torch_dtype(numpy_name: str) -> torch.dtype:
    """The dtype under which a leaf of this numpy dtype is stored."""
    dtype: torch.dtype = getattr(torch, _STORED_AS.get(numpy_name, numpy_name))
    return dtype


@dataclass(frozen=True)
class BlockLayout:
    """What a row holds, and how many there are: `num_blocks` blocks of the rule's length, each with its states."""

    rows: tuple[RowLeaf, ...]
    states: tuple[RowLeaf, ...]
    num_blocks: int
    rule: UnrollRule

    @staticmethod
    def of(
        spec: EnvSpec, stored_actions: RowSpecs, state_leaves: list[Tensor],
        num_blocks: int, rule: UnrollRule, extras: RowSpecs | None = None,
    ) -> BlockLayout:  # fmt: skip
        """The columns that follow from the environment's spec, the action heads, a state of batch 1, and what the policy adds."""
        rows = [
            RowLeaf(f"obs/{leaf.name}", torch_dtype(leaf.dtype), leaf.shape)
            for leaf in spec.observation
        ]
        if spec.mask_size:
            rows.append(RowLeaf("mask", torch.uint8, (spec.mask_size,)))
        rows += [
            RowLeaf(f"action/{name}", dtype, shape)
            for name, (dtype, shape) in stored_actions.items()
        ]
        rows += [RowLeaf("reward", torch.float32, ()), RowLeaf("flags", torch.uint8, (4,))]
        rows += [RowLeaf("log_prob", torch.float32, ()), RowLeaf("value", torch.float32, ())]
        rows += [RowLeaf("version", torch.int64, ())]
        rows += [RowLeaf(f"extra/{name}", *about) for name, about in (extras or {}).items()]
        states = [
            RowLeaf(f"state/{i}", leaf.dtype, tuple(leaf.shape[1:]))
            for i, leaf in enumerate(state_leaves)
        ]
        return BlockLayout(tuple(rows), tuple(states), num_blocks, rule)

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self.rule.block_length

    def offsets(self) -> tuple[list[int], int]:
        """Byte offset of each leaf (rows, then states), and the total."""
        found, at = [], 0
        for leaf, count in self._counted():
            found.append(at)
            at += -(-leaf.row_bytes * count // _ALIGN_BYTES) * _ALIGN_BYTES
        return found, max(at, _ALIGN_BYTES)

    def _counted(self) -> list[tuple[RowLeaf, int]]:
        return [(leaf, self.num_rows) for leaf in self.rows] + [
            (leaf, self.num_blocks * self.rule.states_per_block) for leaf in self.states
        ]

    @property
    def nbytes(self) -> int:
        return self.offsets()[1]

    def bytes_by_leaf(self) -> dict[str, int]:
        return {leaf.name: leaf.row_bytes * count for leaf, count in self._counted()}


class BlockStorage:
    """The columns: `rows[name]` [K * L, ...] and `states[i]` [K * S, ...], as tensors over shared memory.

    `arrays` are the same rows for NumPy, whose indexed assignment is what appends on the CPU (docs/design/0004); None elsewhere.

    Args: memory: uint8 [layout.nbytes] on the store's device.
    """

    def __init__(self, layout: BlockLayout, memory: Tensor) -> None:
        self.layout, self.device = layout, memory.device
        flat = memory
        offsets, _ = layout.offsets()
        tensors = []
        for (leaf, count), at in zip(layout._counted(), offsets, strict=True):
            raw = flat[at : at + leaf.row_bytes * count]
            tensors.append(raw.view(leaf.dtype).view(count, *leaf.shape))
        self.rows = {leaf.name: tensor for leaf, tensor in zip(layout.rows, tensors, strict=False)}
        self.states = tensors[len(layout.rows) :]
        on_host = self.device.type == "cpu"
        self.arrays = (
            {name: tensor.numpy() for name, tensor in self.rows.items()} if on_host else None
        )

    def write(self, rows: np.ndarray, columns: Columns) -> None:
        """Writes `columns` (each [B, ...]) to the rows `rows` int64 [B]."""
        if self.arrays is not None:
            for name, array in self.arrays.items():
                array[rows] = columns[name]
        else:
            at = torch.from_numpy(rows).to(self.device)
            run(scatter_rows, list(self.rows.values()), at, [columns[name] for name in self.rows])

    def write_states(self, places: np.ndarray, states: list[Tensor], kept: np.ndarray) -> None:
        """Keeps the states of the batch's rows `kept` at `places`: int64 [n] both."""
        at, source = torch.from_numpy(places).to(self.device), torch.from_numpy(kept)
        for store, state in zip(self.states, states, strict=True):
            taken = state.index_select(0, source.to(state.device))
            store.index_copy_(0, at, taken.to(self.device))

    @property
    def parts(self) -> list[tuple[Tensor, int]]:
        """Each leaf, rows then states, and how many of its rows a block has."""
        rule = self.layout.rule
        rows = [(leaf, rule.block_length) for leaf in self.rows.values()]
        return rows + [(leaf, rule.states_per_block) for leaf in self.states]

    def block(self, number: int) -> list[np.ndarray]:
        """The bytes of one block, uint8 [rows, bytes of a row] for each of `parts`: its own memory where that is the host's."""
        found = []
        for leaf, count in self.parts:
            rows = leaf[number * count : (number + 1) * count].reshape(-1).view(torch.uint8)
            found.append(rows.cpu().numpy().reshape(count, leaf[0].nbytes))
        return found

    def finish(self) -> None:
        """Returns once what was asked of the store's device is done: before the other process hears of it."""
        store_memory.finish(self.device)


@dataclass(frozen=True)
class UnrollRule:
    """How a slot's rows become unrolls: T = `unroll_length` transitions after up to `burn_in` rows, one every `stride` rows.

    Unroll k of a run of rows has its losses on rows k * stride .. k * stride + T; its first row is max(0, k * stride - burn_in), whose
    state is stored. The `history` rows before that one are read for their frames alone. Blocks may be of any length.
    """

    unroll_length: int
    burn_in: int
    block_length: int
    stride: int
    history: int = 0

    @property
    def lead(self) -> int:
        """Rows of an unroll before the first that has a loss."""
        return self.history + self.burn_in

    @property
    def num_rows(self) -> int:
        """Rows that an unroll reads, history and burn-in included; all but the history are those of a batch."""
        return self.lead + self.unroll_length + 1

    @property
    def state_every(self) -> int:
        """Rows of a run from one whose state is stored to the next."""
        return math.gcd(self.stride, self.burn_in)

    @property
    def states_per_block(self) -> int:
        return -(-self.block_length // self.state_every)

    @property
    def tick(self) -> int:
        """A block opens, a state is stored and an unroll is completed only by rows whose number in the run this divides."""
        return math.gcd(self.block_length, self.state_every, self.unroll_length)

    def _blocks_over(self, rows: int) -> int:
        """The most blocks over which as many rows lie, from one on at which an unroll may begin."""
        latest = self.block_length - math.gcd(self.block_length, self.stride, self.lead)
        return (latest + rows - 1) // self.block_length + 1

    @property
    def blocks_held(self) -> int:
        """Blocks that a slot can hold which no finished unroll will give back: those of one unroll."""
        return self._blocks_over(self.num_rows)

    @property
    def blocks_released(self) -> int:
        """The most blocks that an unroll reads and the next one does not."""
        return self._blocks_over(self.stride + 1) - 1

    @property
    def blocks_shared(self) -> int:
        """Blocks of the next unroll that a finished one may still read: its bootstrap row's, and its rows as burn-in."""
        return self._blocks_over(self.num_rows - self.stride)


@dataclass
class Unrolls:
    """Unrolls that a batch of appended rows completed, `c` of them."""

    index: np.ndarray  # int64 [c, history + burn_in + T + 1]: rows of the storage; before a run's start its first row repeats
    state_at: (
        np.ndarray
    )  # int64 [c]: where the state entering the first row behind the history is stored
    slots: np.ndarray  # int64 [c]
    blocks: np.ndarray  # int64 [c, blocks_held]: those it reads; the last one may repeat
    release: (
        np.ndarray
    )  # int64 [c, blocks_released]: those that the next one does not read; -1 is none


class Places(NamedTuple):
    """Where a row of each of some slots goes, and the unrolls that these rows complete."""

    rows: np.ndarray  # int64 [B]: rows of the storage
    kept: np.ndarray  # int64 [k]: positions in the batch whose entering state is stored
    states: np.ndarray  # int64 [k]: where
    done: Unrolls | None


class Appender:
    """Appends rows of many slots at once; hands out the unrolls they complete. One writer: the engine.

    Args:
        storage: the columns. num_slots: N. rule: see UnrollRule. blocks: those that may be filled; None: all.
    """

    def __init__(
        self,
        storage: BlockStorage,
        num_slots: int,
        rule: UnrollRule,
        blocks: list[int] | None = None,
    ) -> None:
        self.storage, self.rule = storage, rule
        self.free = sorted(
            range(storage.layout.num_blocks) if blocks is None else blocks, reverse=True
        )
        self._ring = rule.blocks_held + 1
        self._chain = np.full(
            (num_slots, self._ring), -1, np.int64
        )  # the slot's newest blocks, by number modulo
        self._next = np.zeros(
            (num_slots, 2), np.int64
        )  # a slot's next row of the storage, and of its run
        self._count = self._next[:, 1]  # rows of the slot's run so far
        self._pushed = np.zeros(num_slots, np.int64)  # unrolls of the run so far
        self._span = np.arange(rule.num_rows) - rule.lead
        self._block_span = np.arange(rule.blocks_held)
        self._release_span = np.arange(rule.blocks_released)
        self._tick, self._always_opens = rule.tick, rule.tick == rule.block_length

    def blocks_needed(self, slots: np.ndarray) -> int:
        """New blocks that appending one row to each of `slots` would take."""
        return int(np.count_nonzero(self._count[slots] % self.rule.block_length == 0))

    def unfinished(self, slots: np.ndarray, workers: np.ndarray) -> np.ndarray:
        """Which of `slots` must go on until every unroll is full: bool [B].

        A full unroll ends with the bootstrap row that begins the next. A worker goes round its groups in a fixed order, so that one
        which gets no answer stops them all: all go on to where the furthest of them has its unroll full.

        Args: slots, workers int64 [B]: slots, and the number of the worker that each belongs to.
        """
        counts, shortest, stride = self._count[slots], self.rule.unroll_length + 1, self.rule.stride
        of, worker = np.unique(workers, return_inverse=True)
        furthest = np.zeros(of.size, np.int64)
        np.maximum.at(furthest, worker, counts)
        further = -(np.minimum(shortest - furthest, 0) // stride)
        goal = np.where(furthest > 1, shortest + further * stride, furthest)
        return counts < goal[worker]

    def full(self, slots: np.ndarray) -> np.ndarray:
        """Which of `slots`, int64 [B], have just filled an unroll, bootstrap row included: bool [B]."""
        return self._completes(self._count[slots])

    def _completes(self, counts: np.ndarray) -> np.ndarray:
        """Whether runs of so many rows, int64 [n], have just filled an unroll: bool [n]."""
        more = counts - self.rule.unroll_length - 1
        out: np.ndarray = (more % self.rule.stride == 0) & (more >= 0)
        return out

    def completing(self, slots: np.ndarray) -> int:
        """Unrolls that appending one row to each of `slots` would complete."""
        return int(np.count_nonzero(self._completes(self._count[slots] + 1)))

    def append(self, slots: np.ndarray, columns: Columns, states: list[Tensor]) -> Unrolls | None:
        """Appends one row to each slot.

        Args:
            slots: int64 [B], each at most once.
            columns: an array (on a device: a tensor) [B, ...] for each row leaf of the layout.
            states: leaves [B, ...] of the state entering the rows.
        Returns: the unrolls completed, or None. The caller has seen to it that blocks are free.
        """
        places = self.place(slots)
        if states and places.kept.size:
            self.storage.write_states(places.states, states, places.kept)
        self.storage.write(places.rows, columns)
        return places.done

    def place(self, slots: np.ndarray) -> Places:
        """Where the next row of each of `slots`, int64 [B], goes: it counts as appended, and is written by the caller."""
        following = self._next[slots]
        rows, counts = following[:, 0], following[:, 1]
        ticking = (counts % self._tick == 0).nonzero()[0]
        if not ticking.size:
            self._next[slots] = following + 1
            return Places(rows, ticking, ticking, None)
        self._open(slots, rows, counts, ticking)
        self._next[slots] = following + 1
        kept = ticking[counts[ticking] % self.rule.state_every == 0]
        done = ticking[self._completes(counts[ticking] + 1)]
        unrolls = self._complete(slots[done]) if done.size else None
        return Places(rows, kept, self._state_places(rows[kept]), unrolls)

    def _open(
        self, slots: np.ndarray, rows: np.ndarray, counts: np.ndarray, ticking: np.ndarray
    ) -> None:
        """A new block for each slot whose last one is full: `rows` is where its next row goes."""
        length = self.rule.block_length
        opening = ticking if self._always_opens else ticking[counts[ticking] % length == 0]
        if opening.size:
            blocks = np.array([self.free.pop() for _ in range(opening.size)], np.int64)
            self._chain[slots[opening], (counts[opening] // length) % self._ring] = blocks
            rows[opening] = blocks * length

    def _state_places(self, rows: np.ndarray) -> np.ndarray:
        """Where the states entering rows of the storage are stored: a block's are so far apart that none shares its place."""
        rule = self.rule
        block, offset = np.divmod(rows, rule.block_length)
        places: np.ndarray = block * rule.states_per_block + offset // rule.state_every
        return places

    def _complete(self, slots: np.ndarray) -> Unrolls:
        rule, length = self.rule, self.rule.block_length
        begin = self._pushed[slots] * rule.stride  # first row with a loss
        rows = np.maximum(begin[:, None] + self._span, 0)  # [c, R]
        lane = slots[:, None]
        index = self._chain[lane, (rows // length) % self._ring] * length + rows % length
        low, high = rows[:, 0, None] // length, rows[:, -1, None] // length
        blocks = self._chain[lane, np.minimum(low + self._block_span, high) % self._ring]
        # once this unroll is consumed, nothing before the next one's first row is needed
        next_low = np.maximum(begin + rule.stride - rule.lead, 0)[:, None] // length
        number = low + self._release_span
        release = np.where(number < next_low, self._chain[lane, number % self._ring], -1)
        self._pushed[slots] += 1
        states = self._state_places(index[:, rule.history])
        return Unrolls(index, states, slots.copy(), blocks, release)

    def discard(self, slots: np.ndarray) -> tuple[int, list[tuple[int, list[int]]]]:
        """Ends the runs of `slots`: the rows of their unfinished unrolls are dropped.

        Returns: rows dropped; and for each slot whose newest unroll may not be consumed yet, the blocks that this unroll
            still reads (its bootstrap row, its last rows as burn-in or history): to give back once it is. The others are free at once.
        """
        rule, length = self.rule, self.rule.block_length
        dropped, shared = 0, []
        for slot in slots.tolist():  # once a lease, not once a step
            count, begin = int(self._count[slot]), int(self._pushed[slot]) * rule.stride
            dropped += count - begin
            low, high = max(0, begin - rule.lead) // length, -(-count // length)
            # the bootstrap row's, beyond which no unroll reads
            bootstrap = (begin - rule.stride + rule.unroll_length) // length if begin else -1
            blocks = {
                number: int(self._chain[slot, number % self._ring]) for number in range(low, high)
            }
            self.free += [block for number, block in blocks.items() if number > bootstrap]
            if begin:
                shared.append(
                    (slot, [block for number, block in blocks.items() if number <= bootstrap])
                )
        self._count[slots] = 0
        self._pushed[slots] = 0
        return dropped, shared
