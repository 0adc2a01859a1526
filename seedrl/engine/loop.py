"""The engine process: wait, batch, step, answer, append. Nothing else runs in it.

`python -m seedrl.engine.loop --channel FD`: everything it needs comes as one message of the supervisor.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from csrc_free_kernels.build import prefer
from seedrl import host
from seedrl.config import Config
from seedrl.engine.batcher import Reason, Rule, choose, reason_to_fire, us_until_fire
from seedrl.engine.device_step import DeviceStep
from seedrl.engine.make_step import make_step
from seedrl.engine.step import PolicyStep, state_leaves
from seedrl.errors import RunError, SeedrlError
from seedrl.policy.agent import make_agent, stored_extras
from seedrl.spec import EnvSpec
from seedrl.store.blocks import BlockStorage, Places
from seedrl.store.board import Board
from seedrl.store.checkpoint import load_checkpoint
from seedrl.store.memory import allocate, require_device, require_room
from seedrl.store.plan import StorePlan
from seedrl.store.replay import ReplayWriter
from seedrl.store.weights import Subscriber, WeightsLayout
from seedrl.transport import doorbell
from seedrl.transport.channel import Channel
from seedrl.transport.slab import (
    BASE,
    DOOR_EPOCH,
    DOOR_LINE,
    EVALUATION,
    GENERATION,
    LEASED,
    PHASE,
    PUBLISHED_NS,
    SAID_BYE,
    SEQUENCE,
    SIZE,
    START,
    SUPERVISOR_LINE,
    WORKER,
    Phase,
    Slab,
    SlabLayout,
)

if TYPE_CHECKING:
    pass


@dataclass
class Ready:
    """A batch that fires: groups and rows, in the same order."""

    groups: np.ndarray  # int64 [G]
    rows: np.ndarray  # int64 [B], slots
    evaluation: np.ndarray | None  # int64: positions in `rows`; None when there are none
    training: np.ndarray | None  # int64: the other positions; None when that is all of them
    lines: np.ndarray  # int64 [G, 16]: what the groups asked
    reason: Reason
    oldest_ns: int
    # what was seen and done when it was queued
    flags: np.ndarray | None = None  # uint8 [B, 4]; None where no row has any
    places: Places | None = None  # of the rows that the step stores by itself
    begin_ns: int = 0
    ingested_ns: int = 0
    forwarded_ns: int = 0

    @property
    def slots(self) -> np.ndarray:
        """Those whose rows are trained on: int64."""
        return self.rows if self.training is None else self.rows[self.training]


class Seating:
    """The engine's own view of the leases: which groups live, where their rows are."""

    def __init__(self, slab: Slab) -> None:
        groups = slab.layout.num_groups
        self.slab = slab
        self.generation = np.zeros(groups, np.int64)
        self.size = np.zeros(groups, np.int64)  # 0: nobody there
        self.evaluation = np.zeros(groups, bool)
        self.answered = np.full(
            groups, np.iinfo(np.int64).max, np.int64
        )  # what nobody asks beyond: not live
        self.rows: list[np.ndarray] = [np.zeros(0, np.int64)] * groups
        self.epoch = -1
        self.live = 0  # rows
        self.evaluates = False  # whether any group is one of evaluation

    def update(self) -> list[tuple[np.ndarray, bool, bool]]:
        """Follows the door's table; returns (slots, evaluation, said bye) of each lease that ended."""
        lease, ended = self.slab.lease, []
        self.epoch = int(self.slab.control[DOOR_LINE, DOOR_EPOCH])
        for group in np.flatnonzero(
            (lease[:, GENERATION] != self.generation) | (lease[:, LEASED] == 0)
        ).tolist():
            line = lease[group]
            if self.size[group]:
                ended.append((self.rows[group], bool(self.evaluation[group]), bool(line[SAID_BYE])))
                self.size[group], self.answered[group] = 0, np.iinfo(np.int64).max
                self.slab.drained[group, 0] = self.generation[group]
            if line[LEASED]:
                self.generation[group], self.size[group] = line[GENERATION], line[SIZE]
                self.evaluation[group] = bool(line[EVALUATION])
                self.answered[group] = self.slab.answered[group, SEQUENCE] = line[BASE]
                self.rows[group] = np.arange(line[START], line[START] + line[SIZE])
            elif (
                line[GENERATION] > self.slab.drained[group, 0]
            ):  # leased and ended between two looks
                self.generation[group] = self.slab.drained[group, 0] = line[GENERATION]
        self.live = int(self.size.sum())
        self.evaluates = bool(self.evaluation[self.size > 0].any())
        return ended


