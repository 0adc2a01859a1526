"""The slab: one sealed memfd that holds a row per slot and the control words of every group.

Bytes, in this order, each array from a multiple of 128 bytes (a pair of cache lines, as prefetched together):

    control   int64 [2, 16]     door_epoch | stop phase     one line each; written by the door, by the supervisor
    lease     int64 [G, 16]     generation leased start size evaluation worker base said_bye   written by the door
    drained   int64 [G, 16]     generation                                              written by the engine
    asked     int64 [G, 16]     sequence published_ns rtt_ns step_ns at_seat            written by the worker
    answered  int64 [G, 16]     sequence                                                written by the engine
    per slot: observation leaves, reward, flags [N, 4], episode_return, episode_length, stats, mask, action leaves

No word has two writers. A row is valid from the moment its group's `asked` sequence is one more than `answered`, and
belongs to the engine until it answers; the actions are valid once `answered` equals what the worker asked. Payload is
written first and the sequence number last: x86-64 keeps stores in order, and `host.require_ordered_stores` refuses other
machines. A sequence number is `base + k`, with `base = generation << 32`, so that what a dead worker writes late is never
taken for a request of the worker that has its seat now.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from seedrl.spec import EnvSpec

LINE_WORDS = 16  # 128 bytes: adjacent-line prefetch makes a pair of lines travel together
ALIGN_BYTES = 128
FLAGS = ("terminated", "truncated", "first", "interrupted")
GENERATION_SHIFT = 32

# words of a line
DOOR_LINE, SUPERVISOR_LINE = 0, 1  # lines of `control`
DOOR_EPOCH = 0
STOP, PHASE = 0, 1
GENERATION, LEASED, START, SIZE, EVALUATION, WORKER, BASE, SAID_BYE = range(8)
SEQUENCE, PUBLISHED_NS, RTT_NS, STEP_NS, AT_SEAT = range(5)


class Phase(IntEnum):
    """What the supervisor lets the engine do."""

    WAIT = 0  # answer nobody yet
    ACT = 1
    EVALUATE = 2  # training is over: only evaluation slots are answered
    EXIT = 3
    PAUSED = 4  # answer nobody; what is open stays open
    FINISH = 5  # answer only those whose unroll is not full yet


@dataclass(frozen=True)
class SlabLayout:
    """Names, dtypes, shapes and offsets; the same on both sides of the door, as it follows from the spec alone."""

    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...]
    nbytes: int
    num_slots: int
    num_groups: int

    @staticmethod
    def of(spec: EnvSpec, num_slots: int, num_groups: int) -> SlabLayout:
        wanted: list[tuple[str, str, tuple[int, ...]]] = [("control", "int64", (2, LINE_WORDS))]
        wanted += [
            (name, "int64", (num_groups, LINE_WORDS))
            for name in ("lease", "drained", "asked", "answered")
        ]
        wanted += [
            (f"obs/{leaf.name}", leaf.dtype, (num_slots, *leaf.shape)) for leaf in spec.observation
        ]
        wanted += [("reward", "float32", (num_slots,)), ("flags", "uint8", (num_slots, len(FLAGS)))]
        wanted += [
            ("episode_return", "float64", (num_slots,)),
            ("episode_length", "int64", (num_slots,)),
        ]
        wanted += [("stats", "float32", (num_slots, len(spec.stats)))]
        wanted += [("mask", "uint8", (num_slots, spec.mask_size))]
        wanted += [
            (f"action/{leaf.name}", leaf.dtype, (num_slots, *leaf.shape)) for leaf in spec.action
        ]
        arrays, at = [], 0
        for name, dtype, shape in wanted:
            arrays.append((name, dtype, shape, at))
            at += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGN_BYTES) * ALIGN_BYTES
        return SlabLayout(tuple(arrays), max(at, ALIGN_BYTES), num_slots, num_groups)


class Slab:
    """Views of the slab's arrays, all of them of the whole: `obs[leaf]` [N, ...], `reward` [N], `flags` [N, 4], ..."""

    def __init__(self, memory: mmap.mmap | np.ndarray, layout: SlabLayout) -> None:
        self.layout = layout
        self.obs: dict[str, np.ndarray] = {}
        self.action: dict[str, np.ndarray] = {}
        arrays = {}
        for name, dtype, shape, offset in layout.arrays:
            array: np.ndarray = np.ndarray(shape, dtype, memory, offset)  # type: ignore[call-overload]
            kind, _, leaf = name.partition("/")
            if kind == "obs":
                self.obs[leaf] = array
            elif kind == "action":
                self.action[leaf] = array
            else:
                arrays[name] = array
        self.control, self.lease, self.drained = (
            arrays["control"],
            arrays["lease"],
            arrays["drained"],
        )
        self.asked, self.answered = arrays["asked"], arrays["answered"]
        self.reward, self.flags = arrays["reward"], arrays["flags"]
        self.episode_return, self.episode_length = (
            arrays["episode_return"],
            arrays["episode_length"],
        )
        self.stats, self.mask = arrays["stats"], arrays["mask"]

    def fill(self, spec: EnvSpec) -> None:
        """Makes rows that no environment has written yet observations of their spaces, with every action legal: the policy may be tried on them."""
        for leaf in spec.observation:
            if any(leaf.start):
                self.obs[leaf.name][:] = np.reshape(leaf.start, leaf.shape)
        self.mask[:] = 1

    def group_view(self, start: int, size: int, group: int = 0) -> GroupView:
        """The rows of one group, as its worker sees them."""
        return GroupView(self, slice(start, start + size), group)


class GroupView:
    """One group's rows: what its worker writes, and the actions that it reads. `E` is the group's size.

    obs[leaf] [E, ...]; reward float32 [E]; terminated, truncated, first, interrupted uint8 [E];
    episode_return float64 [E]; episode_length int64 [E]; stats float32 [E, S]; mask uint8 [E, M] or None;
    action[leaf] [E, ...]; at_seat int64 [1]: the seat whose environment is being stepped.
    """

    def __init__(self, slab: Slab, rows: slice, group: int) -> None:
        self.obs = {name: array[rows] for name, array in slab.obs.items()}
        self.action = {name: array[rows] for name, array in slab.action.items()}
        # a memoryview: set in a third of an array's time
        self.at_seat = memoryview(slab.asked[group, AT_SEAT : AT_SEAT + 1])  # type: ignore[arg-type]
        self.reward = slab.reward[rows]
        flags = slab.flags[rows]
        self.flags = flags
        self.terminated, self.truncated, self.first, self.interrupted = (
            flags[:, i] for i in range(4)
        )
        self.episode_return, self.episode_length = (
            slab.episode_return[rows],
            slab.episode_length[rows],
        )
        self.stats = slab.stats[rows]
        self.mask = slab.mask[rows] if slab.mask.shape[1] else None


def own_rows(spec: EnvSpec, sizes: list[int]) -> list[GroupView]:
    """Rows of groups of these sizes in this process's own memory, zeroed: what crosses the network, or a trial."""
    layout = SlabLayout.of(spec, sum(sizes), len(sizes))
    slab = Slab(np.zeros(layout.nbytes, np.uint8), layout)
    starts = np.cumsum([0, *sizes]).tolist()
    return [
        slab.group_view(start, size, group)
        for group, (start, size) in enumerate(zip(starts, sizes, strict=False))
    ]
