"""Control of a running server from another terminal: what each verb does, and how the answer is shown."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seedrl.errors import AddressError, ConfigError, LeaseRefused, RunError, SeedrlError
from seedrl.transport import attach
from seedrl.transport.slab import RTT_NS, SEQUENCE, SIZE, STEP_NS, Phase
from seedrl.transport.wire import is_remote
from seedrl.watch.trace import Recorder

if TYPE_CHECKING:
    from seedrl.supervise import Supervisor
    from seedrl.transport.door import Lease

# and "figures", which `top` asks for
VERBS = ("status", "pause", "resume", "drain", "kick", "trace")
TRACE_S, _LONGEST_TRACE_S = 5.0, 60.0
MODES = ("keep", "wait", "abort")


class Pace(Enum):
    """What the server is at, for `status`."""

    STARTING = "starting"
    ACTING = "acting"
    PAUSING = "pausing"
    PAUSED = "paused"
    DRAINING = "draining"
    EVALUATING = "evaluating"


class Controls:
    """The verbs, on the supervisor's side; also for a program of one's own that runs a supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._recorder: Recorder | None = None
        self._finishing: str | None = None  # "pause" or "drain": once the open unrolls are full

    def hear(self, lease: Lease, message: dict[str, Any]) -> None:
        """Answers one message of `ask`."""
        try:
            answer = self._do(str(message.get("verb")), message)
        except SeedrlError as error:
            answer = {"error": error.to_wire()}
        self._supervisor.door.reply(lease, answer)

    def _do(self, verb: str, message: dict[str, Any]) -> dict[str, Any]:
        if verb == "pause":
            self.pause(str(message.get("mode", "keep")))
        elif verb == "resume":
            self.resume()
        elif verb == "drain":
            self.drain()
        elif verb == "kick":
            return {"kicked": self.kick(int(message.get("worker", -1)))}
        elif verb == "trace":
            self.trace(float(message.get("seconds", TRACE_S)))
        elif verb == "figures":
            return self.figures()
        elif verb != "status":
            raise ConfigError(
                what=f"there is no verb '{verb:.40}'", where="ctl", do=f"one of {', '.join(VERBS)}"
            )
        return self.status()

    def pause(self, mode: str = "keep") -> None:
        """Stops answering. keep: at once, all stays as it is; wait: once the open unrolls are full; abort: at once, they are dropped."""
        supervisor = self._supervisor
        if mode not in MODES:
            raise ConfigError(
                what=f"there is no way to pause called '{mode:.40}'",
                where="--mode",
                do=f"one of {', '.join(MODES)}",
            )
        self._require(Phase.ACT, Phase.FINISH, Phase.PAUSED)
        self._finishing = "pause" if mode == "wait" else None
        supervisor.enter({"keep": Phase.PAUSED, "wait": Phase.FINISH, "abort": Phase.WAIT}[mode])

    def resume(self) -> None:
        self._require(Phase.ACT, Phase.FINISH, Phase.PAUSED, Phase.WAIT)
        self._finishing, self._supervisor.door.refusing = None, ""
        self._supervisor.enter(Phase.ACT)

    def drain(self) -> None:
        """Lets nobody in any more, fills the open unrolls, and ends the run as if it had come to its end."""
        self._require(Phase.ACT, Phase.FINISH, Phase.PAUSED, Phase.WAIT)
        self._supervisor.door.refusing = "the server is being drained"
        self._finishing = "drain"
        self._supervisor.enter(Phase.FINISH)

    def kick(self, worker: int) -> str:
        """Cuts a worker off, for good; returns what it was."""
        door = self._supervisor.door
        for fd, lease in list(door.leases.items()):
            if lease.attached and lease.worker == worker:
                if lease.pid in self._supervisor.own_pids():
                    raise LeaseRefused(
                        what=f"worker {worker} is the run's own",
                        where="ctl kick",
                        do="change workers.num instead",
                    )
                door.cut(
                    fd,
                    LeaseRefused(what="cut off by the server's operator", where=f"worker {worker}"),
                )
                return f"worker {worker}, {lease.env}"
        known = sorted(lease.worker for lease in door.leases.values() if lease.attached)
        raise ConfigError(
            what=f"there is no worker {worker}",
            where="ctl kick",
            do=f"attached: {', '.join(map(str, known)) or 'nobody'}",
        )

    def trace(self, seconds: float = TRACE_S) -> Path:
        """Records every batch for `seconds`; the file, in the run directory, is there once `status` says that none is under way."""
        supervisor = self._supervisor
        if not 0 < seconds <= _LONGEST_TRACE_S:
            raise ConfigError(what=f"{seconds:g} s is not a window of up to {_LONGEST_TRACE_S:g} s", where="--seconds", do=f"use {TRACE_S:g}")  # fmt: skip
        if self.tracing:
            raise RunError(what="a trace is under way", where="ctl trace", do="wait for it")
        names = {
            group: f"worker {lease.worker}, group {number}"
            for lease in supervisor.door.leases.values() for number, group in enumerate(lease.groups)
        }  # fmt: skip
        path = supervisor.run_dir / "trace.json"
        self._recorder = Recorder(path, time.monotonic() + seconds, names)
        return path

    @property
    def tracing(self) -> bool:
        return self._recorder is not None and self._recorder.under_way

    def record(self, lines: np.ndarray, asks: np.ndarray) -> None:
        """Takes the newest batches' lines; see `BatchReader.count`."""
        if self._recorder is not None:
            self._recorder.add(lines, asks)

    def _require(self, *phases: Phase) -> None:
        phase = self._supervisor.phase
        if phase not in phases or not self._supervisor.running:
            raise RunError(
                what=f"the server is {self.pace().value}", where="ctl", do="wait until it acts"
            )

    def tick(self) -> None:
        """Takes the next step of a pause or a drain that waits for unrolls."""
        supervisor = self._supervisor
        if (
            self._finishing is None
            or supervisor.board.get("acting") != Phase.FINISH
            or supervisor.board.get("unfinished_groups")
        ):
            return
        finishing, self._finishing = self._finishing, None
        if finishing == "drain":
            supervisor.done = supervisor.done or "drained"
        else:
            supervisor.enter(Phase.PAUSED)

    def pace(self) -> Pace:
        supervisor = self._supervisor
        if not supervisor.running:
            return Pace.EVALUATING if supervisor.phase == Phase.EVALUATE else Pace.STARTING
        if supervisor.phase == Phase.FINISH:
            return Pace.DRAINING if self._finishing == "drain" or supervisor.done else Pace.PAUSING
        return Pace.ACTING if supervisor.phase == Phase.ACT else Pace.PAUSED

    def figures(self) -> dict[str, Any]:
        """`status`, and the figures of the last seconds: see `watch.window.Window.figures`."""
        supervisor, slab = self._supervisor, self._supervisor.slab
        status = self.status()
        asked, waiting = slab.asked, 0
        groups = {lease.worker: lease.groups for lease in supervisor.door.leases.values() if lease.attached}  # fmt: skip
        for worker in status["workers"]:
            own = groups[worker["worker"]]
            for name, word in (("env_step_us", STEP_NS), ("rtt_us", RTT_NS)):
                worker[name] = float(asked[own, word].mean()) * 1e-3
            waits = asked[own, SEQUENCE] > slab.answered[own, SEQUENCE]
            waiting += int(slab.lease[own, SIZE][waits].sum())
        record = {name: value for name, value in supervisor.record.items() if isinstance(value, int | float) and math.isfinite(value)}  # fmt: skip
        window = supervisor.window.figures(len(status["workers"]))
        return {**status, **window, "waiting_slots": waiting, "record": record}

    def status(self) -> dict[str, Any]:
        """What runs, in plain values."""
        supervisor, door = self._supervisor, self._supervisor.door
        board, slab = supervisor.board, supervisor.slab
        workers = [
            {
                "worker": lease.worker, "env": lease.env, "host": lease.host, "pid": lease.peer, "evaluation": lease.evaluation,
                "slots": sum(int(slab.lease[group, SIZE]) for group in lease.groups), "groups": len(lease.groups),
                "remote": supervisor.is_remote(lease),
            }
            for lease in door.leases.values() if lease.attached
        ]  # fmt: skip
        rtt = board.histograms["rtt_ns"]
        return {
            "pace": self.pace().value, "env_id": supervisor.spec.env_id, "learner": supervisor.learning, "slots": slab.layout.num_slots,
            "free_slots": door.free_slots(), "workers": sorted(workers, key=lambda worker: worker["worker"]),
            "env_steps": board.get("env_steps"), "batches": board.fired, "policy_version": board.get("policy_version"),
            "rtt_p50_us": _known(rtt.percentile(50) * 1e-3), "rtt_p99_us": _known(rtt.percentile(99) * 1e-3),
            "listen": supervisor.listener.address if supervisor.listener is not None else None, "run_dir": str(supervisor.run_dir),
            "tracing": self.tracing,
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the other side


def asker(where: str, key: Path | None) -> Callable[..., dict[str, Any]]:
    """What asks the server at `where` (an address, or a run directory) for a verb: on its Unix socket, or as an admin over the network.

    Raises: AddressError for an address of another form, and for one of the network without a key.
    """
    address = where if "://" in where else f"unix://{Path(where) / 'door.sock'}"
    if not is_remote(address):
        if key is not None:
            raise ConfigError(what="a Unix socket needs no key", where="--key", do="leave it out")
        return partial(attach.control, address)
    if key is None:
        raise AddressError(
            what="control verbs over the network need an admin's key", where=where,
            do="give --key (seedrl keys DIR --admin NAME makes one), or run it on the server's host with the run directory",
        )  # fmt: skip
    from seedrl.transport import remote  # ZeroMQ only where it is used

    return partial(remote.control, address, key=key)


def ctl(
    where: str, verb: str, worker: int | None, mode: str, timeout_s: float, as_json: bool, key: Path | None = None,
    seconds: float = TRACE_S,
) -> int:  # fmt: skip
    """The `ctl` command; returns its exit code."""
    if verb not in VERBS:
        raise ConfigError(
            what=f"there is no verb '{verb}'", where="ctl", do=f"one of {', '.join(VERBS)}"
        )
    if verb == "kick" and worker is None:
        raise ConfigError(
            what="kick needs the worker's number",
            where="ctl kick",
            do="see seedrl ctl ADDRESS status",
        )
    ask = asker(where, key)
    answer = ask(
        verb,
        **({"mode": mode} if verb == "pause" else {}),
        **({"worker": worker} if verb == "kick" else {}),
        **({"seconds": seconds} if verb == "trace" else {}),
    )
    deadline = time.monotonic() + timeout_s
    while answer.get("pace") == Pace.PAUSING.value:
        if time.monotonic() > deadline:
            raise RunError(
                what=f"unrolls were still open after {timeout_s:g} s",
                where=where,
                do="give --timeout-s, or --mode keep",
            )
        time.sleep(0.05)
        answer = ask("status")
    while verb == "trace" and answer["tracing"]:
        time.sleep(0.1)
        answer = ask("status")
    if as_json:
        print(json.dumps(answer))
    elif verb == "trace":
        print(f"{answer['run_dir']}/trace.json: open it at ui.perfetto.dev")
    elif "kicked" in answer:
        print(f"cut off {answer['kicked']}")
    else:
        _show(answer)
    sys.stdout.flush()
    return 0


def top(where: str, key: Path | None, interval_s: float, once: bool, as_json: bool) -> int:
    """The `top` command: until the server ends, or Ctrl-C; returns its exit code."""
    from rich.console import Console
    from rich.live import Live

    from seedrl.watch.page import headline, page

    looks = _looks(asker(where, key), interval_s)
    first = next(looks)
    if as_json or once or not sys.stdout.isatty():
        for figures in chain([first], looks):
            print(json.dumps(figures) if as_json else "\n".join(headline(figures)), flush=True)
            if once:
                break
        return 0
    with Live(page(first), console=Console(), auto_refresh=False, screen=True) as live:
        for figures in looks:
            live.update(page(figures), refresh=True)
    return 0


def _looks(ask: Callable[..., dict[str, Any]], interval_s: float) -> Iterator[dict[str, Any]]:
    """The server's figures, time and again until it has ended. Raises: AddressError when it is not there at first."""
    figures = ask("figures")
    while True:
        yield figures
        time.sleep(interval_s)
        try:
            figures = ask("figures")
        except AddressError:
            return


def _known(figure: float) -> float | None:
    """None for the figure of nothing, which JSON cannot say as NaN."""
    return None if math.isnan(figure) else figure


def _show(status: dict[str, Any]) -> None:
    took = [
        f"{status[name]:.0f} us" if status[name] is not None else "unknown"
        for name in ("rtt_p50_us", "rtt_p99_us")
    ]
    print(
        f"{status['pace']}: {status['env_id']}, {status['slots'] - status['free_slots']} of {status['slots']} slots taken, "
        f"{status['env_steps']} steps, version {status['policy_version']}, round trip p50 {took[0]}, p99 {took[1]}"
    )
    if status["listen"]:
        print(f"listens at {status['listen']}")
    for worker in status["workers"]:
        kinds = Counter({"remote": worker["remote"], "evaluation": worker["evaluation"]})
        print(
            f"worker {worker['worker']}: {worker['slots']} slots in {worker['groups']} groups, {worker['env']}, "
            f"{worker['host']} pid {worker['pid']}{''.join(f', {kind}' for kind in +kinds)}"
        )
