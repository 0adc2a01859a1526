"""Draws in proportion to priorities (Schaul et al. 2016, arXiv 1511.05952, appendix B.2.1): launches of priority.cu, and the twins.

Two levels are stored: a priority for each place, and the sum of each `CHUNK` of them. Their binary trees are those of
`seedrl.store.sum_tree`, whose draws these are; an update sums a chunk anew, so that errors do not add up.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from csrc_free_kernels import build
from csrc_free_kernels.philox import random_words
from csrc_free_kernels.shapes import check_shapes
from seedrl.errors import ShapeError

CHUNK, MAX_CHUNKS = 1024, 2048  # 32 KiB of shared memory hold the upper tree
THREADS = 256
_LARGEST = torch.finfo(torch.float32).max
_STREAM = 0x80000000  # second word of the counter: no draw of `sample` has it
SOURCE = build.Source(
    "priority",
    (
        ("CHUNK", str(CHUNK)), ("MAX_CHUNKS", str(MAX_CHUNKS)), ("THREADS", str(THREADS)), ("LARGEST", f"{_LARGEST!r}f"),
        ("STREAM", f"{_STREAM}u"),
    ),
    ("philox",),
)  # fmt: skip


class Places(NamedTuple):
    """`places` int64 [n]; `weights` float32 [n], (items * p)^-beta, over the largest of the batch unless that was not asked for."""

    places: Tensor
    weights: Tensor


def empty(capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Priorities float32 [capacity] and sums float64 [chunks], all 0."""
    chunks = -(-capacity // CHUNK)
    return torch.zeros(capacity, device=device), torch.zeros(chunks, dtype=torch.float64, device=device)  # fmt: skip


@torch.no_grad()
def set_priorities(priorities: Tensor, sums: Tensor, places: Tensor, values: Tensor) -> None:
    """Gives places their priorities, in place.

    Args:
        priorities: float32 [N], sums: float64 [chunks]: those of `empty`, which are changed.
        places: int64 [n]; where a place stands twice the last counts, and one that is not there is left out.
        values: float32 [n]; what is not above 0 is 0, and the infinite is float32's largest.
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    _check(priorities, sums)
    check_shapes(places=(places, "n"), values=(values, "n"))
    there = (places >= 0) & (places < priorities.numel())
    again = (places.unsqueeze(0) == places.unsqueeze(1)).triu(1).any(1)
    taken = (there & ~again).nonzero().squeeze(-1)
    given = values.nan_to_num(nan=0.0, posinf=_LARGEST).clamp_min(0.0)
    priorities.index_copy_(0, places[taken], given[taken])
    touched = (places[taken] // CHUNK).unique()
    sums.index_copy_(0, touched, _tree(_chunks(priorities, touched))[0].squeeze(-1))


@torch.no_grad()
def draw_places(
    priorities: Tensor, sums: Tensor, count: int, seed: int, step: Tensor, items: int, beta: float, over_batch: bool = True,
) -> Places:  # fmt: skip
    """Places in proportion to their priorities, stratified: one of each of `count` equal parts of the sum.

    Number i is drawn by two words of Philox-4x32-10 under the key `seed`, of the counter (i, 2^31, step, step >> 32).

    Args:
        priorities: float32 [N], sums: float64 [chunks]: those of `empty`. step: int64 [1], another one each time.
        items: places that could be drawn. beta: how far weights correct for it, from 0 to 1.
        over_batch: whether weights are divided by their largest.
    Returns: places 0 with weights 0 where all priorities are 0.
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    _check(priorities, sums)
    check_shapes(step=(step, "1"))
    number = torch.arange(count, device=step.device)
    counters = torch.stack((number, torch.full_like(number, _STREAM), step.expand(count), (step >> 32).expand(count)), -1)  # fmt: skip
    words = random_words(counters, seed)
    uniform = ((words[:, 0] >> 5).double() * 2.0**26 + (words[:, 1] >> 6).double()) * 2.0**-53
    top = torch.nn.functional.pad(sums, (0, _width(sums.numel()) - sums.numel())).unsqueeze(0)
    levels = _tree(top)
    total = levels[0][0, 0]
    chunk, left = _descend(levels, (number.double() + uniform) / count * total)
    within, _ = _descend(_tree(_chunks(priorities, chunk)), left)
    places = chunk * CHUNK + within
    probabilities = priorities[places].double() / total
    weights = torch.where(total > 0, (items * probabilities) ** -beta, torch.zeros_like(uniform))
    if over_batch and count:
        largest = weights.max()
        weights = weights / torch.where(largest > 0, largest, torch.ones_like(largest))
    return Places(places, weights.float())


def _chunks(priorities: Tensor, chunks: Tensor) -> Tensor:
    """float64 [m, CHUNK] of chunks int64 [m]; 0 behind the last place."""
    at = chunks.unsqueeze(1) * CHUNK + torch.arange(CHUNK, device=chunks.device)
    inside = at < priorities.numel()
    return priorities[at.clamp_max(max(priorities.numel() - 1, 0))].double() * inside


def _tree(leaves: Tensor) -> list[Tensor]:
    """The levels over leaves [m, width], from the root [m, 1] down to the leaves: each node the sum of its two children."""
    levels = [leaves]
    while levels[0].shape[1] > 1:
        levels.insert(0, levels[0][:, 0::2] + levels[0][:, 1::2])
    return levels


def _descend(levels: list[Tensor], left: Tensor) -> tuple[Tensor, Tensor]:
    """In which leaf of its tree each of `left` float64 [m] falls, int64 [m], and what of it is the leaf's own."""
    at = torch.zeros_like(left, dtype=torch.int64)
    for level in levels[1:]:
        nodes = level.expand(left.numel(), -1)
        low, high = (nodes.gather(1, (2 * at + side).unsqueeze(1)).squeeze(1) for side in (0, 1))
        # never into a part that is empty, where rounding would lead
        right = (left >= low) & (high > 0)
        left = torch.where(right, left - low, left)
        at = 2 * at + right
    return at, left


def _width(count: int) -> int:
    """The least power of two of at least `count`."""
    return 1 << max(0, count - 1).bit_length()


@build.launcher_of(set_priorities)
def launch_set_priorities(priorities: Tensor, sums: Tensor, places: Tensor, values: Tensor) -> None:
    """`set_priorities` in two launches. Raises: ShapeError; ArgumentError for another dtype or device."""
    _check(priorities, sums)
    count = check_shapes(places=(places, "n"), values=(values, "n"))["n"]
    device = build.check_arguments(
        priorities=(priorities, torch.float32), sums=(sums, torch.float64), places=(places, torch.int64), values=(values, torch.float32),
    )  # fmt: skip
    capacity = ctypes.c_int64(priorities.numel())
    build.launch(
        SOURCE, "write_priorities", device, build.blocks_for(count), *map(build.pointer, (priorities, places, values)),
        ctypes.c_int64(count), capacity,
    )  # fmt: skip
    build.launch(
        SOURCE, "sum_chunks", device, count, *map(build.pointer, (priorities, sums, places)), capacity, threads=THREADS,
    )  # fmt: skip


@build.launcher_of(draw_places)
def launch_draw_places(
    priorities: Tensor, sums: Tensor, count: int, seed: int, step: Tensor, items: int, beta: float, over_batch: bool = True,
) -> Places:  # fmt: skip
    """`draw_places` in two launches. Raises: ShapeError; ArgumentError for another dtype or device."""
    _check(priorities, sums)
    check_shapes(step=(step, "1"))
    device = build.check_arguments(
        priorities=(priorities, torch.float32), sums=(sums, torch.float64), step=(step, torch.int64)
    )
    places, raw = step.new_empty(count), sums.new_empty(count)
    weights = priorities.new_empty(count)
    build.launch(
        SOURCE, "draw_places", device, count, build.pointer(priorities), build.pointer(sums), ctypes.c_int64(priorities.numel()),
        ctypes.c_int64(_width(sums.numel())), ctypes.c_uint64(seed), build.pointer(step), ctypes.c_int64(items), ctypes.c_double(beta),
        build.pointer(places), build.pointer(raw), threads=THREADS,
    )  # fmt: skip
    build.launch(
        SOURCE, "scale_weights", device, min(count, 1), build.pointer(raw), ctypes.c_int64(count), ctypes.c_bool(over_batch),
        build.pointer(weights), threads=THREADS,
    )  # fmt: skip
    return Places(places, weights)


def _check(priorities: Tensor, sums: Tensor) -> None:
    capacity = check_shapes(priorities=(priorities, "N"))["N"]
    check_shapes(sums=(sums, str(-(-capacity // CHUNK))))
    if not 0 < sums.numel() <= MAX_CHUNKS:
        raise ShapeError(
            what=f"priorities has {capacity} places; it must have 1 to {CHUNK * MAX_CHUNKS}", do="keep fewer, or several of these",
        )  # fmt: skip
