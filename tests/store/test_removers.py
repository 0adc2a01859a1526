"""What makes room: against a plain model that knows every block, and through draws that must stay whole."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.errors import ConfigError
from seedrl.replay import ReplayStore
from seedrl.store.removers import lowest
from tests.test_replay import BOX, CHOICE, a_row
from tests.tools.counting_store import CountingStore


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 30), st.integers(0, 99))
def test_the_lowest_are_those_of_a_sort(keys: list[int], count: int, seed: int) -> None:
    ages = np.random.default_rng(seed).permutation(len(keys))
    found = lowest(np.array(keys, float), ages, count)
    expected = sorted(range(len(keys)), key=lambda i: (keys[i], ages[i]))[:count]
    assert sorted(found.tolist()) == sorted(expected)


class Model:
    """Blocks as lists: which unrolls read each, when it retired, by what version it began. Knows nothing of generations or rings."""

    def __init__(self, store: CountingStore, remover: str, capacity: int) -> None:
        self.store, self.remover, self.capacity = store, remover, capacity
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.version: dict[int, int] = {}
        self.retired: list[int] = []
        self.priority: dict[int, float] = {}
        self.largest, self.announced = 1.0, 0

    def worth(self, block: int) -> float:
        if self.remover == "oldest_version":
            return self.version[block]
        return max((self.priority[number] for number in self.readers[block]), default=0.0)

    def take(self, count: int) -> list[int]:
        chosen = sorted(self.retired, key=lambda b: (self.worth(b), self.retired.index(b)))[:count]
        for block in chosen:
            for number in list(self.readers[block]):
                self.forget(number)
            self.retired.remove(block)
        return sorted(chosen)

    def forget(self, number: int) -> None:
        self.priority.pop(number, None)
        for readers in self.readers.values():
            readers.discard(number)

    def announce(self, blocks: list[int]) -> None:
        number, self.announced = self.announced, self.announced + 1
        self.priority[number] = self.largest
        for block in set(blocks):
            self.readers[block].add(number)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 8), st.integers(1, 6)), st.integers(1, 4), st.integers(3, 9),
    st.sampled_from(["lowest_priority", "oldest_version"]), st.integers(0, 1 << 30), st.integers(0, 3),
)  # fmt: skip
def test_room_is_made_as_a_plain_model_makes_it(
    rule: tuple[int, int, int, int], slots: int, extra: int, remover: str, seed: int, history: int
) -> None:
    random = Random(seed)
    unroll, burn_in, length, stride = rule
    store = CountingStore(slots, unroll, burn_in, length, extra=extra, stride=min(stride, unroll), mode="prioritized", remover=remover, history=history)  # fmt: skip
    model, writer, reader = Model(store, remover, store.layout.capacity), store.writer, store.reader
    taken: list[list[int]] = []
    take, announce, retire = writer._remover.take, writer._announce, writer._remover.retire

    def watched_take(count: int) -> np.ndarray:
        found = take(count)
        taken.append(sorted(found.tolist()))
        assert taken[-1] == model.take(count)
        return found

    def watched_announce(at: np.ndarray, done) -> None:
        for blocks in done.blocks.tolist():
            model.announce(blocks)
        announce(at, done)

    def watched_retire(blocks: np.ndarray) -> None:
        model.retired += blocks.tolist()
        retire(blocks)

    writer._remover.take, writer._announce, writer._remover.retire = watched_take, watched_announce, watched_retire  # fmt: skip
    for _ in range(200):
        some = np.array(sorted(random.sample(range(slots), random.randint(1, slots))))
        if random.random() < 0.06:
            store.discard(some)
            continue
        store.version += random.random() < 0.2
        opening = some[store.count[some] % length == 0]
        assert writer.held_back(some) is None
        store.append(some)
        for slot in opening.tolist():
            chain = writer._appender._chain[slot]
            block = int(chain[(int(store.count[slot] - 1) // length) % chain.size])
            model.version[block] = store.version
        reader._take_in()  # so that both know the same
        for number in [n for n in model.priority if n < reader._oldest()]:
            model.forget(number)  # its announcement was overwritten
        if random.random() < 0.5 and (batch := reader.sample(3, timeout_s=0)) is not None:
            store.check(batch)
            items, at = np.unique(batch.items, return_index=True)
            priorities = np.array([random.choice([0.5, 1.0, 3.0, 9.0]) for _ in items])
            reader.update_priorities(items, priorities)
            for item, priority in zip(items.tolist(), priorities.tolist(), strict=True):
                if item in model.priority:
                    model.priority[item] = priority
            model.largest = max(model.largest, *priorities.tolist())
        entries = reader._entries(np.arange(reader._tail, reader._seen))
        assert set(entries.numbers[reader._whole(entries)].tolist()) == set(model.priority)
    assert reader.kept >= len(model.priority)


def test_what_matters_stays_and_the_rest_goes() -> None:
    store = CountingStore(1, 4, 0, 4, extra=40, mode="prioritized", remover="lowest_priority")
    one, reader = np.array([0]), store.reader
    for step in range(4 * 100 + 1):
        assert store.writer.held_back(one) is None
        store.append(one)
        reader._take_in()
        if step and step % 4 == 0:
            number = step // 4 - 1
            reader.update_priorities(np.array([number]), np.array([100.0 if number % 10 == 0 else 1.0]))  # fmt: skip
    entries = reader._entries(np.arange(reader._tail, reader._seen))
    left = entries.numbers[reader._whole(entries)]
    assert set(range(0, 100, 10)) <= set(left.tolist()), "of each ten the one with the priority"
    # an unroll has a block of its own and its bootstrap row's: 8 of them two each, and 25 in a row
    assert left.tolist() == sorted({*range(0, 80, 10), *range(75, 100)}), "of the others the newest"


def test_a_store_goes_on_with_what_its_blocks_are_worth(tmp_path) -> None:
    def a_store() -> ReplayStore:
        return ReplayStore(BOX, CHOICE, num_slots=2, capacity=200, mode="prioritized", unroll_length=4, block_length=4, remover="lowest_priority")  # fmt: skip

    def play(store: ReplayStore, begin: int, end: int, rng: np.random.Generator) -> list[float]:
        seen = []
        for number in range(begin, end):
            store.append(**a_row(2, number))
            if number % 4 == 0 and (batch := store.sample(4)) is not None:
                store.update_priorities(batch.items, rng.random(4) * 5)
                seen += batch.obs["observation"][..., 0].flatten().tolist()
        return seen

    store, other = a_store(), a_store()
    play(store, 0, 1000, np.random.default_rng(0))
    store.end()
    store.save(tmp_path)
    assert other.restore(tmp_path) == store.stats()["kept_rows"] // 4
    keys = [one._writer._remover._keys(np.arange(one.plan.control.num_blocks)) for one in (store, other)]  # fmt: skip
    alive = np.isfinite(keys[1])
    np.testing.assert_array_equal(keys[0][alive], keys[1][alive])
    assert alive.any()
    rngs = [np.random.default_rng(1) for _ in range(2)]
    first = [one.sample(16).items.tolist() for one in (store, other)]
    assert first[0] == first[1]
    assert play(store, 0, 300, rngs[0])[:100] == play(other, 0, 300, rngs[1])[:100]


@pytest.mark.parametrize(("settings_", "said"), [
    ({"mode": "uniform", "remover": "lowest_priority"}, "lowest_priority goes by priorities"),
    ({"mode": "queue", "capacity": None, "remover": "oldest_version"}, "queue gives its rows to the learner"),
    ({"remover": "newest"}, "newest"),
])  # fmt: skip
def test_a_remover_that_cannot_be_is_refused(settings_: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReplayStore(BOX, CHOICE, num_slots=2, **{"capacity": 100, **settings_})
