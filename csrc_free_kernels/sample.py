"""Actions drawn from logits, with their log-probabilities and entropies: one launch of sample.cu, and the twin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from csrc_free_kernels import build
from csrc_free_kernels.philox import random_words
from csrc_free_kernels.shapes import check_shapes
from seedrl.errors import ShapeError

ILLEGAL = -1e9  # as a logit, as in policy/heads.py
MAX_BRANCHES = 256
SOURCE = build.Source(
    "sample", (("ILLEGAL", f"{ILLEGAL}f"), ("MAX_BRANCHES", str(MAX_BRANCHES))), ("philox",)
)
# of Cephes' logf, from the highest power down
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
    -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


class Sampled(NamedTuple):
    """`actions` int64 [B, C], counted from 0; `log_prob` and `entropy` float32 [B], sums over the C branches."""

    actions: Tensor
    log_prob: Tensor
    entropy: Tensor


class _Branches(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("size", ctypes.c_uint32 * MAX_BRANCHES))


@torch.no_grad()
def sample_discrete(
    logits: Tensor, mask: Tensor | None, branches: Sequence[int], seed: int, slots: Tensor, step: Tensor,
    greedy: Tensor | None = None,
) -> Sampled:  # fmt: skip
    """One choice in each of C branches, by the Gumbel trick, with noise that depends on seed, slot, step and column alone.

    Noise is Philox-4x32-10 under the key `seed`: column j has word j % 4 of the counter (slot, j // 4, step, step >> 32). Up to the
    choice all arithmetic is that of single float32 operations, so that every device draws the same actions from the same logits.

    Args:
        logits: float32 [B, P]. mask: uint8 [B, P], 0 where an action is illegal, or None; a branch without a legal action is uniform.
        branches: the sizes of the branches, of sum P. seed: 64 bits.
        slots: int64 [B], of which the low 32 bits count. step: int64 [1], another one each time.
        greedy: bool [B], rows that take the likeliest action, or None.
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    _check(logits, mask, branches, slots, step, greedy)
    if mask is not None:
        logits = logits.masked_fill(mask == 0, ILLEGAL)
    noise = _gumbel(_words(slots, step, logits.shape[1], seed))
    if greedy is not None:
        noise = noise.masked_fill(greedy.unsqueeze(1), 0.0)
    actions, log_probs, entropies = [], [], []
    for part, added in zip(logits.split(list(branches), 1), noise.split(list(branches), 1), strict=True):  # fmt: skip
        shifted = part - part.amax(1, keepdim=True)
        chosen = (shifted + added).argmax(1, keepdim=True)
        log_prob = torch.log_softmax(shifted, 1)
        actions.append(chosen)
        log_probs.append(log_prob.gather(1, chosen).squeeze(1))
        entropies.append(-(log_prob.exp() * log_prob).sum(1))
    return Sampled(torch.cat(actions, 1), torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0))  # fmt: skip


def _words(slots: Tensor, step: Tensor, columns: int, seed: int) -> Tensor:
    """int64 [B, columns]."""
    fours = -(-columns // 4)
    shape = (slots.numel(), fours)
    parts = (
        slots.unsqueeze(1).expand(shape), torch.arange(fours, device=slots.device).expand(shape), step.expand(shape),
        (step >> 32).expand(shape),
    )  # fmt: skip
    counters = torch.stack(parts, -1).view(-1, 4)
    return random_words(counters, seed).view(slots.numel(), 4 * fours)[:, :columns]


def _gumbel(words: Tensor) -> Tensor:
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -_log(-_log(uniform))


def _log(x: Tensor) -> Tensor:
    """The logarithm of normal float32 numbers above 0, in the order of operations of plain_log in sample.cu."""
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 126).float()
    m = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32)
    low = m < 0.70710678
    exponent, m = exponent - low.float(), torch.where(low, m + m, m) - 1.0
    square = m * m
    y = torch.full_like(m, _LOG[0])
    for factor in _LOG[1:]:
        y = y * m
        y = y + factor
    y = y * m * square
    y = y + exponent * -2.12194440e-4
    y = y + square * -0.5
    return m + y + exponent * 0.693359375


@build.launcher_of(sample_discrete)
def launch_sample_discrete(
    logits: Tensor, mask: Tensor | None, branches: Sequence[int], seed: int, slots: Tensor, step: Tensor,
    greedy: Tensor | None = None,
) -> Sampled:  # fmt: skip
    """`sample_discrete` in one launch. Raises: ShapeError; ArgumentError for another dtype or device."""
    _check(logits, mask, branches, slots, step, greedy)
    given: dict[str, tuple[Tensor, torch.dtype | None]] = {
        "logits": (logits, torch.float32), "slots": (slots, torch.int64), "step": (step, torch.int64),
    }  # fmt: skip
    if mask is not None:
        given["mask"] = (mask, torch.uint8)
    if greedy is not None:
        given["greedy"] = (greedy, torch.bool)
    device = build.check_arguments(**given)
    if len(branches) > MAX_BRANCHES:
        raise build.ArgumentError(
            what=f"branches has {len(branches)} sizes; a launch takes {MAX_BRANCHES}", where="a CUDA kernel's argument",
            do="sample in parts",
        )  # fmt: skip
    (rows, width), table = logits.shape, _Branches(len(branches))
    table.size[: len(branches)] = list(branches)
    actions = slots.new_empty(rows, len(branches))
    log_prob, entropy = logits.new_empty(rows), logits.new_empty(rows)
    build.launch(
        SOURCE, "sample_discrete", device, build.blocks_for(rows, 64), build.pointer(logits), build.pointer(mask), table,
        ctypes.c_uint64(seed), build.pointer(slots), build.pointer(step), build.pointer(greedy), ctypes.c_int64(rows),
        ctypes.c_int64(width), build.pointer(actions), build.pointer(log_prob), build.pointer(entropy), threads=64,
    )  # fmt: skip
    return Sampled(actions, log_prob, entropy)


def _check(
    logits: Tensor, mask: Tensor | None, branches: Sequence[int], slots: Tensor, step: Tensor, greedy: Tensor | None
) -> None:  # fmt: skip
    check_shapes(
        logits=(logits, f"B {sum(branches)}"), slots=(slots, str(logits.shape[0])), step=(step, "1")
    )
    if mask is not None:
        check_shapes(logits=(logits, "B P"), mask=(mask, "B P"))
    if greedy is not None:
        check_shapes(slots=(slots, "B"), greedy=(greedy, "B"))
    if min(branches, default=0) < 1:
        raise ShapeError(
            what=f"branches is {list(branches)}", do="give the size of each branch, 1 or more"
        )