class Engine:
    """The loop over one slab. `step` reads like the architecture."""

    def __init__(
        self, slab: Slab, bell: int, doors: list[int], board: Board, policy_step: PolicyStep | DeviceStep, rule: Rule,
        writer: ReplayWriter | None, subscriber: Subscriber | None, admission: tuple[int, int] | None, iterations: bool = False,
    ) -> None:  # fmt: skip
        self.slab, self.bell, self.doors, self.board = slab, bell, doors, board
        self.policy_step, self.rule, self.writer, self.subscriber = (
            policy_step,
            rule,
            writer,
            subscriber,
        )
        self.seating = Seating(slab)
        self.version = 0
        self._admission = admission  # (max_lag, batch_size), or None
        # with iterations, a group whose unroll is full waits for a newer version than it was acted by
        self._iterations = iterations
        self._acted_by = np.zeros(slab.layout.num_groups, np.int64)
        self._first_version: int | None = None
        self._in_episode = np.zeros(slab.layout.num_slots, bool)
        self._in_flight: deque[Ready] = deque()
        self._asked = slab.asked[:, SEQUENCE]
        self._answered = slab.answered[:, SEQUENCE]
        self._phase = Phase.WAIT
        # memoryviews: looked at far more often than they change
        self._epoch = slab.control[DOOR_LINE, DOOR_EPOCH : DOOR_EPOCH + 1].data
        self._wanted_phase = slab.control[SUPERVISOR_LINE, PHASE : PHASE + 1].data
        self._blocked_since: dict[str, int] = {}
        self._written_ns = 0  # when batches were written last for want of work
        # when this thread's processor time is looked at next (later by what the thread sleeps), and what it was last
        self._look_at_ns, self._own_ns = time.monotonic_ns() + _LOOK_NS, time.thread_time_ns()

    @torch.inference_mode()  # once for the whole step: to enter it costs as much as a small layer
    def step(self) -> bool:
        """One batch, or one more on its way; False when the supervisor wants the engine to end."""
        ready = self.wait()
        if ready is not None:
            self._in_flight.append(ready)
            self._queue(ready)
        elif not self._in_flight:
            return False
        if ready is None or len(self._in_flight) == self.policy_step.depth:
            self._land(self._in_flight.popleft())
        return True

    def _queue(self, ready: Ready) -> None:
        """The batch from the slab through the policy; on a GPU this is only asked for here."""
        step = self.policy_step
        self._new_weights()
        ready.begin_ns = time.monotonic_ns()
        step.ingest(ready.rows)
        ready.flags = step.flags[: ready.rows.size] if step.eventful else None
        self._log_episodes(ready)
        ready.ingested_ns = time.monotonic_ns()
        if isinstance(step, DeviceStep):
            if self._stores(ready):
                assert self.writer is not None
                ready.places = self.writer.place(ready.slots)
            step.forward(ready.rows, ready.evaluation, ready.places, ready.training, self.version)
        else:
            step.forward(ready.rows, ready.evaluation)
        asked = ready.lines[:, SEQUENCE]
        self.seating.answered[ready.groups] = asked
        if self._iterations:
            self._acted_by[ready.groups] = self.version
        ready.forwarded_ns = time.monotonic_ns()

    def _land(self, ready: Ready) -> None:
        """Its answer, and its rows for the learner."""
        self.answer(ready)
        answered_ns = time.monotonic_ns()
        self._count(ready)
        self.append(ready)
        end_ns, begin_ns = time.monotonic_ns(), ready.begin_ns
        own_ns = (
            end_ns - begin_ns if end_ns < self._look_at_ns else self._own_time(begin_ns, end_ns)
        )
        self.board.log_batch(
            ready.oldest_ns, begin_ns, ready.ingested_ns, ready.forwarded_ns, answered_ns, end_ns, own_ns, ready.rows.size, ready.groups,
            ready.lines,
        )  # fmt: skip

    def _own_time(self, begin_ns: int, end_ns: int) -> int:
        """Processor time of this thread in a batch that began and ended then.

        The clock of that is a system call, and is looked at once the thread was awake for `_LOOK_NS` since the last look: a batch from
        which more than that was taken is looked at by itself. Less may be told of the next batch, as is what was taken from the thread
        while it looked for a batch.
        """
        now_ns = time.thread_time_ns()
        awake_ns = end_ns - self._look_at_ns + _LOOK_NS
        taken_ns = awake_ns - (now_ns - self._own_ns)
        self._look_at_ns, self._own_ns = end_ns + _LOOK_NS, now_ns
        return end_ns - begin_ns - taken_ns

    # ------------------------------------------------------------------------------------------------------ wait

    def wait(self) -> Ready | None:
        """Sleeps until a batch fires; None when it is time to end.

        With a batch in flight it does not sleep: None when no other fires now. Seats and phases change when none is.
        """
        seating, slab, bell = self.seating, self.slab, self.bell
        while True:
            changed = self._epoch[0] != seating.epoch or self._wanted_phase[0] != self._phase
            if changed and self._in_flight:
                return None
            if self._epoch[0] != seating.epoch:
                self._reseat()
            if self._wanted_phase[0] != self._phase and not self._enter_phase():
                return None
            if self._phase == Phase.FINISH:
                self._unfinished()
            timeout_us: float | None = None
            groups = (self._asked > seating.answered).nonzero()[0]
            if groups.size:
                groups, live = self._eligible(groups)
            if groups.size:
                lines, sizes = slab.asked[groups], seating.size[groups]
                published = lines[:, PUBLISHED_NS]
                count, oldest_ns = sum(sizes.tolist()), min(published.tolist())
                oldest_us = (time.monotonic_ns() - oldest_ns) * 1e-3
                reason = reason_to_fire(count, live, oldest_us, self.rule)
                if reason is not None:
                    if count > self.rule.max_batch:
                        chosen = choose(published, sizes, self.rule.max_batch)
                        groups, lines = groups[chosen], lines[chosen]
                    ready = self._take(groups, lines, reason, oldest_ns)
                    if ready is not None:
                        return ready
                else:
                    timeout_us = us_until_fire(count, oldest_us, self.rule)
            if self._in_flight:
                return None
            if self._blocked_since and timeout_us is None:
                timeout_us = _BLOCKED_LOOK_US  # so that the time blocked is told while it lasts
            asleep_ns = time.monotonic_ns()
            if asleep_ns - self._written_ns > _UNWRITTEN_NS:
                self.board.write_batches()
                self._written_ns = asleep_ns
            doorbell.wait(bell, timeout_us)
            self._look_at_ns += time.monotonic_ns() - asleep_ns

    def _eligible(self, groups: np.ndarray) -> tuple[np.ndarray, int]:
        """The ready groups that may be answered in this phase, and the live rows that they are weighed against."""
        if self._phase == Phase.ACT and not self._held_back():
            if self._iterations:
                return self._of_this_iteration(groups)
            return groups, self.seating.live
        if self._phase in (Phase.WAIT, Phase.PAUSED):
            return groups[:0], 0
        if self._phase == Phase.FINISH:
            left = self._unfinished()
            if self._held_back():
                left = left[:0]
            if self._iterations:
                left = left[~self._awaits_weights(left)]
            return groups[np.isin(groups, left)], int(self.seating.size[left].sum())
        evaluation = self.seating.evaluation
        return groups[evaluation[groups]], int(self.seating.size[evaluation].sum())

    def _of_this_iteration(self, groups: np.ndarray) -> tuple[np.ndarray, int]:
        """The ready groups that need no newer version first, and the live rows of all such groups."""
        sizes = self.seating.size
        waiting = np.flatnonzero(sizes)
        waiting = waiting[self._awaits_weights(waiting)]
        eligible = groups[~np.isin(groups, waiting)]
        if eligible.size < groups.size or self._blocked_since:
            self._blocked("blocked_lag_ns", not eligible.size)
        return eligible, self.seating.live - int(sizes[waiting].sum())

    def _awaits_weights(self, groups: np.ndarray) -> np.ndarray:
        """Which of `groups` have a full unroll, acted by the newest version: bool [G]."""
        assert self.writer is not None, "iterations are a learner's"
        full = self.writer.full(self.slab.lease[groups, START])
        full &= ~self.seating.evaluation[groups]
        return full & (self._acted_by[groups] >= self.writer.version)

    def _unfinished(self) -> np.ndarray:
        """Groups that must go on until every unroll is full: what a pause waits for."""
        lease, seating = self.slab.lease, self.seating
        left = np.flatnonzero((seating.size > 0) & ~seating.evaluation)
        if self.writer is None:
            left = left[:0]
        else:  # a group's slots advance together: its first one tells
            left = left[self.writer.unfinished(lease[left, START], lease[left, WORKER])]
        self.board.set("unfinished_groups", left.size)
        return left

    def _held_back(self) -> bool:
        """Whether the bound on lag stops acting: unrolls made so far against versions published."""
        if self._admission is None or self.writer is None or self._first_version is None:
            return False
        max_lag, batch_size = self._admission
        published = self.writer.version - self._first_version
        held = self.writer.unrolls - self.writer.stale_unrolls >= (published + max_lag) * batch_size
        if held or self._blocked_since:
            self._blocked("blocked_lag_ns", held)
        return held

    def _take(
        self, groups: np.ndarray, lines: np.ndarray, reason: Reason, oldest_ns: int
    ) -> Ready | None:
        """The batch of these groups; without those for whose rows replay has no room, None when that leaves none."""
        rows, evaluation, training = self._rows(groups)
        if self.writer is not None and (training is None or training.size):
            held_by = self.writer.held_back(rows if training is None else rows[training])
            if held_by is not None or self._blocked_since:
                for why in ("room", "ratio"):
                    self._blocked(f"blocked_{why}_ns", held_by == why)
            if held_by is not None:
                kept = self.seating.evaluation[groups]
                groups, lines = groups[kept], lines[kept]
                if not groups.size:
                    return None
                rows, evaluation, training = self._rows(groups)
        return Ready(groups, rows, evaluation, training, lines, reason, oldest_ns)

    def _rows(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        parts = [self.seating.rows[group] for group in groups.tolist()]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not self.seating.evaluates:
            return rows, None, None
        flags = self.seating.evaluation[groups]
        if not flags.any():
            return rows, None, None
        each = np.repeat(flags, self.seating.size[groups])
        return rows, np.flatnonzero(each), np.flatnonzero(~each)

    def _blocked(self, counter: str, blocked: bool) -> None:
        """Adds up the time during which `counter` names the reason that actors wait."""
        now = time.monotonic_ns()
        since = self._blocked_since.pop(counter, None)
        if since is not None:
            self.board.add(counter, now - since)
        if blocked:
            self._blocked_since[counter] = now

    def _reseat(self) -> None:
        for slots, evaluation, said_bye in self.seating.update():
            if not evaluation:
                self._drop(slots, "detached" if said_bye else "worker_died")
        self.board.set("live_slots", self.seating.live)

    def _drop(self, slots: np.ndarray, reason: str) -> None:
        """Ends the runs of these slots: their unfinished unrolls are dropped, their open episodes marked as broken off."""
        if self.writer is not None:
            self.board.add(f"dropped_{reason}", self.writer.discard(slots))
        if reason != "shutdown":
            self.board.add("interrupted_episodes", int(np.count_nonzero(self._in_episode[slots])))
        self._in_episode[slots] = False

    def _enter_phase(self) -> bool:
        phase = Phase(int(self.slab.control[SUPERVISOR_LINE, PHASE]))
        if self._phase in _RUNNING and phase not in _RUNNING:
            seating = self.seating
            for group in np.flatnonzero((seating.size > 0) & ~seating.evaluation).tolist():
                self._drop(seating.rows[group], "shutdown")
        if phase == Phase.ACT and self._first_version is None and self.writer is not None:
            self._first_version = self.writer.version
            self.writer.adopt()
        self._phase = phase
        self._blocked_since.clear()  # a pause is not the learner's doing
        if phase == Phase.FINISH:
            self._unfinished()
        self.board.write_batches()
        self.board.set("acting", int(phase))
        return phase != Phase.EXIT

    # ---------------------------------------------------------------------------------------------------- the batch

    def _new_weights(self) -> None:
        if self.subscriber is not None:
            version = self.subscriber.poll(self.policy_step.policy)
            if version is not None:
                self.version = version
                self.board.set("policy_version", version)

    def _log_episodes(self, ready: Ready) -> None:
        """Logs the episodes that end in this batch: before the answer, which gives their rows back to the worker."""
        rows, slab, flags = ready.rows, self.slab, ready.flags
        if flags is None:
            return
        at = np.flatnonzero(flags[:, 0] | flags[:, 1])
        if not at.size:
            return
        slots = rows[at]
        evaluation = np.zeros(rows.size, bool)
        if ready.evaluation is not None:
            evaluation[ready.evaluation] = True
        self.board.log_episodes(
            slots, evaluation[at], slab.episode_return[slots], slab.episode_length[slots], self.version, slab.stats[slots],
        )  # fmt: skip

    def _count(self, ready: Ready) -> None:
        """Counts rows and environment steps, and what the batch fired for."""
        rows, board = ready.rows, self.board
        counted, first = rows.size if ready.training is None else ready.training.size, 0
        flags = ready.flags
        if flags is not None:
            self._in_episode[rows] = (flags[:, 0] | flags[:, 1]) == 0
            if ready.training is not None:
                flags = flags[ready.training]
            _, _, first, interrupted = np.count_nonzero(flags, axis=0).tolist()
            if interrupted:
                board.add("interrupted_episodes", interrupted)
        board.add(_FIRED[ready.reason], 1)
        board.add("rows_acted", counted)
        board.add("env_steps", counted - first)
        if ready.training is not None:
            board.add("evaluation_rows", rows.size - counted)

    def answer(self, ready: Ready) -> None:
        """Actions into the slab, sequence numbers after them, a ring for each group."""
        self.policy_step.answer(ready.rows)
        self._answered[ready.groups] = ready.lines[:, SEQUENCE]
        for group in ready.groups.tolist():
            os.eventfd_write(self.doors[group], 1)

    def append(self, ready: Ready) -> None:
        """What the batch has made is the store's, and what it completed is announced."""
        if not self._stores(ready):
            return
        assert self.writer is not None
        if isinstance(self.policy_step, DeviceStep):
            assert ready.places is not None
            stored = 0 if ready.places.done is None else self.writer.announce(ready.places.done)
        else:
            columns, states = self.policy_step.columns(self.version, ready.training)
            stored = self.writer.append(ready.slots, columns, states)
        self.board.add("rows_stored", stored)

    def _stores(self, ready: Ready) -> bool:
        return self.writer is not None and (ready.training is None or ready.training.size > 0)


_CPU = torch.device("cpu")
_BLOCKED_LOOK_US = 100_000.0
_UNWRITTEN_NS = 10_000_000  # no timer: whoever reads rings the bell when nothing came
_LOOK_NS = 1_000_000
_RUNNING = (Phase.ACT, Phase.PAUSED, Phase.FINISH)  # what is open stays open
_FIRED = {reason: f"fired_{reason.name.lower()}" for reason in Reason}


# ---------------------------------------------------------------------------------------------------------- process


def build(start: dict[str, Any], fds: list[int]) -> tuple[Engine, list[int], dict[str, Any]]:
    """The engine of a start message; also the descriptors that the learner needs, and what else the supervisor must know."""
    config, spec = Config.model_validate(start["config"]), EnvSpec.from_dict(start["spec"])
    layout = SlabLayout.of(spec, start["num_slots"], start["num_groups"])
    slab_fd, bell, learner_bell, board_fd, *doors = fds
    slab = Slab(host.map_shared(slab_fd, layout.nbytes), layout)
    board = Board(host.map_shared(board_fd, Board.nbytes(len(spec.stats))), len(spec.stats))
    prefer(config.run.kernels)
    torch.set_num_threads(config.engine.threads)
    device = require_device(config.engine.device, "engine.device")
    store_device = device if config.replay.device in (None, config.engine.device) else _CPU
    if device.type == "cuda":  # before the learner's, where they share the device
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
    policy, heads = make_agent(config, spec, layout.num_slots)
    policy = policy.eval().to(device)
    max_batch = min(config.batching.max_batch or layout.num_slots, layout.num_slots)
    extras = stored_extras(config, policy) if start["learner"] else {}
    batching = config.batching
    rule = Rule(
        max_batch,
        batching.min_batch,
        batching.max_wait_us,
        batching.hard_deadline_us,
        config.run.deterministic,
    )
    writer = subscriber = admission = None
    iterations = False
    shared: list[int] = []
    handle = None
    storage: BlockStorage | None = None
    sizes: dict[str, Any] = {"slab": layout.nbytes}
    if start["learner"]:
        plan = StorePlan.of(
            config, spec, heads.stored_specs(), state_leaves(policy), layout.num_slots, extras
        )
        weights = WeightsLayout.of(policy)
        require_room(store_device, plan.blocks.nbytes + plan.control.nbytes, plan.blocks.num_rows)
        memory, replay = allocate(store_device, plan.blocks.nbytes)
        control, buffers = (
            host.memfd("control", plan.control.nbytes),
            host.memfd("weights", weights.nbytes),
        )
        shared = [control, buffers, *([] if replay.fd is None else [replay.fd])]
        handle = replay.handle
        storage = BlockStorage(plan.blocks, memory)
        writer = plan.writer(storage, host.map_shared(control, plan.control.nbytes), learner_bell)
        subscriber = Subscriber(host.map_shared(buffers, weights.nbytes), weights)
        max_lag = plan.admission
        admission = None if max_lag is None else (max_lag, config.learner.batch_size)
        iterations = plan.iterations
        sizes["replay"] = plan.blocks.bytes_by_leaf()
        sizes["weights"] = weights.nbytes
        sizes["capacity_rows"] = plan.blocks.num_rows
    else:
        checkpoint = load_checkpoint(Path(start["checkpoint"]))
        checkpoint.load_into(policy, spec)
    step = make_step(config, policy, heads, slab, device, storage, start["greedy"], extras)
    step.greedy_for_all = start["greedy"] and not start["learner"]
    sizes["state"] = step.states.nbytes
    engine = Engine(slab, bell, doors, board, step, rule, writer, subscriber, admission, iterations)
    if not start["learner"]:
        engine.version = checkpoint.updates
    return (
        engine,
        shared,
        {"sizes": sizes, "replay_handle": handle, "replay_device": str(store_device)},
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    host.die_with_parent(arguments.parent)
    host.set_timer_slack_us(1)
    channel = Channel.from_fd(arguments.channel)
    try:
        received = channel.receive()
        if received is None:
            return 1
        engine, shared, about = build(*received)
        channel.send({"type": "ready", **about, "threads": config_threads()}, shared)
        while engine.step():
            pass
        return 0
    except SeedrlError as error:
        channel.send({"type": "failed", **error.to_wire()})
        return error.exit_code
    except Exception as error:  # a fault of ours or of the user's policy: shown whole in the log, one line on the screen
        traceback.print_exc()
        failure = RunError(
            what=f"the engine failed: {type(error).__name__}: {error}",
            traceback_text=traceback.format_exc(),
        )
        channel.send({"type": "failed", **failure.to_wire()})
        return 1


def config_threads() -> int:
    """Threads of this process now: more than torch's own is company that the batches will feel."""
    return len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    sys.exit(main())
