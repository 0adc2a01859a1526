"""Kept rows on disk: the next draws are those of the store that went on, and whatever moment a process dies at, what comes back is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from seedrl.errors import CheckpointError
from seedrl.replay import ReplayStore
from seedrl.store.kept import KeptRows
from seedrl.store.limiter import Limiter
from tests.tools.counting_store import CountingStore

MODES = ("uniform", "prioritized", "recent")


def a_store(mode: str, **more: Any) -> CountingStore:
    uses = {"max_uses": 2} if mode == "recent" else {}
    return CountingStore(3, 4, 3, 5, extra=60, stride=2, mode=mode, **(uses | more))


def kept(store: CountingStore, folder: Path) -> KeptRows:
    return KeptRows(folder, store.reader)


def written(store: CountingStore, folder: Path) -> KeptRows:
    saver = kept(store, folder)
    assert saver.save()
    saver.finish()
    return saver


def fill(store: CountingStore, steps: int, random: Random | None = None) -> None:
    for _ in range(steps):
        slots = np.arange(3)
        if random is not None:
            slots = np.array(sorted(random.sample(range(3), random.randint(1, 3))))
            if random.random() < 0.05:
                store.discard(slots)
        assert store.writer.held_back(slots) is None
        store.append(slots)


@pytest.mark.parametrize("mode", MODES)
def test_the_next_draws_are_those_of_the_store_that_went_on(mode: str, tmp_path: Path) -> None:
    store = a_store(mode)
    fill(store, 150, Random(1))
    batch = store.reader.sample(6, timeout_s=0)
    store.reader.update_priorities(batch.items, np.linspace(0.1, 4, 6))
    written(store, tmp_path)
    resumed = a_store(mode)
    found = kept(resumed, tmp_path).restore()
    resumed.writer.adopt()
    assert found is not None and found > 60
    for _ in range(100):
        one, other = (some.reader.sample(4, timeout_s=0) for some in (store, resumed))
        if one is None:  # recent: used up
            assert other is None
            break
        assert one.items.tolist() == other.items.tolist()
        assert store.check(one) == resumed.check(other)
        for mine, its in zip((*one[2:9], one.weights), (*other[2:9], other.weights), strict=True):
            if mine is not None and not isinstance(mine, dict):
                assert mine.equal(its)
        priorities = np.random.default_rng(int(one.items[0])).random(4)
        for some in (store, resumed):
            some.reader.update_priorities(one.items, priorities)


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_store_goes_on_without_mixing_what_was_with_what_comes(mode: str, tmp_path: Path) -> None:  # fmt: skip
    random = Random(2)
    store = a_store(mode)
    fill(store, 200, random)
    for turn in range(4):  # again and again, with what came in between
        saver = kept(store, tmp_path)
        saver.restore() if turn else None
        saver.save()
        saver.finish()
        before, store = store, a_store(mode)
        kept(store, tmp_path).restore()
        store.writer.adopt()
        store.run[:] = before.run + 100  # an environment begins anew after a restart
        for _ in range(60):
            fill(store, 2, random)
            if (batch := store.reader.sample(3, timeout_s=0)) is not None:
                store.check(batch)
        blocks = store.writer._appender.free
        assert len(blocks) == len(set(blocks))


def test_counters_of_the_ratio_go_on(tmp_path: Path) -> None:
    limiter = Limiter(2.0, 12.0, 5)
    store = a_store("uniform", limiter=limiter)
    while store.writer.held_back(np.arange(3)) is None:
        store.append(np.arange(3))
    store.reader.sample(4, timeout_s=0)
    written(store, tmp_path)
    resumed = a_store("uniform", limiter=limiter)
    kept(resumed, tmp_path).restore()
    resumed.writer.adopt()

    def left(some: CountingStore) -> tuple[int, int]:
        """Rows that may come, and draws after them."""
        rows = draws = 0
        while some.writer.held_back(np.array([0])) is None:
            some.append(np.array([0]))
            rows += 1
        while some.reader.sample(1, timeout_s=0) is not None:
            draws += 1
        return rows, draws

    store.discard(np.arange(3))  # as the resumed one begins
    assert left(store) == left(resumed)


def test_full_blocks_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: written.append(at) or pwrite(fd, data, at)
    )  # type: ignore[func-returns-value]
    store = a_store("uniform")
    fill(store, 40)
    saver = kept(store, tmp_path)
    counts = []
    for _ in range(3):
        saver.save()
        saver.finish()
        counts.append(len(written))
        written.clear()
        fill(store, 5)  # a block each
    # unrolls read up to rows 38, 44 and 48: blocks of 5 rows, and those that were read in part again
    assert counts == [3 * 8, 3 * 2, 3 * 1]


def _torn(folder: Path, how: Callable[[bytearray], None]) -> None:
    path = folder / "blocks.bin"
    data = bytearray(path.read_bytes())
    how(data)
    path.write_bytes(data)


def test_a_torn_block_takes_only_its_own_unrolls(tmp_path: Path) -> None:
    store = a_store("uniform")
    fill(store, 100)
    record = written(store, tmp_path)._record_bytes

    def flip(data: bytearray) -> None:
        data[7 * record + 40] ^= 1

    _torn(tmp_path, flip)
    resumed = a_store("uniform")
    found = kept(resumed, tmp_path).restore()
    entries = resumed.reader._entries(np.arange(*resumed.reader.bounds()))
    assert found == int(np.count_nonzero(~(entries.blocks == 7).any(1))) < len(entries.blocks)
    resumed.check(resumed.reader.sample(50, timeout_s=0))


def test_rows_of_another_store_are_refused_by_name(tmp_path: Path) -> None:
    store = a_store("uniform")
    fill(store, 50)
    written(store, tmp_path)
    other = CountingStore(3, 4, 3, 5, extra=70, stride=2, mode="uniform")
    with pytest.raises(CheckpointError, match="another store; blocks: here 79, there 69"):
        kept(other, tmp_path).restore()
    index = (tmp_path / "index.npz").read_bytes()
    for wrong in (b"PK nonsense", index[: len(index) // 2], b""):
        (tmp_path / "index.npz").write_bytes(wrong)
        with pytest.raises(CheckpointError, match="cannot be read"):
            kept(a_store("uniform"), tmp_path).restore()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store("uniform")
    fill(store, 50)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    saver = kept(store, tmp_path)
    saver.save()
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.finish()


CHILD = """
import sys
from pathlib import Path
from random import Random
from tests.store.test_kept import a_store, fill, kept
store, random = a_store("prioritized"), Random(int(sys.argv[2]))
saver = kept(store, Path(sys.argv[1]))
if saver.restore() is not None:
    store.writer.adopt()
    store.run[:] = 1000 * int(sys.argv[2])
