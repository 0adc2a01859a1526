"""The supervisor: starts engine, learner and workers, hears them, shuts all down. Sockets and files live here, not in the engine."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from seedrl import host
from seedrl.children import Child, Children
from seedrl.config import Config
from seedrl.control import Controls
from seedrl.errors import RunError, SeedrlError, from_wire
from seedrl.evaluation import Evaluation, Round
from seedrl.listen import Listen, Listener
from seedrl.spec import EnvSpec
from seedrl.store.board import BatchReader, Board, EpisodeReader
from seedrl.transport import doorbell
from seedrl.transport.channel import Channel
from seedrl.transport.door import Door, Lease
from seedrl.transport.slab import (
    AT_SEAT,
    BASE,
    LEASED,
    PHASE,
    SEQUENCE,
    SIZE,
    START,
    STOP,
    SUPERVISOR_LINE,
    Phase,
    Slab,
    SlabLayout,
)
from seedrl.watch.slow import SlowBatches
from seedrl.watch.window import Window
from seedrl.worker.envs import probe_spec
from seedrl.worker.group import PROBE, seat_seed
from seedrl.worker.loop import env_arguments

if TYPE_CHECKING:
    from seedrl.watch.prometheus import Page

MAX_GROUPS = 512
_START_S = 120.0  # a large policy, a slow disk: imports and allocation may take so long
_RESPAWNS, _RESPAWN_WINDOW_S = 5, 60.0
_LEARNER_GRACE_S = 6.0  # of the 10 s in which everything must be gone
_TICK_S = 0.05
_TELL_S = 5.0
_OTHER_DESCRIPTORS = 128


def probe(config: Config) -> EnvSpec:
    """The environment's spec, from a short-lived process that makes it."""
    env = config.env
    seed = seat_seed(config.run.seed, False, 0, 0, PROBE)
    return probe_spec(env.id, env.kwargs, env.action_mask, env.stats, seed=seed)


class Ended(Enum):
    """How `Supervisor.train` came to its end."""

    DONE = "done"
    INTERRUPTED = "interrupted"


@dataclass
class WorkerSlot:
    """One worker that the supervisor keeps alive."""

    index: int
    evaluation: bool
    attempt: int = 0
    child: Child | None = None
    arguments: list[str] = field(default_factory=list)


