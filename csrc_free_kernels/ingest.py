"""Ready rows out of the slab, into the batch and into replay at once: all leaves in one launch of ingest.cu, and the twin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from csrc_free_kernels import build, leaves
from csrc_free_kernels.append import open_rows
from csrc_free_kernels.shapes import check_shapes

SOURCE = leaves.source("ingest")


@torch.no_grad()
def ingest_rows(
    slab: Sequence[Tensor], into: Sequence[Tensor], storage: Sequence[Tensor], slots: Tensor, block: Tensor, offset: Tensor,
    block_length: int,
) -> None:  # fmt: skip
    """Copies the slab's rows `slots` into the batch, and into the row of replay that the slot's open block takes next.

    Args:
        slab: leaves [N, ...] of any dtype, on the host (for the kernel: pinned and mapped) or on the device.
        into: leaves [B, ...] on the device, which are filled. storage: leaves [K * L, ...] there, which are changed; or none, ().
        slots: int64 [B], each at most once; below 0 a row is padding, which is left as it is.
        block, offset: int64 [N], the slot's open block and its next row there; block below 0: nothing of the slot is kept.
        block_length: L.
    Raises: ShapeError, naming the argument. A slot or a row that is not there is an error here; the kernel leaves it out.
    """
    _check(slab, into, storage, slots, block, offset)
    rows = (slots >= 0).nonzero().squeeze(-1)
    kept, at = open_rows(slots, block, offset, block_length)
    for i, (source, out) in enumerate(zip(slab, into, strict=True)):
        ready = source.index_select(0, slots[rows].to(source.device)).to(out.device)
        out.index_copy_(0, rows, ready)
        if storage:
            storage[i].index_copy_(0, at, out.index_select(0, kept))


@build.launcher_of(ingest_rows)
def launch_ingest_rows(
    slab: Sequence[Tensor], into: Sequence[Tensor], storage: Sequence[Tensor], slots: Tensor, block: Tensor, offset: Tensor,
    block_length: int,
) -> None:  # fmt: skip
    """`ingest_rows` in one launch, which reads each byte of the slab once. Raises: ShapeError; ArgumentError for another dtype or
    device, and for a slab that is not pinned."""
    num_rows = _check(slab, into, storage, slots, block, offset)
    device = leaves.on_one_device(
        ("into", into), ("storage", storage), slots=(slots, torch.int64), block=(block, torch.int64), offset=(offset, torch.int64),
    )  # fmt: skip
    entries = []
    for i, (source, out) in enumerate(zip(slab, into, strict=True)):
        second = storage[i].data_ptr() if storage else 0
        entries.append((_address(i, source, device), out.data_ptr(), second, leaves.row_bytes(out)))
    opened = leaves.OpenRows(
        slots.data_ptr(), block.data_ptr(), offset.data_ptr(), block.numel(), block_length, num_rows
    )
    for table, grid in leaves.tables(entries, slots.numel()):
        build.launch(
            SOURCE, "ingest_rows", device, grid, table, opened, ctypes.c_int64(slots.numel())
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
    slab: Sequence[Tensor], into: Sequence[Tensor], storage: Sequence[Tensor], slots: Tensor, block: Tensor, offset: Tensor,
) -> int:  # fmt: skip
    """Returns: K * L, 0 without storage."""
    rows, count = (
        check_shapes(slots=(slots, "B"), block=(block, "N"), offset=(offset, "N"))[x] for x in "BN"
    )
    leaves.check_leaves(slab=(slab, str(count)), into=(into, str(rows)))
    if not storage:
        return 0
    return leaves.check_leaves(storage=(storage, "rows"), into=(into, str(rows))).get("rows", 0)
