"""Every bit comes back, whatever is compressed; what does not pay is left as it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.store.codec import Codec

DTYPES = [np.uint8, np.int16, np.float32, np.int64, np.float64, np.bool_]


def leaves_of(
    kind: str, rows: int, widths: list[int], rng: np.random.Generator
) -> list[np.ndarray]:
    found = []
    for i, width in enumerate(widths):
        dtype = np.dtype(DTYPES[i % len(DTYPES)])
        if kind == "noise":
            raw = rng.integers(0, 256, rows * width * dtype.itemsize, np.uint8)
            leaf = (raw & 1 if dtype == np.bool_ else raw).view(dtype)
        elif kind == "constant":
            leaf = np.full(rows * width, 3).astype(dtype)
        else:
            leaf = np.arange(rows * width).astype(dtype)
        found.append(leaf.reshape(rows, width))
    return found


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["noise", "constant", "steps"]), min_size=1, max_size=6), st.integers(1, 20),
    st.lists(st.integers(1, 40), min_size=1, max_size=7), st.booleans(), st.integers(0, 999),
)  # fmt: skip
def test_every_bit_comes_back(
    kinds: list[str], rows: int, widths: list[int], compresses: bool, seed: int
) -> None:
    rng, codec = np.random.default_rng(seed), None
    for kind in kinds:  # what a trial chose meets other bytes
        leaves = leaves_of(kind, rows, widths, rng)
        codec = codec or Codec([(rows, leaf.itemsize) for leaf in leaves], compresses)
        record = codec.encode(leaves)
        into = [np.empty_like(leaf) for leaf in leaves]
        codec.decode(record, into)
        for leaf, found in zip(leaves, into, strict=True):
            assert leaf.tobytes() == found.tobytes()


def test_random_bytes_take_no_more_room_than_they_are() -> None:
    rng, codec = np.random.default_rng(0), Codec([(16, 1), (16, 4)], True)
    for _ in range(600):
        codec.encode([rng.integers(0, 256, (16, 4096), np.uint8), rng.random((16, 40), np.float32)])
    assert codec.stored_bytes <= 1.01 * codec.raw_bytes
    assert codec._method == [0, 0]


@pytest.mark.parametrize(("leaf", "method"), [("frames", 2), ("constant", 1)])
def test_what_pays_is_compressed_by_what_pays_most(leaf: str, method: int) -> None:
    rng = np.random.default_rng(0)
    frames = np.broadcast_to(rng.integers(0, 256, 7056, np.uint8), (16, 7056)).copy()
    if leaf == "frames":
        frames[np.arange(16), np.arange(16) * 9] += 1  # noise that stays, and one pixel that moves
    else:
        frames[:] = rng.integers(0, 256, (16, 1))  # by itself it is nothing, by difference too
    codec = Codec([(16, 1)], True)
    record = codec.encode([frames])
    assert len(record) < frames.nbytes / 10
    assert codec._method[0] in (method, 2)
