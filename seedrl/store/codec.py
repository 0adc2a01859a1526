"""Blocks as bytes, leaf by leaf: as they are, by LZ4, or by LZ4 of each row's difference from the one before; whatever a trial says is worth it.

    record   uint32 [P, 2]: method and size of each part | the parts one after the other

All three give back every bit. A part that a method would make larger is written as it is, so that a record is at most its header larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from seedrl.errors import ConfigError

RAW, LZ4, DELTA = range(3)
_WORTH = 1.3  # times smaller, or the leaf is left as it is
_TRIAL_EVERY = 256  # blocks from one trial of a leaf to the next
_SHORT_ROW_BYTES = 512
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Codec:
    """Args: parts: of each leaf, rows of a block and bytes of an item, in their order. compresses: False writes all as it is."""

    def __init__(self, parts: list[tuple[int, int]], compresses: bool) -> None:
        self._parts = parts
        self._method = [RAW] * len(parts)
        self._until_trial = [0] * len(parts)
        self._lz4 = _lz4() if compresses else None
        self.raw_bytes = self.stored_bytes = 0

    def encode(self, leaves: list[np.ndarray]) -> bytes:
        """A record of a block's leaves, contiguous, each of its rows."""
        head = np.zeros((len(leaves), 2), np.uint32)
        bodies: list[Any] = []
        for i, leaf in enumerate(leaves):
            raw = leaf.reshape(-1).view(np.uint8).data
            method, body = self._encoded(i, raw)
            head[i] = method, len(body)
            bodies.append(body)
        record = b"".join([head.tobytes(), *bodies])
        self.raw_bytes += sum(leaf.nbytes for leaf in leaves)
        self.stored_bytes += len(record)
        return record

    def decode(
        self, record: bytes | memoryview, into: list[np.ndarray], reach: int | None = None
    ) -> None:
        """Fills the leaves of one block, contiguous, with those of the record; of each its first `reach` rows at least (None: all)."""
        view = memoryview(record)
        head = np.frombuffer(view, np.uint32, 2 * len(into)).reshape(-1, 2)
        at = head.nbytes
        for i, ((method, size), leaf) in enumerate(zip(head.tolist(), into, strict=True)):
            body, at = view[at : at + size], at + size
            flat, count = leaf.reshape(-1).view(np.uint8), self._parts[i][0]
            needed = flat.size if reach is None else flat.size // count * min(reach, count)
            if method == RAW:
                flat[:needed] = np.frombuffer(body, np.uint8, needed)
                continue
            assert self._lz4 is not None
            plain = np.frombuffer(self._lz4[1](body, uncompressed_size=flat.size), np.uint8, needed)
            if method == LZ4:
                flat[:needed] = plain
                continue
            rows, differences = (self._as_rows(i, part, needed * count // flat.size) for part in (flat[:needed], plain))  # fmt: skip
            if rows.nbytes < _SHORT_ROW_BYTES * len(rows):
                np.add.accumulate(differences, axis=0, out=rows)
                continue
            rows[:1] = differences[:1]
            for k in range(
                1, len(rows)
            ):  # an addition of long rows each: 52 us for 40 frames, where accumulate takes 890
                np.add(rows[k - 1], differences[k], out=rows[k])

    def _encoded(self, i: int, raw: memoryview) -> tuple[int, Any]:
        if self._lz4 is None:
            return RAW, raw
        self._until_trial[i] -= 1
        if self._until_trial[i] < 0:
            self._until_trial[i] = _TRIAL_EVERY
            found = {method: self._by(method, i, raw) for method in (LZ4, DELTA)}
            best = min(found, key=lambda method: len(found[method]))
            worth = len(found[best]) * _WORTH <= len(raw)
            self._method[i] = best if worth else RAW
            return (best, found[best]) if worth else (RAW, raw)
        method = self._method[i]
        if method == RAW:
            return RAW, raw
        body = self._by(method, i, raw)
        return (method, body) if len(body) < len(raw) else (RAW, raw)

    def _by(self, method: int, i: int, raw: memoryview) -> bytes:
        assert self._lz4 is not None
        if method == LZ4:
            return self._lz4[0](raw, store_size=False)
        rows = self._as_rows(i, np.frombuffer(raw, np.uint8))
        differences = rows.copy()
        differences[1:] -= rows[:-1]
        return self._lz4[0](differences.data, store_size=False)

    def _as_rows(self, i: int, flat: np.ndarray, count: int | None = None) -> np.ndarray:
        """uint8 [n] as unsigned whole numbers [rows, items], whose sums go round."""
        rows, item_bytes = self._parts[i]
        return flat.view(_UNSIGNED[item_bytes]).reshape(rows if count is None else count, -1)


def _lz4() -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    try:
        import lz4.block
    except ModuleNotFoundError:
        raise ConfigError(what="there is no module 'lz4'", where="replay.compress", do="pip install 'seedrl[lz4]', or set replay.compress to false") from None  # fmt: skip
    return lz4.block.compress, lz4.block.decompress