print("began", flush=True)
while True:
    fill(store, 7, random)
    saver.save()
"""


def test_whatever_moment_it_is_killed_at_what_comes_back_is_whole(tmp_path: Path) -> None:
    random, root = Random(3), Path(__file__).parents[2]
    found = []
    for turn in range(int(os.environ.get("SEEDRL_KILLS", "6"))):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(turn)], stdout=subprocess.PIPE, cwd=root,
        )  # fmt: skip
        assert child.stdout is not None and child.stdout.readline() == b"began\n"
        time.sleep(0.02 + 0.4 * random.random())
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        store = a_store("prioritized")
        found.append(kept(store, tmp_path).restore())
        if found[-1]:
            for _ in range(10):
                store.check(store.reader.sample(20, timeout_s=0))
    assert max(n or 0 for n in found) > 50, found


def test_an_index_of_others_is_not_mixed_with_blocks_that_are_written_over(tmp_path: Path) -> None:
    """A fresh store writes where another one had; killed before its index, neither may be read as the other."""
    store = a_store("uniform")
    fill(store, 50)
    written(store, tmp_path)
    fresh = a_store("uniform")
    fill(fresh, 30)
    half = kept(fresh, tmp_path)
    index, blocks, rows = half._snapshot()
    # an index that cannot be written: as if it were killed there
    half._write(index | {"about": np.array(object(), dtype=object)}, blocks, rows)
    assert half._failure is not None
    assert kept(a_store("uniform"), tmp_path).restore() is None


@pytest.mark.parametrize(("there", "here"), [
    ({}, {"mode": "prioritized"}), ({}, {"mode": "recent"}), ({}, {"max_uses": 2}), ({"mode": "prioritized"}, {}),
    ({"mode": "prioritized"}, {"mode": "prioritized", "remover": "lowest_priority"}), ({}, {"host_gib": 1e-4}), ({"host_gib": 1e-4}, {}),
])  # fmt: skip
def test_rows_that_were_kept_in_another_way_are_refused_by_name(
    there: dict[str, Any], here: dict[str, Any], tmp_path: Path
) -> None:
    spaces_ = (spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    one, other = (ReplayStore(*spaces_, num_slots=1, **{"capacity": 200, "unroll_length": 4, **more}) for more in (there, here))  # fmt: skip
    for number in range(100):
        one.append(obs=np.zeros((1, 2)), action=0, reward=0.0, terminated=False, truncated=False, first=number == 0)  # fmt: skip
    one.save(tmp_path)
    with pytest.raises(CheckpointError, match="of another store|cannot be read: there is no"):
        other.restore(tmp_path)


def test_the_exponents_are_the_configurations_not_the_files(tmp_path: Path) -> None:
    spaces_ = (spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    stores = [ReplayStore(*spaces_, num_slots=1, capacity=200, mode="prioritized", priority_exponent=alpha) for alpha in (0.6, 0.0)]  # fmt: skip
    for number in range(100):
        stores[0].append(obs=np.zeros((1, 2)), action=0, reward=0.0, terminated=False, truncated=False, first=number == 0)  # fmt: skip
    stores[0].save(tmp_path)
    stores[1].restore(tmp_path)
    assert stores[1].stats()["priority_exponent"] == 0.0
