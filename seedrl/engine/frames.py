"""The last frames of every slot, for environments that send single ones: stacks are made where the policy acts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class FrameHistory:
    """The last F frames of each slot's episode, on the device, and stacks of them.

    As Gymnasium's FrameStackObservation does with padding "reset", the episode's first frame stands for those before it. Nothing here looks at a
    number or makes one of the host's, so that a CUDA graph can hold it.

    Args: frames: of each leaf one, [...], which stands for those that no slot has sent yet.
    """

    def __init__(self, frames: Sequence[Tensor], num_slots: int, stack: int, device: torch.device) -> None:  # fmt: skip
        self._stack, self._nobody = stack, num_slots  # rows of padding have a place of their own
        self._age = torch.zeros(
            num_slots + 1, dtype=torch.int64, device=device
        )  # frames of the episode before the newest
        self._memory = [
            frame.to(device).repeat((num_slots + 1) * stack, *(1 for _ in frame.shape))
            for frame in frames
        ]  # a slot's are a ring: the episode's frame number k at k % F
        self._back = torch.arange(stack - 1, -1, -1, device=device)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in (self._age, *self._memory))

    def push(self, slots: Tensor, first: Tensor, frames: Sequence[Tensor], into: Sequence[Tensor]) -> None:  # fmt: skip
        """Takes in a frame of each slot and fills `into` with the stacks, the newest frame last.

        Args: slots: int64 [B], each at most once but for those below 0, which are nobody's. first: bool [B], the frame begins an episode.
            frames: [B, ...] of each leaf. into: contiguous [B, F, ...] of each.
        """
        slots = slots.masked_fill(slots < 0, self._nobody)
        age = (self._age.index_select(0, slots) + 1).masked_fill(first, 0)
        self._age.index_copy_(0, slots, age)
        ring = slots * self._stack
        newest = ring + age % self._stack
        shown = (age.unsqueeze(1) - self._back).clamp_min(0)  # numbers in the episode
        index = (ring.unsqueeze(1) + shown % self._stack).flatten()
        for memory, frame, stacks in zip(self._memory, frames, into, strict=True):
            memory.index_copy_(0, newest, frame)
            torch.index_select(memory, 0, index, out=stacks.flatten(0, 1))
