"""Rows that are kept until newer ones need the room, and drawn as often as wished: uniformly, by priority, the newest first.

Inserting never waits for a reader. The writer fills the block that was let go of longest ago, and first gives it its next generation;
the reader looks at the generations of an unroll's blocks before and after it gathers, and draws again where one has changed.
Announcements are a ring of their own in which the reader never moves anything: an unroll's number says where it stands there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from seedrl.store.batch import Batch, joined
from seedrl.store.blocks import Unrolls
from seedrl.store.limiter import Limiter
from seedrl.store.removers import BlockKeys, Oldest, Remover
from seedrl.store.replay import (
    ITEMS_HEAD,
    LEARNED_ROWS,
    SAMPLED,
    STALE_ROWS,
    VERSION,
    WANTED,
    ReplayReader,
    ReplayWriter,
)
from seedrl.store.selectors import Selector
from seedrl.store.sum_tree import check_priorities

_FEW, _MANY = 8, 256  # unrolls looked at for what is gone: at first, and then at a time
_TRIES = 100  # of a batch, before the learner waits for new unrolls


class RingWriter(ReplayWriter):
    """Room is made by the oldest rows; the ratio of draws to inserts may hold back."""

    def __init__(self, *arguments: Any, limiter: Limiter, remover: Remover | None = None, **keywords: Any) -> None:  # fmt: skip
        super().__init__(*arguments, **keywords)
        self._limiter = limiter
        self._remover = remover or Oldest(self._layout.storage_blocks)

    def held_back(self, slots: np.ndarray) -> str | None:
        appender = self._appender
        if self._limiter.ratio is not None:
            sampled = int(self._control.learner[SAMPLED])
            if not self._limiter.may_insert(self.unrolls, sampled, appender.completing(slots)):
                return "ratio"
        if len(appender.free) < slots.size:
            self._make_room(appender.blocks_needed(slots) - len(appender.free))
        return None

    def adopt(self) -> None:
        """Goes on from unrolls that were announced before this writer began: from a file. Their blocks are the oldest to make room."""
        control, layout = self._control, self._layout
        head = self.unrolls = int(control.engine[ITEMS_HEAD])
        numbers = np.arange(max(0, head - layout.capacity), head)
        more = control.more[numbers % layout.capacity]
        half = more.shape[1] // 2
        blocks, generations = more[:, :half].reshape(-1), more[:, half:].reshape(-1)
        live = blocks[control.blocks[blocks] == generations]
        # a block goes with the last one that reads it
        _, last = np.unique(live[::-1], return_index=True)
        kept = live[::-1][np.sort(last)[::-1]]
        self._remover.retire(kept)
        self._appender.free = sorted(set(self._appender.free) - set(kept.tolist()), reverse=True)

    def _make_room(self, count: int) -> None:
        if count > 0:
            blocks = self._remover.take(count)
            self._control.blocks[blocks] += 1  # before anything is written there
            self._appender.free += blocks.tolist()

    def _announce(self, at: np.ndarray, done: Unrolls) -> None:
        count = done.blocks.shape[1]
        self._control.more[at, :count] = done.blocks
        self._control.more[at, count:] = self._control.blocks[done.blocks]
        self._remover.retire(done.release[done.release >= 0])

    def discard(self, slots: np.ndarray) -> int:
        dropped, shared = self._appender.discard(slots)
        for _, blocks in shared:
            self._remover.retire(np.array(blocks, np.int64))
        return dropped


class Entries(NamedTuple):
    """What was announced of some unrolls."""

    numbers: np.ndarray  # int64 [n]
    rows: np.ndarray  # int64 [n, R]
    state_at: np.ndarray
    slots: np.ndarray
    blocks: np.ndarray  # int64 [n, k]
    generations: np.ndarray  # int64 [n, k]


class Part(NamedTuple):
    """Some of the unrolls that were asked for: at which positions, int64 [n], and whether each is whole, bool [n]."""

    batch: Batch
    positions: np.ndarray
    whole: np.ndarray


class RingReader(ReplayReader):
    """`sample` draws by the selector, as often as the limiter allows.

    Args: max_uses: draws of each unroll, after which it is gone; None: any number.
        initial: priorities of new unrolls by their rows; None: the largest that was given so far.
    """

    def __init__(
        self, *arguments: Any, selector: Selector, limiter: Limiter, max_uses: int | None = None,
        initial: Callable[[np.ndarray], np.ndarray] | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        super().__init__(*arguments, **keywords)
        self.selector, self.limiter, self._max_uses = selector, limiter, max_uses
        self._initial = initial
        capacity = self._layout.capacity
        self._uses = np.zeros(capacity, np.int64)
        self._oldest_version = np.zeros(capacity, np.int64)
        # unrolls and drawn rows of the run that this one resumes
        self._began = self._drawn_before = 0
        self._tail = self._seen = 0  # numbers from the one up to the other may be drawn
        self._tail_blocks = np.zeros(1, np.int64)  # of the oldest one, at the last look
        self._tail_generations = np.full(1, -1)
        keyed = self._layout.keyed
        self._keys = BlockKeys(self._layout, self._control, selector) if keyed else None
        self.redrawn = self.dropped_priorities = self.missed = self.forgiven = 0

    # ------------------------------------------------------------------------------------------------------- drawing

    def _attempt(self, batch_size: int) -> tuple[Batch | None, str | None]:
        self._take_in()
        reason = self._held_by(batch_size)
        if reason is not None:
            return None, reason
        pieces, weights, lacking = [], [], batch_size
        for _ in range(_TRIES):
            entries, weight = self._usable(lacking)
            if entries is None:
                break
            if not entries.numbers.size:
                continue
            for batch, positions, whole in self._read(entries):
                if not whole.all():
                    self.redrawn += int(np.count_nonzero(~whole))
                    kept = np.flatnonzero(whole)
                    batch = batch.columns(torch.from_numpy(kept).to(batch.reward.device))
                    positions = positions[kept]
                pieces.append(batch)
                if weight is not None:
                    weights.append(weight[positions])
                lacking -= len(batch.items)
            if not lacking:
                return self._counted(joined(pieces), weights), None
        for piece in pieces:
            self._unuse(piece.items)
        self.skip()  # whatever the ratio owes, there is nothing to draw it from: acting must go on
        return None, "empty" if self._max_lag is None else "staleness"

    def _read(self, entries: Entries) -> list[Part]:
        batch = self._gather(entries.rows, entries.state_at, entries.slots, entries.numbers)
        return [Part(batch, np.arange(entries.numbers.size), self._on_device(entries))]

    def _held_by(self, batch_size: int) -> str | None:
        learner = self._control.learner
        if self._seen < self.limiter.min_fill:
            return "min_fill"
        if not self.limiter.may_sample(self._seen, int(learner[SAMPLED]), batch_size):
            return "ratio"
        if self._tail == self._seen:
            self.skip()
            return "staleness" if learner[STALE_ROWS] else "empty"
        return None

    def _usable(self, count: int) -> tuple[Entries | None, np.ndarray | None]:
        """Up to `count` unrolls that are whole now, and their weights; no entries when nothing is left to draw."""
        entries, weights = self._candidates(count)
        if entries is not None:
            self._use(entries.numbers)
        return entries, weights

    def _candidates(self, count: int) -> tuple[Entries | None, np.ndarray | None]:
        """The same, without a use."""
        numbers, weights = self.selector.draw(count, self._tail, self._seen)
        if not numbers.size:
            return None, None
        entries = self._entries(numbers)
        there = self._whole(entries) & self._fresh(numbers)
        good = there.copy()
        if self._max_uses is not None:
            good[there] = self._within_uses(numbers[there])
        if not good.all():
            self.selector.remove(numbers[~there | self._used_up(numbers)])
            entries = Entries(*(part[good] for part in entries))
            weights = None if weights is None else weights[good]
        return entries, weights

    def _within_uses(self, numbers: np.ndarray) -> np.ndarray:
        """Which of `numbers`, drawn together, are still within their uses: one that stands there twice is drawn twice."""
        order = np.argsort(numbers, kind="stable")
        rows = numbers[order]
        begins = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
        rank = np.arange(rows.size) - np.repeat(begins, np.diff(np.r_[begins, rows.size]))
        within = np.empty(numbers.size, bool)
        within[order] = self._uses[rows % self._layout.capacity] + rank < self._max_uses
        return within

    def _use(self, items: np.ndarray) -> None:
        if self._max_uses is not None:
            np.add.at(self._uses, items % self._layout.capacity, 1)
            used_up = items[self._used_up(items)]
            self.selector.remove(used_up)
            if self._keys is not None:
                self._keys.changed(used_up)

    def _unuse(self, items: np.ndarray) -> None:
        if self._max_uses is not None:
            again = items[self._used_up(items)]
            np.subtract.at(self._uses, items % self._layout.capacity, 1)
            if again.size:
                self.selector.insert(np.unique(again))

    def _counted(self, batch: Batch, weights: list[np.ndarray]) -> Batch:
        items, learner = batch.items, self._control.learner
        learner[SAMPLED] += items.size
        learner[LEARNED_ROWS] += items.size * self._layout.rule.stride
        if self.limiter.ratio is not None:
            os.eventfd_write(self._engine_bell, 1)
        if not weights:
            return batch
        weight = np.concatenate(weights)
        if not self.selector.over_store:
            weight /= weight.max()
        return batch._replace(weights=torch.from_numpy(weight.astype(np.float32)).to(batch.reward.device))  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- what is left

    def _entries(self, numbers: np.ndarray) -> Entries:
        control, places = self._control, numbers % self._layout.capacity
        more = control.more[places]
        half = more.shape[1] // 2
        return Entries(numbers, control.index[places], control.state_at[places], control.slot[places], more[:, :half], more[:, half:])  # fmt: skip

    def _whole(self, entries: Entries) -> np.ndarray:
        """Which may be drawn, as nothing of them is gone, neither rows nor announcement: bool [n]."""
        return self._on_device(entries)

    def _on_device(self, entries: Entries) -> np.ndarray:
        """Of which nothing was overwritten there: bool [n]."""
        same: np.ndarray = (self._control.blocks[entries.blocks] == entries.generations).all(1)
        return same & (entries.numbers >= self._oldest())

    def _oldest(self) -> int:
        """The oldest number whose announcement is not being overwritten: the next may be, one for each slot."""
        layout = self._layout
        return int(self._control.engine[ITEMS_HEAD]) - layout.capacity + layout.num_slots

    def _fresh(self, numbers: np.ndarray) -> np.ndarray:
        if self._max_lag is None:
            return np.ones(numbers.size, bool)
        limit = int(self._control.learner[VERSION]) - self._max_lag
        fresh: np.ndarray = self._oldest_version[numbers % self._layout.capacity] >= limit
        return fresh

    def _used_up(self, numbers: np.ndarray) -> np.ndarray:
        if self._max_uses is None:
            return np.zeros(numbers.size, bool)
        used: np.ndarray = self._uses[numbers % self._layout.capacity] >= self._max_uses
        return used

    def _take_in(self) -> None:
        """Admits what was announced since the last look, and lets go of what is gone at the old end."""
        head, oldest = int(self._control.engine[ITEMS_HEAD]), self._oldest()
        if self._keys is not None:
            self.selector.remove(self._keys.overwritten())
        if self._tail < oldest:  # the ring went round
            self.missed += max(0, oldest - self._seen)
            gone = np.arange(self._tail, min(oldest, self._seen))
            self.selector.remove(gone)
            if self._keys is not None:
                self._keys.changed(gone)
            self._tail = oldest
            self._seen = max(self._seen, oldest)
            self._tail_generations = np.full_like(self._tail_generations, -1)
        if self._seen < head:
            numbers = np.arange(self._seen, head)
            places = numbers % self._layout.capacity
            self._uses[places] = 0
            if self._max_lag is not None:
                first = torch.from_numpy(self._control.index[places, self._layout.rule.history]).to(
                    self._version.device
                )
                self._oldest_version[places] = self._version.index_select(0, first).cpu().numpy()
            initial = None if self._initial is None else self._initial(self._control.index[places])
            self.selector.insert(numbers, initial)
            self._seen = head
            self._admitted(numbers)
        if self._tail < self._seen and not self._tail_is_gone():
            return
        looked_at = _FEW
        while self._tail < self._seen:
            numbers = np.arange(self._tail, min(self._tail + looked_at, self._seen))
            looked_at = _MANY
            whole, fresh = self._whole(self._entries(numbers)), self._fresh(numbers)
            gone = ~whole | ~fresh | self._used_up(numbers)
            if gone.any():
                self.selector.remove(numbers[gone])
            leading = int(np.argmin(gone)) if not gone.all() else numbers.size
            stale = int(np.count_nonzero((whole & ~fresh & ~self._used_up(numbers))[:leading]))
            self._control.learner[STALE_ROWS] += stale * self._layout.rule.stride
            self._tail += leading
            if leading < numbers.size:
                self._tail_blocks, self._tail_generations = (
                    part[leading] for part in self._entries(numbers)[4:]
                )
                break

    def _admitted(self, numbers: np.ndarray) -> None:
        if self._keys is not None:
            entries = self._entries(numbers)
            self._keys.admit(entries.numbers, entries.blocks, entries.generations)

    def _tail_is_gone(self) -> bool:
        """Whether the oldest unroll, which stood at the last look, is gone: mostly it isn't, and no other needs a look."""
        tail = np.array([self._tail])
        same = self._control.blocks[self._tail_blocks] == self._tail_generations
        return not (same.all() and self._fresh(tail)[0]) or bool(self._used_up(tail)[0])

    # ------------------------------------------------------------------------------------------------------- the rest

    def want(self, batch_size: int) -> None:
        learner = self._control.learner
        wanted = self.limiter.inserts_for(int(learner[SAMPLED]), batch_size)
        learner[WANTED] = max(wanted, self._seen + 1)

    def set_progress(self, share: float) -> None:
        self.selector.set_progress(share)

    def skip(self) -> None:
        learner, limiter = self._control.learner, self.limiter
        if limiter.ratio is not None:  # as if it had drawn as many as it may
            head = int(self._control.engine[ITEMS_HEAD])
            most = (head - limiter.min_fill) * limiter.ratio + limiter.tolerance
            owed = int(most) - int(learner[SAMPLED])
            if owed > 0:
                learner[SAMPLED] += owed
                self.forgiven += owed
                os.eventfd_write(self._engine_bell, 1)

    def update_priorities(self, items: np.ndarray, priorities: np.ndarray) -> None:
        """Gives drawn items new priorities; those overwritten since are dropped, and counted.

        Raises: ConfigError for a priority that is negative or not finite: which one, and nothing is changed then.
        """
        check_priorities("item", items, priorities)
        there = (items >= self._tail) & (items < self._seen)
        there[there] = self._whole(self._entries(items[there])) & ~self._used_up(items[there])
        self.dropped_priorities += int(np.count_nonzero(~there))
        self.selector.update(items[there], priorities[there])
        if self._keys is not None:
            self._keys.changed(items[there])

    def accounts(self) -> dict[str, int]:
        self._take_in()
        stride, learner = self._layout.rule.stride, self._control.learner
        return {
            "inserted_rows": (self._seen - self._began) * stride, "drawn_rows": int(learner[LEARNED_ROWS]) - self._drawn_before, "kept_rows": self.kept * stride,
            "stale_rows": int(learner[STALE_ROWS]),
        }  # fmt: skip

    def figures(self) -> dict[str, float]:
        learner, stride = self._control.learner, self._layout.rule.stride
        return super().figures() | {
            "replay_rows": self.kept * stride, "samples_per_insert": (int(learner[SAMPLED]) - self.forgiven) / max(self._seen, 1),
            "forgiven_draws": self.forgiven,
            "redrawn_unrolls": self.redrawn, "missed_unrolls": self.missed, "late_priorities": self.dropped_priorities,
            "stale_rows": int(learner[STALE_ROWS]), **self.selector.figures(),
        }  # fmt: skip

    def bounds(self) -> tuple[int, int]:
        """Takes in what is new: numbers from the one up to the other may be drawn."""
        self._take_in()
        return self._tail, self._seen

    def state(self) -> dict[str, np.ndarray]:
        """What the next draws depend on beside the rows, as arrays."""
        return {
            "uses": self._uses.copy(), "oldest_version": self._oldest_version.copy(), "forgiven": np.array(self.forgiven), **self.selector.state(),
        }  # fmt: skip

    def load_state(self, state: dict[str, np.ndarray], tail: int, seen: int) -> None:
        """Goes on from `state`, of another reader of the same sizes."""
        self._uses[:], self._oldest_version[:] = state["uses"], state["oldest_version"]
        self.forgiven = int(state["forgiven"])
        self.selector.load_state(state)
        self._tail, self._seen = tail, seen
        self._began, self._drawn_before = seen, int(self._control.learner[LEARNED_ROWS])
        self._tail_generations = np.full_like(self._tail_generations, -1)
        if self._keys is not None:
            self._keys.overwritten()
        self._admitted(np.arange(tail, seen))

    @property
    def kept(self) -> int:
        """Unrolls that may be drawn, but for some that are gone in between: counted where those are many."""
        if self._keys is None:
            return self._seen - self._tail
        return int(np.count_nonzero(self._whole(self._entries(np.arange(self._tail, self._seen)))))
