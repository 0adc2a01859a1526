"""One measured run, one JSON line: workers, the engine, rows appended to replay and taken from it again, by a learner only if asked for."""

from __future__ import annotations

import json
import platform
import selectors
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from seedrl.config import Config, config_from
from seedrl.errors import ConfigError, RunError
from seedrl.learn.loop import open_store
from seedrl.listen import Listen
from seedrl.metrics import Histogram
from seedrl.policy.agent import make_agent
from seedrl.spec import EnvSpec
from seedrl.store.board import STAGES
from seedrl.supervise import Supervisor, probe
from seedrl.transport import doorbell
from seedrl.transport.slab import Phase
from seedrl.transport.wire import make_keys

TRANSPORTS = ("shm", "zmq-ipc", "zmq-tcp", "zmq-tcp-curve")
_WARM_UP_S = 1.0
_TICK_S = 0.05


class Workload(NamedTuple):
    """What is measured: an environment, and the settings of its policy."""

    env: str
    settings: tuple[str, ...]


WORKLOADS = {
    "S": Workload("seedrl.synthetic:flat", ()),
    "A": Workload("seedrl.synthetic:frames", ("policy.encoder=nature",)),
    "L": Workload("seedrl.synthetic:flat", ("policy.core=lstm", "policy.core_size=128")),
    "C": Workload("CartPole-v1", ()),
}


class Acting(Supervisor):
    """A run that acts for some seconds at a time."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.records: list[dict[str, Any]] = []  # the learner's figures, one a second
        super().__init__(*arguments, on_metrics=self.records.append, **keywords)

    def begin(self, key: list[str] | None = None) -> None:
        """Starts everything, and returns once all workers have their seats and the engine may act. Raises: the failure of one.

        Args: key: arguments that give the workers a key.
        """
        self.start()
        own = self.config.workers
        address = f"unix://{self.address}" if self.listener is None else self.listener.address
        extra = ["--address", address, "--check-steps", "0", *(key or [])]
        self.start_workers(own.num, own.envs_per_worker, own.groups, extra=extra)
        while self.seats_taken < own.num * own.envs_per_worker:
            self._attend(0.01)
        self.enter(Phase.ACT)

    def act(self, seconds: float) -> float:
        """Lets the engine act for so long; returns how long it was."""
        begin = time.monotonic()
        while (left := begin + seconds - time.monotonic()) > 0:
            self._attend(min(left, _TICK_S))
        return time.monotonic() - begin

    def _attend(self, timeout_s: float) -> None:
        self.pump(timeout_s)
        if self.interrupted:
            raise KeyboardInterrupt
        if self.done is not None:
            raise RunError(what=f"the run ended while it was measured: {self.done}", do="leave run.max_steps and run.stop_at_return out")  # fmt: skip


class Unlearnt(Acting):
    """Rows are given back as soon as they are whole, by this process in the learner's place."""

    def _start_learner(self) -> None:
        self._learner_ready = True

    def _hand_store_to_learner(self, ready: dict[str, Any], fds: list[int]) -> None:
        policy, _ = make_agent(self.config, self.spec)
        self._reader, publisher = open_store(
            self.config, self.spec, policy, self.layout.num_slots, ready, fds, self._learner_bell, self._bell
        )  # fmt: skip
        self._selector.register(self._learner_bell, selectors.EVENT_READ, self._rows_came)
        publisher.publish(policy, 0)
        self._reader.publish_version(0)

    def _rows_came(self, _: Any = None) -> None:
        doorbell.hush(self._learner_bell)
        self._reader.skip()
        self._reader.want(self.layout.num_slots)

    def _attend(self, timeout_s: float) -> None:
        super()._attend(timeout_s)
        self._rows_came()


def configuration(
    workload: str, transport: str, policy: str, workers: int, envs: int, step_us: float, overrides: list[str],
) -> Config:  # fmt: skip
    """The configuration of a measured run. Raises: ConfigError for a name that is none, and for what `overrides` has wrong."""
    for flag, value, known in (("--workload", workload, tuple(WORKLOADS)), ("--transport", transport, TRANSPORTS), ("--policy", policy, ("none", "default"))):  # fmt: skip
        if value not in known:
            raise ConfigError(
                what=f"'{value}' is none of {', '.join(known)}", where=flag, do=f"use {known[0]}"
            )
    if step_us and workload == "C":
        raise ConfigError(
            what="CartPole's steps cost what they cost", where="--step-us", do="use --workload S"
        )
    chosen = WORKLOADS[workload]
    slots = workers * envs
    return config_from([
        f"env.id={chosen.env}", *([f"env.kwargs={{step_us: {step_us}}}"] if step_us else []), f"policy.name={policy}",
        f"workers.num={workers}", f"workers.envs_per_worker={envs}", "workers.groups=1", "learner.unroll_length=20",
        f"learner.batch_size={slots}", *chosen.settings, *overrides,
    ])  # fmt: skip


