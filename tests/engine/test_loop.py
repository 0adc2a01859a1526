"""The engine's loop over a real slab, worked by the test in the place of door and workers. BEHAVIOUR cases 2, 3, 4, 5, 9."""

from __future__ import annotations

import os
import statistics
import threading
import time

import numpy as np
import pytest
import torch

from seedrl import host
from seedrl.engine.batcher import Rule
from seedrl.engine.loop import Engine
from seedrl.engine.step import PolicyStep
from seedrl.policy.base import Heads
from seedrl.spec import EnvSpec, Leaf
from seedrl.store.board import BatchReader, Board
from seedrl.transport import doorbell
from seedrl.transport.slab import (
    BASE,
    DOOR_EPOCH,
    DOOR_LINE,
    GENERATION,
    LEASED,
    PHASE,
    PUBLISHED_NS,
    SAID_BYE,
    SEQUENCE,
    SIZE,
    START,
    SUPERVISOR_LINE,
    Phase,
    Slab,
    SlabLayout,
)  # fmt: skip
from system_policies import Count

PASS_US = 15_000  # one pass, and what a busy machine may add to it


def _spec() -> EnvSpec:
    def leaf(name: str, dtype: str, shape: tuple[int, ...], kind: str, n: tuple[int, ...]) -> Leaf:
        return Leaf(
            name=name,
            dtype=dtype,
            shape=shape,
            kind=kind,
            low=None,
            high=None,
            n=n,
            start=(0,) * len(n),
        )

    return EnvSpec(
        observation=(leaf("observation", "float32", (1,), "box", ()),), action=(leaf("action", "int64", (), "discrete", (512,)),),
        action_mask=None, mask_size=0, stats=(), env_id="fake",
    )  # fmt: skip


class Bench:
    """An engine of `num_slots` seats; each live seat is a group of its own."""

    def __init__(self, num_slots: int, live: int, **rule: float) -> None:
        spec = _spec()
        layout = SlabLayout.of(spec, num_slots, num_slots)
        self.slab = Slab(host.map_shared(host.memfd("slab", layout.nbytes), layout.nbytes), layout)
        self.board = Board(
            host.map_shared(host.memfd("board", Board.nbytes(0)), Board.nbytes(0)), 0
        )
        self.counted = BatchReader(self.board)
        self.bell, self.doors = doorbell.make(), [doorbell.make() for _ in range(num_slots)]
        heads = Heads(spec.action, "squashed")
        step = PolicyStep(
            Count(heads.num_inputs).eval(), heads, self.slab, num_slots, 0, greedy=False
        )
        settings = {
            "max_batch": num_slots,
            "min_batch": 1,
            "max_wait_us": 200,
            "hard_deadline_us": 20_000,
            **rule,
        }
        self.engine = Engine(
            self.slab, self.bell, self.doors, self.board, step, Rule(**settings), None, None, None
        )
        self.sequence = np.zeros(num_slots, np.int64)
        self.generation = 0
        for seat in range(live):
            self.lease(seat)
        self.slab.control[SUPERVISOR_LINE, PHASE] = Phase.ACT

    def lease(self, seat: int) -> None:
        self.generation += 1
        line = self.slab.lease[seat]
        line[[START, SIZE, BASE]] = seat, 1, self.generation << 32
        line[GENERATION], line[LEASED] = self.generation, 1
        self.sequence[seat] = self.generation << 32
        self.slab.asked[seat, SEQUENCE] = self.sequence[seat]
        self.slab.flags[seat] = 0, 0, 1, 0
        self._changed()

    def revoke(self, seat: int, bye: bool = False) -> None:
        self.slab.lease[seat, SAID_BYE], self.slab.lease[seat, LEASED] = bye, 0
        self._changed()

    def _changed(self) -> None:
        self.slab.control[DOOR_LINE, DOOR_EPOCH] += 1
        os.eventfd_write(self.bell, 1)

    def publish(self, *seats: int) -> None:
        for seat in seats:
            self.sequence[seat] += 1
            self.slab.asked[seat, PUBLISHED_NS] = time.monotonic_ns()
            self.slab.asked[seat, SEQUENCE] = self.sequence[seat]
            os.eventfd_write(self.bell, 1)

    def step(self) -> tuple[list[int], float]:
        """One batch: (seats answered, microseconds that it took)."""
        before, begin = self.slab.answered[:, SEQUENCE].copy(), time.monotonic()
        assert self.engine.step()
        took_us = (time.monotonic() - begin) * 1e6
        now = self.slab.answered[:, SEQUENCE]
        asked = self.sequence & 0xFFFFFFFF != 0  # a fresh lease's base is no answer
        return np.flatnonzero((now != before) & (now == self.sequence) & asked).tolist(), took_us


@pytest.mark.parametrize(("min_batch", "after_us"), [(4, 2_000), (6, 20_000)])
def test_case_2_a_partial_batch_is_flushed_at_its_deadline(min_batch: int, after_us: int) -> None:
    bench = Bench(40, 8, min_batch=min_batch, max_wait_us=2_000, hard_deadline_us=20_000)
    bench.publish(*range(8))
    assert bench.step()[0] == list(range(8))
    times = []
    for _ in range(7):
        bench.publish(0, 1, 2, 3, 4)
        seats, took_us = bench.step()
        assert seats == [0, 1, 2, 3, 4]
        times.append(took_us)
    assert min(times) >= after_us - 200
    assert statistics.median(times) < after_us + PASS_US


