"""A ring whose unrolls are drawn from what lies behind the device as well (`tiers.py`).

The next batch is drawn when one is handed out, so that what must be brought from behind comes while the learner works on this one: priorities
given in between count from the draw after it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from seedrl.store.batch import Batch
from seedrl.store.ring import Entries, Part, RingReader
from seedrl.store.tiers import Tiers


class _Ahead(NamedTuple):
    asked: int
    entries: Entries
    weights: np.ndarray | None
    behind: np.ndarray  # positions of those that are not on the device
    coming: Future[tuple[Batch, np.ndarray]] | None


class TieredReader(RingReader):
    """Args: tiers: behind the device; the reader closes it."""

    def __init__(self, *arguments: Any, tiers: Tiers, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.tiers = tiers
        self._ahead: _Ahead | None = None
        self._now: _Ahead | None = None  # that `_read` is about
        self._helper = ThreadPoolExecutor(1, "tiers")

    def _attempt(self, batch_size: int) -> tuple[Batch | None, str | None]:
        found = super()._attempt(batch_size)
        if found[0] is not None:
            entries, weights = super()._usable(batch_size)
            if entries is not None:
                self._ahead = self._begin(batch_size, entries, weights)
        return found

    def _usable(self, count: int) -> tuple[Entries | None, np.ndarray | None]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.asked == count and self._fresh(ahead.entries.numbers).all():
            self._now = ahead
            return ahead.entries, ahead.weights
        if ahead is not None:
            self._unuse(ahead.entries.numbers)
        entries, weights = super()._usable(count)
        self._now = None if entries is None else self._begin(count, entries, weights)
        return entries, weights

    def _begin(self, asked: int, entries: Entries, weights: np.ndarray | None) -> _Ahead:
        behind = np.flatnonzero(~self._on_device(entries))
        if (
            behind.size and self.storage.device.type == "cpu"
        ):  # then all of them: to join two parts is another copy
            behind = np.arange(entries.numbers.size)
        coming = None
        if behind.size:
            some = Entries(*(part[behind] for part in entries))
            coming = self._helper.submit(
                self.tiers.fetch, some.rows, some.state_at, some.slots, some.numbers, some.blocks, some.generations
            )  # fmt: skip
        return _Ahead(asked, entries, weights, behind, coming)

    def _read(self, entries: Entries) -> list[Part]:
        now = self._now
        if now is None or now.coming is None or now.entries is not entries:
            return super()._read(entries)
        batch, whole = now.coming.result()
        parts = [Part(batch.to(self.storage.device), now.behind, whole)]
        here = np.setdiff1d(np.arange(entries.numbers.size), now.behind)
        if here.size:
            (part,) = super()._read(Entries(*(column[here] for column in entries)))
            parts.append(part._replace(positions=here))
        return parts

    def _whole(self, entries: Entries) -> np.ndarray:
        found: np.ndarray = self.tiers.has(entries.blocks, entries.generations) & (entries.numbers >= self._oldest())  # fmt: skip
        return found

    def _admitted(self, numbers: np.ndarray) -> None:
        super()._admitted(numbers)
        entries = self._entries(numbers)
        self.tiers.admit(entries.rows, entries.blocks, entries.generations)

    def _tail_is_gone(self) -> bool:
        tail = np.array([self._tail])
        whole = self._whole(self._entries(tail)) & self._fresh(tail)
        return not whole[0] or bool(self._used_up(tail)[0])

    def load_state(self, state: dict[str, np.ndarray], tail: int, seen: int) -> None:
        super().load_state(state, tail, seen)
        self._ahead, self.tiers.lost_blocks = None, 0  # what lay behind stays there

    def figures(self) -> dict[str, float]:
        return super().figures() | self.tiers.figures()

    def close(self) -> None:
        self._helper.shutdown()
        self.tiers.close()
