"""Published weights: a double buffer in shared memory, written by the learner, read by the engine.

    header  int64 [16]     magic | format | 4 words of fingerprint | layout_bytes | buffer_bytes
    line    int64 [16]     published: how many versions so far; buffer (published & 1) is whole
    line    int64 [2, 16]  of each buffer: sequence (odd while it is written) | policy_version
    text    layout as JSON: [[name, dtype, shape], ...], padded to 64 bytes
    bytes   two buffers, each tensor from a multiple of 64 bytes

The writer fills the buffer that nobody is pointed at, then moves `published`. The reader copies the
buffer out in one piece and looks at its sequence again: it changes only when two versions were
published during one copy, and then the copy is thrown away and taken anew. So weights that are half
of one version and half of another never reach a module. There is one writer, and x86-64 keeps its
stores in order (`host.require_ordered_stores`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seedrl.errors import CheckpointError, RunError

_MAGIC = int.from_bytes(b"seedrl-w", "little")
_FORMAT = 1
_ALIGN_BYTES = 64
_LINE = 16  # words: 128 bytes, a line pair for each writer's word
_HEADER_BYTES = 4 * _LINE * 8
_PUBLISHED = _LINE
_SEQUENCE = (2 * _LINE, 3 * _LINE)
_VERSION = (2 * _LINE + 1, 3 * _LINE + 1)
_TRIES = 8

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype ("float32"), shape


@dataclass(frozen=True)
class WeightsLayout:
    """Where each tensor of a module's `state_dict` lies; it follows from names and shapes."""

    entries: tuple[Entry, ...]
    offsets: tuple[int, ...]
    buffer_bytes: int

    @staticmethod
    def of(module: nn.Module) -> WeightsLayout:
        """The layout of a module's parameters and persistent buffers, by sorted name."""
        return WeightsLayout.from_entries(entries_of(module.state_dict()))

    @staticmethod
    def from_entries(entries: tuple[Entry, ...]) -> WeightsLayout:
        offsets, at = [], 0
        for _, dtype, shape in entries:
            offsets.append(at)
            at += _aligned(math.prod(shape) * getattr(torch, dtype).itemsize)
        return WeightsLayout(entries, tuple(offsets), at)

    @property
    def text(self) -> bytes:
        return json.dumps(self.entries, separators=(",", ":")).encode()

    @property
    def fingerprint(self) -> bytes:
        """sha256 of the names, dtypes and shapes."""
        return hashlib.sha256(self.text).digest()

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that the header and both buffers take."""
        return _HEADER_BYTES + _aligned(len(self.text)) + 2 * self.buffer_bytes

    def views(self, memory: Any, start: int) -> list[Tensor]:
        """One tensor per entry, in the bytes of `memory` from `start` on."""
        tensors = []
        for (_, dtype_name, shape), offset in zip(self.entries, self.offsets, strict=True):
            dtype, count = getattr(torch, dtype_name), math.prod(shape)
            if count == 0:  # frombuffer refuses it
                tensors.append(torch.empty(shape, dtype=dtype))
                continue
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + offset)
            tensors.append(flat.view(shape))
        return tensors

    def tensors_of(self, module: nn.Module) -> list[Tensor]:
        """The module's own tensors, in this order, sharing its memory.

        Looked up each time: moving a module to another device or dtype gives it new ones.

        Raises: CheckpointError, naming the first that differs.
        """
        state: dict[str, Tensor] = module.state_dict()
        entries = entries_of(state)
        if entries != self.entries:
            _refuse(entries, self.entries)
        return [state[name] for name, _, _ in entries]


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """Name, dtype and shape of each tensor, by sorted name.

    Raises: RunError for what is no tensor (a module's own extra state).
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise RunError(
                what=f"'{name}' of the policy is a {type(tensor).__name__}, not a tensor",
                do="keep it in a buffer (register_buffer), or out of the state_dict",
            )
    names = sorted(tensors)
    return tuple((name, _dtype_name(tensors[name]), tuple(tensors[name].shape)) for name in names)


def differences(here: tuple[Entry, ...], there: tuple[Entry, ...]) -> list[str]:
    """What two sets of tensors do not share, a line for each name, in order of the names."""
    mine, others = ({name: rest for name, *rest in entries} for entries in (here, there))
    lines = []
    for name in sorted(mine.keys() | others.keys()):
        if mine.get(name) != others.get(name):
            lines.append(
                f"{name}: {_described(mine.get(name))} here, {_described(others.get(name))} there"
            )
    return lines


class Publisher:
    """The learner's side: publishes a module's tensors under growing versions.

    Args:
        buffer: writable bytes, zeros at first, `layout.nbytes` or more; all sides map it.
    """

    def __init__(self, buffer: Any, layout: WeightsLayout) -> None:
        self._layout = layout
        self._words = _words_of(buffer, layout)
        if (
            self._words[0] == _MAGIC
        ):  # a learner that was restarted goes on where the last one stopped
            _check_header(buffer, self._words, layout)
        start = _HEADER_BYTES + _aligned(len(layout.text))
        memoryview(buffer)[_HEADER_BYTES : _HEADER_BYTES + len(layout.text)] = layout.text
        digest = layout.fingerprint
        words = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
        for index, word in enumerate([_FORMAT, *words, len(layout.text), layout.buffer_bytes]):
            self._words[1 + index] = word
        self._words[0] = _MAGIC
        self._buffers = [layout.views(buffer, start + i * layout.buffer_bytes) for i in range(2)]

    @property
    def version(self) -> int:
        """The version published last; -1 before the first."""
        return _published_version(self._words)

    def publish(self, module: nn.Module, version: int) -> None:
        """Copies the module's tensors into the free buffer and makes it the one that is read.

        Raises: RunError when the version does not grow; CheckpointError when the module is another.
        """
        if version <= self.version:
            raise RunError(what=f"weights of version {version} published after {self.version}")
        sources = self._layout.tensors_of(module)
        words = self._words
        count = words[_PUBLISHED] + 1
        side = count & 1
        words[_SEQUENCE[side]] |= 1  # odd: whoever still copies this buffer sees it and starts anew
        for source, target in zip(sources, self._buffers[side], strict=True):
            target.copy_(source)
        words[_VERSION[side]] = version
        words[_SEQUENCE[side]] += 1
        words[_PUBLISHED] = count


class Subscriber:
    """The engine's side: brings a module to the newest version, between batches.

    Args:
        buffer: the publisher's bytes; it may not have written yet.
    """

    def __init__(self, buffer: Any, layout: WeightsLayout) -> None:
        self._layout = layout
        self._memory = buffer
        self._words = _words_of(buffer, layout)
        self._seen = 0
        self._staged = torch.empty(layout.buffer_bytes, dtype=torch.uint8)
        start = _HEADER_BYTES + _aligned(len(layout.text))
        size = layout.buffer_bytes
        self._bytes = [
            torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=start + i * size)
            if size
            else self._staged
            for i in range(2)
        ]
        self._staged_views = layout.views(self._staged.numpy(), 0)
        self.version = -1
        if self._words[0] == _MAGIC:
            _check_header(buffer, self._words, layout)

    @property
    def newest_version(self) -> int:
        """The version that the publisher is at; -1 before the first."""
        return _published_version(self._words)

    def poll(self, module: nn.Module) -> int | None:
        """The version now in `module`, copied in place, when there is a newer one; else None.

        Without news it reads one word. While a writer is so fast that each copy is torn, the module
        keeps the weights it has, and the next call tries again.

        Raises: CheckpointError, naming the first tensor that differs from the publisher's.
        """
        if self._words[_PUBLISHED] == self._seen:
            return None
        if self._seen == 0:
            _check_header(self._memory, self._words, self._layout)
        targets = self._layout.tensors_of(module)
        taken = self._take()
        if taken is None:
            return None
        for source, target in zip(self._staged_views, targets, strict=True):
            target.copy_(source)
        self._seen, self.version = taken
        return self.version

    def _take(self) -> tuple[int, int] | None:
        """Copies the newest whole buffer: its place in the count, and its version."""
        words = self._words
        for _ in range(_TRIES):
            count = words[_PUBLISHED]
            side = count & 1
            sequence = words[_SEQUENCE[side]]
            if sequence & 1:
                continue
            self._staged.copy_(self._bytes[side])
            version = words[_VERSION[side]]
            if words[_SEQUENCE[side]] == sequence:
                return count, version
        return None


