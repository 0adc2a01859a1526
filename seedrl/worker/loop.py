"""The worker process: environments of its own, stepped group by group; the engine answers the others meanwhile.

`python -m seedrl.worker.loop --address unix://PATH --env ENV ...` makes the environments, tries them, takes seats at the door, and
goes round its groups until the server ends the lease (exit 0), it is told to stop, or an environment may not be rebuilt (exit 1).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from seedrl import host
from seedrl.errors import AddressError, ConfigError, EnvError, SeedrlError
from seedrl.spec import EnvSpec
from seedrl.transport import attach
from seedrl.transport.link import connect
from seedrl.worker.check import check_env, require_same_spec
from seedrl.worker.envs import close_all, is_vector, make_env, spec_of
from seedrl.worker.group import TRIAL, Group, RebuildBudget, Rules, VectorGroup, seat_seed
from seedrl.worker.process import kill_descendants

_TRIAL_BUDGET_S = 10.0
_CLOSE_S = 1.0  # for all environments, when the worker ends
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.05, 1.0


class Lease(Protocol):
    """What a worker needs of a lease: `link.Link` over shared memory, `remote.RemoteLink` over the network."""

    spec: EnvSpec
    seed: int
    worker: int

    @property
    def stopped(self) -> bool: ...
    @property
    def groups(self) -> Sequence[Any]: ...
    def check(self) -> None: ...
    def send(self, report: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class _Told(BaseException):
    """SIGTERM, or SIGINT of a worker started by hand: leave in good order, whatever the environments are at."""


class Worker:
    """Environments, groups and the lease that joins them.

    Args: arguments: of the command line, see `parser`.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.where = (
            f"worker {arguments.index}"
            if arguments.index is not None
            else f"worker pid {os.getpid()}"
        )
        self.sizes: list[int] = []
        self.envs: list[Any] = []  # single ones seat by seat, or one vector environment a group
        self.warnings: list[str] = []
        self.groups: list[Group | VectorGroup] = []
        self.link: Lease | None = None
        self._rows_before: list[Any] = []  # of the lease that was lost
        self.rules = Rules(
            arguments.on_nan, RebuildBudget(arguments.max_rebuilds, arguments.rebuild_window_s), self.where
        )  # fmt: skip
        self.seed_parts = (0, arguments.evaluation, arguments.index or 0)

    def make(self, seat: int = 0, size: int | None = None) -> Any:
        """One more environment, with the size of its group when it is a vector environment."""
        arguments = self.arguments
        if not arguments.video:
            return make_env(arguments.env, arguments.env_kwargs, num_envs=size)
        from seedrl.worker.video import Recorder

        env = make_env(arguments.env, arguments.env_kwargs, "rgb_array", num_envs=size)
        return Recorder(env, Path(arguments.video), seat, arguments.video_episodes)

    def build(self) -> EnvSpec:
        """Makes every environment and returns their common spec."""
        arguments = self.arguments
        each = arguments.envs // arguments.groups
        first = self.make(0, each)
        self.envs.append(first)
        spec = spec_of(first, arguments.env, arguments.action_mask, arguments.stat)
        if is_vector(first):
            if first.num_envs * arguments.groups != arguments.envs:
                raise ConfigError(
                    what=f"the vector environment has {first.num_envs} seats, a group {each}", where=f"env.id {arguments.env}",
                    do=f"ask for {first.num_envs * arguments.groups} environments, or let its constructor take num_envs",
                )  # fmt: skip
            self.sizes = [first.num_envs] * arguments.groups
            self.envs += [self.make(each * group, each) for group in range(1, arguments.groups)]
        else:
            self.sizes = [each] * arguments.groups
            self.envs += [self.make(seat) for seat in range(1, arguments.envs)]
        for number, env in enumerate(self.envs[1:], 1):
            require_same_spec(
                env, spec, f"{self.where}, {'group' if is_vector(env) else 'seat'} {number}"
            )
        return spec

    def try_out(self, spec: EnvSpec) -> None:
        """The trial before the first real step. Evaluation seats have none: it would play with what they are to show."""
        arguments = self.arguments
        if arguments.evaluation or not arguments.check_steps:
            return
        deadline = time.monotonic() + _TRIAL_BUDGET_S
        for seat, env in enumerate(self.envs):
            left = deadline - time.monotonic()
            if left <= 0:
                self.warnings.append(
                    f"the trial of the environments was cut short after {_TRIAL_BUDGET_S:g} s, at seat {seat}"
                )
                return
            seed = seat_seed(arguments.trial_seed, False, arguments.index or 0, seat, TRIAL)
            found = check_env(
                env, spec, seed, arguments.check_steps, left, arguments.check, on_nan=arguments.on_nan,
                where=f"{self.where}, seat {seat}",
            )  # fmt: skip
            self.warnings += [text for text in found if text not in self.warnings]

    def attach(self, spec: EnvSpec) -> None:
        """Takes seats for every group, seated anew or for the first time."""
        arguments = self.arguments
        hello = {
            "groups": self.sizes, "spec": spec.to_dict(), "pid": os.getpid(), "host": socket.gethostname(), "env": arguments.env,
            "evaluation": arguments.evaluation, "attempt": arguments.attempt,
            **({} if arguments.index is None else {"index": arguments.index}),
        }  # fmt: skip
        self.link = link = self._connect(hello)
        if arguments.say:
            self._say_what_is_seen(link)
        self.seed_parts = (link.seed, arguments.evaluation, link.worker)
        if self.groups:
            self._rows_before = [group.view for group in self.groups]
            for group, seats in zip(self.groups, link.groups, strict=True):
                group.bind(seats.view)
        else:
            self.seat(spec, [seats.view for seats in link.groups])

    def seat(self, spec: EnvSpec, views: Sequence[Any]) -> None:
        """Makes the groups, each over the rows of its view."""
        at = 0
        for number, (view, size) in enumerate(zip(views, self.sizes, strict=True)):
            about: dict[str, Any] = {
                "seed": partial(self._seed, at),
                "rules": self.rules,
                "group": number,
            }
            if is_vector(self.envs[0]):
                make = partial(self.make, at, size)
                self.groups.append(VectorGroup(self.envs[number], spec, view, make=make, **about))
            else:
                make, envs = partial(self.make, at), self.envs[at : at + size]
                self.groups.append(Group(envs, spec, view, make=make, **about))
            at += size

    def _say_what_is_seen(self, link: Lease) -> None:
        observation = ", ".join(leaf.text() for leaf in link.spec.observation)
        action = ", ".join(leaf.text() for leaf in link.spec.action)
        round_trip_s = getattr(link, "round_trip_s", None)
        away = f", round trip {1e3 * round_trip_s:.1f} ms" if round_trip_s is not None else ""
        if getattr(link, "packs", False):
            away += f", frames compressed: the link carries {getattr(link, 'bytes_per_s', 0) / 1e6:.0f} MB/s"
        print(
            f"worker {link.worker} at {self.arguments.address}: {sum(self.sizes)} slots in {len(self.sizes)} groups, {observation} -> {action}{away}",
            flush=True,
        )

    def _seed(self, begin: int, seat: int, *extra: int) -> int:
        run_seed, evaluation, worker = self.seed_parts
        return seat_seed(run_seed, evaluation, worker, begin + seat, *extra)

    def _knock(self, hello: dict[str, Any]) -> Lease:
        arguments = self.arguments
        if arguments.address.startswith("unix://"):
            return connect(arguments.address, hello)
        from seedrl.transport import remote  # ZeroMQ only where it is used

        return remote.connect(arguments.address, hello, key=arguments.key)

    def _connect(self, hello: dict[str, Any]) -> Lease:
        """Knocks until somebody opens, for `--reconnect-s`; says once that nobody does."""
        deadline, pause, said = time.monotonic() + self.arguments.reconnect_s, _BACKOFF_S, False
        while True:
            try:
                return self._knock(hello)
            except AddressError as error:
                if time.monotonic() >= deadline:
                    raise
                if not said:
                    print(
                        f"{self.where}: {error.what}; trying for {self.arguments.reconnect_s:g} s",
                        file=sys.stderr,
                        flush=True,
                    )
                    said = True
            time.sleep(pause * random.uniform(0.5, 1.5))  # many workers do not come back in step
            pause = min(2 * pause, _LONGEST_BACKOFF_S)

    def run(self) -> None:
        """From the environments to the end of the lease, and to a new one when the server was lost."""
        spec = self.build()
        self.try_out(spec)
        seeded = True
        while True:
            self.attach(spec)
            assert self.link is not None
            for text in self.warnings:
                self.link.send({"type": "warning", "message": text})
            self.warnings = []
            self.serve(seeded)
            seeded = False
            ended = self.link.stopped
            if not ended:
                self.link.check()
            self.link.close()
            self.link = None
            if ended or not self.arguments.reconnect_s:
                return

    def serve(self, seeded: bool) -> None:
        """Resets every environment, then goes round the groups until the server ends the lease."""
        assert self.link is not None
        links, groups = self.link.groups, self.groups
        before, self._rows_before = self._rows_before, []
        for number, (group, link) in enumerate(zip(groups, links, strict=True)):
            if before and self.arguments.on_reconnect == "keep":
                group.go_on(before[number])
            else:
                group.reset(seeded)
            self._report(group)
            link.publish()
        while True:
            for group, link in zip(groups, links, strict=True):
                if not link.wait():
                    return
                group.step()
                if group.faults:
                    self._report(group)
                link.publish()

    def _report(self, group: Group | VectorGroup) -> None:
        assert self.link is not None
        for fault in group.faults:
            self.link.send(fault)
        group.faults.clear()

    def fail(self, error: SeedrlError) -> None:
        """Tells the server why this worker ends."""
        if self.link is None:
            if self.arguments.address.startswith("unix://"):
                attach.report_failure(self.arguments.address, error)
            return
        for group in self.groups:
            self._report(group)
        self.link.send({"type": "failed", **error.to_wire()})

    def close(self) -> None:
        """Gives the seats back, closes the environments and ends what they have started."""
        if self.link is not None:
            self.link.close()
        owned = [env for group in self.groups for env in group.envs] or self.envs
        close_all(owned, _CLOSE_S)
        kill_descendants()


