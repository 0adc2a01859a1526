"""Kernels that copy rows (state, ingest, unrolls), run on the CPU, against their twins; the twins against naive loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csrc_free_kernels import build, leaves
from csrc_free_kernels.ingest import ingest_rows, launch_ingest_rows
from csrc_free_kernels.state import (
    gather_state,
    launch_gather_state,
    launch_scatter_rows,
    scatter_rows,
)
from csrc_free_kernels.unroll import (
    gather_frames,
    gather_rows,
    launch_gather_frames,
    launch_gather_rows,
)
from seedrl.errors import ShapeError
from tests.kernels.compilers import HostBackend

pytestmark = pytest.mark.usefixtures("on_host")
DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.int16, torch.float64)  # fmt: skip
# rows of 1 byte to some 200, of every alignment; without an element, and of none at all
SHAPES = st.sampled_from([(), (4,), (3,), (1,), (2, 3), (16,), (5, 5), (0,), (4, 1, 2), (13,)])
ROWS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6)
SEED = st.integers(0, 2**32 - 1)
Rows = list[tuple[torch.dtype, tuple[int, ...]]]


class Random:
    """Leaves of random bytes, laid so that some begin off the alignment of memory."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def leaf(self, dtype: torch.dtype, *shape: int) -> Tensor:
        size, begin = math.prod(shape) * dtype.itemsize, int(self.rng.integers(0, 3)) * dtype.itemsize  # fmt: skip
        raw = self.rng.integers(0, 2 if dtype == torch.bool else 256, begin + size).astype(np.uint8)
        return torch.from_numpy(raw)[begin:].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)  # fmt: skip

    def leaves(self, rows: Rows, *lead: int) -> list[Tensor]:
        return [self.leaf(dtype, *lead, *shape) for dtype, shape in rows]

    def slots(self, count: int, num_slots: int) -> Tensor:
        """Each at most once; some are padding."""
        slots = self.rng.permutation(num_slots)[:count]
        return torch.from_numpy(np.where(self.rng.random(count) < 0.2, -1, slots))

    def flags(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.rng.random(shape) < 0.3)


def _bytes(leaf: Tensor) -> np.ndarray:
    """A NaN of random bytes equals none."""
    return leaf.reshape(-1).view(torch.uint8).numpy() if leaf.numel() else np.zeros(0, np.uint8)


def _same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(_bytes(a), _bytes(b))


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


@settings(max_examples=60)
@given(rows=ROWS, num_slots=st.integers(1, 40), share=st.floats(0, 1), seed=SEED)
def test_states_are_gathered_and_scattered_as_by_the_twin(
    rows: Rows, num_slots: int, share: float, seed: int
) -> None:
    random, count = Random(seed), int(share * num_slots)
    store, initial = random.leaves(rows, num_slots), random.leaves(rows, 1)
    slots, first = random.slots(count, num_slots), random.flags(count)
    ours, theirs = random.leaves(rows, count), random.leaves(rows, count)
    launch_gather_state(store, initial, slots, first, ours)
    gather_state(store, initial, slots, first, theirs)
    _same(ours, theirs)
    for b in range(count):  # the definition
        begins = first[b] or slots[b] < 0
        _same([leaf[b] for leaf in ours], [begin[0] if begins else kept[slots[b]] for kept, begin in zip(store, initial, strict=True)])  # fmt: skip
    new, right = random.leaves(rows, count), _copies(store)
    for b in range(count):
        for kept, state in zip(right, new, strict=True):
            if slots[b] >= 0:
                kept[slots[b]] = state[b]
    twin = _copies(store)
    scatter_rows(twin, slots, new)
    launch_scatter_rows(store, slots, new)
    _same(twin, right)
    _same(store, right)


@settings(max_examples=60)
@given(rows=ROWS, num_slots=st.integers(1, 20), more=st.integers(0, 9), share=st.floats(0, 1), kept=st.booleans(), seed=SEED)  # fmt: skip
def test_rows_are_ingested_as_by_the_twin(
    rows: Rows, num_slots: int, more: int, share: float, kept: bool, seed: int
) -> None:
    random, count = Random(seed), int(share * num_slots)
    slab, into = random.leaves(rows, num_slots), random.leaves(rows, count)
    storage = random.leaves(rows, count + more) if kept else []
    slots, places = random.slots(count, num_slots), random.slots(count, count + more)
    twin_into, twin_storage = _copies(into), _copies(storage)
    right_into, right_storage = _copies(into), _copies(storage)
    for b, slot in enumerate(slots.tolist()):
        for i, source in enumerate(slab):
            if slot >= 0:
                right_into[i][b] = source[slot]
            if slot >= 0 and kept and places[b] >= 0:
                right_storage[i][places[b]] = source[slot]
    ingest_rows(slab, twin_into, twin_storage, slots, places)
    launch_ingest_rows(slab, into, storage, slots, places)
    _same(twin_into, right_into)
    _same(twin_storage, right_storage)
    _same(into, right_into)
    _same(storage, right_storage)


