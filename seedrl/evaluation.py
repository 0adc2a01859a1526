"""Evaluation episodes: which of those that end on evaluation slots count, and what they came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of evaluation episodes."""

    returns: np.ndarray  # float64 [E]
    lengths: np.ndarray  # float64 [E]

    def summary(self) -> dict[str, float | int]:
        return {
            "episodes": int(self.returns.size),
            "mean_return": float(self.returns.mean()), "std_return": float(self.returns.std()),
            "min_return": float(self.returns.min()), "max_return": float(self.returns.max()),
            "mean_length": float(self.lengths.mean()),
        }  # fmt: skip


class Round:
    """The first episodes of each seat, `episodes` in all: so that short ones count no more than long ones.

    Seats may change: when the worker that held them was replaced, what its seats had played is not counted.
    """

    def __init__(self, episodes: int, seats: int) -> None:
        self.episodes, self.seats = episodes, min(seats, episodes)
        self._quota = -(-episodes // self.seats)
        self._held: list[int] = []
        self._played: dict[int, list[tuple[float, float]]] = {}

    def hold(self, slots: Iterable[int]) -> None:
        """The slots that the round's worker holds now; none while it starts."""
        held = sorted(slots)
        if held != self._held:
            self._held, self._played = held, {slot: [] for slot in held}

    def take(self, episodes: np.ndarray) -> None:
        """Takes the round's own of `episodes` float64 [n, 5 or more]: slot, evaluation, return, length, ... in order."""
        for slot, evaluation, value, length, *_ in episodes.tolist():  # per episode, not per step
            seen = self._played.get(int(slot))
            if evaluation and seen is not None and len(seen) < self._quota:
                seen.append((value, length))

    @property
    def played(self) -> int:
        return min(sum(map(len, self._played.values())), self.episodes)

    @property
    def complete(self) -> bool:
        return bool(self._held) and all(len(seen) == self._quota for seen in self._played.values())

    def result(self) -> Evaluation:
        order = [self._played[slot][k] for k in range(self._quota) for slot in self._held]
        table = np.array(order[: self.episodes])
        return Evaluation(table[:, 0], table[:, 1])