class Supervisor:
    """One run's processes and the door, from `start` to `close`; a context manager.

    Args:
        config: complete. spec: of the environment. run_dir: for logs, checkpoints and the door's address.
        address: where workers attach; None is a socket in the run directory. listen: where those of other hosts do, if they may.
        checkpoint: weights to act with when there is no learner. resume: checkpoint (or folder) that the learner continues.
        on_metrics, on_message: called with each record of figures, and with each line for the user.
    """

    def __init__(
        self, config: Config, spec: EnvSpec, run_dir: Path, *, num_slots: int, address: Path | None = None,
        checkpoint: Path | None = None, resume: Path | None = None, greedy: bool = True, listen: Listen | None = None,
        on_metrics: Callable[[dict[str, Any]], None] = lambda record: None,
        on_message: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        host.require_ordered_stores()
        self.config, self.spec, self.run_dir = config, spec, run_dir
        self.learning = checkpoint is None
        self._checkpoint, self._resume, self._greedy = checkpoint, resume, greedy
        self._listen = listen
        self.listener: Listener | None = None
        self._on_metrics, self._on_message = on_metrics, on_message
        self.layout = SlabLayout.of(spec, num_slots, min(num_slots, MAX_GROUPS))
        self.address = address or run_dir / "door.sock"
        self.failure: SeedrlError | None = None
        self.done: str | None = None
        self.sizes: dict[str, Any] = {}
        self.final: dict[str, Any] = {}
        self.faults: Counter[str] = Counter()
        self.seats_taken = 0
        self._first_traceback: dict[str, str] = {}
        self._interrupts = 0
        self._workers: list[WorkerSlot] = []
        self._deaths: deque[float] = deque()
        self._engine_ready = self._learner_ready = self._stopping = False
        self.controls = Controls(self)
        self.phase = Phase.WAIT
        self.running = False  # between the first answer and the end of training
        self._last_asked = np.zeros(self.layout.num_groups, np.int64)
        self._moved_s = np.full(self.layout.num_groups, time.monotonic())
        self.record: dict[str, Any] = {}  # the learner's newest figures
        self._page: Page | None = None
        self.last_round: Evaluation | None = None
        self._playing: _Playing | None = None
        self._next_round_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._old_handlers: dict[int, Any] = {}
        self.children = Children()
        self._logs = run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------------- start

    def _open(self) -> None:
        stats = len(self.spec.stats)
        host.allow_descriptors(
            3 * self.layout.num_groups + _OTHER_DESCRIPTORS
        )  # a bell each, and a worker or two
        self._slab_fd = host.memfd("slab", self.layout.nbytes)
        self.slab = Slab(host.map_shared(self._slab_fd, self.layout.nbytes), self.layout)
        self.slab.fill(self.spec)
        self._board_fd = host.memfd("board", Board.nbytes(stats))
        self.board = Board(host.map_shared(self._board_fd, Board.nbytes(stats)), stats)
        self._batches, self._batches_counted_s = BatchReader(self.board), 0.0
        self.window = Window(self.board)
        limit_ms = self.config.engine.slow_batch_ms
        self._slow = None if limit_ms is None else SlowBatches(limit_ms, self._say)
        self._bell, self._learner_bell = doorbell.make(), doorbell.make()
        self._doors = [doorbell.make() for _ in range(self.layout.num_groups)]
        batching = self.config.batching
        max_group = min(batching.max_batch or self.layout.num_slots, self.layout.num_slots)
        self.door = Door(
            self.address, self.slab, self._slab_fd, self._bell, self._doors, self.spec, self.config.run.seed, max_group,
            self._heard_door,
        )  # fmt: skip
        self.children.forget_at_death(self.address)
        if self.config.run.metrics_listen is not None:
            from seedrl.watch import prometheus  # only where it is used

            figures = prometheus.Figures(self.board, self.layout.num_slots, lambda: self.record)
            self._page = prometheus.Page(self.config.run.metrics_listen, figures)
            self._say(f"figures for Prometheus at http://{self._page.address}/metrics")
        self._selector.register(self.door.listener, selectors.EVENT_READ, self._accept)
        self._install_signals()

    def start(self) -> None:
        """Starts engine and learner and returns once both are ready to act."""
        self._engine_channel, engine_end = Channel.pair()
        self._engine = self._start_process(
            "engine", "seedrl.engine.loop", engine_end, self.config.engine.threads
        )
        if self.learning:  # its imports take as long as the engine's, and there may be two cores
            self._start_learner()
        message = {
            **self._common(), "num_groups": self.layout.num_groups, "learner": self.learning, "greedy": self._greedy,
            "checkpoint": str(self._checkpoint) if self._checkpoint else None,
        }  # fmt: skip
        self._engine_channel.send(
            message, [self._slab_fd, self._bell, self._learner_bell, self._board_fd, *self._doors]
        )
        self._selector.register(self._engine_channel, selectors.EVENT_READ, self._heard_engine)
        if self._listen is not None:
            self._start_listening(self._listen)
        deadline = time.monotonic() + _START_S
        while not self._all_ready():
            self.pump()
            if time.monotonic() > deadline:
                raise RunError(
                    what=f"engine and learner were not ready after {_START_S:.0f} s",
                    where=str(self._logs),
                )
            if self._interrupts:
                raise KeyboardInterrupt

    def _all_ready(self) -> bool:
        listening = self.listener is None or bool(self.listener.address)
        return self._engine_ready and (self._learner_ready or not self.learning) and listening

    def _start_listening(self, listen: Listen) -> None:
        gateway = self.config.gateway
        message = {
            "spec": self.spec.to_dict(), "num_slots": self.layout.num_slots, "num_groups": self.layout.num_groups,
            "door": f"unix://{self.address.absolute()}", "heartbeat_s": gateway.heartbeat_s, "lease_s": self.config.workers.lease_s,
        }  # fmt: skip

        def fail(error: SeedrlError) -> None:
            if not self._stopping:
                self.failure = self.failure or error

        self.listener = Listener(
            listen, self.children, self._selector, message, [self._slab_fd, self._bell], self._logs / "gateway.txt",
            self._say, fail,
        )  # fmt: skip

    def _start_learner(self) -> None:
        self._learner_channel, end = Channel.pair()
        self._learner = self._start_process(
            "learner", "seedrl.learn.loop", end, self.config.learner.threads
        )
        self._selector.register(self._learner_channel, selectors.EVENT_READ, self._heard_learner)

    def _hand_store_to_learner(self, ready: dict[str, Any], fds: list[int]) -> None:
        """`fds` are those of the queue, the weights and, on the CPU, the replay storage."""
        message = {
            "replay_handle": ready["replay_handle"],
            "replay_device": ready["replay_device"],
            **self._common(),
            "run_dir": str(self.run_dir),
            "resume": str(self._resume) if self._resume else None,
        }
        self._learner_channel.send(message, [self._board_fd, self._learner_bell, self._bell, *fds])

    def _common(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json", by_alias=True), "spec": self.spec.to_dict(),
            "num_slots": self.layout.num_slots,
        }  # fmt: skip

    def _start_process(self, name: str, module: str, end: Channel, threads: int) -> Child:
        arguments = ["--channel", str(end.fileno()), "--parent", str(os.getpid())]
        child = self.children.start(
            name,
            module,
            arguments,
            threads=threads,
            fds=[end.fileno()],
            log=self._logs / f"{name}.txt",
        )
        end.close()
        self._watch(child)
        return child

    def _watch(self, child: Child) -> None:
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda _: self._ended(child))

    def start_workers(
        self,
        num: int,
        envs: int,
        groups: int,
        *,
        evaluation: bool = False,
        extra: list[str] | None = None,
    ) -> list[WorkerSlot]:
        """Starts `num` workers that attach here, and keeps them alive; returns them."""
        started = []
        for index in range(num):
            worker = WorkerSlot(index, evaluation)
            worker.arguments = [
                "--address", f"unix://{self.address.absolute()}", *env_arguments(self.config.env, self.spec.action_mask, envs, groups),
                "--supervised", "--parent", str(os.getpid()), "--trial-seed", str(self.config.run.seed),
                *(["--evaluation"] if evaluation else []), *(extra or []),
            ]  # fmt: skip
            self._workers.append(worker)
            started.append(worker)
            self._start_worker(worker)
        return started

    def end_workers(self, workers: list[WorkerSlot], grace_s: float) -> None:
        """Ends these workers; what they hold is free afterwards."""
        self._end([worker.child for worker in workers if worker.child is not None], grace_s)
        self._workers = [worker for worker in self._workers if worker not in workers]

    def slots_of(self, worker: WorkerSlot) -> list[int]:
        """The slots that it holds now."""
        pid = worker.child.pid if worker.child is not None else -1
        found: list[int] = []
        for lease in self.door.leases.values():
            if lease.pid == pid:
                for group in lease.groups:
                    start, size = (int(self.slab.lease[group, word]) for word in (START, SIZE))
                    found.extend(range(start, start + size))
        return found

    def _start_worker(self, worker: WorkerSlot) -> None:
        kind = "evaluation" if worker.evaluation else "worker"
        arguments = [
            *worker.arguments,
            "--index",
            str(worker.index),
            "--attempt",
            str(worker.attempt),
        ]
        worker.child = self.children.start(
            f"{kind} {worker.index}",
            "seedrl.worker.loop",
            arguments,
            log=self._logs / f"{kind}-{worker.index}.txt",
        )
        self._watch(worker.child)

    # ------------------------------------------------------------------------------------------------------- events

    def pump(self, timeout_s: float = _TICK_S) -> None:
        """Handles what has happened, for at most `timeout_s`; raises the failure that ends the run."""
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fileobj)
        self.door.collect()
        if time.monotonic() - self._batches_counted_s >= _TICK_S:
            lines, asks = self._batches.count()
            if not len(lines):
                doorbell.ring(self._bell, 1)  # for the engine to write what it still has
            self.window.tick()
            self.controls.record(lines, asks)
            if self._slow is not None:
                self._slow.look(lines)
            self._batches_counted_s = time.monotonic()
        if self.failure is not None:
            raise self.failure

    def _accept(self, _: Any) -> None:
        lease = self.door.accept()
        if lease is not None:
            fd = lease.connection.fileno()
            self._selector.register(fd, selectors.EVENT_READ, lambda _: self.door.hear(fd))

    def _heard_door(self, event: str, lease: Lease, report: dict[str, Any]) -> None:
        name = f"worker {lease.worker}" if lease.worker >= 0 else f"pid {lease.pid}"
        if event == "attached":
            self.seats_taken += report["slots"]
            if lease.pid not in self.own_pids():
                self._say(
                    f"{name} of {report['host']} attached: {report['slots']} slots, {self.door.free_slots()} free"
                )
        elif event == "ctl":
            self.controls.hear(lease, report)
        elif event == "refused":
            if lease.pid in self.own_pids():
                self.failure = self.failure or from_wire(report)
            else:
                self._say(f"{name} refused: {report['what']}")
        elif event in ("detached", "gone"):
            self._selector.unregister(lease.fd)
            self.seats_taken -= sum(int(self.slab.lease[group, SIZE]) for group in lease.groups)
            if lease.groups and lease.pid not in self.own_pids() and not self._stopping:
                self._say(
                    f"{name} {'detached' if lease.said_bye else 'died'}: its slots are free again"
                )
        else:
            self._heard_report(name, lease, report)

    def _heard_report(self, name: str, lease: Lease, report: dict[str, Any]) -> None:
        kind = report.get("type")
        if kind == "fault":
            fault = str(report.get("kind", "raised"))
            self.faults[fault] += 1
            where = f"{name}, seat {report.get('seat')}, episode {report.get('episode')}, step {report.get('step')}"
            self._first_traceback.setdefault(fault, str(report.get("traceback", "")))
            self._say(
                f"{report.get('env', 'environment')} fault at {where}: {report.get('message')}"
            )
        elif kind == "failed":
            error = from_wire(report)
            if lease.pid not in self.own_pids():
                self._say(f"{name} failed: {error.what}")
            else:
                error.where = error.where or f"{name}, {lease.env}"
                error.traceback_text = next(
                    filter(None, self._first_traceback.values()), error.traceback_text
                )
                self.failure = self.failure or error
        elif kind == "warning":
            self._say(f"{name}: {report.get('message')}")

    def is_remote(self, lease: Lease) -> bool:
        """Whether the gateway holds it for a worker of another host."""
        return self.listener is not None and lease.pid == self.listener.child.pid

    def own_pids(self) -> set[int]:
        """Of the workers that this run started itself."""
        return {worker.child.pid for worker in self._workers if worker.child is not None}

    def _heard_engine(self, channel: Channel) -> None:
        received = self._receive(channel)
        if received is None:
            return
        message, fds = received
        if message["type"] == "ready":
            self._engine_ready, self.sizes = True, message["sizes"]
            if self.learning:
                self._hand_store_to_learner(message, fds)
            for fd in fds:
                os.close(fd)
        elif message["type"] == "failed":
            self.failure = self.failure or from_wire(message)

    def _heard_learner(self, channel: Channel) -> None:
        received = self._receive(channel)
        if received is None:
            return
        message, _ = received
        kind = message["type"]
        if kind == "metrics":
            self.record = self._with_evaluation(message["record"])
            self._on_metrics(self.record)
        elif kind == "ready":
            self._learner_ready = True
            self.sizes["parameters"] = message["parameters"]
        elif kind == "done":
            self.done = self.done or message["reason"]
        elif kind == "stopped":
            self.final = message
        elif kind == "resumed":
            self._say(
                f"resumed from {message['path']}: {message['env_steps']} steps, {message['updates']} updates"
                + ("" if message["restored"] is None else f", {message['restored']} kept unrolls")
            )
        elif kind == "failed":
            self.failure = self.failure or from_wire(message)

    def _receive(self, channel: Channel) -> tuple[dict[str, Any], list[int]] | None:
        received = channel.receive()
        if received is None:
            self._selector.unregister(channel)
        return received

    def _ended(self, child: Child) -> None:
        """A process has ended: expected, or a reason to start it again, or the end of the run."""
        self._selector.unregister(child.pidfd)
        how = child.process.wait() and child.how_it_ended()
        self.children.bury(child)
        worker = next((worker for worker in self._workers if worker.child is child), None)
        if self._stopping:
            return
        if worker is None:
            for channel in (self._engine_channel, getattr(self, "_learner_channel", None)):
                if channel is not None:  # its last words may still be in the line
                    self._drain(channel)
            if self.failure is None and not (child.name == "learner" and self.final):
                self.failure = RunError(
                    what=f"the {child.name} ended by itself: {how or 'exit code 0'}", where=str(child.log),
                    do="see that log; continue with --resume",
                )  # fmt: skip
            return
        for fd in [fd for fd, lease in self.door.leases.items() if lease.pid == child.pid]:
            self.door.hear(fd)  # its last report, or the end of its socket
        if self.failure is not None or worker not in self._workers:
            return
        if worker.evaluation and not how:
            return
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > _RESPAWN_WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > _RESPAWNS:
            self.failure = RunError(
                what=f"workers died {len(self._deaths)} times within {_RESPAWN_WINDOW_S:.0f} s, the last: {child.name}, {how}",
                where=str(child.log), do="see that log",
            )  # fmt: skip
            return
        worker.attempt += 1
        self._say(f"{child.name} ended ({how or 'exit code 0'}); started again")
        self._start_worker(worker)

    def _drain(self, channel: Channel) -> None:
        channel.socket.setblocking(False)
        heard = self._heard_engine if channel is self._engine_channel else self._heard_learner
        try:
            while channel in [key.fileobj for key in self._selector.get_map().values()]:
                heard(channel)
        except (BlockingIOError, ConnectionError):
            pass

    def _say(self, text: str) -> None:
        self._on_message(text)

    # ------------------------------------------------------------------------------------------------------ signals

    def _install_signals(self) -> None:
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old_handlers[number] = signal.signal(number, self._on_signal)
            self._old_wakeup = signal.set_wakeup_fd(
                self._wake_write.fileno(), warn_on_full_buffer=False
            )
        except ValueError:  # a thread of somebody's program: its main thread keeps its signals
            return
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda s: s.recv(64))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt

    @property
    def interrupted(self) -> bool:
        return self._interrupts > 0

    # -------------------------------------------------------------------------------------------------------- phases

    def enter(self, phase: Phase) -> None:
        """Tells the engine what it may do."""
        self.phase = phase
        self.slab.control[SUPERVISOR_LINE, PHASE] = phase
        os.eventfd_write(self._bell, 1)

    def train(self) -> Ended:
        """Acts and learns until the run's end, an interrupt, or a failure (raised)."""
        if self.config.run.deterministic:
            wanted = self.config.workers.num * self.config.workers.envs_per_worker
            while self.seats_taken < wanted and not self.interrupted:
                self.pump()
        self.enter(Phase.ACT)
        self.running = True
        limit, begin = self.config.run.max_seconds, time.monotonic()
        self._next_round_s = begin + self.config.evaluation.every_s
        while not self.done and not self.interrupted:
            self.pump()
            self.controls.tick()
            self._mind_the_silent()
            self._evaluate_in_turn()
            if limit is not None and time.monotonic() - begin >= limit:
                self.done = f"max_seconds {limit:g} reached"
        return Ended.INTERRUPTED if self.interrupted else Ended.DONE

    def play_for_others(self) -> Iterator[tuple[np.ndarray, int]]:
        """Acts without a learner until the run's end or an interrupt; yields the episodes that ended, and steps, now and then."""
        reader, run = EpisodeReader(self.board), self.config.run
        self.enter(Phase.ACT)
        self.running = True
        begin = told = time.monotonic()
        while self.done is None and not self.interrupted:
            self.pump()
            self.controls.tick()
            self._mind_the_silent()
            now, steps = time.monotonic(), self.board.get("env_steps")
            if run.max_seconds is not None and now - begin >= run.max_seconds:
                self.done = f"max_seconds {run.max_seconds:g} reached"
            if run.max_steps is not None and steps >= run.max_steps:
                self.done = f"max_steps {run.max_steps} reached"
            if now - told >= _TELL_S or self.done is not None or self.interrupted:
                told = now
                yield reader.read(), steps
        self.running = False

    def stop_training(self) -> None:
        """Ends acting and learning: the engine lets go of all runs, the learner writes its checkpoint."""
        self.running = False
        self.enter(Phase.EVALUATE)
        self._stopping = True
        self._pump_until(lambda: self.board.get("acting") == Phase.EVALUATE, 2.0)
        if (
            self.learning
        ):  # after the engine, so that its accounts are of everything that was stored
            self._learner.process.terminate()
            self._pump_until(lambda: bool(self.final), _LEARNER_GRACE_S)
        self._playing = None
        self.end_workers(list(self._workers), 1.0)
        if self.learning:
            self._end([self._learner], 0.5)
        self._stopping = False

    def _pump_until(self, reached: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not reached() and time.monotonic() < deadline:
            self.pump(0.01)

    def _end(self, children: list[Child], grace_s: float) -> None:
        for child in children:
            if child in self.children.living():
                self._selector.unregister(child.pidfd)
        self.children.end([child for child in children if child in self.children.living()], grace_s)
        for _ in range(len(self.door.leases) + 1):
            self.pump(0.0)

    def accounts(self) -> dict[str, int]:
        """The rows of training, acted and what became of them; see `balance`."""
        get = self.board.get
        dropped = {name: get(f"dropped_{name}") for name in ("worker_died", "detached", "shutdown")}
        return {"acted": get("rows_acted"), "stored": get("rows_stored"), **dropped}

    def evaluate(self, episodes: int, envs: int, *, extra: list[str] | None = None) -> Evaluation:
        """Plays `episodes` episodes on `envs` evaluation slots; nothing else acts meanwhile.

        Raises: the failure of the worker, KeyboardInterrupt.
        """
        if self.board.get("acting") != Phase.EVALUATE:
            self.enter(Phase.EVALUATE)
        playing = _Playing(self, Round(episodes, envs), extra)
        while not playing.look():
            self.pump()
            if self.interrupted:
                raise KeyboardInterrupt
        return playing.end()

    def _mind_the_silent(self) -> None:
        """Takes the seats of workers that have not taken a step for `workers.lease_s`; those of the run's own are started anew."""
        now, slab = time.monotonic(), self.slab
        asked, answered = slab.asked[:, SEQUENCE], slab.answered[:, SEQUENCE]
        theirs = (slab.lease[:, LEASED] != 0) & (asked <= np.maximum(answered, slab.lease[:, BASE]))
        moved = (asked != self._last_asked) | ~theirs  # what waits for the engine is not silent
        self._last_asked[:], self._moved_s[moved] = asked, now
        if not (now - self._moved_s > self.config.workers.lease_s).any():
            return
        for lease in list(self.door.leases.values()):
            if not lease.groups or self.is_remote(lease):  # the gateway minds its own
                continue
            silent_s = now - self._moved_s[lease.groups]
            number = int(silent_s.argmax())  # the one whose turn came first: the worker is in there
            if silent_s[number] > self.config.workers.lease_s:
                seat = int(slab.asked[lease.groups[number], AT_SEAT])
                self._say(
                    f"worker {lease.worker}, {lease.env}: group {number}, seat {seat} has not come back from its step for "
                    f"{silent_s[number]:.0f} s; its seats are given back"
                )
                self._moved_s[lease.groups] = now
                if lease.pid in self.own_pids():
                    os.kill(lease.pid, signal.SIGKILL)
                else:
                    self.door.end(lease.fd)

    def _evaluate_in_turn(self) -> None:
        """Every `evaluation.every_s` seconds: a round beside the training."""
        evaluation, now = self.config.evaluation, time.monotonic()
        if self._playing is None:
            if evaluation.every_s and now >= self._next_round_s:
                self._playing = _Playing(self, Round(evaluation.episodes, evaluation.slots))
                self._next_round_s = now + evaluation.every_s
        elif self._playing.look():
            self.last_round, self._playing = self._playing.end(), None
            figures = self.last_round.summary()
            self._say(
                f"evaluation: {figures['episodes']} episodes, mean return {figures['mean_return']:.2f} "
                f"(min {figures['min_return']:.2f}, max {figures['max_return']:.2f})"
            )

    def _with_evaluation(self, record: dict[str, Any]) -> dict[str, Any]:
        faults, live = sum(self.faults.values()), self.board.get("live_slots")
        record = {**record, "environment_faults": faults, "live_slots": live}
        if self.config.evaluation.every_s:  # of whole rounds, not of whatever ended last
            record.pop("evaluation_return_mean", None)
            if self.last_round is not None:
                record["evaluation_return_mean"] = float(self.last_round.returns.mean())
        return record

    def close(self, *, orderly: bool = True) -> None:
        """Ends whatever runs; nothing is left of it afterwards.

        Args: orderly: workers that others attached end too; otherwise (the run failed) they wait for the next server here.
        """
        self._stopping = True
        if hasattr(self, "slab"):
            self.slab.control[SUPERVISOR_LINE, STOP] = int(orderly)
            self.slab.control[SUPERVISOR_LINE, PHASE] = Phase.EXIT
            os.eventfd_write(self._bell, 1)
            for door in self._doors:
                os.eventfd_write(door, 1)
        if self._page is not None:
            self._page.close()
        self.children.close(0.0 if self._interrupts > 1 else 2.0)
        if hasattr(self, "door"):
            self.door.close()
        if self.listener is not None:
            self.listener.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_wakeup)
        self._selector.close()
        for name in ("_engine_channel", "_learner_channel", "_wake_read", "_wake_write"):
            if hasattr(self, name):
                getattr(self, name).close()
        for fd in [
            *getattr(self, "_doors", []),
            *(
                getattr(self, name)
                for name in ("_slab_fd", "_board_fd", "_bell", "_learner_bell")
                if hasattr(self, name)
            ),
        ]:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(orderly=kind is None or issubclass(kind, KeyboardInterrupt))


