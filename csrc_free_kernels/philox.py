"""Random words that depend on a key and a counter alone: Philox-4x32-10 in torch's integers, and the launcher of philox.cu.

Kernel and twin draw the same numbers on any device, in any order: what a slot draws at a step depends on nothing else.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from csrc_free_kernels import build
from csrc_free_kernels.shapes import check_shapes

SOURCE = build.Source("philox", headers=("philox",))
_MASK = 0xFFFFFFFF
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


@torch.no_grad()
def random_words(counters: Tensor, key: int) -> Tensor:
    """Four random words of 32 bits for each counter (Salmon et al. 2011, section 3.3).

    Args: counters: int64 [n, 4], of which the low 32 bits count. key: 64 bits.
    Returns: int64 [n, 4], each from 0 to 2^32 - 1.
    """
    check_shapes(counters=(counters, "n 4"))
    c0, c1, c2, c3 = (counters & _MASK).unbind(-1)
    low, high = key & _MASK, key >> 32 & _MASK
    for _ in range(10):
        (top0, bottom0), (top1, bottom1) = (
            _product(factor, c) for factor, c in zip(_FACTORS, (c0, c2), strict=True)
        )
        c0, c1, c2, c3 = top1 ^ c1 ^ low, bottom1, top0 ^ c3 ^ high, bottom0
        low, high = (low + _STEPS[0]) & _MASK, (high + _STEPS[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), -1)


def _product(factor: int, c: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of two words: in halves, as 64 bits with a sign do not hold it."""
    low = (c & 0xFFFF) * factor
    upper = (c >> 16) * factor + (low >> 16)
    return upper >> 16, (upper & 0xFFFF) << 16 | low & 0xFFFF


@build.launcher_of(random_words)
def launch_random_words(counters: Tensor, key: int) -> Tensor:
    """`random_words` in one launch. Raises: ShapeError; ArgumentError for another dtype or device."""
    count = check_shapes(counters=(counters, "n 4"))["n"]
    device = build.check_arguments(counters=(counters, torch.int64))
    into = torch.empty_like(counters)
    build.launch(
        SOURCE, "random_words", device, build.blocks_for(count), build.pointer(counters), ctypes.c_uint64(key),
        ctypes.c_int64(count), build.pointer(into),
    )  # fmt: skip
    return into
