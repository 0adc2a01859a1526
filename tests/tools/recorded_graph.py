"""A CUDA graph without a GPU: what a capture calls is recorded, and a replay calls it again on the same memory, kernels of the host's compiler too.

As under a capture, whatever looks at a number on the host is an error, and what is computed in Python between the calls is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from csrc_free_kernels import build
from tests.kernels.compilers import HostBackend

_ON_THE_HOST = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "equal",
    "lift_fresh",
)


class RecordedGraph:
    captured = 0  # in all

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        pass

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        for call in self.calls:
            call()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _ON_THE_HOST:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        given = func(*args, **kwargs)
        held = {leaf.untyped_storage().data_ptr() for leaf in _tensors((args, kwargs))}
        made = [leaf if leaf.untyped_storage().data_ptr() not in held else None for leaf in _tensors(given)]  # fmt: skip

        def again() -> None:
            for was, now in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                if was is not None:
                    was.copy_(now)

        self._graph.calls.append(again)
        return given


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _nothing(*arguments: Any) -> Iterator[None]:
    yield


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


def record_graphs(patch: pytest.MonkeyPatch, backend: HostBackend | None) -> None:
    """`torch.cuda`'s graphs are recorded ones on the CPU, and tensors there get the kernels of `backend` (None: twins)."""

    @contextmanager
    def capturing(graph: RecordedGraph, pool: Any = None) -> Iterator[None]:
        RecordedGraph.captured += 1
        with pytest.MonkeyPatch.context() as inner:
            if backend is not None:
                launch = backend.launch

                def recorded(*arguments: Any) -> None:
                    launch(*arguments)
                    graph.calls.append(lambda: launch(*arguments))

                inner.setattr(backend, "launch", recorded)
            with _Recorder(graph):
                yield

    for name, fake in (
        ("CUDAGraph", RecordedGraph), ("graph", capturing), ("Stream", lambda device: _Stream()), ("stream", _nothing),
        ("current_stream", lambda device: _Stream()),
    ):  # fmt: skip
        patch.setattr(torch.cuda, name, fake)
    host_kernels(patch, backend)


def host_kernels(patch: pytest.MonkeyPatch, backend: HostBackend | None) -> None:
    if backend is not None:
        patch.setattr(build, "backend", lambda: backend)
        patch.setattr(build, "kernels_on", lambda device: True)
