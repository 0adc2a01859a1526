"""Which unrolls next. The queue: each unroll once, in the order of completion; a learner that is behind stops the actors.

Engine and learner share the storage (`blocks.py`) and this control memory, int64 words, every one with one writer:

    line 0  items_head                                          engine
    line 1  items_tail  learned_rows stale_rows wanted version  learner
    line 2  free_head                                           learner
    line 3  free_tail                                           engine
    items [C, W]: row numbers [R] | state block | slot (-1 - slot: no unroll, only blocks to give back) | release
    free  [K]:    numbers of blocks that may be filled again

Heads and tails only grow; an entry is written before the head that covers it. An unroll owns its rows until the learner has
gathered them, so nothing that is read can be overwritten, and neither side ever waits under a lock.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seedrl.errors import RunError
from seedrl.store.blocks import Appender, BlockStorage, Columns, UnrollRule
from seedrl.store.state import State, leaves, rebuild
from seedrl.transport import doorbell

_LINE = 16
ITEMS_HEAD = 0
ITEMS_TAIL, LEARNED_ROWS, STALE_ROWS, WANTED, VERSION = range(5)


class Batch(NamedTuple):
    """`B` unrolls of `R = burn_in + T + 1` rows, time first, on the store's device. Row k's reward and flags are of the step
    that led to it.

    obs[leaf] [R, B, ...] in the environment's dtype; mask uint8 [R, B, M] or None; actions[leaf] [R, B, ...] as stored;
    reward, log_prob, value float32 [R, B]; terminated, truncated, first, interrupted bool [R, B]; version int64 [R, B];
    state: the policy's, each leaf [B, ...], entering row 0; slots int64 [B].
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

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; itself where it lies there already."""
        if self.reward.device == device:
            return self

        def moved(part: Any) -> Any:
            if isinstance(part, Tensor):
                return part.to(device)
            if isinstance(part, dict):
                return {name: leaf.to(device) for name, leaf in part.items()}
            return part

        state = rebuild(self.state, [leaf.to(device) for leaf in leaves(self.state)])
        return Batch(*map(moved, self))._replace(state=state)


@dataclass(frozen=True)
class QueueLayout:
    """Sizes of the control memory."""

    rule: UnrollRule
    num_blocks: int
    num_slots: int

    @property
    def width(self) -> int:
        return self.rule.num_rows + 2 + max(self.rule.blocks_per_unroll, self.rule.blocks_shared)

    @property
    def capacity(self) -> int:
        return 2 * self.num_blocks + self.num_slots * (self.rule.blocks_held + 2)

    @property
    def nbytes(self) -> int:
        return 8 * (4 * _LINE + self.capacity * self.width + self.num_blocks)


class _Control:
    def __init__(self, layout: QueueLayout, memory: mmap.mmap) -> None:
        words = np.frombuffer(memory, np.int64, layout.nbytes // 8)
        self.engine, self.learner = words[:_LINE], words[_LINE : 2 * _LINE]
        self.free_head, self.free_tail = words[2 * _LINE :][:1], words[3 * _LINE :][:1]
        at = 4 * _LINE
        self.items = words[at : at + layout.capacity * layout.width].reshape(
            layout.capacity, layout.width
        )
        self.free = words[at + layout.capacity * layout.width :]
        rows = layout.rule.num_rows
        self.index, self.state_block, self.slot = (
            self.items[:, :rows],
            self.items[:, rows],
            self.items[:, rows + 1],
        )
        self.release = self.items[:, rows + 2 :]


def queue_blocks(rule: UnrollRule, num_slots: int, batch_size: int) -> int:
    """The fewest blocks with which engine and learner can never wait for each other.

    Those of every slot's unfinished unrolls, and those of a batch whose runs have all ended.
    """
    return num_slots * rule.blocks_held + batch_size * (rule.blocks_per_unroll + rule.blocks_shared)


class ReplayWriter:
    """The engine's side: append rows, end runs, know when there is no room."""

    def __init__(
        self, storage: BlockStorage, layout: QueueLayout, memory: mmap.mmap, learner_bell: int
    ) -> None:
        self._control, self._layout, self._bell = _Control(layout, memory), layout, learner_bell
        self._storage = storage
        self._appender = Appender(storage, layout.num_slots, layout.rule)
        self._unroll = layout.rule.unroll_length
        self.unrolls = 0

    def room_for(self, slots: np.ndarray) -> bool:
        """Whether one more row for each of `slots` fits; takes in what the learner gave back."""
        free = self._appender.free
        if len(free) < slots.size:
            self._collect()
            return len(free) >= slots.size or len(free) >= self._appender.blocks_needed(slots)
        return True

    def unfinished(self, slots: np.ndarray, workers: np.ndarray) -> np.ndarray:
        """Which of `slots` must go on until every unroll is full. See `Appender.unfinished`."""
        return self._appender.unfinished(slots, workers)

    def full(self, slots: np.ndarray) -> np.ndarray:
        """Which of `slots` have just filled an unroll. See `Appender.full`."""
        return self._appender.full(slots)

    def _collect(self) -> None:
        control, size = self._control, self._layout.num_blocks
        head, tail = int(control.free_head[0]), int(control.free_tail[0])
        if head > tail:
            self._appender.free += control.free[np.arange(tail, head) % size].tolist()
            control.free_tail[0] = head

    def append(self, slots: np.ndarray, columns: Columns, states: list[Tensor]) -> int:
        """Appends one row to each slot; room was asked for. See `Appender.append`.

        Returns: rows that are stored for good now, those of the unrolls completed (a bootstrap row counts in the next one).
        """
        done = self._appender.append(slots, columns, states)
        if done is None:
            return 0
        control, count = self._control, done.slots.size
        at = self._claim(count)
        control.index[at], control.state_block[at] = done.index, done.state_block
        control.slot[at], control.release[at] = done.slots, -1
        control.release[at, : self._layout.rule.blocks_per_unroll] = done.release
        self.unrolls += count
        self._storage.finish()
        self._publish(count)
        return count * self._unroll

    def _claim(self, count: int) -> np.ndarray:
        head, capacity = int(self._control.engine[ITEMS_HEAD]), self._layout.capacity
        if head + count - int(self._control.learner[ITEMS_TAIL]) > capacity:
            raise RunError(
                what=f"the queue of {capacity} unrolls is overrun",
                do="report this as a fault of seedrl",
            )
        return np.arange(head, head + count) % capacity

    def _publish(self, count: int) -> None:
        head = int(self._control.engine[ITEMS_HEAD]) + count
        self._control.engine[ITEMS_HEAD] = head
        if head >= self._control.learner[WANTED]:
            os.eventfd_write(self._bell, 1)

    def discard(self, slots: np.ndarray) -> int:
        """Ends the runs of `slots` and returns how many rows were dropped with their unfinished unrolls."""
        dropped, shared = self._appender.discard(slots)
        if shared:
            at = self._claim(len(shared))
            for number, (slot, blocks) in zip(at.tolist(), shared, strict=True):
                self._control.slot[number], self._control.release[number] = -1 - slot, -1
                self._control.release[number, : len(blocks)] = blocks
            self._publish(len(shared))
        return dropped

    @property
    def stale_unrolls(self) -> int:
        """Unrolls that the learner has dropped as too old."""
        return int(self._control.learner[STALE_ROWS]) // self._unroll

    @property
    def version(self) -> int:
        """The learner's newest published version."""
        return int(self._control.learner[VERSION])


