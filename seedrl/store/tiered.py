"""A ring whose unrolls are drawn from what lies behind the device as well (`tiers.py`).

The next batch is drawn when one is handed out, so that what must be brought from behind comes while the learner works on this one: priorities
given in between count from the draw after it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from seedrl.store.batch import Batch
from seedrl.store.replay import WANTED
from seedrl.store.ring import Entries, Part, RingReader
from seedrl.store.tiers import Tiers

_SWEPT = 256  # unrolls looked at for what is gone, each time


class _Ahead(NamedTuple):
    """Unrolls that are drawn, and not handed out: `behind` are the positions of those that are being fetched."""

    asked: int
    entries: Entries
    weights: np.ndarray | None
    behind: np.ndarray
    coming: Future[tuple[Batch, np.ndarray]] | None


class TieredReader(RingReader):
    """Args: tiers: behind the device; the reader closes it."""

    def __init__(self, *arguments: Any, tiers: Tiers, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.tiers = tiers
        self._ahead: _Ahead | None = None
        self._now: tuple[_Ahead, np.ndarray] | None = None  # that `_read` is about, and which of it
        self._swept = 0
        self._helper = ThreadPoolExecutor(1, "tiers")

    def _attempt(self, batch_size: int) -> tuple[Batch | None, str | None]:
        found = super()._attempt(batch_size)
        if found[0] is not None:
            self._ahead = self._draw_ahead(batch_size)
        return found

    def _usable(self, count: int) -> tuple[Entries | None, np.ndarray | None]:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.asked != count:
            ahead = self._draw_ahead(count)
            if ahead is None:
                return None, None
        numbers = ahead.entries.numbers
        good = self._fresh(numbers) & (numbers >= self._oldest())
        if self._max_uses is not None:
            good[good] = self._within_uses(numbers[good])
        kept = np.flatnonzero(good)
        entries = Entries(*(part[kept] for part in ahead.entries))
        self._now = ahead, kept
        self._use(entries.numbers)
        return entries, None if ahead.weights is None else ahead.weights[kept]

    def _draw_ahead(self, count: int) -> _Ahead | None:
        entries, weights = self._candidates(count)
        return None if entries is None else self._begin(count, entries, weights)

    def _begin(self, asked: int, entries: Entries, weights: np.ndarray | None) -> _Ahead:
        behind = np.flatnonzero(~self._on_device(entries))
        # on the host then all of them: to join two parts is another copy
        if behind.size and self.storage.device.type == "cpu":
            behind = np.arange(entries.numbers.size)
        coming = self._fetch(entries, behind) if behind.size else None
        return _Ahead(asked, entries, weights, behind, coming)

    def _fetch(self, entries: Entries, at: np.ndarray) -> Future[tuple[Batch, np.ndarray]]:
        some = Entries(*(part[at] for part in entries))
        return self._helper.submit(self.tiers.fetch, some.rows, some.state_at, some.slots, some.numbers, some.blocks, some.generations)  # fmt: skip

    def _read(self, entries: Entries) -> list[Part]:
        assert self._now is not None
        ahead, kept = self._now
        parts = []
        if ahead.coming is not None:
            batch, whole = ahead.coming.result()
            _, mine, positions = np.intersect1d(ahead.behind, kept, return_indices=True)
            if mine.size < ahead.behind.size:
                batch, whole = batch.columns(torch.from_numpy(mine)), whole[mine]
            parts.append(Part(batch.to(self.storage.device), positions, whole))
        rest = np.flatnonzero(~np.isin(kept, ahead.behind))
        on_device = self._on_device(Entries(*(part[rest] for part in entries)))
        left = rest[~on_device]  # since they were drawn
        if left.size:
            batch, whole = self._fetch(entries, left).result()
            parts.append(Part(batch.to(self.storage.device), left, whole))
        here = rest[on_device]
        if here.size:
            (part,) = super()._read(Entries(*(column[here] for column in entries)))
            parts.append(part._replace(positions=here))
        return parts

    def _take_in(self) -> None:
        super()._take_in()
        # an unroll that stays long holds the tail: those behind it that are gone are looked for some at a time
        begin = max(self._swept, self._tail)
        numbers = np.arange(begin, min(begin + _SWEPT, self._seen))
        self._swept = int(numbers[-1]) + 1 if numbers.size == _SWEPT else 0
        if numbers.size:
            gone = numbers[~self._whole(self._entries(numbers))]
            if gone.size:
                self.selector.remove(gone)

    def want(self, batch_size: int) -> None:
        # whatever is wanted, it rings with every unroll: what is full must be copied, also while nothing may be drawn yet
        self._control.learner[WANTED] = self._seen + 1

    def _held_by(self, batch_size: int) -> str | None:
        reason = super()._held_by(batch_size)
        waiting = self._ahead is not None and self._ahead.asked == batch_size
        return None if waiting and reason in ("empty", "staleness") else reason

    def _whole(self, entries: Entries) -> np.ndarray:
        found: np.ndarray = self.tiers.has(entries.blocks, entries.generations) & (entries.numbers >= self._oldest())  # fmt: skip
        return found

    def _admitted(self, numbers: np.ndarray) -> None:
        super()._admitted(numbers)
        entries = self._entries(numbers)
        self.tiers.admit(entries.rows, entries.slots, entries.blocks, entries.generations)

    def _tail_is_gone(self) -> bool:
        tail = np.array([self._tail])
        whole = self._whole(self._entries(tail)) & self._fresh(tail)
        return not whole[0] or bool(self._used_up(tail)[0])

    def state(self) -> dict[str, np.ndarray]:
        ahead = self._ahead
        numbers = np.zeros(0, np.int64) if ahead is None else ahead.entries.numbers
        weights = np.zeros(0) if ahead is None or ahead.weights is None else ahead.weights
        asked = np.array(0 if ahead is None else ahead.asked)
        return super().state() | {"ahead": numbers, "ahead_weights": weights, "ahead_asked": asked}

    def load_state(self, state: dict[str, np.ndarray], tail: int, seen: int) -> None:
        super().load_state(state, tail, seen)
        self.tiers.lost_blocks = 0  # what lay behind stays there
        numbers, weights = state["ahead"], state["ahead_weights"]
        entries = self._entries(numbers)
        there = self._whole(entries)
        self._ahead = None
        if there.any():
            entries = Entries(*(part[there] for part in entries))
            self._ahead = self._begin(int(state["ahead_asked"]), entries, weights[there] if weights.size else None)  # fmt: skip

    def figures(self) -> dict[str, float]:
        return super().figures() | self.tiers.figures()

    def close(self) -> None:
        self._helper.shutdown()
        self.tiers.close()
