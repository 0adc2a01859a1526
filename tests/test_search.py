"""The search for settings: within a tenth of the best that trying everything finds, and never over the limit."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from seedrl.config import Config
from seedrl.errors import ConfigError, RunError
from seedrl.search import Found, Measured, Search, Setting, Space

CONFIG = Config()
FULL = Space.of(set(), cores=8, max_workers=None, max_envs=None)


class Machine:
    """A made-up machine, each of whose trials takes 5 s of its own clock: an engine that batches, and workers that share cores.

    Args: step_us: of one environment. noise: of a measurement, as a share.
    """

    def __init__(
        self, space: Space, step_us: float, cores: int = 8, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.space, self.step_us, self.cores, self.noise = space, step_us, cores, noise
        self.random, self.now_s, self.trials = random.Random(seed), 0.0, 0

    def clock(self) -> float:
        return self.now_s

    def true(self, setting: Setting) -> Measured:
        config = self.space.config(setting, CONFIG)
        own, batching, threads = config.workers, config.batching, config.engine.threads
        slots, group = own.num * own.envs_per_worker, own.envs_per_worker // own.groups
        rows = min(batching.max_batch or slots, max(batching.min_batch, slots / own.groups))
        engine_us = 150 * (1 + 0.2 * (threads - 1)) + 1.8 * rows / threads**0.5
        crowd = max(1.0, (own.num + threads) / self.cores)  # workers and engine share the cores
        worker_us = group * self.step_us * crowd * own.groups
        wait_us = (
            batching.max_wait_us if batching.min_batch > 1 or batching.max_wait_us < 300 else 300
        )
        rtt_us = crowd * engine_us * (1 + slots / own.groups / rows * 0.5) + wait_us
        round_us = max(worker_us, worker_us / own.groups + rtt_us, engine_us * crowd * slots / rows)
        return Measured(
            slots / round_us * 1e6, (rtt_us * 2.5 + worker_us * 0.2 * (crowd - 1)) * 1e-3
        )

    def measure(self, setting: Setting) -> Measured:
        self.now_s += 5.0
        self.trials += 1
        steps, p99 = self.true(setting)
        return Measured(
            steps * self.random.gauss(1, self.noise), p99 * abs(self.random.gauss(1, self.noise))
        )

    def best(self, limit_ms: float) -> float:
        """By trying everything."""
        kept = []
        for setting in itertools.product(*self.space.choices.values()):
            try:
                steps, p99 = self.true(setting)
            except ConfigError:
                continue
            if p99 <= limit_ms:
                kept.append(steps)
        return max(kept)


@pytest.mark.parametrize(
    ("step_us", "limit_ms", "share"),
    [
        (100.0, 5.0, 0.9), (100.0, 1.5, 0.9), (50.0, 1.0, 0.9), (2000.0, 20.0, 0.9),
        (5.0, 1.2, 0.8),  # 6 of 8,064 settings are within a tenth, beyond a ridge of over-the-limit ones
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_within_a_tenth_of_the_best_that_trying_everything_finds(
    step_us: float, limit_ms: float, share: float, seed: int
) -> None:
    machine = Machine(FULL, step_us, noise=0.02, seed=seed)
    search = Search(
        FULL,
        machine.measure,
        limit_ms,
        first=list(FULL.first(CONFIG, 8)),
        seed=seed,
        clock=machine.clock,
    )
    search.run(600.0)
    assert machine.trials <= 121 and machine.trials < len(FULL) / 40
    chosen = search.found.best()
    assert chosen is not None
    true = machine.true(chosen)
    assert true.steps_per_s >= share * machine.best(limit_ms)
    assert true.p99_ms <= 1.05 * limit_ms and search.found.of(chosen).p99_ms <= limit_ms
    assert len(search.found.by_setting[chosen]) >= 3, "the choice was measured again"


def test_the_limit_decides() -> None:
    """Without the limit something faster would be chosen: the test above would fail without the constraint."""
    machine = Machine(FULL, 5.0)
    assert machine.best(1.2) < 0.9 * machine.best(1e9)


SMALL = Space(
    {"workers.num": (1, 2, 4), "workers.envs_per_worker": (4, 8), "batching.max_batch": (None, 0.5)}
)


def test_a_study_goes_on_where_it_stopped(tmp_path: Path) -> None:
    machine = Machine(SMALL, 50.0)
    one = Search(
        SMALL, machine.measure, 10.0, study=tmp_path / "a.study", name="x", clock=machine.clock
    )
    one.run(20.0)
    again = Search(
        SMALL, machine.measure, 10.0, study=tmp_path / "a.study", name="x", clock=machine.clock
    )
    assert (
        again.known == len(one.found.by_setting) > 0
        and again.found.by_setting == one.found.by_setting
    )
    other = Search(
        SMALL, machine.measure, 10.0, study=tmp_path / "a.study", name="y", clock=machine.clock
    )
    assert other.known == 0


def test_a_small_space_is_searched_once_and_the_rest_of_the_time_given_back() -> None:
    machine = Machine(SMALL, 50.0)
    search = Search(SMALL, machine.measure, 10.0, clock=machine.clock)
    search.run(10_000.0)
    assert len(search.found.by_setting) == len(SMALL) == 12 and machine.now_s < 5_000
    chosen = search.found.best()
    assert chosen is not None and machine.true(chosen).steps_per_s == machine.best(10.0)


def test_an_interrupt_keeps_what_was_found() -> None:
    machine = Machine(SMALL, 50.0)

    def measure(setting: Setting) -> Measured:
        if machine.trials == 4:
            raise KeyboardInterrupt
        return machine.measure(setting)

    search = Search(SMALL, measure, 10.0, clock=machine.clock)
    with pytest.raises(KeyboardInterrupt):
        search.run(600.0)
    assert sum(map(len, search.found.by_setting.values())) == 4 and search.found.best() is not None


def test_trials_that_fail_are_told_and_three_in_a_row_end_it() -> None:
    machine, told = Machine(SMALL, 50.0), []

    def measure(setting: Setting) -> Measured:
        raise RunError(what="the simulator has no licence")

    search = Search(
        SMALL, measure, 10.0, clock=machine.clock, tell=lambda setting, found: told.append(found)
    )
    with pytest.raises(RunError, match="licence"):
        search.run(600.0)
    assert len(told) == 3 and all(isinstance(error, RunError) for error in told)


def test_what_cannot_be_is_passed_over() -> None:
    space = Space({"workers.envs_per_worker": (1, 2), "workers.groups": (1, 2)})
    machine, told = Machine(space, 50.0), []
    search = Search(
        space,
        machine.measure,
        100.0,
        clock=machine.clock,
        tell=lambda s, found: told.append((s, found)),
    )
    search.run(6000.0)
    assert set(search.found.by_setting) == {(1, 1), (2, 1), (2, 2)}
    assert [s for s, found in told if isinstance(found, ConfigError)] == [(1, 2)], "said once"
    assert machine.now_s < 600, "nothing is left to try: the rest of the time is given back"


def test_shares_are_rows_of_what_there_is() -> None:
    space = Space({"workers.num": (4,), "workers.envs_per_worker": (8,), "workers.groups": (2,), "batching.max_batch": (None, 0.25, 0.05), "batching.min_batch": (0, 0.5)})  # fmt: skip

    def of(most: float | None, least: float) -> tuple[int | None, int]:
        batching = space.config((4, 8, 2, most, least), CONFIG).batching
        return batching.max_batch, batching.min_batch

    assert of(None, 0) == (None, 1) and of(None, 0.5) == (None, 16)
    assert of(0.25, 0.5) == (8, 8), "never more than max_batch"
    assert of(0.05, 0) == (4, 1), "never less than a group"


def test_what_is_held_is_no_part_of_the_space() -> None:
    space = Space.of({"workers.num", "engine.threads"}, cores=2, max_workers=None, max_envs=8)
    assert "workers.num" not in space.names and "engine.threads" not in space.names
    assert space.choices["workers.envs_per_worker"] == (1, 2, 4, 8)
    setting = space.nearest(CONFIG)
    assert space.config(setting, CONFIG).workers.num == CONFIG.workers.num


def test_the_front_has_nobody_who_is_beaten_in_both() -> None:
    found = Found(limit_ms=3.0)
    for name, steps, p99 in (
        ("a", 10, 1.0),
        ("b", 20, 2.0),
        ("c", 15, 2.5),
        ("d", 30, 4.0),
        ("e", 20, 1.5),
    ):
        found.add((name,), Measured(steps, p99))
    assert found.front() == [("a",), ("e",), ("d",)]
    assert found.ranked()[0] == ("b",) or found.ranked()[0] == ("e",)
    found.add(("b",), Measured(40, 3.5))  # once over the limit
    assert found.best() == ("e",) and found.of(("b",)) == Measured(30, 3.5)