def measure(
    config: Config,
    transport: str,
    seconds: float,
    *,
    learner: bool = False,
    warm_up_s: float = _WARM_UP_S,
    spec: EnvSpec | None = None,
) -> dict[str, Any]:
    """Runs it for `seconds` after warming up; the figures of `seedrl bench --json` but for its names.

    Args: learner: whether the rows are learnt from. spec: of the environment, if it is known already.
    Raises: whatever ends the run.
    """
    spec = spec or probe(config)
    slots = config.workers.num * config.workers.envs_per_worker
    with tempfile.TemporaryDirectory(prefix="seedrl-bench-") as name:
        folder = Path(name)
        listen, key = _listen(transport, folder)
        kind = Acting if learner else Unlearnt
        with kind(config, spec, folder, num_slots=slots, listen=listen) as run:
            run.begin(key)
            run.act(warm_up_s)
            run.records.clear()
            board = run.board
            before = {name: histogram.copy() for name, histogram in board.histograms.items()}
            rows, batches = board.get("rows_acted"), board.fired
            took_s = run.act(seconds)
            rows, batches = board.get("rows_acted") - rows, board.fired - batches
            seen = {name: board.histograms[name].since(before[name]) for name in before}
    return {
        "seconds": round(took_s, 3), "steps_per_s": round(rows / took_s, 1), "mean_batch": round(rows / max(batches, 1), 2),
        "batches": batches, "rtt_us": _microseconds(seen["rtt_ns"]),
        "stage_us": {stage: _microseconds(seen[f"{stage}_ns"]) for stage in STAGES},
        "deschedule_us": _microseconds(seen["deschedule_ns"]), "replay": True, "device": config.engine.device, "versions": _versions(),
        **({"learner": _learnt(run.records)} if learner else {}),
    }  # fmt: skip


def _learnt(records: list[dict[str, Any]]) -> dict[str, float | None]:
    """Means of the learner's figures over its whole seconds; None where there was none."""

    def mean(name: str) -> float | None:
        found = [record[name] for record in records if name in record]
        return round(sum(found) / len(found), 4) if found else None

    return {name: mean(name) for name in ("updates_per_s", "learner_wait_time_fraction", "actors_wait_time_fraction", "lag_mean")}  # fmt: skip


def _listen(transport: str, folder: Path) -> tuple[Listen | None, list[str]]:
    """Where the workers come in, and their key's arguments."""
    if transport == "shm":
        return None, []
    if transport == "zmq-ipc":
        return Listen(f"ipc://{folder}/gate"), []
    if transport == "zmq-tcp":
        return Listen("tcp://127.0.0.1:0"), []
    make_keys(folder / "keys", "worker")
    return Listen("tcp://127.0.0.1:0", folder / "keys"), ["--key", str(folder / "keys/worker.key")]


def _microseconds(histogram: Histogram) -> dict[str, float]:
    return {
        name: round(histogram.percentile(q) * 1e-3, 1)
        for name, q in (("p50", 50), ("p99", 99), ("p999", 99.9))
    }


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("seedrl", "numpy", "torch", "gymnasium", "pyzmq")}
    return {"python": platform.python_version(), **packages}


def bench(
    workload: str, workers: int, envs_per_worker: int, transport: str, seconds: float, policy: str, step_us: float, learner: bool,
    as_json: bool, overrides: list[str],
) -> int:  # fmt: skip
    """The `bench` command; returns its exit code."""
    config = configuration(
        workload, transport, policy, workers, envs_per_worker, step_us, overrides
    )
    own = config.workers
    figures = {
        "workload": workload, "transport": transport, "policy": policy, "workers": own.num, "envs_per_worker": own.envs_per_worker,
        "step_us": step_us, **measure(config, transport, seconds, learner=learner),
    }  # fmt: skip
    if as_json:
        print(json.dumps(figures))
    else:
        _show(figures)
    sys.stdout.flush()
    return 0


def _show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['steps_per_s']:,.0f} steps/s: {figures['workload']}, {figures['workers']} workers of {figures['envs_per_worker']}, "
        f"{figures['transport']}, batches of {figures['mean_batch']:.1f} rows, {figures['batches'] / figures['seconds']:,.0f} a second"
    )
    print(f"{'us':>12} {'p50':>9} {'p99':>9} {'p99.9':>9}")
    lines = {"round trip": figures["rtt_us"], **figures["stage_us"], "descheduled": figures["deschedule_us"]}  # fmt: skip
    for name, row in lines.items():
        print(f"{name:>12} {row['p50']:9,.0f} {row['p99']:9,.0f} {row['p999']:9,.0f}")
    learnt = figures.get("learner", {})
    if learnt:
        print("learner: " + ", ".join(f"{name} {value}" for name, value in learnt.items() if value is not None))  # fmt: skip