@settings(max_examples=60)
@given(rows=ROWS, num_rows=st.integers(1, 30), steps=st.integers(0, 6), columns=st.integers(0, 5), seed=SEED)  # fmt: skip
def test_unrolls_are_gathered_as_by_the_twin(
    rows: Rows, num_rows: int, steps: int, columns: int, seed: int
) -> None:
    random = Random(seed)
    storage = random.leaves(rows, num_rows)
    index = torch.from_numpy(random.rng.integers(0, num_rows, (steps, columns)))
    ours, theirs = random.leaves(rows, steps, columns), random.leaves(rows, steps, columns)
    launch_gather_rows(storage, index, ours)
    gather_rows(storage, index, theirs)
    _same(ours, theirs)
    _same(ours, [leaf[index] for leaf in storage])


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(), (3,), (4, 4), (5, 3), (1, 8)]), stack=st.integers(1, 5), history=st.integers(0, 5),
    steps=st.integers(0, 5), columns=st.integers(0, 4), seed=SEED,
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float16, torch.float32]),
)  # fmt: skip
def test_stacks_are_rebuilt_as_by_the_twin(
    shape: tuple[int, ...], stack: int, history: int, steps: int, columns: int, seed: int, dtype: torch.dtype
) -> None:  # fmt: skip
    random = Random(seed)
    frames = random.leaf(torch.uint8, 30, *shape)
    index = torch.from_numpy(random.rng.integers(0, 30, (history + steps, columns)))
    first = random.flags(history + steps, columns)
    ours, theirs = (random.leaf(dtype, steps, columns, stack, *shape) for _ in range(2))
    scale = float(random.rng.choice([1 / 255, 1.0, 0.3]))
    launch_gather_frames(frames, index, first, ours, scale)
    gather_frames(frames, index, first, theirs, scale)
    _same([ours], [theirs])
    for r in range(steps):
        for b in range(columns):
            at, numbers = history + r, []
            for _ in range(stack):
                numbers.insert(0, int(index[at, b]))
                at -= 0 if first[at, b] or at == 0 else 1
            right = frames[numbers]
            right = right if dtype == torch.uint8 else (right.float() * scale).to(dtype)
            _same([ours[r, b]], [right])


def test_stacks_equal_gymnasiums() -> None:
    """Frames of two episodes, stored once, against those that FrameStackObservation gave."""
    import gymnasium
    from gymnasium.spaces import Box, Discrete
    from gymnasium.wrappers import FrameStackObservation

    class Frames(gymnasium.Env):
        observation_space, action_space = Box(0, 255, (2, 3), np.uint8), Discrete(2)

        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def _frame(self) -> np.ndarray:
            return self.rng.integers(0, 256, (2, 3)).astype(np.uint8)

        def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
            return self._frame(), {}

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return self._frame(), 0.0, False, False, {}

    env = FrameStackObservation(Frames(), 4, padding_type="reset")
    seen, first = [], []
    for length in (3, 7, 1, 6):
        seen.append(env.reset()[0])
        seen += [env.step(0)[0] for _ in range(length)]
        first += [True] + [False] * length
    stacks = torch.from_numpy(np.stack(seen))
    frames, begins = stacks[:, -1].contiguous(), torch.tensor(first).unsqueeze(1)
    rows = torch.arange(len(seen)).unsqueeze(1)
    for history in (0, 3, 9):
        into = torch.zeros(len(seen) - history, 1, 4, 2, 3, dtype=torch.uint8)
        launch_gather_frames(frames, rows, begins, into)
        assert torch.equal(into[:, 0], stacks[history:])


def test_a_row_or_slot_that_is_not_there_is_left_out_by_the_kernel_and_refused_by_the_twin() -> None:  # fmt: skip
    store, batch = [torch.arange(3.0)], [torch.full((2,), 9.0)]
    slots = torch.tensor([1, 3])
    launch_gather_state(store, [torch.zeros(1)], slots, torch.zeros(2, dtype=torch.bool), batch)
    assert batch[0].tolist() == [1.0, 0.0]
    launch_scatter_rows(store, slots, [torch.tensor([7.0, 8.0])])
    assert store[0].tolist() == [0.0, 7.0, 2.0]
    rows, into = torch.tensor([[2, 3, -1]]), [torch.full((1, 3), 9.0)]
    launch_gather_rows(store, rows, into)
    assert into[0].tolist() == [[2.0, 9.0, 9.0]]
    launch_ingest_rows([torch.tensor([4.0, 5.0])], batch, store, torch.tensor([2, 0]), torch.tensor([1, 5]))  # fmt: skip
    assert store[0].tolist() == [0.0, 7.0, 2.0] and batch[0].tolist() == [1.0, 4.0]
    frames, image = torch.zeros(3, 4, dtype=torch.uint8), torch.full((1, 3, 1, 4), 9, dtype=torch.uint8)  # fmt: skip
    launch_gather_frames(frames, rows, torch.zeros(1, 3, dtype=torch.bool), image)
    assert image[0, :, 0, 0].tolist() == [0, 9, 9]
    with pytest.raises(IndexError):
        gather_rows(store, rows, into)
    with pytest.raises(IndexError):
        scatter_rows(store, slots, [torch.zeros(2)])


