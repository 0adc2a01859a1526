"""Draws in proportion to priorities: a tree of sums (Schaul et al. 2016, arXiv 1511.05952, appendix B.2.1), and what corrects for it.

A node has 64 children instead of two: three levels of a few calls of NumPy each cost less than eighteen. Sums are float64, and an update
computes each anew from all its children instead of adding differences, so that errors do not add up over millions of updates.
"""

from __future__ import annotations

import numpy as np

from seedrl.errors import ConfigError

_CHILDREN = 64


class SumTree:
    """Priorities of `capacity` places, 0 at first. Draws and updates take whole batches."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # [nodes, children] a level, the leaves last: node i of one is what row i of the next adds up to
        self._levels: list[np.ndarray] = []
        count = capacity
        while not self._levels or count > 1:
            count = -(-count // _CHILDREN)
            self._levels.insert(0, np.zeros((count, _CHILDREN)))

    @property
    def total(self) -> float:
        return float(self._levels[0].sum())

    def priorities(self, places: np.ndarray) -> np.ndarray:
        """float64 [n] of places int64 [n]."""
        found: np.ndarray = self._levels[-1].reshape(-1)[places]
        return found

    def smallest(self) -> float:
        """The least priority above 0, 0 when there is none: looks at every place."""
        leaves = self._levels[-1]
        above = leaves[leaves > 0]
        return float(above.min()) if above.size else 0.0

    def set(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Gives places int64 [n] the priorities float [n]; where a place stands twice, the last counts.

        Raises: ConfigError for a priority that is negative or not finite: which one, and nothing is changed then.
        """
        check_priorities("place", places, priorities)
        self._levels[-1].reshape(-1)[places] = priorities
        nodes = places
        for children, sums in zip(self._levels[:0:-1], self._levels[-2::-1], strict=True):
            nodes = nodes // _CHILDREN
            if nodes.size > len(children):
                nodes = np.arange(len(children))
            sums.reshape(-1)[nodes] = children[nodes].sum(1)

    def draw(self, uniform: np.ndarray) -> np.ndarray:
        """Places int64 [n] for numbers of [0, 1), float64 [n]: each with a probability in proportion to its priority.

        Raises: ConfigError when all priorities are 0.
        """
        total = self.total
        if not total > 0:
            raise ConfigError(
                what="no place has a priority above 0",
                where="priorities",
                do="insert something first",
            )
        left, node = uniform * total, np.zeros(uniform.shape, np.int64)
        lane = np.arange(uniform.size)
        for level in self._levels:
            children = level[node]
            sums = children.cumsum(1)
            beyond = sums > left[:, None]
            child = beyond.argmax(1)
            found = beyond[lane, child]
            if not found.all():  # rounding leads behind the last one that has anything: that one
                child = np.where(found, child, (sums == sums[:, -1:]).argmax(1))
            left = left - (sums[lane, child] - children[lane, child])
            node = node * _CHILDREN + child
        return node


def check_priorities(kind: str, numbers: np.ndarray, priorities: np.ndarray) -> None:
    """Raises: ConfigError for a priority [n] that is negative or not finite, by the number, int64 [n], of its `kind`."""
    wrong = ~(np.isfinite(priorities) & (priorities >= 0))
    if wrong.any():
        worst = int(wrong.argmax())
        raise ConfigError(
            what=f"the priority of {kind} {int(numbers[worst])} is {float(priorities[worst])}", where="priorities",
            do="give numbers from 0 on; check the loss for infinities",
        )  # fmt: skip


def importance_weights(
    probabilities: np.ndarray, count: int, beta: float, largest: float | None = None
) -> np.ndarray:
    """(count * p)^-beta over the largest (Schaul et al. 2016, section 3.4): float64 [n] of probabilities [n].

    Args: count: items that could be drawn. beta: 0 corrects nothing, 1 all. largest: weight to divide by; None: the batch's own.
    """
    weights: np.ndarray = (count * probabilities) ** -beta
    return weights / (weights.max() if largest is None else largest)
