"""Which unrolls of the ring are drawn: uniformly, the newest first, or in proportion to their priorities; plugs over one index.

Unrolls are known by their numbers, which count from 0 over the whole run; a place is a number modulo the ring's capacity.
"""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol

import numpy as np

from seedrl.store.sum_tree import SumTree, check_priorities, importance_weights

_FLOOR = 1e-6  # of a priority, so that nothing is never drawn again
_CEILING = 1e28  # raised to the highest exponent, and summed up, it is still a number
_ALPHA_STEP = 0.005  # by which the exponent has moved before the whole tree is raised to it anew


class Drawn(NamedTuple):
    """`numbers` int64 [n]; `weights` float64 [n] up to one factor, or None; fewer than asked for when there are no more."""

    numbers: np.ndarray
    weights: np.ndarray | None


class Selector(Protocol):
    over_store: bool  # whether weights are final; else the largest of a batch is to be 1

    def insert(self, numbers: np.ndarray, priorities: np.ndarray | None = None) -> None:
        """Admits new unrolls, int64 [n], in their order; priorities float [n] where there are any yet."""
        ...

    def remove(self, numbers: np.ndarray) -> None:
        """Draws these, int64 [n], no more."""
        ...

    def draw(self, count: int, low: int, high: int) -> Drawn:
        """`count` of the numbers from `low` up to `high`, which is not one of them. Some may be gone: the caller sees to that."""
        ...

    def update(self, numbers: np.ndarray, priorities: np.ndarray) -> None:
        """Gives these, int64 [n], priorities, float [n]."""
        ...

    def set_progress(self, share: float) -> None:
        """How much of the run is over, from 0 to 1."""
        ...

    def figures(self) -> dict[str, float]:
        """For the records."""
        ...

    def state(self) -> dict[str, np.ndarray]:
        """What the next draws depend on."""
        ...

    def load_state(self, state: dict[str, np.ndarray]) -> None: ...


