"""When a batch fires, and which groups are in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Reason(IntEnum):
    FULL = 0
    ALL_READY = 1
    WAIT = 2
    HARD_DEADLINE = 3


@dataclass(frozen=True)
class Rule:
    """The batching knobs: rows and microseconds. `whole` fires only when every live slot is ready (deterministic runs)."""

    max_batch: int
    min_batch: int
    max_wait_us: float
    hard_deadline_us: float
    whole: bool = False


def reason_to_fire(ready: int, live: int, oldest_wait_us: float, rule: Rule) -> Reason | None:
    """Why a batch fires now, or None.

    Args:
        ready: rows that wait. live: rows of every attached slot. oldest_wait_us: age of the oldest ready row.
    """
    if ready == 0:
        return None
    if ready >= live:
        return Reason.ALL_READY
    if rule.whole:
        return None
    if ready >= rule.max_batch:
        return Reason.FULL
    if ready >= rule.min_batch and oldest_wait_us >= rule.max_wait_us:
        return Reason.WAIT
    if oldest_wait_us >= rule.hard_deadline_us:
        return Reason.HARD_DEADLINE
    return None


def us_until_fire(ready: int, oldest_wait_us: float, rule: Rule) -> float | None:
    """How long until `reason_to_fire` could say yes with nothing new arriving; None: never."""
    if ready == 0 or rule.whole:
        return None
    deadline = (
        rule.hard_deadline_us
        if ready < rule.min_batch
        else min(rule.max_wait_us, rule.hard_deadline_us)
    )
    return max(deadline - oldest_wait_us, 0.0)


def choose(published_ns: np.ndarray, sizes: np.ndarray, max_batch: int) -> np.ndarray:
    """Which of the ready groups go into the batch: whole groups, oldest first, at most `max_batch` rows.

    Args: published_ns int64 [G], sizes int64 [G] of the ready groups.
    Returns: their positions, in the order given. A group that does not fit is the first of the next batch.
    """
    if int(sizes.sum()) <= max_batch:
        return np.arange(sizes.size)
    order = np.argsort(published_ns, kind="stable")
    fits = np.cumsum(sizes[order]) <= max_batch
    return np.sort(order[: max(1, int(np.argmin(fits)) if not fits.all() else fits.size)])