def _words_of(buffer: Any, layout: WeightsLayout) -> memoryview:
    view = memoryview(buffer).cast("B")
    if view.nbytes < layout.nbytes:
        raise RunError(
            what=f"{view.nbytes} bytes for weights that take {layout.nbytes}",
            where="shared memory of the published weights",
            do="start all processes from one configuration",
        )
    return view[:_HEADER_BYTES].cast("q")


def _published_version(words: memoryview) -> int:
    count = words[_PUBLISHED]
    return words[_VERSION[count & 1]] if count else -1


def _check_header(buffer: Any, words: memoryview, layout: WeightsLayout) -> None:
    if words[0] != _MAGIC or words[1] != _FORMAT:
        raise RunError(
            what="shared memory of the published weights is of another format",
            do="start all processes from the same version of seedrl",
        )
    digest = b"".join(words[2 + i].to_bytes(8, "little", signed=True) for i in range(4))
    if digest == layout.fingerprint:
        return
    text = bytes(memoryview(buffer).cast("B")[_HEADER_BYTES : _HEADER_BYTES + words[6]])
    there = tuple((name, dtype, tuple(shape)) for name, dtype, shape in json.loads(text))
    _refuse(layout.entries, there)


def _refuse(here: tuple[Entry, ...], there: tuple[Entry, ...]) -> None:
    lines = differences(here, there)
    more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
    raise CheckpointError(
        what=f"weights of another policy: {lines[0]}{more}",
        where="published weights",
        do="give learner and engine the same policy section and environment",
    )


def _described(entry: list[Any] | None) -> str:
    return f"{entry[0]} {list(entry[1])}" if entry else "absent"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
