"""Rows behind the device: drawn like those on it, whole, from memory and from a file; and gone in their order."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.dataset import kept_runs
from seedrl.errors import ConfigError
from seedrl.replay import ReplayStore
from seedrl.store.tiers import Arena
from tests.test_replay import BOX, CHOICE

GIB = 1 << 30
IMAGE = spaces.Box(0, 255, (20, 20), np.uint8)


def a_store(slots: int = 2, **more: Any) -> ReplayStore:
    return ReplayStore(IMAGE, CHOICE, num_slots=slots, **{"capacity": 200, "unroll_length": 4, "batch_size": 16, **more})  # fmt: skip


def play(store: ReplayStore, begin: int, end: int, noise: np.random.Generator | None = None) -> None:  # fmt: skip
    """Row `number` of slot `s` has the number in its reward, and the slot and the number's bytes in its frame."""
    slots = store.num_slots
    for number in range(begin, end):
        frame = np.zeros((slots, 20, 20), np.uint8) if noise is None else noise.integers(0, 256, (slots, 20, 20), np.uint8)  # fmt: skip
        frame[:, 0, 0], frame[:, 0, 1], frame[:, 0, 2] = np.arange(slots), number % 256, number // 256  # fmt: skip
        store.append(obs=frame, action=number % 3, reward=float(number), terminated=False, truncated=False, first=number == 0)  # fmt: skip


def check(batch: Any) -> list[int]:
    """Each unroll is of one slot, and consecutive; returns the number of its first row."""
    frame, reward = batch.obs["observation"], batch.reward
    assert (frame[..., 0, 0] == batch.slots).all()
    assert (frame[..., 0, 1].int() + 256 * frame[..., 0, 2].int() == reward.int()).all()
    assert (reward[1:] == reward[:-1] + 1).all()
    assert (batch.actions["action"] == reward.long() % 3).all()
    return reward[0].int().tolist()


def settle(store: ReplayStore) -> None:
    store._reader._take_in()
    deadline = time.monotonic() + 20
    while not store._reader.tiers.idle():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("tiers", [(1.0, 0.0), (0.0, 1.0), (0.3, 1.0)], ids=["memory", "file", "both"])  # fmt: skip
