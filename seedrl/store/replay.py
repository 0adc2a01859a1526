"""What engine and learner tell each other of the rows that lie in the storage (`blocks.py`): which unrolls are complete, and who may go on.

The control memory is int64 words, every one with one writer:

    line 0  items_head                                                  engine
    line 1  items_tail  learned_rows stale_rows wanted version sampled  learner
    line 2  free_head   (queue)                                         learner
    line 3  free_tail   (queue)                                         engine
    items [C, W]  a ring: row numbers [R] | place of the state | slot (-1 - slot: no unroll, only blocks to give back) | then
                  queue: blocks to give back; ring: the blocks it reads, and the generation of each
    blocks [K]    queue: a ring of numbers of blocks that may be filled again (learner)
                  ring: the generation of each block, one more before it is filled again (engine)
    keys [K]      ring, removed by priority: the largest of its unrolls', float64, and of which generation: int64 [K] behind (learner)

Heads and tails only grow; an entry is written before the head that covers it. `queue.py` and `ring.py` are the two ways to keep rows: until
the learner has taken each unroll once, or until newer rows need the room.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from seedrl.store.batch import Batch, Gather
from seedrl.store.blocks import Appender, BlockStorage, Columns, Places, UnrollRule, Unrolls
from seedrl.transport import doorbell

_LINE = 16
_KEPT_LONGER = 4  # than the newest rows, what has a high priority: so many announcements there are
ITEMS_HEAD = 0
ITEMS_TAIL, LEARNED_ROWS, STALE_ROWS, WANTED, VERSION, SAMPLED = range(6)


@dataclass(frozen=True)
class ReplayLayout:
    """Sizes of the control memory."""

    rule: UnrollRule
    num_blocks: int
    num_slots: int
    ring: bool
    keyed: bool = False  # whether the learner says what each block is worth
    rows_behind: int = 0  # that may be kept behind the device
    pool_blocks: int = 0  # blocks of the storage, where others share it

    @property
    def storage_blocks(self) -> int:
        return self.pool_blocks or self.num_blocks

    @property
    def width(self) -> int:
        rule = self.rule
        more = 2 * rule.blocks_held if self.ring else max(rule.blocks_released, rule.blocks_shared)
        return rule.num_rows + 2 + more

    @property
    def capacity(self) -> int:
        """Unrolls that the ring of announcements holds; in ring mode all that can be whole at once, and some that are being written."""
        if not self.ring:
            return 2 * self.num_blocks + self.num_slots * (self.rule.blocks_held + 2)
        rows, rule = self.num_blocks * self.rule.block_length, self.rule
        rows = rows * (_KEPT_LONGER if self.keyed else 1) + self.rows_behind
        return rows // rule.stride + self.num_slots * (rule.lead // rule.stride + 4)

    @property
    def nbytes(self) -> int:
        columns = 3 if self.keyed else 1
        return 8 * (4 * _LINE + self.capacity * self.width + columns * self.storage_blocks)


class Control:
    """Views of the control memory."""

    def __init__(self, layout: ReplayLayout, memory: mmap.mmap) -> None:
        words = np.frombuffer(memory, np.int64, layout.nbytes // 8)
        self.engine, self.learner = words[:_LINE], words[_LINE : 2 * _LINE]
        self.free_head, self.free_tail = words[2 * _LINE :][:1], words[3 * _LINE :][:1]
        at = 4 * _LINE
        self.items = words[at : at + layout.capacity * layout.width].reshape(
            layout.capacity, layout.width
        )
        columns = words[at + layout.capacity * layout.width :].reshape(-1, layout.storage_blocks)
        self.blocks = columns[0]
        if layout.keyed:
            self.keys, self.key_generations = columns[1].view(np.float64), columns[2]
        rows = layout.rule.num_rows
        self.index, self.state_at, self.slot = (
            self.items[:, :rows],
            self.items[:, rows],
            self.items[:, rows + 1],
        )
        self.more = self.items[:, rows + 2 :]


class ReplayWriter:
    """The engine's side: append rows, end runs, know when there is no room.

    Args: blocks: those of the storage that are this writer's; None: all.
    """

    def __init__(
        self, storage: BlockStorage, layout: ReplayLayout, memory: mmap.mmap, learner_bell: int,
        blocks: list[int] | None = None,
    ) -> None:  # fmt: skip
        self._control, self._layout, self._bell = Control(layout, memory), layout, learner_bell
        self._storage = storage
        self._appender = Appender(storage, layout.num_slots, layout.rule, blocks)
        self.unrolls = 0

    def adopt(self) -> None:
        """Goes on from what lies in the store already."""

    def held_back(self, slots: np.ndarray) -> str | None:
        """Why no row for each of `slots` may come now ("room", "ratio"); None when it may."""
        raise NotImplementedError

    def unfinished(self, slots: np.ndarray, workers: np.ndarray) -> np.ndarray:
        """Which of `slots` must go on until every unroll is full. See `Appender.unfinished`."""
        return self._appender.unfinished(slots, workers)

    def full(self, slots: np.ndarray) -> np.ndarray:
        """Which of `slots` have just filled an unroll. See `Appender.full`."""
        return self._appender.full(slots)

    def append(self, slots: np.ndarray, columns: Columns, states: list[Tensor]) -> int:
        """Appends one row to each slot, which nothing held back. See `Appender.append`.

        Returns: rows that are stored for good now, those of the unrolls completed (what they share with the next one counts there).
        """
        done = self._appender.append(slots, columns, states)
        if done is None:
            return 0
        self.unrolls += done.slots.size
        self._storage.finish()
        return self.announce(done)

    def place(self, slots: np.ndarray) -> Places:
        """Where a row of each of `slots`, which nothing held back, goes. The caller writes it, and then announces what it completes."""
        places = self._appender.place(slots)
        if places.done is not None:
            self.unrolls += places.done.slots.size
        return places

    def announce(self, done: Unrolls) -> int:
        """Tells the learner of unrolls that are written whole. Returns: rows that are stored for good now."""
        control, count = self._control, done.slots.size
        at = self._claim(count)
        control.index[at], control.state_at[at], control.slot[at] = (
            done.index,
            done.state_at,
            done.slots,
        )
        self._announce(at, done)
        self._publish(count)
        return count * self._layout.rule.stride

    def _announce(self, at: np.ndarray, done: Unrolls) -> None:
        """Writes what the items at places `at` of the ring have beyond their rows."""
        raise NotImplementedError

    def _claim(self, count: int) -> np.ndarray:
        head = int(self._control.engine[ITEMS_HEAD])
        return np.arange(head, head + count) % self._layout.capacity

    def _publish(self, count: int) -> None:
        head = int(self._control.engine[ITEMS_HEAD]) + count
        self._control.engine[ITEMS_HEAD] = head
        if head >= self._control.learner[WANTED]:
            os.eventfd_write(self._bell, 1)

    def discard(self, slots: np.ndarray) -> int:
        """Ends the runs of `slots` and returns how many rows were dropped with their unfinished unrolls."""
        raise NotImplementedError

    @property
    def stale_unrolls(self) -> int:
        """Unrolls that the learner has dropped as too old."""
        return int(self._control.learner[STALE_ROWS]) // self._layout.rule.stride

    @property
    def version(self) -> int:
        """The learner's newest published version."""
        return int(self._control.learner[VERSION])