def test_case_3_fires_at_once_when_every_live_slot_is_ready() -> None:
    bench = Bench(40, 5, min_batch=40, max_wait_us=50_000, hard_deadline_us=500_000)
    times = []
    for _ in range(9):
        bench.publish(*range(5))
        seats, took_us = bench.step()
        assert seats == [0, 1, 2, 3, 4]
        times.append(took_us)
    assert statistics.median(times) < 25_000


def test_case_4_the_deadline_is_the_age_of_the_oldest_row() -> None:
    bench = Bench(16, 16, min_batch=1, max_wait_us=10_000, hard_deadline_us=1_000_000)
    bench.publish(*range(16))
    bench.step()

    def trickle() -> None:
        for seat in range(12):
            bench.publish(seat)
            time.sleep(0.008)

    arrivals = threading.Thread(target=trickle)
    arrivals.start()
    answered: list[int] = []
    while len(answered) < 12:
        answered += bench.step()[0]
    arrivals.join()
    assert sorted(answered) == list(range(12))
    bench.counted.count()
    assert bench.board.histograms["wait_ns"].percentile(50) < (10_000 + PASS_US) * 1000
    assert bench.board.get("batches") >= 1 + 5, (
        "a timer that begins anew with each arrival would have gathered all"
    )


def test_case_5_at_most_max_batch_and_nobody_twice() -> None:
    bench = Bench(8, 6, max_batch=2, min_batch=1, max_wait_us=0)
    bench.publish(0, 1, 2, 3, 4)
    batches = [bench.step()[0] for _ in range(3)]
    assert [len(seats) for seats in batches] == [2, 2, 1]
    assert sorted(seat for seats in batches for seat in seats) == [0, 1, 2, 3, 4]
    assert bench.board.get("rows_acted") == 5


def test_case_9_a_row_of_the_old_lease_gives_way_to_the_new_ones() -> None:
    bench = Bench(4, 4, min_batch=4, max_wait_us=1e6, hard_deadline_us=1e7)
    bench.publish(*range(4))
    bench.step()
    for seat in range(4):
        bench.slab.flags[seat] = 0
    bench.publish(2)  # the old run's row waits in the open batch
    old = int(bench.sequence[2])
    for _ in range(2):  # restarted, twice even
        bench.revoke(2)
        bench.lease(2)
    bench.publish(0, 1, 2, 3)
    assert bench.step()[0] == [0, 1, 2, 3]
    assert bench.slab.answered[2, SEQUENCE] == bench.sequence[2] != old
    # the new run counts from the initial state, the others go on
    assert bench.slab.action["action"][:4].tolist() == [1, 1, 0, 1]
    bench.slab.asked[2, SEQUENCE] = old + 1  # the dead worker writes late
    bench.slab.flags[2] = 0
    bench.publish(0, 1, 3)
    bench.revoke(2)
    assert bench.step()[0] == [0, 1, 3]
    assert bench.board.get("live_slots") == 3


def test_a_detached_seat_is_drained_and_its_group_free_again() -> None:
    bench = Bench(4, 2)
    bench.publish(0, 1)
    bench.step()
    bench.revoke(1, bye=True)
    bench.publish(0)
    assert bench.step()[0] == [0]
    assert bench.slab.drained[1, 0] == bench.slab.lease[1, GENERATION]


def test_answers_are_the_states_whatever_the_order_of_batches() -> None:
    bench = Bench(8, 8, max_batch=3, max_wait_us=0, min_batch=1)
    chance, expected = np.random.default_rng(0), np.zeros(8, int)
    for _ in range(50):
        seats = sorted(chance.choice(8, int(chance.integers(1, 8)), replace=False).tolist())
        bench.publish(*seats)
        answered: list[int] = []
        while len(answered) < len(seats):
            answered += bench.step()[0]
        assert sorted(answered) == seats
        assert bench.slab.action["action"][seats].tolist() == expected[seats].tolist()
        expected[seats] += 1
        bench.slab.flags[seats] = 0
    assert torch.is_grad_enabled()


class _Full:
    """A writer that says which slots have filled their unroll, and the newest version."""

    def __init__(self, slots: int) -> None:
        self.is_full, self.version = np.zeros(slots, bool), 0

    def full(self, slots: np.ndarray) -> np.ndarray:
        return self.is_full[slots]

    def held_back(self, slots: np.ndarray) -> None:
        return None

    def adopt(self) -> None:
        pass

    def append(self, slots: np.ndarray, columns: object, states: object) -> int:
        return 0


def test_an_iteration_ends_for_each_group_with_its_unroll_and_goes_on_with_new_weights() -> None:
    bench = Bench(4, 4, min_batch=4, max_wait_us=0, hard_deadline_us=1e7)
    bench.engine.writer = writer = _Full(4)  # type: ignore[assignment]
    bench.engine._iterations = True
    bench.publish(*range(4))
    assert bench.step()[0] == [0, 1, 2, 3]
    writer.is_full[[1, 2]] = True
    bench.publish(*range(4))
    seats, took_us = bench.step()  # at once: the two others are all that live
    assert seats == [0, 3] and took_us < 5e6
    writer.is_full[:] = True
    bench.publish(0, 3)

    def publish_weights() -> None:
        time.sleep(0.05)
        bench.engine.version = writer.version = 1
        os.eventfd_write(bench.bell, 1)

    learner = threading.Thread(target=publish_weights)
    learner.start()
    seats, took_us = bench.step()
    learner.join()
    assert seats == [0, 1, 2, 3] and took_us > 40_000
    assert bench.board.get("blocked_lag_ns") > 30e6
