"""Ready rows out of the slab, into the batch and into replay at once: all leaves in one launch of ingest.cu, and the twin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from csrc_free_kernels import build, leaves
from csrc_free_kernels.shapes import check_shapes

SOURCE = leaves.source("ingest")


class _Ingest(ctypes.Structure):
    _fields_ = (
        ("slots", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("num_slots", ctypes.c_int64), ("num_rows", ctypes.c_int64),
    )  # fmt: skip


@torch.no_grad()
def ingest_rows(
    slab: Sequence[Tensor], into: Sequence[Tensor], storage: Sequence[Tensor], slots: Tensor, rows: Tensor
) -> None:  # fmt: skip
    """Copies the slab's rows `slots` into the batch, and to `rows` of replay.

    Args:
        slab: leaves [N, ...] of any dtype, on the host (for the kernel: pinned and mapped) or on the device.
        into: leaves [B, ...] on the device, which are filled. storage: leaves [K * L, ...] there, which are changed; or none, ().
        slots: int64 [B]; below 0 a row is padding, which is left as it is.
        rows: int64 [B], each at most once; below 0 the row is not kept.
    Raises: ShapeError, naming the argument. A slot or a row that is not there is an error here; the kernel leaves it out.
    """
    _check(slab, into, storage, slots, rows)
    filled, kept = slots >= 0, (slots >= 0) & (rows >= 0)
    for i, (source, out) in enumerate(zip(slab, into, strict=True)):
        out[filled] = source.index_select(0, slots[filled].to(source.device)).to(out.device)
        if storage:
            storage[i].index_copy_(0, rows[kept], out[kept])


@build.launcher_of(ingest_rows)
def launch_ingest_rows(
    slab: Sequence[Tensor], into: Sequence[Tensor], storage: Sequence[Tensor], slots: Tensor, rows: Tensor
) -> None:  # fmt: skip
    """`ingest_rows` in one launch, which reads each byte of the slab once. Raises: ShapeError; ArgumentError for another dtype or
    device, and for a slab that is not pinned."""
    num_slots, num_rows = _check(slab, into, storage, slots, rows)
    device = leaves.on_one_device(
        ("into", into), ("storage", storage), slots=(slots, torch.int64), rows=(rows, torch.int64),
    )  # fmt: skip
    entries = []
    for i, (source, out) in enumerate(zip(slab, into, strict=True)):
        second = storage[i].data_ptr() if storage else 0
        entries.append((_address(i, source, device), out.data_ptr(), second, leaves.row_bytes(out)))
    ingest = _Ingest(slots.data_ptr(), rows.data_ptr(), num_slots, num_rows)
    for table, grid in leaves.tables(entries, slots.numel()):
        build.launch(
            SOURCE, "ingest_rows", device, grid, table, ingest, ctypes.c_int64(slots.numel())
        )


def _address(i: int, source: Tensor, device: torch.device) -> int:
    """Where the device finds leaf i of the slab."""
    if source.device == device and device.type != "cpu":
        build.check_arguments(**{f"slab[{i}]": (source, None)})
        return source.data_ptr()
    found = build.backend()
    assert found is not None, "a launcher is called only where kernel_or_twin chose it"
    at = None
    if source.device.type == "cpu" and source.is_contiguous():
        at = found.mapped(source) if source.numel() else 0
    if at is None:
        raise build.ArgumentError(
            what=f"slab[{i}] is not pinned memory that {device} can read, or not contiguous", where="a CUDA kernel's argument",
            do="register the slab with cudaHostRegister, mapped, or pass tensors made by pin_memory()",
        )  # fmt: skip
    return at


def _check(
    slab: Sequence[Tensor], into: Sequence[Tensor], storage: Sequence[Tensor], slots: Tensor, rows: Tensor
) -> tuple[int, int]:  # fmt: skip
    """Returns: N, and K * L or 0 without storage."""
    count = str(check_shapes(slots=(slots, "B"), rows=(rows, "B"))["B"])
    slots_there = leaves.check_leaves(slab=(slab, "N"), into=(into, count)).get("N", 0)
    if not storage:
        return slots_there, 0
    rows_there = leaves.check_leaves(storage=(storage, "rows"), into=(into, count)).get("rows", 0)
    return slots_there, rows_there
