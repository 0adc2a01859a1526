"""The search behind `seedrl tune`: a space of settings, trials of them, and which is best under a limit.

Optuna's tree-structured Parzen estimator (Bergstra et al. 2011, Algorithms for Hyper-Parameter Optimization) proposes settings, with the
limit as a constraint. As one short run proves little, the best ones are measured again at the end, and only settings whose every
measurement kept the limit are candidates. What a trial is, the caller says: nothing here starts a process.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from seedrl.config import Config
from seedrl.errors import ConfigError, SeedrlError

Setting = tuple[Any, ...]  # a value for each of the space's names
_FINALISTS, _EACH = 3, 2  # the best settings, and how often each is measured again
_SHAPE = ("workers.num", "workers.envs_per_worker", "workers.groups")
_FINAL_SHARE = 0.25  # of the budget
_RANDOM_TRIALS = 10
_IMPOSSIBLE = 1e9  # ms over the limit
_FAILURES = 3  # trials that fail in a row, before it is the task's fault


class Measured(NamedTuple):
    """What one trial found: environment steps a second, and the round trip's p99."""

    steps_per_s: float
    p99_ms: float


Measure = Callable[[Setting], Measured]


# --------------------------------------------------------------------------------------------------------- the space


def _nearest(values: Sequence[Any], wanted: float) -> Any:
    return min(
        (value for value in values if value is not None), key=lambda value: abs(value - wanted)
    )


