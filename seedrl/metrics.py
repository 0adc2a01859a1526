"""Histograms of fixed memory, over words that may lie in shared memory: one writer, many readers.

    words   int64 [16]           count | total | max | min + 1 | unused       (128 bytes)
    buckets int64 [NUM_BUCKETS]  how many values fell into each

Values are whole numbers (nanoseconds, microseconds, rows). Those below 128 have a bucket each; above, every doubling is
cut into 64 buckets, so the middle of a bucket is within 1/128 = 0.8 % of each value in it. 2**40 ns are 1099 s; what is
larger is counted in the last bucket, and `max` still tells it exactly. A reader needs no lock: it takes its totals from
the buckets themselves, so the worst that it sees is a batch of values counted in part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

_EXACT_BITS = 7  # values below 2**7 are exact
_STEP = 1 << (_EXACT_BITS - 1)  # buckets for each doubling above
_TOP_BITS = 40
_TOP = (1 << _TOP_BITS) - 1
NUM_BUCKETS = (_TOP_BITS - _EXACT_BITS) * _STEP + 2 * _STEP
_HEADER_WORDS = 16
_COUNT, _TOTAL, _MAX, _MIN_PLUS_1 = range(4)
_FIRST_BITS = (1023 + _EXACT_BITS - 2) * _STEP  # bias of a double's exponent
_CHUNK = 1024  # values taken at once by add_many: the scratch arrays stay this small


def bucket_of(value: int) -> int:
    """The bucket of a whole number, 0 <= value < 2**40."""
    shift = max(0, value.bit_length() - _EXACT_BITS)
    return shift * _STEP + (value >> shift)


def _middles() -> NDArray[np.float64]:
    bucket = np.arange(NUM_BUCKETS)
    shift = np.maximum(0, bucket // _STEP - 1)
    low = (bucket - shift * _STEP) << shift
    middle: NDArray[np.float64] = low + ((1 << shift) - 1) / 2
    return middle


_MIDDLE = _middles()  # float64 [NUM_BUCKETS]
_Scratch = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]


class Histogram:
    """Counts of whole numbers in logarithmic buckets; percentiles within 1 %, in memory that never grows.

    Args:
        buffer: int64 [words()], zeros at first; a view of shared memory where other processes read. Own memory if None.
    """

    def __init__(self, buffer: NDArray[np.int64] | None = None) -> None:
        if buffer is None:
            buffer = np.zeros(self.words(), np.int64)
        fits = buffer.dtype == np.int64 and buffer.shape == (self.words(),)
        if not fits or not buffer.flags.c_contiguous:
            raise ValueError(f"a histogram needs contiguous int64 [{self.words()}] words")
        self._words = buffer
        cells = memoryview(buffer.data)  # plain ints in and out: twice as fast as numpy's scalars
        self._header, self._cells = cells[:_HEADER_WORDS], cells[_HEADER_WORDS:]
        self._buckets = buffer[_HEADER_WORDS:]
        self._scratch: _Scratch | None = None  # a reader needs none

    @staticmethod
    def words() -> int:
        """How many int64 words one histogram takes."""
        return _HEADER_WORDS + NUM_BUCKETS

    @property
    def count(self) -> int:
        return self._header[_COUNT]

    @property
    def total(self) -> int:
        """The sum of all values, exactly."""
        return self._header[_TOTAL]

    @property
    def max(self) -> int:
        """The largest value ever added, exactly; 0 when empty."""
        return self._header[_MAX]

    @property
    def min(self) -> int:
        """The smallest value ever added, exactly; 0 when empty."""
        return max(0, self._header[_MIN_PLUS_1] - 1)

    @property
    def mean(self) -> float:
        """The mean of all values, exactly; nan when empty."""
        return self._header[_TOTAL] / self.count if self.count else math.nan

    def add(self, value: int) -> None:
        """Counts one value; a negative one (a clock that was read on another core) as 0."""
        value = max(0, int(value))
        self._cells[bucket_of(min(value, _TOP))] += 1
        self._count(1, value, value, value)

    def add_many(self, values: ArrayLike) -> None:
        """Counts whole arrays; `values` any shape, whole numbers (a fraction is cut off)."""
        flat = np.asarray(values).reshape(-1)
        if flat.size <= 8:  # a dozen array operations cost what some ten single values do
            for value in flat.tolist():
                self.add(value)
            return
        if self._scratch is None:
            self._scratch = (np.empty(_CHUNK, np.int64), np.empty(_CHUNK), np.empty(_CHUNK, int))
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            n = part.size
            whole, real, bucket = self._scratch[0][:n], self._scratch[1][:n], self._scratch[2][:n]
            np.copyto(whole, part, casting="unsafe")
            np.maximum(whole, 0, out=whole)
            total, lowest, highest = int(whole.sum()), int(whole.min()), int(whole.max())
            np.minimum(whole, _TOP, out=whole)
            # A double holds the number exactly, exponent first: exponent and the mantissa's first
            # 6 bits are the bucket, but for a constant; below 64 they give less than the number.
            real[:] = whole
            np.right_shift(real.view(np.int64), 52 - (_EXACT_BITS - 1), out=bucket)
            bucket -= _FIRST_BITS
            np.minimum(whole, _STEP, out=whole)
            np.maximum(bucket, whole, out=bucket)
            np.add.at(self._buckets, bucket, 1)
            self._count(n, total, lowest, highest)

    def merge(self, other: Histogram) -> None:
        """Adds what another histogram counted; the sum of all processes is the merge of theirs."""
        if other.count == 0:
            return
        self._buckets += other._buckets
        header = other._header
        self._count(header[_COUNT], header[_TOTAL], header[_MIN_PLUS_1] - 1, header[_MAX])

    def copy(self) -> Histogram:
        """The state now, in memory of its own: what a reader keeps to compare with later."""
        return Histogram(self._words.copy())

    def since(self, earlier: Histogram) -> Histogram:
        """What was counted after `earlier`, a copy of this one; its `min` and `max` are those of buckets."""
        recent = Histogram()
        np.subtract(self._buckets, earlier._buckets, out=recent._buckets)
        np.maximum(recent._buckets, 0, out=recent._buckets)
        used = np.flatnonzero(recent._buckets)
        if used.size:
            total = self._header[_TOTAL] - earlier._header[_TOTAL]
            highest = self.max if self.max > earlier.max else min(int(_MIDDLE[used[-1]]), self.max)
            recent._count(int(recent._buckets.sum()), total, int(_MIDDLE[used[0]]), highest)
        return recent

    def percentile(self, q: float) -> float:
        """The value that `q` percent of all values do not exceed (0 <= q <= 100), within 1 %; nan when empty."""
        counts = self._buckets.cumsum()
        total = int(counts[-1])
        if total == 0:
            return math.nan
        rank = min(total, max(1, math.ceil(q / 100 * total)))
        if rank == total:
            return float(self.max)
        middle = float(_MIDDLE[int(np.searchsorted(counts, rank))])
        return min(max(middle, float(self.min)), float(self.max))

    def cumulative(self, edges: Sequence[int]) -> tuple[list[int], int, int]:
        """(how many values each of the rising `edges` is not exceeded by, how many there are, their total).

        An edge is taken with its whole bucket: within 1/64.
        """
        counts, total = self._buckets.cumsum(), self._header[_TOTAL]
        upto = [int(counts[bucket_of(min(edge, _TOP))]) for edge in edges]
        return upto, int(counts[-1]), total

    def _count(self, count: int, total: int, lowest: int, highest: int) -> None:
        header = self._header
        header[_TOTAL] += total
        if highest > header[_MAX]:  # a store saved, nearly always
            header[_MAX] = highest
        known_lowest = header[_MIN_PLUS_1]
        if known_lowest == 0 or lowest + 1 < known_lowest:
            header[_MIN_PLUS_1] = lowest + 1
        header[_COUNT] += count