def test_any_number_of_leaves_takes_one_launch_for_each_table(on_host: HostBackend) -> None:
    for count, launches in ((0, 0), (1, 1), (leaves.MAX_LEAVES, 1), (leaves.MAX_LEAVES + 1, 2)):
        storage = [torch.full((2,), float(i)) for i in range(count)]
        into = [torch.zeros(1, 1) for _ in range(count)]
        before = len(on_host.launched)
        launch_gather_rows(storage, torch.ones(1, 1, dtype=torch.int64), into)
        assert len(on_host.launched) - before == launches
        assert [leaf.item() for leaf in into] == list(range(count))


def test_more_words_than_threads_are_copied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "_MOST_BLOCKS", 2)
    storage, rows = torch.randn(50, 40), torch.arange(50).view(10, 5).flip(1)
    into = torch.zeros(10, 5, 40)
    launch_gather_rows([storage], rows, [into])
    assert torch.equal(into, storage[rows])
    column = torch.zeros(50, 3, dtype=torch.uint8), torch.arange(150).to(torch.uint8).view(50, 3)
    launch_scatter_rows([column[0]], torch.arange(50), [column[1]])
    assert torch.equal(*column)


def test_storage_without_rows_gives_none() -> None:
    into, rows = torch.full((1, 1, 2, 3), 9, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int64)  # fmt: skip
    launch_gather_frames(torch.zeros(0, 3, dtype=torch.uint8), rows, rows < 0, into)
    launch_gather_rows([torch.zeros(0, 2, 3, dtype=torch.uint8)], rows, [into])
    assert (into == 9).all()


def test_the_widest_word_that_fits_is_copied() -> None:
    assert [leaves.width_of(*numbers) for numbers in ((32, 0, 16), (32, 0, 8), (32, 2), (4, 5))] == [16, 4, 1, 1]  # fmt: skip


def test_leaves_that_do_not_fit_each_other_are_named() -> None:
    slots, first = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    store, initial, into = [torch.zeros(3, 4)], [torch.zeros(1, 4)], [torch.zeros(2, 4)]
    for gather in (gather_state, launch_gather_state):
        with pytest.raises(ShapeError, match=r"into\[0\] has the shape \[3, 4\]; it must be \[2"):
            gather(store, initial, slots, first, [torch.zeros(3, 4)])
        with pytest.raises(ShapeError, match=r"initial\[0\] has rows torch.float32 \[5\], store\[0\]"):  # fmt: skip
            gather(store, [torch.zeros(1, 5)], slots, first, into)
        with pytest.raises(ShapeError, match=r"into\[0\] has rows torch.float64"):
            gather(store, initial, slots, first, [into[0].double()])
        with pytest.raises(ShapeError, match="initial has 0 leaves, store 1"):
            gather(store, [], slots, first, into)
    with pytest.raises(build.ArgumentError, match="slots is int32; it must be int64"):
        launch_gather_state(store, initial, slots.int(), first, into)
    with pytest.raises(build.ArgumentError, match=r"store\[0\] has the strides"):
        launch_gather_state([torch.zeros(4, 3).t()], initial, slots, first, into)
    with pytest.raises(build.ArgumentError, match="into is torch.float64"):
        launch_gather_frames(torch.zeros(2, 4, dtype=torch.uint8), slots.view(1, 2), first.view(1, 2), torch.zeros(1, 2, 3, 4, dtype=torch.float64))  # fmt: skip
    for gather in (gather_frames, launch_gather_frames):
        with pytest.raises(ShapeError, match=r"into has the shape \[2, 2, 3, 4\]"):
            gather(torch.zeros(2, 4, dtype=torch.uint8), slots.view(1, 2), first.view(1, 2), torch.zeros(2, 2, 3, 4))  # fmt: skip


def test_a_slab_that_is_not_pinned_is_named(
    on_host: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_host, "mapped", lambda tensor: None)
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(build.ArgumentError, match=r"slab\[0\] is not pinned memory") as raised:
        launch_ingest_rows([torch.zeros(1, 2)], [torch.zeros(1, 2)], (), zero, zero)
    assert raised.match("cudaHostRegister")
