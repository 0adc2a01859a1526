"""Checks of a whole group's rows, after they were written and before they are published: numbers that are not finite, discrete
entries outside their range, masks without a legal action. For a worker's own environments and for rows that came over the network.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from seedrl.errors import EnvError
from seedrl.spec import INFO_MASK, EnvSpec, Leaf

FLOAT32_MAX = float(np.finfo(np.float32).max)


class RowChecks:
    """Args: spec: the server's. view: the group's rows (`slab.GroupView`). where: "worker 3, group 1", for messages."""

    def __init__(self, spec: EnvSpec, view: Any, where: str) -> None:
        self.spec, self.where, self.view = spec, where, view
        self.size = len(view.reward)
        self._columns = [view.obs[leaf.name] for leaf in spec.observation]
        self._floats = [
            (column, np.empty(column.shape, bool), leaf)
            for column, leaf in zip(self._columns, spec.observation, strict=True)
            if column.dtype.kind == "f"
        ]
        self._ranges = [
            (column, *_range_buffers(column, leaf), leaf)
            for column, leaf in zip(self._columns, spec.observation, strict=True)
            if leaf.kind != "box"
        ]
        self._mask = view.mask if spec.mask_size else None
        self.mask_in_info = self._mask is not None and spec.action_mask == INFO_MASK
        self._mask_column = (
            view.obs[spec.action_mask].reshape(self.size, -1)
            if self._mask is not None and not self.mask_in_info
            else None
        )

    def finite(self) -> bool:
        """Whether every float leaf of every row is finite."""
        for column, buffer, _ in self._floats:
            np.isfinite(column, out=buffer)
            if np.count_nonzero(buffer) != buffer.size:  # half the time of all()
                return False
        return True

    def not_finite(self) -> list[tuple[int, str]]:
        """(seat, leaf) of each row that holds a number that is not finite: its first such leaf."""
        found: dict[int, str] = {}
        for column, _, leaf in self._floats:
            rows = np.isfinite(column).reshape(self.size, -1).all(1)
            for seat in np.flatnonzero(~rows).tolist():
                found.setdefault(seat, leaf.name)
        return sorted(found.items())

    def check_ranges(self) -> None:
        """EnvError when a discrete entry is outside its space: it would index past a table in the policy."""
        for column, shifted, unsigned, n, start, buffer, leaf in self._ranges:
            np.subtract(
                column, start, out=shifted
            )  # below the start wraps to a large unsigned number
            np.greater_equal(unsigned, n, out=buffer)
            if np.count_nonzero(buffer):
                seat = int(np.flatnonzero(buffer.reshape(self.size, -1).any(1))[0])
                raise EnvError(
                    what=f"leaf '{leaf.name}' is {np.asarray(column[seat]).tolist()}, outside {leaf.text_in_full()}",
                    where=f"{self.where}, seat {seat}",
                    do="return values inside the observation space",
                )

    def finish_masks(self, over: Any) -> None:
        """Completes the masks of all rows: from their leaf, if they are one, and all ones on final rows without a legal action.

        Args: over: per seat, whether its row is a final one.
        Raises: EnvError naming a seat whose mask leaves no legal action on a row that will be answered.
        """
        mask = self._mask
        if mask is None:
            return
        if self._mask_column is not None:
            np.not_equal(self._mask_column, 0, out=mask.view(bool))
        for start, stop in self.spec.mask_segments:
            legal = mask[:, start:stop].any(1)
            if not legal.all():
                for seat in np.flatnonzero(~legal).tolist():
                    if not over[seat]:
                        raise EnvError(
                            what=f"the action mask of choices {start} to {stop - 1} leaves no legal action",
                            where=f"{self.where}, seat {seat}",
                            do="leave at least one action legal, or end the episode",
                        )
                    mask[seat, start:stop] = 1


def _range_buffers(
    column: np.ndarray, leaf: Leaf
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(shifted column, the same as unsigned, numbers of values, starts, out of range) for `check_ranges`."""
    unsigned = np.dtype(f"u{column.dtype.itemsize}")
    shifted, shape = np.empty(column.shape, column.dtype), leaf.shape
    n = [2] * leaf.size if leaf.kind == "multi_binary" else leaf.n
    start = leaf.start or (0,) * leaf.size
    return (
        shifted,
        shifted.view(unsigned),
        np.array(n, unsigned).reshape(shape),
        np.array(start, column.dtype).reshape(shape),
        np.empty(column.shape, bool),
    )
