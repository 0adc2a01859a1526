"""Each unroll once, in the order of completion; a learner that is behind stops the actors.

An unroll owns its rows until the learner has gathered them and given the blocks back, so nothing that is read can be overwritten, and
neither side ever waits under a lock.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from seedrl.errors import RunError
from seedrl.store.batch import Batch
from seedrl.store.blocks import UnrollRule, Unrolls
from seedrl.store.replay import (
    ITEMS_HEAD,
    ITEMS_TAIL,
    LEARNED_ROWS,
    STALE_ROWS,
    VERSION,
    WANTED,
    ReplayReader,
    ReplayWriter,
)


def queue_blocks(rule: UnrollRule, num_slots: int, batch_size: int) -> int:
    """The fewest blocks with which engine and learner can never wait for each other.

    Those of every slot's unfinished unrolls, and those of a batch whose runs have all ended.
    """
    return num_slots * rule.blocks_held + batch_size * (rule.blocks_released + rule.blocks_shared)


class QueueWriter(ReplayWriter):
    """Blocks come back from the learner; when none is free, nothing may be appended."""

    def held_back(self, slots: np.ndarray) -> str | None:
        free = self._appender.free
        if len(free) < slots.size:
            self._collect()
            if len(free) < slots.size and len(free) < self._appender.blocks_needed(slots):
                return "room"
        return None

    def _collect(self) -> None:
        control, size = self._control, self._layout.num_blocks
        head, tail = int(control.free_head[0]), int(control.free_tail[0])
        if head > tail:
            self._appender.free += control.blocks[np.arange(tail, head) % size].tolist()
            control.free_tail[0] = head

    def _announce(self, at: np.ndarray, done: Unrolls) -> None:
        self._control.more[at] = -1
        self._control.more[at, : done.release.shape[1]] = done.release

    def _claim(self, count: int) -> np.ndarray:
        head, capacity = int(self._control.engine[ITEMS_HEAD]), self._layout.capacity
        if head + count - int(self._control.learner[ITEMS_TAIL]) > capacity:
            raise RunError(
                what=f"the queue of {capacity} unrolls is overrun",
                do="report this as a fault of seedrl",
            )
        return super()._claim(count)

    def discard(self, slots: np.ndarray) -> int:
        dropped, shared = self._appender.discard(slots)
        if shared:
            at = self._claim(len(shared))
            for number, (slot, blocks) in zip(at.tolist(), shared, strict=True):
                self._control.slot[number], self._control.more[number] = -1 - slot, -1
                self._control.more[number, : len(blocks)] = blocks
            self._publish(len(shared))
        return dropped


@dataclass
class _Pending:
    """One complete unroll that waits for its batch."""

    number: int
    index: np.ndarray  # int64 [R]
    state_at: int
    slot: int
    release: np.ndarray  # int64: blocks to give back once it is consumed
    oldest: int  # policy version of its oldest row


class QueueReader(ReplayReader):
    """`sample` gathers the oldest unrolls and gives their blocks back."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._pending: deque[_Pending] = deque()

    def want(self, batch_size: int) -> None:
        learner = self._control.learner
        learner[WANTED] = int(learner[ITEMS_TAIL]) + batch_size - len(self._pending)

    def _attempt(self, batch_size: int) -> tuple[Batch | None, str | None]:
        if not self._take(batch_size):
            return None, "empty"
        entries = [self._pending.popleft() for _ in range(batch_size)]
        batch = self._gather(
            np.stack([entry.index for entry in entries]),
            np.array([entry.state_at for entry in entries]),
            np.array([entry.slot for entry in entries]),
            np.array([entry.number for entry in entries]),
        )
        self._give_back(np.concatenate([entry.release for entry in entries]))
        self._control.learner[LEARNED_ROWS] += batch_size * self._layout.rule.stride
        return batch, None

    def skip(self) -> None:
        self._take(0)
        if self._pending:
            entries, self._pending = self._pending, deque()
            self._give_back(np.concatenate([entry.release for entry in entries]))

    def accounts(self) -> dict[str, int]:
        self._take(0)
        learner, stride = self._control.learner, self._layout.rule.stride
        return {
            "learned_rows": int(learner[LEARNED_ROWS]), "stale_rows": int(learner[STALE_ROWS]),
            "queued_rows": len(self._pending) * stride,
        }  # fmt: skip

    def _take(self, wanted: int) -> bool:
        """Moves what is new in the ring to the pending unrolls, drops those too old; True when `wanted` are there."""
        control, capacity = self._control, self._layout.capacity
        tail, head = int(control.learner[ITEMS_TAIL]), int(control.engine[ITEMS_HEAD])
        for number in range(tail, head):  # per unroll, not per row
            at = number % capacity
            if control.slot[at] < 0:
                self._release_after(-1 - int(control.slot[at]), control.more[at].copy())
                continue
            index = control.index[at].copy()
            learnt = torch.from_numpy(index[self._layout.rule.history :])
            oldest = (
                int(self._version[learnt.to(self._version.device)].min())
                if self._max_lag is not None
                else 0
            )
            state_at, slot = int(control.state_at[at]), int(control.slot[at])
            self._pending.append(
                _Pending(number, index, state_at, slot, control.more[at].copy(), oldest)
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
                self._control.learner[STALE_ROWS] += self._layout.rule.stride
                self._give_back(entry.release)  # older unrolls of its slot went before it
            else:
                self._pending.append(entry)

    def _give_back(self, blocks: np.ndarray) -> None:
        blocks = blocks[blocks >= 0]
        if blocks.size:
            control = self._control
            head = int(control.free_head[0])
            control.blocks[np.arange(head, head + blocks.size) % self._layout.num_blocks] = blocks
            control.free_head[0] = head + blocks.size
            os.eventfd_write(self._engine_bell, 1)
