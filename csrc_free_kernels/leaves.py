"""Lists of leaves whose rows one launch copies: the table that the kernels of prelude.cuh take, and its checks at the door."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from csrc_free_kernels import build
from csrc_free_kernels.shapes import check_shapes
from seedrl.errors import ShapeError

# 40 bytes each, of the 4 KiB that a launch has for its arguments; a longer list takes further launches
MAX_LEAVES = 64
_MOST_BLOCKS = 1 << 14  # a thread goes on to further words beyond that


def source(name: str) -> build.Source:
    """`name`.cu, which copies rows."""
    return build.Source(name, (("MAX_LEAVES", str(MAX_LEAVES)),), ("rows",))


class Leaf(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64), ("target", ctypes.c_uint64), ("second", ctypes.c_uint64), ("row_bytes", ctypes.c_int64),
        ("width", ctypes.c_uint32),
    )  # fmt: skip


class Leaves(ctypes.Structure):
    _fields_ = (("leaf", Leaf * MAX_LEAVES),)


def row_bytes(leaf: Tensor) -> int:
    """Of a row of leaf [N, ...]."""
    return math.prod(leaf.shape[1:]) * leaf.element_size()


def width_of(*numbers: int) -> int:
    """The widest word, in bytes, that all of these addresses and sizes are multiples of."""
    return next(width for width in (16, 4, 1) if all(number % width == 0 for number in numbers))


def tables(
    entries: Sequence[tuple[int, int, int, int]], rows: int
) -> Iterator[tuple[Leaves, tuple[int, int]]]:
    """Tables of at most MAX_LEAVES leaves, each with the grid that copies `rows` rows of them.

    Args: entries: addresses of source, target and second target (0: none), and the bytes of a row.
    """
    for begin in range(0, len(entries), MAX_LEAVES):
        part, table, words = entries[begin : begin + MAX_LEAVES], Leaves(), 0
        for i, numbers in enumerate(part):
            width = width_of(*numbers)
            table.leaf[i] = Leaf(*numbers, width)
            words = max(words, rows * numbers[-1] // width)
        yield table, (min(build.blocks_for(words), _MOST_BLOCKS), len(part))


def check_leaves(**lists: tuple[Sequence[Tensor], str]) -> dict[str, int]:
    """Checks that leaf i has the same dtype and shape of a row in all lists, and that leading letters mean the same size.

    Args: each a list of tensors and their leading dimensions, "N" or "R B".
    Returns: the size of each letter.
    Raises: ShapeError, naming the leaf.
    """
    sizes: dict[str, int] = {}
    (name, (model, dims)), *others = lists.items()
    lead = len(dims.split())
    for other, (leaves, _) in others:
        if len(leaves) != len(model):
            raise ShapeError(
                what=f"{other} has {len(leaves)} leaves, {name} {len(model)}", do="pass the same leaves, in the same order",
            )  # fmt: skip
    for each, (leaves, letters) in lists.items():
        for i, leaf in enumerate(leaves):
            known = [str(sizes.get(letter, letter)) for letter in letters.split()]
            sizes |= check_shapes(**{f"{each}[{i}]": (leaf, " ".join([*known, "..."]))})
            row, right = leaf.shape[len(known) :], model[i].shape[lead:]
            if row != right or leaf.dtype != model[i].dtype:
                raise ShapeError(
                    what=f"{each}[{i}] has rows {leaf.dtype} {list(row)}, {name}[{i}] {model[i].dtype} {list(right)}",
                    do="pass the same leaves, in the same order",
                )  # fmt: skip
    return {letter: size for letter, size in sizes.items() if not letter.isdigit()}


def on_one_device(
    *lists: tuple[str, Sequence[Tensor]], **others: tuple[Tensor, torch.dtype | None]
) -> torch.device:
    """`build.check_arguments` of `others` and of all leaves, of any dtype."""
    leaves = {f"{name}[{i}]": (leaf, None) for name, part in lists for i, leaf in enumerate(part)}
    return build.check_arguments(**others, **leaves)
