"""How often each unroll is learnt from: samples per insert, between bounds that stop the one side or the other."""

from __future__ import annotations

from dataclasses import dataclass

_ROUNDING = 1e-9  # of floats, which must not make both sides wait


@dataclass(frozen=True)
class Limiter:
    """Counts of unrolls, inserted so far and drawn so far, against `ratio` draws for each insert.

    The first `min_fill` inserts count for nothing: sampling begins after them, and owes nothing for them.

    Args: ratio: None: any. tolerance: draws by which the count may be off, either way.
    """

    ratio: float | None
    tolerance: float
    min_fill: int

    @staticmethod
    def fewest_tolerance(ratio: float, batch_size: int, num_slots: int) -> float:
        """With less, both sides may wait at once: for a batch, and for the unrolls that every slot completes with its next row."""
        return (batch_size + ratio * num_slots) / 2

    def may_insert(self, inserted: int, sampled: int, count: int) -> bool:
        """Whether `count` more unrolls may be inserted."""
        if self.ratio is None or inserted < self.min_fill:
            return True
        ahead = (inserted + count - self.min_fill) * self.ratio - sampled
        return ahead <= self.tolerance * (1 + _ROUNDING)

    def may_sample(self, inserted: int, sampled: int, count: int) -> bool:
        """Whether `count` more may be drawn."""
        return inserted >= self.inserts_for(sampled, count)

    def inserts_for(self, sampled: int, count: int) -> int:
        """How many inserts it takes until `count` more may be drawn."""
        if self.ratio is None:
            return self.min_fill
        more = (sampled + count - self.tolerance) / self.ratio
        return self.min_fill + max(0, -int(-more // 1))