class Space:
    """Names of fields, and the values that each may take; those that the user has set himself are no part of it.

    `batching.min_batch` and `batching.max_batch` are shares of all environments, 0 and None meaning 1 row and no bound.
    """

    def __init__(self, choices: Mapping[str, Sequence[Any]]) -> None:
        self.choices = {name: tuple(values) for name, values in choices.items()}

    @staticmethod
    def of(held: set[str], cores: int, max_workers: int | None, max_envs: int | None) -> Space:
        """Args: held: names that stay as they are. cores: of this machine. max_workers, max_envs: of a worker; None: 2 a core, and 64."""
        most = max_workers or 2 * cores
        workers = sorted(
            {n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n <= most} | {most}
        )
        envs = [1 << power for power in range(13) if 1 << power <= (max_envs or 64)]
        choices: dict[str, Sequence[Any]] = {
            "workers.num": workers, "workers.envs_per_worker": envs, "workers.groups": (1, 2, 4),
            "batching.max_batch": (None, 0.5), "batching.min_batch": (0, 0.5), "batching.max_wait_us": (0, 200, 1000),
            "engine.threads": [n for n in (1, 2, 4, 8) if n <= cores],
        }  # fmt: skip
        return Space({name: values for name, values in choices.items() if name not in held})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.choices)

    def __len__(self) -> int:
        return math.prod(len(values) for values in self.choices.values())

    def changes(self, setting: Setting, config: Config) -> dict[str, Any]:
        """The fields that a setting changes; shares as rows of the environments that there then are."""
        values = dict(zip(self.names, setting, strict=True))
        own = config.workers
        num, envs = values.get("workers.num", own.num), values.get("workers.envs_per_worker", own.envs_per_worker)  # fmt: skip
        group = -(-envs // values.get("workers.groups", own.groups))
        most = values.get("batching.max_batch")
        if most is not None:
            values["batching.max_batch"] = most = max(group, int(most * num * envs))
        if "batching.min_batch" in values:
            rows = max(1, int(values["batching.min_batch"] * num * envs))
            values["batching.min_batch"] = rows if most is None else min(rows, most)
        return values

    def config(self, setting: Setting, config: Config) -> Config:
        """`config` with a setting. Raises: ConfigError for a combination that cannot be."""
        changed = config.model_dump(by_alias=True)
        for name, value in self.changes(setting, config).items():
            section, _, key = name.partition(".")
            changed[section][key] = value
        return Config.model_validate(changed)

    def nearest(self, config: Config) -> Setting:
        """The setting that is nearest to `config` as it was given."""
        found: list[Any] = []
        slots = config.workers.num * config.workers.envs_per_worker
        for name, values in self.choices.items():
            section, _, key = name.partition(".")
            now = getattr(getattr(config, section), key)
            if name == "batching.max_batch":
                now = None if now is None or now >= slots else now / slots
            elif name == "batching.min_batch":
                now = now / slots if now > 1 else 0
            found.append(None if now is None else _nearest(values, now))
        return tuple(found)

    def neighbours(self, setting: Setting) -> Iterator[Setting]:
        """The settings one place away: in one name, or in several of workers, environments and groups, which make up for each other."""
        places = self.places(setting)
        shape = [name for name in _SHAPE if name in self.choices]
        steps = product((-1, 0, 1), repeat=len(shape))
        moves = [dict(zip(shape, by, strict=True)) for by in steps if any(by)]
        moves += [{name: by} for name in self.names if name not in shape for by in (-1, 1)]
        for move in moves:
            there = {name: place + move.get(name, 0) for name, place in places.items()}
            if all(0 <= place < len(self.choices[name]) for name, place in there.items()):
                yield self.at(there)

    def places(self, setting: Setting) -> dict[str, int]:
        """The place of each value among its choices."""
        return {
            name: self.choices[name].index(value)
            for name, value in zip(self.names, setting, strict=True)
        }

    def at(self, places: Mapping[str, int]) -> Setting:
        """The setting of these places."""
        return tuple(self.choices[name][places[name]] for name in self.names)

    def first(self, config: Config, cores: int) -> Iterator[Setting]:
        """What is worth trying before anything is known: as given, and a worker a core in one group and in two."""
        given = self.nearest(config)
        yield given
        for groups in (1, 2):
            values = dict(zip(self.names, given, strict=True))
            for name, wanted in (
                ("workers.num", cores),
                ("workers.groups", groups),
                ("workers.envs_per_worker", 16),
            ):
                if name in values:
                    values[name] = _nearest(self.choices[name], wanted)
            yield tuple(values.values())


# -------------------------------------------------------------------------------------------------------- the search


@dataclass
class Found:
    """All measurements of each setting that was tried, those of earlier searches of the same study too."""

    limit_ms: float
    by_setting: dict[Setting, list[Measured]] = field(default_factory=dict)

    def add(self, setting: Setting, measured: Measured) -> None:
        self.by_setting.setdefault(setting, []).append(measured)

    def of(self, setting: Setting) -> Measured:
        """Median throughput, and the worst p99, of all its measurements."""
        all_ = self.by_setting[setting]
        return Measured(statistics.median(one.steps_per_s for one in all_), max(one.p99_ms for one in all_))  # fmt: skip

    def ranked(self) -> list[Setting]:
        """Settings that kept the limit whenever they were measured, fastest first."""
        kept = [setting for setting in self.by_setting if self.of(setting).p99_ms <= self.limit_ms]
        return sorted(kept, key=lambda setting: -self.of(setting).steps_per_s)

    def best(self) -> Setting | None:
        ranked = self.ranked()
        return ranked[0] if ranked else None

    def front(self) -> list[Setting]:
        """The Pareto front: settings than which none is both faster and of a lower p99, by rising p99."""
        order = sorted(self.by_setting, key=lambda s: (self.of(s).p99_ms, -self.of(s).steps_per_s))
        front: list[Setting] = []
        for setting in order:
            if not front or self.of(setting).steps_per_s > self.of(front[-1]).steps_per_s:
                front.append(setting)
        return front


class Search:
    """Args:
    space: what may change. measure: one trial of a setting. limit_ms: of the p99 round trip. first: settings to begin with.
    study: file of the study, which an earlier search may have begun; None keeps nothing. name: of the request within that file.
    tell: called with each setting that was measured, and what was found of it, or the error that kept it from being measured.
    clock: monotonic, in seconds.
    """

    def __init__(
        self, space: Space, measure: Measure, limit_ms: float, *, first: Sequence[Setting] = (), study: Path | None = None,
        name: str = "tune", seed: int = 1, tell: Callable[[Setting, Measured | SeedrlError], None] = lambda setting, found: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        import optuna
        from optuna.storages.journal import JournalFileBackend

        self._space, self._measure, self._tell, self._clock = space, measure, tell, clock
        self.found = Found(limit_ms)
        self._failed_in_a_row = 0
        self._impossible: set[Setting] = set()
        self._random = random.Random(seed)
        self._seen: set[Setting] = set()  # that were tried, whatever came of it
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=_RANDOM_TRIALS, multivariate=True, seed=seed
        )
        storage = None
        if study is not None:
            backend = JournalFileBackend(str(study))
            storage = optuna.storages.JournalStorage(backend)
        self._study = optuna.create_study(
            storage=storage,
            study_name=name,
            sampler=sampler,
            direction="maximize",
            load_if_exists=True,
        )
        for trial in self._study.get_trials(deepcopy=False):
            if trial.value is not None and "p99_ms" in trial.user_attrs:
                self.found.add(self._space.at(trial.params), Measured(trial.value, trial.user_attrs["p99_ms"]))  # fmt: skip
        self._seen.update(self.found.by_setting)
        self.known = len(self.found.by_setting)
        for setting in dict.fromkeys(first):
            if setting not in self.found.by_setting:
                self._study.enqueue_trial(self._space.places(setting), skip_if_exists=True)

    def _try(self, trial: Any) -> None:
        """Measures what `trial` proposes, and tells the study."""
        import optuna

        places = {name: trial.suggest_int(name, 0, len(values) - 1) for name, values in self._space.choices.items()}  # fmt: skip
        setting = self._space.at(places)
        self._seen.add(setting)
        try:
            measured = self._measure(setting)
        except ConfigError as error:  # cannot be, and costs nothing: to be avoided
            trial.set_constraint("p99", _IMPOSSIBLE)
            self._study.tell(trial, 0.0)
            if setting not in self._impossible:
                self._impossible.add(setting)
                self._tell(setting, error)
            return
        except SeedrlError as error:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            self._tell(setting, error)
            self._failed_in_a_row += 1
            if self._failed_in_a_row == _FAILURES:
                raise
            return
        except BaseException:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            raise
        self._failed_in_a_row = 0
        trial.set_user_attr("p99_ms", measured.p99_ms)
        trial.set_constraint("p99", measured.p99_ms - self.found.limit_ms)
        self._study.tell(trial, measured.steps_per_s)
        self.found.add(setting, measured)
        self._tell(setting, measured)

    def run(self, budget_s: float) -> None:
        """Tries settings for three quarters of the budget, and the best ones again in the rest.

        Raises: the error of the task when trial after trial fails; KeyboardInterrupt, `found` being complete so far.
        """
        begin = self._clock()
        while self._clock() < begin + (1 - _FINAL_SHARE) * budget_s:
            if len(self.found.by_setting) + len(self._impossible) == len(self._space):
                break
            if self.found.by_setting and self._study.get_trials(deepcopy=False)[-1].number % 3:
                self._step_aside()
            self._try(self._study.ask())
        self._confirm(begin + budget_s)

    def _step_aside(self) -> None:
        """Puts next a neighbour of the best setting that has any left: the estimator alone seldom follows a limit's edge to its end."""
        for setting in self.found.ranked():
            near = [s for s in self._space.neighbours(setting) if s not in self._seen]
            if near:
                self._study.enqueue_trial(self._space.places(self._random.choice(near)))
                return

    def _confirm(self, end: float) -> None:
        """Measures the finalists again in turn, whoever they then are, until each has been measured often enough."""
        while self._clock() < end:
            finalists = self.found.ranked()[:_FINALISTS]
            left = [s for s in finalists if len(self.found.by_setting[s]) <= _EACH]
            if not left:
                return
            setting = min(left, key=lambda s: len(self.found.by_setting[s]))
            self._study.enqueue_trial(self._space.places(setting))
            self._try(self._study.ask())
