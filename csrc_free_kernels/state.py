"""The recurrent states of a batch's slots out of their store; and rows into any store: all leaves in one launch of state.cu, and the twins."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from csrc_free_kernels import build, leaves
from csrc_free_kernels.shapes import check_shapes

SOURCE = leaves.source("state")


@torch.no_grad()
def gather_state(
    store: Sequence[Tensor], initial: Sequence[Tensor], slots: Tensor, first: Tensor, into: Sequence[Tensor]
) -> None:  # fmt: skip
    """The state entering each row of a batch: the slot's, or the initial one where the row is `first`.

    Args:
        store: leaves [N, ...] of any dtype. initial: leaves [1, ...]. into: leaves [B, ...], which are filled.
        slots: int64 [B]; below 0 a row is padding, which gets the initial state. first: bool [B], the row begins an episode.
    Raises: ShapeError, naming the argument. A slot from N on is an error here; the kernel takes it for padding.
    """
    _check_gather(store, initial, slots, first, into)
    begins = (first | (slots < 0)).nonzero().squeeze(-1)
    for kept, begin, out in zip(store, initial, into, strict=True):
        torch.index_select(kept, 0, slots.clamp_min(0), out=out)
        out.index_copy_(0, begins, begin.expand(begins.numel(), *begin.shape[1:]))


@torch.no_grad()
def scatter_rows(store: Sequence[Tensor], places: Tensor, columns: Sequence[Tensor]) -> None:
    """Writes row b of every column to row `places[b]` of its store: the states that left a batch, a step's leaves into replay.

    Args:
        store: leaves [N, ...] of any dtype, which are changed. columns: leaves [B, ...].
        places: int64 [B], each at most once; below 0 nothing of the row is kept.
    Raises: ShapeError, naming the argument. A place from N on is an error here; the kernel keeps nothing of such a row.
    """
    _check_scatter(store, places, columns)
    rows = (places >= 0).nonzero().squeeze(-1)
    for kept, column in zip(store, columns, strict=True):
        kept.index_copy_(0, places[rows], column.index_select(0, rows))


@build.launcher_of(gather_state)
def launch_gather_state(
    store: Sequence[Tensor], initial: Sequence[Tensor], slots: Tensor, first: Tensor, into: Sequence[Tensor]
) -> None:  # fmt: skip
    """`gather_state` in one launch. Raises: ShapeError; ArgumentError for another dtype or device."""
    num_slots = _check_gather(store, initial, slots, first, into)
    device = leaves.on_one_device(
        ("store", store), ("initial", initial), ("into", into), slots=(slots, torch.int64), first=(first, torch.bool),
    )  # fmt: skip
    entries = [
        (kept.data_ptr(), out.data_ptr(), begin.data_ptr(), leaves.row_bytes(begin))
        for kept, begin, out in zip(store, initial, into, strict=True)
    ]
    rows = slots.numel()
    for table, grid in leaves.tables(entries, rows):
        build.launch(
            SOURCE, "gather_state", device, grid, table, build.pointer(slots), build.pointer(first),
            ctypes.c_int64(num_slots), ctypes.c_int64(rows),
        )  # fmt: skip


@build.launcher_of(scatter_rows)
def launch_scatter_rows(store: Sequence[Tensor], places: Tensor, columns: Sequence[Tensor]) -> None:
    """`scatter_rows` in one launch. Raises: ShapeError; ArgumentError for another dtype or device."""
    there = _check_scatter(store, places, columns)
    device = leaves.on_one_device(
        ("store", store), ("columns", columns), places=(places, torch.int64)
    )
    entries = [
        (column.data_ptr(), kept.data_ptr(), 0, leaves.row_bytes(column))
        for kept, column in zip(store, columns, strict=True)
    ]
    rows = places.numel()
    for table, grid in leaves.tables(entries, rows):
        build.launch(
            SOURCE, "scatter_rows", device, grid, table, build.pointer(places),
            ctypes.c_int64(there), ctypes.c_int64(rows),
        )  # fmt: skip


def _check_gather(
    store: Sequence[Tensor], initial: Sequence[Tensor], slots: Tensor, first: Tensor, into: Sequence[Tensor]
) -> int:  # fmt: skip
    """Returns: N, 0 without leaves."""
    rows = check_shapes(slots=(slots, "B"), first=(first, "B"))["B"]
    sizes = leaves.check_leaves(store=(store, "N"), initial=(initial, "1"), into=(into, str(rows)))
    return sizes.get("N", 0)


def _check_scatter(store: Sequence[Tensor], places: Tensor, columns: Sequence[Tensor]) -> int:
    """Returns: N, 0 without leaves."""
    rows = check_shapes(places=(places, "B"))["B"]
    return leaves.check_leaves(store=(store, "N"), columns=(columns, str(rows))).get("N", 0)