class ReplayReader:
    """The learner's side.

    Args: max_lag: unrolls with a row older than this many versions are dropped and counted; None keeps all.
    """

    def __init__(
        self, storage: BlockStorage, layout: ReplayLayout, memory: mmap.mmap, bell: int, engine_bell: int, gather: Gather,
        max_lag: int | None = None,
    ) -> None:  # fmt: skip
        self.storage, self._layout, self._control = storage, layout, Control(layout, memory)
        self._bell, self._engine_bell, self._max_lag = bell, engine_bell, max_lag
        self._gather = gather
        self._version = storage.rows["version"]
        self.waited_ns = 0
        self.blocks: list[int] | None = (
            None  # those of the storage that are this reader's; None: all
        )
        self.blocked_by: dict[str, int] = {}  # nanoseconds that `sample` waited, by reason
        # the one place where `sample` may be left by an exception: nothing is half moved there
        self.wait: Callable[[int, float | None], bool] = doorbell.wait

    def sample(self, batch_size: int, timeout_s: float | None = None) -> Batch | None:
        """The next `batch_size` unrolls, or None when the time is up first."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            batch, _ = self._attempt(batch_size)
            if batch is None:
                self.want(batch_size)  # and one may have come between look and wish
                batch, reason = self._attempt(batch_size)
            if batch is not None:
                return batch
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            begin = time.monotonic_ns()
            self.wait(self._bell, None if left is None else left * 1e6)
            waited = time.monotonic_ns() - begin
            self.waited_ns += waited
            self.blocked_by[reason or ""] = self.blocked_by.get(reason or "", 0) + waited

    def _attempt(self, batch_size: int) -> tuple[Batch | None, str | None]:
        """Takes in what is new; a batch, or why there is none: "empty", "min_fill", "ratio", "staleness"."""
        raise NotImplementedError

    def want(self, batch_size: int) -> None:
        """Asks the engine to ring once there may be so many unrolls."""
        raise NotImplementedError

    def skip(self) -> None:
        """Lets go of every complete unroll unread: for a run in which nobody learns. No account has those rows."""
        raise NotImplementedError

    def accounts(self) -> dict[str, int]:
        """What became of the stored rows."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """For the records: what is kept and drawn, and the seconds that `sample` has waited, by reason."""
        return {
            f"blocked_by_{reason}_s": waited * 1e-9 for reason, waited in self.blocked_by.items()
        }

    def update_priorities(self, items: np.ndarray, priorities: np.ndarray) -> None:
        """Gives drawn items int64 [B] new priorities float [B], where the mode has any."""

    def close(self) -> None:
        """Ends what runs beside."""

    def set_progress(self, share: float) -> None:
        """How much of the run is over, from 0 to 1: what schedules go by."""

    def publish_version(self, version: int) -> None:
        """Tells the engine, which may have waited for it, that weights of `version` are out."""
        self._control.learner[VERSION] = version
        os.eventfd_write(self._engine_bell, 1)
