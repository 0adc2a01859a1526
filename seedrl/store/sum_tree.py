"""Draws in proportion to priorities: a binary tree of sums (Schaul et al. 2016, arXiv 1511.05952, appendix B.2.1), and what corrects for it.

Sums are float64, and an update computes each anew from its two children instead of adding differences, so that errors do not add up
over millions of updates.
"""

from __future__ import annotations

import numpy as np

from seedrl.errors import ConfigError


class SumTree:
    """Priorities of `capacity` places, 0 at first.

    Draws and updates take whole batches, and work in O(log capacity) calls of NumPy for each.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._leaves = 1 << max(0, (capacity - 1).bit_length())
        self._levels = self._leaves.bit_length() - 1
        self._nodes = np.zeros(
            2 * self._leaves
        )  # node i has the children 2i and 2i + 1; node 1 is the root

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def priorities(self, places: np.ndarray) -> np.ndarray:
        """float64 [n] of places int64 [n]."""
        found: np.ndarray = self._nodes[self._leaves + places]
        return found

    def smallest(self) -> float:
        """The least priority above 0, 0 when there is none: looks at every place."""
        leaves = self._nodes[self._leaves :]
        above = leaves[leaves > 0]
        return float(above.min()) if above.size else 0.0

    def set(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Gives places int64 [n] the priorities float [n]; where a place stands twice, the last counts.

        Raises: ConfigError for a priority that is negative or not finite: which one, and nothing is changed then.
        """
        check_priorities("place", places, priorities)
        nodes = self._nodes
        at = self._leaves + places
        nodes[at] = priorities
        for _ in range(self._levels):
            at = np.unique(at >> 1)
            nodes[at] = nodes[2 * at] + nodes[2 * at + 1]

    def draw(self, uniform: np.ndarray) -> np.ndarray:
        """Places int64 [n] for numbers of [0, 1), float64 [n]: each with a probability in proportion to its priority.

        Raises: ConfigError when all priorities are 0.
        """
        if not self.total > 0:
            raise ConfigError(
                what="no place has a priority above 0",
                where="priorities",
                do="insert something first",
            )
        nodes, left = self._nodes, uniform * self.total
        at = np.ones(uniform.shape, np.int64)
        for _ in range(self._levels):
            at = 2 * at
            low = nodes[at]
            # never into a part that is empty, where rounding would lead
            right = (left >= low) & (nodes[at + 1] > 0)
            left = np.where(right, left - low, left)
            at += right
        return at - self._leaves


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
