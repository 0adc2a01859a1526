"""Unrolls out of the rows of replay, frames stacked and cast as they are read: launches of unroll.cu, and the twins."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from csrc_free_kernels import build, leaves
from csrc_free_kernels.shapes import check_shapes
from seedrl.errors import ShapeError

SOURCE = leaves.source("unroll")
FRAME_DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


class _Stacks(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("frames", "rows", "first")),
        *((name, ctypes.c_int64) for name in ("num_rows", "frame_bytes", "history", "columns", "stack")),
        ("width", ctypes.c_uint32),
    )  # fmt: skip


@torch.no_grad()
def gather_rows(storage: Sequence[Tensor], rows: Tensor, into: Sequence[Tensor]) -> None:
    """Copies rows of every leaf: `into[i][r, b] = storage[i][rows[r, b]]`.

    Args:
        storage: leaves [K * L, ...] of any dtype. into: leaves [R, B, ...], which are filled.
        rows: int64 [R, B], block * L + offset of each row.
    Raises: ShapeError, naming the argument. A row that is not there is an error here; the kernel leaves it out.
    """
    _check_rows(storage, rows, into)
    for kept, out in zip(storage, into, strict=True):
        out.copy_(kept.index_select(0, rows.flatten()).view_as(out))


@torch.no_grad()
def gather_frames(frames: Tensor, rows: Tensor, first: Tensor, into: Tensor, scale: float = 1.0) -> None:  # fmt: skip
    """Rebuilds each row's stack of the last F frames from frames that are stored once, cast and scaled on the way.

    As Gymnasium's FrameStackObservation does with padding "reset", frames before the episode's first are that first frame; and as
    there is none before the first of `rows`, that one is repeated too. The newest frame is the last.

    Args:
        frames: uint8 [K * L, ...], a frame of every row.
        rows: int64 [H + R, B]: H rows of history (F - 1 of them where stacks are to be whole), then those that are wanted.
        first: bool [H + R, B], the row begins an episode.
        into: [R, B, F, ...], which is filled: uint8, bfloat16, float16 or float32. scale: multiplies, in float32, where `into` is not uint8.
    Raises: ShapeError, naming the argument. A row that is not there is an error here; the kernel leaves it out.
    """
    history, stack = _check_frames(frames, rows, first, into)
    at = torch.arange(history, rows.shape[0], device=rows.device).unsqueeze(1)
    at = at.expand(-1, rows.shape[1])
    stays = first.clone()
    stays[:1] = True
    for place in range(stack - 1, -1, -1):
        picked = frames[rows.gather(0, at)]
        into[:, :, place] = picked if into.dtype == torch.uint8 else picked.float() * scale
        at = torch.where(stays.gather(0, at), at, at - 1)


@build.launcher_of(gather_rows)
def launch_gather_rows(storage: Sequence[Tensor], rows: Tensor, into: Sequence[Tensor]) -> None:
    """`gather_rows` in one launch. Raises: ShapeError; ArgumentError for another dtype or device."""
    num_rows = _check_rows(storage, rows, into)
    device = leaves.on_one_device(("storage", storage), ("into", into), rows=(rows, torch.int64))
    entries = [
        (kept.data_ptr(), out.data_ptr(), 0, leaves.row_bytes(kept))
        for kept, out in zip(storage, into, strict=True)
    ]
    for table, grid in leaves.tables(entries, rows.numel()):
        build.launch(
            SOURCE, "gather_rows", device, grid, table, build.pointer(rows), ctypes.c_int64(num_rows), ctypes.c_int64(rows.numel()),
        )  # fmt: skip


@build.launcher_of(gather_frames)
def launch_gather_frames(frames: Tensor, rows: Tensor, first: Tensor, into: Tensor, scale: float = 1.0) -> None:  # fmt: skip
    """`gather_frames` in one launch. Raises: ShapeError; ArgumentError for another dtype or device."""
    history, stack = _check_frames(frames, rows, first, into)
    device = build.check_arguments(
        frames=(frames, torch.uint8),
        rows=(rows, torch.int64),
        first=(first, torch.bool),
        into=(into, None),
    )
    if into.dtype not in FRAME_DTYPES:
        raise build.ArgumentError(
            what=f"into is {into.dtype}; it must be one of {', '.join(map(str, FRAME_DTYPES))}", where="a CUDA kernel's argument",
            do="gather into one of these, and cast after",
        )  # fmt: skip
    if not into.numel():
        return
    frame_bytes, shades = leaves.row_bytes(frames), _shades(into.dtype, scale, device)
    width = min(4, leaves.width_of(frames.data_ptr(), frame_bytes))
    # a target's word is as many times larger as its dtype
    if into.data_ptr() % (4 * into.element_size()):
        width = 1
    stacks = _Stacks(
        frames.data_ptr(), rows.data_ptr(), first.data_ptr(), frames.shape[0], frame_bytes, history, rows.shape[1], stack, width,
    )  # fmt: skip
    threads = min(build.THREADS, 32 * build.blocks_for(frame_bytes // width, 32))
    build.launch(
        SOURCE, f"gather_frames_{8 * into.element_size()}", device, into.shape[:3].numel(),
        stacks, build.pointer(shades), build.pointer(into), threads=threads,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _shades(dtype: torch.dtype, scale: float, device: torch.device) -> Tensor:
    """What each of the 256 bytes becomes, by the twin's own arithmetic: [256]."""
    every = torch.arange(256, device=device)
    return every.to(torch.uint8) if dtype == torch.uint8 else (every.float() * scale).to(dtype)


def _check_rows(storage: Sequence[Tensor], rows: Tensor, into: Sequence[Tensor]) -> int:
    """Returns: K * L."""
    sizes = check_shapes(rows=(rows, "R B"))
    wanted = f"{sizes['R']} {sizes['B']}"
    return leaves.check_leaves(storage=(storage, "rows"), into=(into, wanted)).get("rows", 0)


def _check_frames(frames: Tensor, rows: Tensor, first: Tensor, into: Tensor) -> tuple[int, int]:
    """Returns: H and F."""
    sizes = check_shapes(rows=(rows, "HR B"), first=(first, "HR B"), frames=(frames, "rows ..."))
    stack = check_shapes(into=(into, f"R {sizes['B']} F ..."))
    history = sizes["HR"] - stack["R"]
    if history < 0 or into.shape[3:] != frames.shape[1:]:
        raise ShapeError(
            what=f"into has the shape {list(into.shape)}; it must be [R, {sizes['B']}, F, {', '.join(map(str, frames.shape[1:]))}]",
            where=f"with R of at most {sizes['HR']} rows", do="pass a frame's shape after the stack's size",
        )  # fmt: skip
    return history, stack["F"]
