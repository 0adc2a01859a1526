"""The recurrent states of a batch's slots, out of the store and back: all leaves in one launch of state.cu, and the twins."""

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
def scatter_state(store: Sequence[Tensor], slots: Tensor, states: Sequence[Tensor]) -> None:
    """Keeps the states that left the rows of a batch.

    Args:
        store: leaves [N, ...] of any dtype, which are changed. states: leaves [B, ...].
        slots: int64 [B], each at most once; below 0 a row is padding, of which nothing is kept.
    Raises: ShapeError, naming the argument. A slot from N on is an error here; the kernel takes it for padding.
    """
    _check_scatter(store, slots, states)
    rows = (slots >= 0).nonzero().squeeze(-1)
    for kept, state in zip(store, states, strict=True):
        kept.index_copy_(0, slots[rows], state.index_select(0, rows))


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


@build.launcher_of(scatter_state)
def launch_scatter_state(store: Sequence[Tensor], slots: Tensor, states: Sequence[Tensor]) -> None:
    """`scatter_state` in one launch. Raises: ShapeError; ArgumentError for another dtype or device."""
    num_slots = _check_scatter(store, slots, states)
    device = leaves.on_one_device(("store", store), ("states", states), slots=(slots, torch.int64))
    entries = [
        (state.data_ptr(), kept.data_ptr(), 0, leaves.row_bytes(state))
        for kept, state in zip(store, states, strict=True)
    ]
    rows = slots.numel()
    for table, grid in leaves.tables(entries, rows):
        build.launch(
            SOURCE, "scatter_state", device, grid, table, build.pointer(slots),
            ctypes.c_int64(num_slots), ctypes.c_int64(rows),
        )  # fmt: skip


def _check_gather(
    store: Sequence[Tensor], initial: Sequence[Tensor], slots: Tensor, first: Tensor, into: Sequence[Tensor]
) -> int:  # fmt: skip
    """Returns: N, 0 without leaves."""
    rows = check_shapes(slots=(slots, "B"), first=(first, "B"))["B"]
    sizes = leaves.check_leaves(store=(store, "N"), initial=(initial, "1"), into=(into, str(rows)))
    return sizes.get("N", 0)


def _check_scatter(store: Sequence[Tensor], slots: Tensor, states: Sequence[Tensor]) -> int:
    rows = check_shapes(slots=(slots, "B"))["B"]
    return leaves.check_leaves(store=(store, "N"), states=(states, str(rows))).get("N", 0)