def test_what_has_left_the_device_is_drawn_too(tiers: tuple[float, float], compress: bool) -> None:
    budget = 1_000_000  # bytes: some 2,000 plain rows
    store = a_store(host_gib=tiers[0] * budget / GIB, file_gib=tiers[1] * budget / GIB, compress=compress)  # fmt: skip
    noise = None if compress else np.random.default_rng(0)
    drawn: list[int] = []
    for begin in range(0, 3000, 50):
        play(store, begin, begin + 50, noise)
        settle(store)
        batch = store.sample(16)
        assert batch is not None
        check(batch)
    for _ in range(60):
        drawn += check(store.sample(16))
    assert store.stats()["tier_lost_blocks"] == 0
    row_bytes = store.plan.blocks.nbytes / store.plan.blocks.num_rows
    plain = sum(tiers) * budget / row_bytes
    oldest = 3000 - min(drawn)
    if compress:  # more than there is room for plain ones, and the oldest as likely as the newest
        assert store.stats()["tier_compression"] > 4 and oldest > min(2 * plain / 2, 2900)
    else:
        assert 0.7 * plain / 2 < oldest <= 1.2 * plain / 2 + 300
        assert store.stats()["kept_rows"] == pytest.approx(plain + 200, rel=0.25)
    behind = np.mean(np.array(drawn) < 3000 - 150)
    assert behind > 0.5, "most of what is kept is not on the device"


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(2, 8), st.integers(1, 6)), st.integers(1, 3), st.integers(0, 1 << 30),
    st.sampled_from(["uniform", "prioritized", "recent"]), st.booleans(), st.integers(1, 4),
)  # fmt: skip
def test_every_draw_is_whole_whatever_the_lengths(
    rule: tuple[int, int, int, int], slots: int, seed: int, mode: str, compress: bool, stack: int
) -> None:
    unroll, burn_in, length, stride = rule
    random = Random(seed)
    state = (torch.zeros(1, 2),)
    store = ReplayStore(
        BOX, CHOICE, num_slots=slots, capacity=max(60, 3 * (unroll + burn_in + stack)), mode=mode, unroll_length=unroll, burn_in=burn_in,
        stride=min(stride, unroll), block_length=length, state=state, host_gib=20_000 / GIB, file_gib=30_000 / GIB, compress=compress, batch_size=5,
        seed=seed % 1000, max_uses=3 if mode == "recent" else None, frame_stack=stack,
    )  # fmt: skip
    count, run = np.zeros(slots, int), np.zeros(slots, int)
    for step in range(400):
        if random.random() < 0.01:
            some = np.array([random.randrange(slots)])
            store.end(some)
            run[some] += 1
            count[some] = 0
        obs = np.stack([run * 1000 + count, np.arange(slots)], 1).astype(np.float32)
        entering = (torch.from_numpy(np.stack([count, run], 1).astype(np.float32)),)
        store.append(obs=obs, action=0, reward=0.0, terminated=False, truncated=False, first=count == 0, state=entering)  # fmt: skip
        count += 1
        if step % 7 == 0:
            settle(store)
            batch = store.sample(random.choice([1, 5]))
            if batch is None:
                continue
            rows = batch.obs["observation"]
            if stack > 1:
                back = torch.arange(stack - 1, -1, -1)
                shown = (rows[:, :, -1:, 0] % 1000 - back).clamp_min(0)
                assert torch.equal(rows[..., 0] % 1000, shown)
                rows = rows[:, :, -1]
            number = rows[..., 0] % 1000
            assert (rows[..., 1] == batch.slots).all()
            assert (rows[..., 0] // 1000 == rows[0, :, 0] // 1000).all()
            begin = number[burn_in]
            expected = (begin + torch.arange(-burn_in, unroll + 1)[:, None]).clamp_min(0)
            assert torch.equal(number, expected)
            assert torch.equal(batch.state[0], torch.stack([number[0], rows[0, :, 0] // 1000], 1))
            if mode == "prioritized":
                items, at = np.unique(batch.items, return_index=True)
                store.update_priorities(items, np.array([random.random() * 3 for _ in at]))


def test_priorities_reach_what_is_behind() -> None:
    store = a_store(mode="prioritized", host_gib=1_000_000 / GIB)
    play(store, 0, 50)
    settle(store)
    batch = store.sample(16)
    high = set(check(batch))
    for begin in range(50, 800, 50):
        play(store, begin, begin + 50)
        settle(store)
    store.update_priorities(batch.items, np.full(16, 1e6))  # which have left the device
    store.sample(16)  # drawn before
    drawn = [number for _ in range(10) for number in check(store.sample(16))]
    assert np.mean([number in high for number in drawn]) > 0.9
    assert store.stats()["late_priorities"] == 0


def test_a_block_that_was_overwritten_before_it_was_copied_is_lost_and_counted() -> None:
    store = a_store(host_gib=1_000_000 / GIB)
    store._behind = False  # nobody takes anything in meanwhile
    play(store, 0, 2000)
    store._reader._take_in()
    settle(store)
    for _ in range(5):
        assert min(check(store.sample(16))) > 1700
    assert store.stats()["tier_lost_blocks"] > 0 or store.stats()["missed_unrolls"] > 0


def test_a_full_disk_ends_the_run_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store(file_gib=1_000_000 / GIB)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        for begin in range(0, 1000, 50):
            play(store, begin, begin + 50)
            settle(store)


def test_threads_and_files_go_with_the_store() -> None:
    gc.collect()
    before, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    store = a_store(host_gib=100_000 / GIB, file_gib=100_000 / GIB)
    play(store, 0, 100)
    settle(store)
    store.sample(4)
    del store
    gc.collect()
    assert threading.active_count() <= before and len(os.listdir("/proc/self/fd")) == fds


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.booleans())
@settings(max_examples=40, deadline=None)
def test_an_arena_gives_back_what_it_holds(sizes: list[int], on_disk: bool) -> None:
    arena = Arena(100, Path("/tmp") if on_disk else None)
    held: list[tuple[int, int, int, int]] = []
    for number, size in enumerate(sizes):
        record = bytes([number] * size)
        begin, gone = arena.write(record)
        for one in gone:
            held.remove(one)
        arena.put(begin, record, number, 0)
        held.append((begin, size, number, 0))
        assert all(arena.read(at, n) == bytes([who] * n) for at, n, who, _ in held)
        assert sum(n for _, n, _, _ in held) <= 100 and arena.records == len(held)
    arena.close()


@pytest.mark.parametrize(("settings_", "said"), [
    ({"mode": "queue", "capacity": None, "host_gib": 1.0}, "queue keeps no rows that could leave"),
    ({"compress": True}, "there is nothing to compress"),
    ({"host_gib": 1.0, "remover": "oldest_version"}, "go in the order in which they came"),
    ({"host_gib": -1.0}, "host_gib"),
])  # fmt: skip
def test_what_cannot_be_is_refused(settings_: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReplayStore(BOX, CHOICE, num_slots=2, **{"capacity": 100, **settings_})


def test_a_restart_keeps_what_was_on_the_device_and_goes_on(tmp_path: Path) -> None:
    stores = [a_store(host_gib=1_000_000 / GIB, mode="prioritized") for _ in range(2)]
    for begin in range(0, 1000, 50):
        play(stores[0], begin, begin + 50)
        settle(stores[0])
        check(stores[0].sample(16))
    stores[0].save(tmp_path)
    found = stores[1].restore(tmp_path)
    assert 200 // 4 <= found <= 200 // 4 + 2 * 8
    settle(stores[1])
    for begin in range(1000, 2000, 50):
        play(stores[1], begin, begin + 50)
        settle(stores[1])
        first = check(stores[1].sample(16))
        assert min(first) > 700
    assert stores[1].stats()["tier_lost_blocks"] == 0
    assert min(check(stores[1].sample(16))) < 1800, "what has left since is there"


@pytest.mark.parametrize("mode", ["recent", "uniform", "prioritized"])
@pytest.mark.parametrize("sizes", [(4,), (4, 2, 1, 3)])
def test_what_is_drawn_ahead_is_handed_out_once_and_never_lost(
    mode: str, sizes: tuple[int, ...]
) -> None:
    store = a_store(1, capacity=200, mode=mode, max_uses=1, batch_size=4, host_gib=2_000_000 / GIB)
    seen: list[int] = []
    play(store, 0, 1)
    for turn in range(150):
        play(store, 1 + 8 * turn, 9 + 8 * turn)
        settle(store)
        for _ in range(turn % 3):
            batch = store.sample(sizes[turn % len(sizes)])
            if batch is not None:
                check(batch)
                seen += batch.items.tolist()
    while (batch := store.sample(sizes[-1])) is not None or (batch := store.sample(1)) is not None:
        seen += batch.items.tolist()
    assert sorted(seen) == list(range(300))
    assert store.stats()["redrawn_unrolls"] == store.stats()["tier_lost_blocks"] == 0


def test_what_is_exported_is_what_lies_on_the_device() -> None:
    store = a_store(1, host_gib=1_000_000 / GIB)
    for begin in range(0, 1000, 50):
        play(store, begin, begin + 50)
        settle(store)
    (run,) = kept_runs(store)
    assert 190 <= run["reward"].size <= 250
    np.testing.assert_array_equal(np.diff(run["reward"]), 1)


def test_a_run_that_ended_within_a_block_is_copied_too() -> None:
    store = a_store(1, block_length=16, host_gib=4_000_000 / GIB)
    for number in range(3000):
        play(store, number, number + 1)
        if number % 10 == 9:
            store.end()
        if number % 50 == 0:
            settle(store)
    assert store.stats()["tier_lost_blocks"] == 0
    assert store.stats()["kept_rows"] == 300 * 8, "each run's two unrolls of four"


def test_nothing_is_lost_while_nothing_is_drawn() -> None:
    store = a_store(host_gib=2_000_000 / GIB)
    for begin in range(0, 1500, 20):
        play(store, begin, begin + 20)
        while not store._reader.tiers.idle():
            time.sleep(0.001)
    assert store.stats()["tier_lost_blocks"] == 0
    assert store.stats()["kept_rows"] == 1496 * 2


def test_the_draws_after_a_restart_are_those_that_would_have_come(tmp_path: Path) -> None:
    stores = [a_store(1, capacity=2000, mode="prioritized", host_gib=1_000_000 / GIB) for _ in range(2)]  # fmt: skip
    rng = np.random.default_rng(0)
    for begin in range(0, 800, 40):
        play(stores[0], begin, begin + 40)
        batch = stores[0].sample(16)
        stores[0].update_priorities(batch.items, rng.random(16).astype(np.float32) * 3)
    stores[0].end()
    stores[0].save(tmp_path)
    stores[1].restore(tmp_path)
    for _ in range(20):
        one, two = (store.sample(16) for store in stores)
        assert one.items.tolist() == two.items.tolist() and torch.equal(one.weights, two.weights)


def test_a_tier_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="file_gib is 100 bytes, and a block"):
        a_store(host_gib=1_000_000 / GIB, file_gib=100 / GIB)


def test_a_short_write_is_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arena = Arena(100, tmp_path)
    monkeypatch.setattr(os, "pwrite", lambda *_: 3)
    with pytest.raises(OSError, match="No space left"):
        arena.put(0, b"abcdef", 0, 0)
    arena.close()
