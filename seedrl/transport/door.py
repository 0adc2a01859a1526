"""The door's end: listens, leases seats, hears reports, takes seats back. The messages are those of `attach.py`."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from seedrl.errors import (
    AddressError,
    LeaseRefused,
    ProtocolError,
    SeedrlError,
    SpecError,
    from_wire,
)
from seedrl.spec import EnvSpec
from seedrl.transport import doorbell
from seedrl.transport.attach import (
    MAX_GROUPS_PER_WORKER,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    peer_pid,
    short,
)
from seedrl.transport.slab import (
    BASE,
    DOOR_EPOCH,
    DOOR_LINE,
    EVALUATION,
    GENERATION,
    GENERATION_SHIFT,
    LEASED,
    SAID_BYE,
    SIZE,
    START,
    WORKER,
    Slab,
)

FIRST_FREE_INDEX = 1 << 16  # seed index of workers that were not numbered by `train`
ATTEMPT_SHIFT = 20
_HELLO_S = 5.0  # a caller says hello at once, or goes
_MAX_SILENT = 64  # callers that have not said it yet: descriptors are few


@dataclass
class Lease:
    """What the door knows of one attached worker."""

    connection: socket.socket
    fd: int
    pid: int
    worker: int = -1
    env: str = ""
    host: str = ""
    peer: int = -1  # the pid that the worker has on its own host
    evaluation: bool = False
    groups: list[int] = field(default_factory=list)
    said_bye: bool = False
    failed: SeedrlError | None = None
    came_s: float = field(default_factory=time.monotonic)

    @property
    def attached(self) -> bool:
        return bool(self.groups)


class Door:
    """The server's end: listens, leases seats, hears reports, takes seats back. One thread, never blocks.

    Args:
        path: of the Unix socket. slab, slab_fd, engine_bell: what is handed out.
        doors: one doorbell a group. seed: the run's.
        on_event: called with (what, lease, report) for "attached", "detached", "report", "ctl" and "refused".
    """

    def __init__(
        self, path: Path, slab: Slab, slab_fd: int, engine_bell: int, doors: list[int], spec: EnvSpec, seed: int,
        max_group: int, on_event: Callable[[str, Lease, dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self.path, self.slab, self.spec, self.seed = path, slab, spec, seed
        self._slab_fd, self._engine_bell, self._doors = slab_fd, engine_bell, doors
        self._max_group, self._on_event = max_group, on_event
        self._generation, self._next_index, self._cursor, self._next_group = (
            0,
            FIRST_FREE_INDEX,
            0,
            0,
        )
        self.refusing = ""  # why nobody may come in, if so
        self._seats = np.zeros(slab.layout.num_slots, bool)
        self._draining: set[int] = set()
        self.leases: dict[int, Lease] = {}  # by the connection's descriptor
        self.listener = self._listen()

    def _listen(self) -> socket.socket:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        listener = socket.socket(socket.AF_UNIX, kind)
        try:
            self._bind(listener)
        except BaseException:
            listener.close()
            raise
        return listener

    def _bind(self, listener: socket.socket) -> None:
        with short(self.path) as name:
            if self.path.is_socket():
                probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
                try:
                    probe.connect(name)
                    pid, _ = peer_pid(probe)
                    raise AddressError(
                        what=f"the address is in use by a live server, pid {pid}", where=f"unix://{self.path}",
                        do="stop that server, or bind another address",
                    )  # fmt: skip
                except OSError as error:
                    if error.errno != errno.ECONNREFUSED:
                        raise
                    self.path.unlink(missing_ok=True)  # left by a server that was killed
                finally:
                    probe.close()
            elif self.path.exists():
                raise AddressError(
                    what="the address is a file that is no socket", where=f"unix://{self.path}",
                    do="bind another address",
                )  # fmt: skip
            old = os.umask(0o177)
            try:
                listener.bind(name)
            except OSError as error:
                raise AddressError(
                    what=f"cannot bind the address ({error.strerror})", where=f"unix://{self.path}",
                    do="choose a folder that you may write to",
                ) from None  # fmt: skip
            finally:
                os.umask(old)
        listener.listen(socket.SOMAXCONN)

    def accept(self) -> Lease | None:
        """Takes one caller in; None when it has gone already or may not come in."""
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return None
        pid, uid = peer_pid(connection)
        silent = sum(not lease.attached for lease in self.leases.values())
        if uid not in (os.getuid(), 0) or silent >= _MAX_SILENT:
            connection.close()
            return None
        connection.setblocking(False)
        lease = self.leases[connection.fileno()] = Lease(connection, connection.fileno(), pid)
        return lease

    def hear(self, fd: int) -> None:
        """Reads one message of the connection `fd`; its end, or nonsense, is the end of the lease."""
        lease = self.leases.get(fd)
        if lease is None:  # ended by what was heard from another just before
            return
        try:
            data = lease.connection.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.end(fd)
            return
        try:
            message = msgpack.unpackb(data)
            kind = message["type"]
            if not lease.attached:
                if (
                    kind == "failed"
                ):  # an environment that could not be made: there is no spec to say hello with
                    lease.failed = from_wire(message)
                    self._on_event("report", lease, message)
                    return
                if kind == "ctl":
                    self._on_event("ctl", lease, message)
                    self.end(lease.fd)
                    return
                if kind != "hello":
                    raise ProtocolError(what=f"a '{kind}' before the hello")
                self._hello(lease, message)
                return
        except SeedrlError as error:
            self._refuse(lease, error, retry=False)
            return
        except Exception as error:  # whatever a stranger may send
            self._refuse(lease, ProtocolError(what=f"not understood: {error!r}"), retry=False)
            return
        if kind == "bye":
            lease.said_bye = True
        elif kind == "failed":
            lease.failed = from_wire(message)
        self._on_event("report", lease, message)

    def _refuse(self, lease: Lease, error: SeedrlError, *, retry: bool) -> None:
        try:
            lease.connection.send(
                msgpack.packb({"type": "refused", "error": error.to_wire(), "retry": retry})
            )
        except OSError:
            pass
        if not retry:
            self._on_event("refused", lease, error.to_wire())
        self.end(lease.fd)

    def _hello(self, lease: Lease, hello: dict[str, Any]) -> None:
        if hello.get("protocol") != PROTOCOL:
            raise ProtocolError(
                what=f"the worker speaks protocol {hello.get('protocol')}, this server {PROTOCOL}",
                do="install the same version of seedrl on both sides",
            )
        if self.refusing:
            raise LeaseRefused(what=self.refusing, do="attach to another server, or later")
        lease.host, lease.peer = str(hello.get("host", "")), int(hello.get("pid", lease.pid))
        where = f"worker of {lease.host or 'this host'}, pid {lease.peer}"
        sizes = [int(size) for size in hello["groups"]]
        if not sizes or min(sizes) < 1 or len(sizes) > MAX_GROUPS_PER_WORKER:
            raise LeaseRefused(
                what=f"groups of sizes {sizes} cannot be seated",
                where=where,
                do="ask for 1 to 64 groups",
            )
        if max(sizes) > self._max_group:
            raise LeaseRefused(
                what=f"a group of {max(sizes)} environments is more than batching.max_batch {self._max_group}",
                where=where, do="use more groups or fewer environments per worker, or raise batching.max_batch",
            )  # fmt: skip
        theirs = EnvSpec.from_dict(hello["spec"])
        difference = theirs.difference(self.spec)
        if difference:
            raise SpecError(
                what="the worker's environment differs from the server's: " + "; ".join(difference), where=where,
                do="attach the environment that the server was started with, or start the server with this one",
            )  # fmt: skip
        placed = self._place(sizes)
        if placed is None:
            free = int(self.slab.layout.num_slots - self._seats.sum())
            error = LeaseRefused(
                what=f"{sum(sizes)} environments do not fit: {free} of {self.slab.layout.num_slots} slots are free",
                where=where, do="attach fewer environments, detach others, or raise batching.max_slots",
            )  # fmt: skip
            self._refuse(lease, error, retry=bool(self._draining))
            return
        index = hello.get("index")
        if index is None:
            index, self._next_index = self._next_index, self._next_index + 1
        lease.worker = int(index) + (int(hello.get("attempt", 0)) << ATTEMPT_SHIFT)
        lease.env, lease.evaluation = str(hello.get("env", "")), bool(hello.get("evaluation"))
        self._generation += 1
        base = self._generation << GENERATION_SHIFT
        groups = []
        for group, start, size in placed:
            self._seats[start : start + size] = True
            line = self.slab.lease[group]
            line[[START, SIZE, EVALUATION, WORKER, BASE]] = (
                start,
                size,
                lease.evaluation,
                lease.worker,
                base,
            )
            doorbell.hush(self._doors[group])
            line[GENERATION] = self._generation
            line[LEASED] = 1
            groups.append({"group": group, "start": start, "size": size, "base": base})
        lease.groups = [group for group, _, _ in placed]
        self._changed()
        welcome = {
            "type": "welcome", "protocol": PROTOCOL, "worker": lease.worker, "seed": self.seed,
            "spec": self.spec.to_dict(), "num_slots": self.slab.layout.num_slots,
            "num_groups": self.slab.layout.num_groups, "generation": self._generation, "groups": groups,
        }  # fmt: skip
        fds = [self._slab_fd, self._engine_bell, *(self._doors[group] for group in lease.groups)]
        socket.send_fds(lease.connection, [msgpack.packb(welcome)], fds)
        self._on_event(
            "attached",
            lease,
            {"type": "attached", "slots": sum(sizes), "host": hello.get("host", "")},
        )

    def _place(self, sizes: list[int]) -> list[tuple[int, int, int]] | None:
        """[(group, first slot, size)]: contiguous free slots and free groups; those freed longest ago come first."""
        seats, num_slots, num_groups = (
            self._seats.copy(),
            self.slab.layout.num_slots,
            self.slab.layout.num_groups,
        )
        taken = {group for lease in self.leases.values() for group in lease.groups} | self._draining
        placed = []
        for size in sizes:
            group = next(
                (
                    g
                    for k in range(num_groups)
                    if (g := (self._next_group + k) % num_groups) not in taken
                ),
                None,
            )
            start = self._run(seats, size)
            if group is None or start is None:
                return None
            seats[start : start + size] = True
            taken.add(group)
            self._next_group, self._cursor = (group + 1) % num_groups, (start + size) % num_slots
            placed.append((group, start, size))
        return placed

    def _run(self, seats: np.ndarray, size: int) -> int | None:
        """Start of `size` free slots in a row, looked for from the cursor on, then from the beginning."""
        for begin in (self._cursor, 0):
            free = np.flatnonzero(~seats[begin:]) + begin
            if free.size >= size:
                runs = free[size - 1 :] - free[: free.size - size + 1] == size - 1
                if runs.any():
                    return int(free[int(np.argmax(runs))])
        return None

    def end(self, fd: int) -> None:
        """Ends the lease of connection `fd`: its seats drain, and are free once the engine has let go of them."""
        lease = self.leases.pop(fd)
        for group in lease.groups:
            self.slab.lease[group, SAID_BYE] = lease.said_bye
            self.slab.lease[group, LEASED] = 0
            self._draining.add(group)
        if lease.groups:
            self._changed()
        self._on_event("detached" if lease.groups else "gone", lease, {"type": "detached"})
        lease.connection.close()

    def cut(self, fd: int, error: SeedrlError) -> None:
        """Ends the lease and tells the worker not to come back."""
        self.reply(self.leases[fd], {"type": "cut", "error": error.to_wire()})
        self.end(fd)

    @staticmethod
    def reply(lease: Lease, message: dict[str, Any]) -> None:
        try:
            lease.connection.send(msgpack.packb(message))
        except OSError:  # it is gone, and loses its seats by that
            pass

    def _changed(self) -> None:
        self.slab.control[DOOR_LINE, DOOR_EPOCH] += 1
        os.eventfd_write(self._engine_bell, 1)

    def collect(self) -> bool:
        """Frees the seats that have drained, shows out who never said hello; True while some seats still drain."""
        too_long_s = time.monotonic() - _HELLO_S
        for lease in [lease for lease in self.leases.values() if not lease.attached]:
            if lease.came_s < too_long_s:
                self.end(lease.fd)
        for group in list(self._draining):
            line = self.slab.lease[group]
            if self.slab.drained[group, 0] >= line[GENERATION]:
                self._draining.discard(group)
                self._seats[line[START] : line[START] + line[SIZE]] = False
        return bool(self._draining)

    def free_slots(self) -> int:
        return int(self.slab.layout.num_slots - self._seats.sum())

    def close(self) -> None:
        """Ends all leases and takes the address away."""
        for fd in list(self.leases):
            self.end(fd)
        self.listener.close()
        self.path.unlink(missing_ok=True)