class _Playing:
    """A round that is being played: its worker, and the episodes that end from now on."""

    def __init__(
        self, supervisor: Supervisor, round_: Round, extra: list[str] | None = None
    ) -> None:
        self._supervisor, self._round = supervisor, round_
        self._reader = EpisodeReader(supervisor.board)
        (self._worker,) = supervisor.start_workers(1, round_.seats, 1, evaluation=True, extra=extra)

    def look(self) -> bool:
        """Takes what has ended since; True when all has been played."""
        self._round.hold(self._supervisor.slots_of(self._worker))
        self._round.take(self._reader.read())
        return self._round.complete

    def end(self) -> Evaluation:
        self._supervisor.end_workers([self._worker], 2.0)
        return self._round.result()


def balance(accounts: dict[str, int], final: dict[str, Any]) -> tuple[str, bool]:
    """The accounts in one line, and whether they balance: every acted row was stored or dropped, every stored one learnt or left."""
    dropped = {name: accounts[name] for name in ("worker_died", "detached", "shutdown")}
    if "inserted_rows" in final:  # they stay until newer ones need the room
        left = accounts["stored"] - final["inserted_rows"]
        stored = f"{final['kept_rows']} of them kept, {final['drawn_rows']} drawn"
    else:
        left = accounts["stored"] - sum(final[f"{kind}_rows"] for kind in ("learned", "stale", "queued"))  # fmt: skip
        stored = f"stored = learnt {final['learned_rows']} + stale {final['stale_rows']} + queued {final['queued_rows']}"
    fits = accounts["acted"] == accounts["stored"] + sum(dropped.values()) and left == 0
    reasons = ", ".join(f"{name} {count}" for name, count in dropped.items())
    line = (
        f"rows acted {accounts['acted']} = stored {accounts['stored']} + dropped {sum(dropped.values())} ({reasons}); "
        f"{stored}"
    )
    return line + ("" if fits else "  DO NOT BALANCE"), fits