@dataclass
class _Pending:
    """One complete unroll that waits for its batch."""

    index: np.ndarray  # int64 [R]
    state_block: int
    slot: int
    release: np.ndarray  # int64: blocks to give back once it is consumed
    oldest: int  # policy version of its oldest row


class ReplayReader:
    """The learner's side: `sample` gathers a batch and gives its blocks back.

    Args:
        state_like: a state of batch 1, for the nest of `Batch.state`.
        max_lag: unrolls with a row older than this many versions are dropped and counted; None keeps all.
    """

    def __init__(
        self, storage: BlockStorage, layout: QueueLayout, memory: mmap.mmap, bell: int, engine_bell: int,
        state_like: State, max_lag: int | None = None,
    ) -> None:  # fmt: skip
        self._storage, self._layout, self._control = storage, layout, _Control(layout, memory)
        self._bell, self._engine_bell, self._like, self._max_lag = (
            bell,
            engine_bell,
            state_like,
            max_lag,
        )
        self._pending: deque[_Pending] = deque()
        self._obs = [name for name in storage.rows if name.startswith("obs/")]
        self._actions = [name for name in storage.rows if name.startswith("action/")]
        self._version = storage.rows["version"]
        self.waited_ns = 0
        # the one place where `sample` may be left by an exception: nothing is half moved there
        self.wait: Callable[[int, float | None], bool] = doorbell.wait

    def sample(self, batch_size: int, timeout_s: float | None = None) -> Batch | None:
        """The next `batch_size` unrolls, or None when the time is up first."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._take(batch_size):
            self.want(batch_size)
            if self._take(batch_size):  # an unroll may have come between the look and the wish
                break
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            begin = time.monotonic_ns()
            self.wait(self._bell, None if left is None else left * 1e6)
            self.waited_ns += time.monotonic_ns() - begin
        return self._gather([self._pending.popleft() for _ in range(batch_size)])

    def want(self, unrolls: int) -> None:
        """Asks the engine to ring once `unrolls` wait in all."""
        learner = self._control.learner
        learner[WANTED] = int(learner[ITEMS_TAIL]) + unrolls - len(self._pending)

    def skip(self) -> None:
        """Gives the blocks of every complete unroll back unread: for a run in which nobody learns. No account has those rows."""
        self._take(0)
        if self._pending:
            entries, self._pending = self._pending, deque()
            self._give_back(np.concatenate([entry.release for entry in entries]))

    def accounts(self) -> dict[str, int]:
        """What became of the stored rows: learnt from, dropped as too old, or waiting."""
        self._take(0)
        learner, unroll = self._control.learner, self._layout.rule.unroll_length
        return {
            "learned_rows": int(learner[LEARNED_ROWS]), "stale_rows": int(learner[STALE_ROWS]),
            "queued_rows": len(self._pending) * unroll,
        }  # fmt: skip

    def _take(self, wanted: int) -> bool:
        """Moves what is new in the ring to the pending unrolls, drops those too old; True when `wanted` are there."""
        control, capacity = self._control, self._layout.capacity
        tail, head = int(control.learner[ITEMS_TAIL]), int(control.engine[ITEMS_HEAD])
        for number in range(tail, head):  # per unroll, not per row
            at = number % capacity
            if control.slot[at] < 0:
                self._release_after(-1 - int(control.slot[at]), control.release[at].copy())
                continue
            index = control.index[at].copy()
            oldest = (
                int(self._version[torch.from_numpy(index).to(self._version.device)].min())
                if self._max_lag is not None
                else 0
            )
            state_block, slot = int(control.state_block[at]), int(control.slot[at])
            self._pending.append(
                _Pending(index, state_block, slot, control.release[at].copy(), oldest)
            )
        control.learner[ITEMS_TAIL] = head
        if self._max_lag is not None:
            self._drop_older_than(int(control.learner[VERSION]) - self._max_lag)
        return len(self._pending) >= wanted

    def _release_after(self, slot: int, blocks: np.ndarray) -> None:
        """Gives blocks back once the slot's newest pending unroll, which still reads them, is consumed."""
        for entry in reversed(self._pending):
            if entry.slot == slot:
                entry.release = np.concatenate([entry.release, blocks])
                return
        self._give_back(blocks)

    def _drop_older_than(self, version: int) -> None:
        pending, self._pending = self._pending, deque()
        for entry in pending:
            if entry.oldest < version:
                self._control.learner[STALE_ROWS] += self._layout.rule.unroll_length
                self._give_back(entry.release)  # older unrolls of its slot went before it
            else:
                self._pending.append(entry)

    def _give_back(self, blocks: np.ndarray) -> None:
        blocks = blocks[blocks >= 0]
        if blocks.size:
            control = self._control
            head = int(control.free_head[0])
            control.free[np.arange(head, head + blocks.size) % self._layout.num_blocks] = blocks
            control.free_head[0] = head + blocks.size
            os.eventfd_write(self._engine_bell, 1)

    def _gather(self, entries: list[_Pending]) -> Batch:
        index = torch.from_numpy(np.stack([entry.index for entry in entries], axis=1))  # [R, B]
        rows, columns = index.shape
        device = self._storage.device
        flat, stored = index.reshape(-1).to(device), self._storage.rows

        def take(name: str) -> Tensor:
            leaf = stored[name]
            return leaf.index_select(0, flat).view(rows, columns, *leaf.shape[1:])

        blocks = torch.tensor([entry.state_block for entry in entries], device=device)
        state = rebuild(self._like, [leaf.index_select(0, blocks) for leaf in self._storage.states])
        flags = take("flags").bool()
        batch = Batch(
            obs={name[4:]: take(name) for name in self._obs},
            mask=take("mask") if "mask" in stored else None,
            actions={name[7:]: take(name) for name in self._actions},
            reward=take("reward"),
            terminated=flags[..., 0], truncated=flags[..., 1], first=flags[..., 2], interrupted=flags[..., 3],
            log_prob=take("log_prob"), value=take("value"), version=take("version"),
            state=state, slots=torch.tensor([entry.slot for entry in entries], device=device),
        )  # fmt: skip
        self._storage.finish()
        self._give_back(np.concatenate([entry.release for entry in entries]))
        self._control.learner[LEARNED_ROWS] += columns * self._layout.rule.unroll_length
        return batch

    def publish_version(self, version: int) -> None:
        """Tells the engine, which may have waited for it, that weights of `version` are out."""
        self._control.learner[VERSION] = version
        os.eventfd_write(self._engine_bell, 1)
