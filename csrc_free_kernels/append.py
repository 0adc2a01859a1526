"""One row of each slot into its open block of replay: all leaves in one launch of append.cu, and the twin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from csrc_free_kernels import build, leaves
from csrc_free_kernels.shapes import check_shapes

SOURCE = leaves.source("append")


@torch.no_grad()
def append_rows(
    storage: Sequence[Tensor], columns: Sequence[Tensor], slots: Tensor, block: Tensor, offset: Tensor, block_length: int,
) -> None:  # fmt: skip
    """Writes row b of every column to row `block[slot] * L + offset[slot]` of its storage, with slot = slots[b].

    Args:
        storage: leaves [K * L, ...] of any dtype, which are changed. columns: leaves [B, ...].
        slots: int64 [B], each at most once; below 0 a row is padding, of which nothing is kept.
        block, offset: int64 [N], the slot's open block and its next row there; block below 0: nothing of the slot is kept.
        block_length: L.
    Raises: ShapeError, naming the argument. A slot or a row that is not there is an error here; the kernel leaves it out.
    """
    _check(storage, columns, slots, block, offset)
    rows, at = open_rows(slots, block, offset, block_length)
    for kept, column in zip(storage, columns, strict=True):
        kept.index_copy_(0, at, column.index_select(0, rows))


def open_rows(
    slots: Tensor, block: Tensor, offset: Tensor, block_length: int
) -> tuple[Tensor, Tensor]:
    """Which rows of a batch are kept, and where: int64 [n] both."""
    rows = ((slots >= 0) & (block[slots.clamp_min(0)] >= 0)).nonzero().squeeze(-1)
    kept = slots[rows]
    return rows, block[kept] * block_length + offset[kept]


@build.launcher_of(append_rows)
def launch_append_rows(
    storage: Sequence[Tensor], columns: Sequence[Tensor], slots: Tensor, block: Tensor, offset: Tensor, block_length: int,
) -> None:  # fmt: skip
    """`append_rows` in one launch. Raises: ShapeError; ArgumentError for another dtype or device."""
    num_rows = _check(storage, columns, slots, block, offset)
    device = leaves.on_one_device(
        ("storage", storage), ("columns", columns), slots=(slots, torch.int64), block=(block, torch.int64), offset=(offset, torch.int64),
    )  # fmt: skip
    entries = [
        (column.data_ptr(), kept.data_ptr(), 0, leaves.row_bytes(column))
        for kept, column in zip(storage, columns, strict=True)
    ]
    opened = leaves.OpenRows(
        slots.data_ptr(), block.data_ptr(), offset.data_ptr(), block.numel(), block_length, num_rows
    )
    for table, grid in leaves.tables(entries, slots.numel()):
        build.launch(
            SOURCE, "append_rows", device, grid, table, opened, ctypes.c_int64(slots.numel())
        )


def _check(
    storage: Sequence[Tensor],
    columns: Sequence[Tensor],
    slots: Tensor,
    block: Tensor,
    offset: Tensor,
) -> int:
    """Returns: K * L."""
    rows = check_shapes(slots=(slots, "B"), block=(block, "N"), offset=(offset, "N"))["B"]
    sizes = leaves.check_leaves(storage=(storage, "rows"), columns=(columns, str(rows)))
    return sizes.get("rows", 0)
