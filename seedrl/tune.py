"""`seedrl tune`: the settings of highest throughput whose p99 round trip keeps a limit, found by short runs of the user's own task.

A trial is one run of `bench.measure`; `search` decides which. The study lies beside the output, so that the same request goes on where
it stopped. The end is a configuration that `train` and `serve` take as it is, and a picture.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from seedrl.alone import in_own_process
from seedrl.bench import measure as measure_run
from seedrl.config import DEFAULT_SERVED_SLOTS, Config, dump_yaml, load_config
from seedrl.errors import ConfigError, RunError, SeedrlError
from seedrl.search import Found, Measured, Search, Setting, Space
from seedrl.supervise import probe

_ALONE_ENVS = 32


@dataclass(frozen=True)
class Request:
    """What the command line asks for; see `seedrl tune --help`."""

    config: str
    overrides: list[str]
    p99_ms: float
    out: Path
    budget_s: float
    trial_s: float
    max_workers: int | None
    max_envs: int | None
    learner: bool


def cores() -> int:
    return len(os.sched_getaffinity(0))


def tune(request: Request) -> int:
    """The `tune` command; returns its exit code."""
    given, space = _asked(request)
    config = given.model_copy(deep=True)
    config.run.stop_at_return = None  # a trial has no end but its own
    spec = probe(config)
    config.env.action_mask = spec.action_mask  # which the probe may have found by itself

    def measure(setting: Setting) -> Measured:
        figures = measure_run(
            space.config(setting, config),
            "shm",
            request.trial_s,
            learner=request.learner,
            warm_up_s=0.5,
            spec=spec,
        )
        return Measured(figures["steps_per_s"], figures["rtt_us"]["p99"] * 1e-3)

    teller = _Teller(space, request, config)
    search = Search(
        space, measure, request.p99_ms, first=list(space.first(config, cores())), study=request.out.with_suffix(".study"),
        name=_name(config, space, request), seed=config.run.seed, tell=teller.tell,
    )  # fmt: skip
    teller.begin(search)
    interrupted = False
    try:
        search.run(request.budget_s)
    except KeyboardInterrupt:
        interrupted = True
        teller.say("interrupted: keeping the best so far")
    best = search.found.best()
    if search.found.by_setting:
        picture = request.out.with_suffix(".png")
        draw(search.found, best, picture)
        teller.say(f"picture       {picture}: throughput against p99, {len(search.found.by_setting)} settings")  # fmt: skip
    if best is not None:
        _write(request, space.config(best, given), best, search.found)
        teller.end(best, space.config(best, config))
        if not interrupted:
            _tell_alone(config, search.found.of(best), teller)
        return 130 if interrupted else 0
    if interrupted:
        return 130
    nearest = min(search.found.by_setting.values(), key=lambda all_: min(one.p99_ms for one in all_), default=None)  # fmt: skip
    what = f"no setting kept a p99 round trip of {request.p99_ms:g} ms"
    if nearest is not None:
        what += f"; the nearest had {min(one.p99_ms for one in nearest):.2f} ms"
    raise RunError(what=what, where="--p99-ms", do="allow more, give --budget-s more time, or see the picture")  # fmt: skip


def _asked(request: Request) -> tuple[Config, Space]:
    """The configuration to begin with, and what may change. Raises: ConfigError for a request that cannot be met."""
    for flag, value, least in (("--p99-ms", request.p99_ms, 0), ("--budget-s", request.budget_s, 0), ("--trial-s", request.trial_s, 0.2)):  # fmt: skip
        if not (math.isfinite(value) and value > 0 and value >= least):
            raise ConfigError(
                what=f"{value:g} is too little", where=flag, do=f"use more than {least:g}"
            )
    if request.out.suffix not in (".yaml", ".yml"):
        raise ConfigError(what=f"'{request.out}' is no YAML file", where="--out", do=f"write --out {request.out.with_suffix('.yaml')}")  # fmt: skip
    if not request.out.absolute().parent.is_dir():
        raise ConfigError(what=f"there is no folder {request.out.absolute().parent}", where="--out", do="create it, or choose another place")  # fmt: skip
    _need("optuna")
    _need("matplotlib")
    config = load_config(request.config, request.overrides)
    held = {argument.partition("=")[0] for argument in request.overrides}
    space = Space.of(held, cores(), request.max_workers, request.max_envs)
    if len(space) < 2:
        raise ConfigError(what="everything is set already: nothing is left to search", where="command line", do=f"leave out one of {', '.join(sorted(held))}")  # fmt: skip
    return config, space


def _need(module: str) -> None:
    """Raises: ConfigError, before anything starts, when `module` is not installed."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise ConfigError(what=f"tune needs {module}, which is not installed", do="pip install 'seedrl[tune]'")  # fmt: skip