class Uniform:
    """Each with the same probability, with replacement."""

    over_store = False

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def insert(self, numbers: np.ndarray, priorities: np.ndarray | None = None) -> None:
        pass

    def remove(self, numbers: np.ndarray) -> None:
        pass

    def draw(self, count: int, low: int, high: int) -> Drawn:
        return Drawn(self.rng.integers(low, high, count), None)

    def update(self, numbers: np.ndarray, priorities: np.ndarray) -> None:
        pass

    def set_progress(self, share: float) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, np.ndarray]:
        return {"random": _random(self.rng)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        _set_random(self.rng, state["random"])


class Recent:
    """The newest that were not removed, each once in a draw."""

    over_store = False

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._open = np.zeros(capacity, bool)
        self._newest = 0  # no number from here on is open

    def insert(self, numbers: np.ndarray, priorities: np.ndarray | None = None) -> None:
        self._open[numbers % self._capacity] = True
        self._newest = max(self._newest, int(numbers[-1]) + 1)

    def remove(self, numbers: np.ndarray) -> None:
        self._open[numbers % self._capacity] = False

    def draw(self, count: int, low: int, high: int) -> Drawn:
        window = 2 * count
        while True:
            begin = max(low, self._newest - window)
            numbers = np.arange(begin, self._newest)
            found = numbers[self._open[numbers % self._capacity]]
            if found.size >= count or begin == low:
                break
            window *= 2
        if found.size:
            self._newest = int(found[-1]) + 1
        return Drawn(found[::-1][:count], None)

    def update(self, numbers: np.ndarray, priorities: np.ndarray) -> None:
        pass

    def set_progress(self, share: float) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, np.ndarray]:
        return {"open": self._open.copy(), "newest": np.array(self._newest)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self._open[:], self._newest = state["open"], int(state["newest"])


class Schedule(NamedTuple):
    """A number that goes evenly from `begin` to `end` over the run; None: it stays."""

    begin: float
    end: float | None = None

    def at(self, share: float) -> float:
        if self.end is None:
            return self.begin
        return self.begin + (self.end - self.begin) * min(max(share, 0.0), 1.0)


class Prioritized:
    """In proportion to priority^alpha, stratified: one draw of each of `count` equal parts of the sum (Schaul et al. 2016, appendix B.2.1).

    New ones have the largest priority that was given so far, unless they bring one.

    Args: alpha, beta: the exponent of priorities, and how far weights correct for it, from 0 to 1. over_store: whether the largest weight is
        that of the least priority in the store, instead of the batch's.
    """

    def __init__(
        self, capacity: int, seed: int, alpha: Schedule, beta: Schedule, over_store: bool
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.over_store, self._alpha, self._beta = over_store, alpha, beta
        self.alpha, self.beta = alpha.begin, beta.begin
        self.tree, self.largest = SumTree(capacity), 1.0
        self.priorities = np.zeros(capacity)  # as they were given; 0: not there
        self._capacity = capacity

    def insert(self, numbers: np.ndarray, priorities: np.ndarray | None = None) -> None:
        if priorities is None:
            self._set(numbers, np.full(numbers.size, self.largest))
        else:
            self.update(numbers, priorities)

    def remove(self, numbers: np.ndarray) -> None:
        places = numbers % self._capacity
        self.priorities[places] = 0.0
        self.tree.set(places, np.zeros(numbers.size))

    def draw(self, count: int, low: int, high: int) -> Drawn:
        if not self.tree.total > 0:
            return Drawn(np.zeros(0, np.int64), np.zeros(0))
        places = self.tree.draw((np.arange(count) + self.rng.random(count)) / count)
        self.rng.shuffle(places)  # so that those replaced later are not all of one part
        numbers = low + (places - low) % self._capacity
        probabilities = self.tree.priorities(places) / self.tree.total
        largest = None
        if self.over_store:
            largest = float(importance_weights(np.array([self.tree.smallest() / self.tree.total]), high - low, self.beta, 1.0)[0])  # fmt: skip
        return Drawn(numbers, importance_weights(probabilities, high - low, self.beta, largest or 1.0))  # fmt: skip

    def update(self, numbers: np.ndarray, priorities: np.ndarray) -> None:
        if numbers.size:
            check_priorities("item", numbers, priorities)
            raised = np.clip(np.asarray(priorities, np.float64), _FLOOR, _CEILING)
            self._set(numbers, raised)
            self.largest = max(self.largest, float(raised.max()))

    def _set(self, numbers: np.ndarray, priorities: np.ndarray) -> None:
        places = numbers % self._capacity
        self.tree.set(places, priorities**self.alpha)  # refuses what is no priority
        self.priorities[places] = priorities

    def set_progress(self, share: float) -> None:
        self.beta = self._beta.at(share)
        alpha = self._alpha.at(share)
        if abs(alpha - self.alpha) >= _ALPHA_STEP or (share >= 1 and alpha != self.alpha):
            self.alpha = alpha
            self._raise_all()

    def figures(self) -> dict[str, float]:
        return {"priority_exponent": self.alpha, "importance_exponent": self.beta}

    def _raise_all(self) -> None:
        there = np.flatnonzero(self.priorities)
        self.tree.set(there, self.priorities[there] ** self.alpha)

    def state(self) -> dict[str, np.ndarray]:
        return {
            "random": _random(self.rng), "priorities": self.priorities.copy(), "largest": np.array(self.largest),
        }  # fmt: skip

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        _set_random(self.rng, state["random"])
        self.priorities[:] = state["priorities"]
        self.largest = float(state["largest"])
        self._raise_all()


def _random(rng: np.random.Generator) -> np.ndarray:
    return np.array(json.dumps(rng.bit_generator.state))


def _set_random(rng: np.random.Generator, state: np.ndarray) -> None:
    rng.bit_generator.state = json.loads(str(state))