def env_arguments(env: Any, action_mask: str | None, envs: int, groups: int) -> list[str]:
    """What the command line says of the environments: `env` is that section of a configuration, `action_mask` that of the spec."""
    return [
        "--env", env.id, "--env-kwargs", json.dumps(env.kwargs), "--envs", str(envs), "--groups", str(groups), "--check", env.check,
        "--check-steps", str(env.check_steps), "--on-nan", env.on_nan, "--max-rebuilds", str(env.max_rebuilds),
        "--rebuild-window-s", str(env.rebuild_window_s), *(["--action-mask", action_mask] if action_mask else []),
        *(part for name in env.stats for part in ("--stat", name)),
    ]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="seedrl.worker.loop")
    parse.add_argument("--address", required=True)
    parse.add_argument("--env", required=True)
    parse.add_argument("--env-kwargs", type=json.loads, default={})
    parse.add_argument("--envs", type=int, default=1)
    parse.add_argument("--groups", type=int, default=1)
    parse.add_argument("--check", choices=("strict", "warn", "off"), default="strict")
    parse.add_argument("--check-steps", type=int, default=8)
    parse.add_argument("--on-nan", choices=("error", "drop_episode"), default="error")
    parse.add_argument("--max-rebuilds", type=int, default=3)
    parse.add_argument("--rebuild-window-s", type=float, default=60.0)
    parse.add_argument("--action-mask", default=None)
    parse.add_argument("--stat", action="append", default=[])
    parse.add_argument("--evaluation", action="store_true")
    # of a run that is not its own a worker knows the seed only once it is attached: the trial has one of its own then
    parse.add_argument("--trial-seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parse.add_argument("--index", type=int, default=None)
    parse.add_argument("--attempt", type=int, default=0)
    parse.add_argument("--on-reconnect", choices=("reset", "keep"), default="reset")
    parse.add_argument("--key", type=Path, default=None)
    parse.add_argument("--reconnect-s", type=float, default=0.0)
    parse.add_argument("--video", default=None)
    parse.add_argument("--video-episodes", type=int, default=1)
    parse.add_argument("--say", action="store_true")
    parse.add_argument("--supervised", action="store_true")
    parse.add_argument("--parent", type=int, default=None)
    return parse


def main() -> int:
    arguments = parser().parse_args()
    if arguments.parent is not None:
        host.die_with_parent(arguments.parent)
    host.set_slice_us(300)  # an older kernel goes on as it was
    if arguments.supervised:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor says when it is over

    def told(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise _Told

    signal.signal(signal.SIGTERM, told)
    worker = Worker(arguments)
    code = 0
    try:
        worker.run()
    except _Told:
        pass
    except SeedrlError as error:
        print(f"{error.traceback_text}seedrl: {error}", file=sys.stderr)
        worker.fail(error)
        code = error.exit_code
    except Exception as error:  # a fault of ours: the log has it whole, the screen in one line
        traceback.print_exc()
        failure = EnvError(
            what=f"{type(error).__name__}: {error}",
            where=worker.where,
            traceback_text=traceback.format_exc(),
        )
        worker.fail(failure)
        code = 1
    finally:
        worker.close()
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a simulator's thread must not keep the process