def _name(config: Config, space: Space, request: Request) -> str:
    """Names the request, so that another one in the same file begins anew: by what is measured, and how."""
    fixed = config.model_dump(mode="json", by_alias=True)
    about = [fixed, list(space.choices.items()), request.p99_ms, request.trial_s, request.learner, cores()]  # fmt: skip
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _write(request: Request, tuned: Config, best: Setting, found: Found) -> None:
    """The tuned configuration, whole, as `train` and `serve` take it; replaced in one go."""
    slots = tuned.workers.num * tuned.workers.envs_per_worker + tuned.evaluation.slots
    if slots > (tuned.batching.max_slots or DEFAULT_SERVED_SLOTS):
        tuned.batching.max_slots = slots
    measured = found.of(best)
    text = (
        f"# seedrl tune, {date.today()}: {measured.steps_per_s:,.0f} steps/s at a p99 round trip of {measured.p99_ms:.2f} ms (limit {request.p99_ms:g}),\n"
        f"# {len(found.by_setting[best])} runs of {request.trial_s:g} s on {cores()} cores, {'with' if request.learner else 'without'} a learner\n"
        f"{dump_yaml(tuned)}"
    )
    unfinished = request.out.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(request.out)


def draw(found: Found, best: Setting | None, path: Path) -> None:
    """Throughput against p99 of every setting, the Pareto front, the limit and the choice, as a picture (PNG)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    kept = set(found.ranked())
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for settings, colour, label in (
        ([s for s in found.by_setting if s in kept], "tab:blue", "keeps the limit"),
        ([s for s in found.by_setting if s not in kept], "tab:gray", "does not"),
    ):
        points = [found.of(s) for s in settings]
        axes.scatter([p.p99_ms for p in points], [p.steps_per_s for p in points], s=18, color=colour, label=label)  # fmt: skip
    front = [found.of(s) for s in found.front()]
    axes.step([p.p99_ms for p in front], [p.steps_per_s for p in front], where="post", color="tab:blue", linewidth=1, label="Pareto front")  # fmt: skip
    axes.axvline(found.limit_ms, color="tab:red", linestyle="--", linewidth=1, label=f"limit {found.limit_ms:g} ms")  # fmt: skip
    if best is not None:
        chosen = found.of(best)
        axes.scatter([chosen.p99_ms], [chosen.steps_per_s], marker="*", s=160, color="tab:orange", label="chosen", zorder=3)  # fmt: skip
    axes.set(xscale="log", xlabel="p99 of the round trip, ms", ylabel="environment steps a second")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


class _Teller:
    """Lines for the user: a trial each."""

    def __init__(self, space: Space, request: Request, config: Config) -> None:
        self._space, self._request, self._config = space, request, config
        self._begin_s, self._count, self._best = time.monotonic(), 0, 0.0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, search: Search) -> None:
        request, names = self._request, self._space.names
        self.say(f"searching     {len(self._space):,} settings of {', '.join(names)}")
        self.say(f"              for {request.budget_s:g} s, runs of {request.trial_s:g} s; p99 of the round trip at most {request.p99_ms:g} ms")  # fmt: skip
        if search.known:
            self.say(f"              {search.known} settings are known from {request.out.with_suffix('.study')}")  # fmt: skip
            best = search.found.best()
            self._best = search.found.of(best).steps_per_s if best is not None else 0.0
        self.say(f"{'trial':>5} {'s':>5} {'steps/s':>11} {'p99 ms':>8}  setting")

    def tell(self, setting: Setting, found: Measured | SeedrlError) -> None:
        self._count += 1
        head = f"{self._count:5} {time.monotonic() - self._begin_s:5.0f}"
        if isinstance(found, SeedrlError):
            self.say(f"{head} {'-':>11} {'-':>8}  {self.text(setting)}: {found.what}")
            return
        mark = ""
        if found.p99_ms > self._request.p99_ms:
            mark = "  over the limit"
        elif found.steps_per_s > self._best:
            self._best, mark = found.steps_per_s, "  best"
        self.say(f"{head} {found.steps_per_s:11,.0f} {found.p99_ms:8.2f}  {self.text(setting)}{mark}")  # fmt: skip

    def text(self, setting: Setting) -> str:
        changes = self._space.changes(setting, self._config)
        return " ".join(f"{name.partition('.')[2]}={'all' if value is None else value}" for name, value in changes.items())  # fmt: skip

    def end(self, best: Setting, config: Config) -> None:
        out, own = self._request.out, config.workers
        self.say(f"written       {out}: {self.text(best)}")
        self.say(f"              seedrl train {out}")
        self.say(f"              seedrl serve {out}, and seedrl attach ADDRESS --env {config.env.id} --workers {own.num} --envs-per-worker {own.envs_per_worker} --groups {own.groups}")  # fmt: skip


def _tell_alone(config: Config, best: Measured, teller: _Teller) -> None:
    """Measures what one process would do that steps the same environments itself, and says which is the faster."""
    try:
        alone = in_own_process(config, _ALONE_ENVS, 2.0)
    except RunError as error:
        teller.say(f"one process   could not be measured: {error.what}")
        return
    verdict = f"{best.steps_per_s / alone:.1f} times as many here"
    if alone > best.steps_per_s:
        verdict = "more than here: with environments this cheap a plain loop in one process acts faster (docs/tune.md, when to use something else)"  # fmt: skip
    teller.say(f"one process   that steps {_ALONE_ENVS} environments itself: {alone:,.0f} steps/s; {verdict}")  # fmt: skip
