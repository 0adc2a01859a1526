"""Rows behind those on the device: full blocks copied to memory of the host, and from there to a file, from which they are drawn as well.

A thread of the reader's copies each block once it is full, encoded (`codec.py`), into a ring of bytes; what is overwritten there goes on to
the file's ring, and is gone after that. Neither engine nor appending knows of it: a block that is overwritten on the device before it was
copied is lost, and counted. A record is known by its block and generation, as an unroll's announcement names them.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from seedrl import host
from seedrl.errors import ConfigError
from seedrl.store.batch import Batch, Gather
from seedrl.store.blocks import BlockLayout, BlockStorage
from seedrl.store.codec import Codec
from seedrl.store.state import State

if TYPE_CHECKING:
    from seedrl.store.replay import Control

EXPANSION = (
    4  # times as many rows as there is room for plain ones, at most, where they are compressed
)


def rows_behind(layout: BlockLayout, nbytes: int, compresses: bool) -> int:
    """How many rows so many bytes may hold, at most."""
    plain = layout.nbytes // layout.num_blocks
    return nbytes // plain * layout.rule.block_length * (EXPANSION if compresses else 1)


class Arena:
    """A ring of bytes, in memory or in a file without a name: records are written one after the other, over the oldest."""

    def __init__(self, nbytes: int, folder: Path | None) -> None:
        self.nbytes, self._fd, self._memory = nbytes, -1, None
        if folder is None:
            self._memory = np.empty(nbytes, np.uint8)
        else:
            self._fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        self._head = 0
        self._records: deque[tuple[int, int, int, int]] = (
            deque()
        )  # offset, size, block, generation: oldest first

    def write(self, record: bytes) -> tuple[int, list[tuple[int, int, int, int]]]:
        """Returns: where the record begins, and those that it overwrites, whose bytes are still there for `read` until `put`."""
        gone = []
        if (
            self._head + len(record) > self.nbytes
        ):  # the last round's records behind the head are the oldest
            while self._records and self._records[0][0] >= self._head:
                gone.append(self._records.popleft())
            self._head = 0
        begin, end = self._head, self._head + len(record)
        while self._records and self._overlaps(self._records[0], begin, end):
            gone.append(self._records.popleft())
        return begin, gone

    @staticmethod
    def _overlaps(record: tuple[int, int, int, int], begin: int, end: int) -> bool:
        return record[0] < end and record[0] + record[1] > begin

    def put(self, begin: int, record: bytes, block: int, generation: int) -> None:
        if self._memory is not None:
            self._memory[begin : begin + len(record)] = np.frombuffer(record, np.uint8)
        elif os.pwrite(self._fd, record, begin) < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._head = begin + len(record)
        self._records.append((begin, len(record), block, generation))

    def read(self, begin: int, size: int) -> bytes | memoryview:
        """A record; in memory a view, which is right until the next `put`."""
        if self._memory is not None:
            return self._memory[begin : begin + size].data
        return os.pread(self._fd, size, begin)

    @property
    def records(self) -> int:
        return len(self._records)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class Tiers:
    """Args:
    storage, control: of the reader. host_bytes, file_bytes: of the two rings; 0: none. compresses: whether leaves are, where it pays.
    folder: in which the file is. batch_size: unrolls that are fetched at a time, at most. state_like, cross_episodes: as for `Gather`.
    """

    def __init__(
        self, storage: BlockStorage, control: Control, host_bytes: int, file_bytes: int, *, compresses: bool, folder: Path | None,
        num_slots: int, batch_size: int, state_like: State, cross_episodes: bool,
    ) -> None:  # fmt: skip
        self._storage, self._control, layout = storage, control, storage.layout
        rule = layout.rule
        parts = [(count, leaf.element_size()) for leaf, count in storage.parts]
        self._codec = Codec(parts, compresses)
        folder = folder or Path(tempfile.gettempdir())
        self._arenas = [Arena(size, None if i == 0 else folder) for i, size in enumerate((host_bytes, file_bytes)) if size]  # fmt: skip
        largest = layout.nbytes // layout.num_blocks + 8 * len(parts)
        for name, size in (("host_gib", host_bytes), ("file_gib", file_bytes)):
            if 0 < size < 2 * largest:
                raise ConfigError(
                    what=f"replay.{name} is {size} bytes, and a block {largest}", where=f"replay.{name}", do=f"set it to {2 * largest / (1 << 30):.2g} or more, or to 0",
                )  # fmt: skip
        records = rows_behind(layout, host_bytes + file_bytes, compresses) // rule.block_length
        # where the record of a block's generation is: by the generation modulo as many as may be there
        self._ways = records // layout.num_blocks + 3
        shape = (layout.num_blocks, self._ways)
        self._generation = np.full(shape, -1, np.int64)
        self._arena, self._begin, self._size = (np.zeros(shape, np.int64) for _ in range(3))
        # the newest generation of each block that was to be copied
        self._asked = np.full(layout.num_blocks, -1, np.int64)
        # blocks and generations of each slot's newest unroll
        self._latest = np.full((num_slots, 2, rule.blocks_held), -1, np.int64)
        self._waiting: deque[tuple[int, int]] = deque()
        self._copying = False
        self._lock, self._work, self._over = threading.Lock(), threading.Semaphore(0), False
        self.lost_blocks = 0
        stage = replace(layout, num_blocks=batch_size * rule.blocks_held)
        memory = torch.zeros(stage.nbytes, dtype=torch.uint8)
        self._stage = BlockStorage(stage, memory.pin_memory() if storage.device.type == "cuda" else memory)  # fmt: skip
        self._gather = Gather(self._stage, state_like, cross_episodes)
        self._thread = threading.Thread(target=self._copy_all, daemon=True)
        self._failure: BaseException | None = None
        self._thread.start()

    # --------------------------------------------------------------------------------------------------------- copying

    def admit(
        self, rows: np.ndarray, slots: np.ndarray, blocks: np.ndarray, generations: np.ndarray
    ) -> None:
        """Has those blocks copied that new unrolls, in their order, show to be full, or left: rows int64 [n, R], slots int64 [n],
        blocks and generations int64 [n, k].

        Raises: whatever has ended the thread that copies: a full disk, say.
        """
        if self._failure is not None:
            raise self._failure
        last = rows[:, -1] % self._storage.layout.rule.block_length
        full = blocks != blocks[:, -1:]
        full |= (last == self._storage.layout.rule.block_length - 1)[:, None]
        # those of the slot's unroll before that this one does not read: its run went on elsewhere, or ended
        order = np.argsort(slots, kind="stable")
        same = np.r_[False, slots[order][1:] == slots[order][:-1]]
        before = self._latest[slots]  # [n, 2, k]
        both = np.stack([blocks, generations], 1)
        before[order[same]] = both[order[np.flatnonzero(same) - 1]]
        self._latest[slots[order]] = both[order]  # the last one counts
        left = ~(before[:, 0, :, None] == blocks[:, None, :]).any(2) & (before[:, 0] >= 0)
        pairs = np.concatenate([both.transpose(0, 2, 1)[full], before.transpose(0, 2, 1)[left]])
        wanted = pairs[:, 1] > self._asked[pairs[:, 0]]
        if wanted.any():
            found = np.unique(pairs[wanted], axis=0)
            there = self._control.blocks[found[:, 0]] == found[:, 1]
            self.lost_blocks += int(np.count_nonzero(~there))
            found = found[there]
            self._asked[found[:, 0]] = found[:, 1]
            self._waiting.extend(map(tuple, found.tolist()))
            self._work.release()

    def _copy_all(self) -> None:
        host.lower_priority()
        try:
            while True:
                self._work.acquire()
                if self._over:
                    return
                self._copying = True
                while self._waiting and not self._over:
                    self._copy(*self._waiting.popleft())
                self._copying = False
        except BaseException as error:  # told by `admit`, in the reader's own thread
            self._failure, self._copying = error, False
            self._waiting.clear()

    def _copy(self, block: int, generation: int) -> None:
        if self._control.blocks[block] != generation:
            self.lost_blocks += 1
            return
        record = self._codec.encode(self._storage.block(block))
        if self._control.blocks[block] != generation:  # written to meanwhile
            self.lost_blocks += 1
            return
        self._put(0, record, block, generation)

    def _put(self, number: int, record: bytes, block: int, generation: int) -> None:
        arena, way = self._arenas[number], generation % self._ways
        if len(record) > arena.nbytes:
            self._forget(block, generation)
            return
        begin, gone = arena.write(record)
        for place, size, old_block, old_generation in gone:
            with self._lock:
                there = self._at(number, old_block, old_generation, place)
                bytes_of = bytes(arena.read(place, size)) if there else b""
            if there and number + 1 < len(self._arenas):
                self._put(number + 1, bytes_of, old_block, old_generation)
            elif there:
                self._forget(old_block, old_generation)
        with self._lock:
            arena.put(begin, record, block, generation)
            self._arena[block, way], self._begin[block, way], self._size[block, way] = number, begin, len(record)  # fmt: skip
            self._generation[block, way] = generation

    def _forget(self, block: int, generation: int) -> None:
        way = generation % self._ways
        with self._lock:
            if self._generation[block, way] == generation:
                self._generation[block, way] = -1

    def _at(self, number: int, block: int, generation: int, begin: int) -> bool:
        way = generation % self._ways
        found = (self._generation[block, way], self._arena[block, way], self._begin[block, way])
        return found == (generation, number, begin)

    # --------------------------------------------------------------------------------------------------------- drawing

    def has(self, blocks: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """Whether all blocks of an unroll are here, or still as they were on the device: bool [n] of int64 [n, k]."""
        here = self._generation[blocks, generations % self._ways] == generations
        here |= self._control.blocks[blocks] == generations
        found: np.ndarray = here.all(1)
        return found

    def fetch(
        self, rows: np.ndarray, state_at: np.ndarray, slots: np.ndarray, numbers: np.ndarray, blocks: np.ndarray, generations: np.ndarray
    ) -> tuple[Batch, np.ndarray]:  # fmt: skip
        """The unrolls of these announcements, on the host, and which of them are whole: bool [n]. One thread at a time."""
        rule = self._storage.layout.rule
        pairs, inverse = np.unique(np.stack([blocks.reshape(-1), generations.reshape(-1)], 1), axis=0, return_inverse=True)  # fmt: skip
        staged = inverse.reshape(blocks.shape)
        # which of the unroll's blocks a row is in
        which = (rows[:, :, None] // rule.block_length == blocks[:, None, :]).argmax(2)
        reach = np.zeros(len(pairs), np.int64)  # rows of each block that are read, from its first
        np.maximum.at(reach, np.take_along_axis(staged, which, 1), rows % rule.block_length + 1)
        wanted = zip(range(len(pairs)), *pairs.T.tolist(), reach.tolist(), strict=True)
        good = np.array([self._read(*one) for one in wanted])
        at = np.take_along_axis(staged, which, 1) * rule.block_length + rows % rule.block_length
        states = staged[np.arange(len(rows)), which[:, rule.history]] * rule.states_per_block + state_at % rule.states_per_block  # fmt: skip
        whole = np.asarray(good[staged].all(axis=1))
        return self._gather(at, states, slots, numbers), whole

    def _read(self, staged: int, block: int, generation: int, reach: int) -> bool:
        """Fills the first `reach` rows of a block of the stage from its record, or from the device where it still is."""
        into = self._stage.block(staged)
        way = generation % self._ways
        with self._lock:
            there = self._generation[block, way] == generation
            if there:
                arena = self._arenas[self._arena[block, way]]
                record = arena.read(int(self._begin[block, way]), int(self._size[block, way]))
                self._codec.decode(record, into, reach)
                return True
        for leaf, source in zip(into, self._storage.block(block), strict=True):
            leaf[:reach] = source[:reach]
        return bool(self._control.blocks[block] == generation)

    def figures(self) -> dict[str, float]:
        codec = self._codec
        return {
            "tier_blocks": sum(arena.records for arena in self._arenas), "tier_lost_blocks": self.lost_blocks,
            "tier_compression": codec.raw_bytes / max(codec.stored_bytes, 1),
        }  # fmt: skip

    def idle(self) -> bool:
        """Whether nothing waits to be copied."""
        return not self._waiting and not self._copying

    def close(self) -> None:
        self._over = True
        self._work.release()
        self._thread.join()
        for arena in self._arenas:
            arena.close()
