"""A local worker's end of a lease: the slab and the bells come as descriptors, and a round trip is two calls."""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from typing import Any

import msgpack

from seedrl.errors import (
    AddressError,
    from_wire,
)
from seedrl.spec import EnvSpec
from seedrl.transport import doorbell
from seedrl.transport.attach import (
    MAX_GROUPS_PER_WORKER,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    parse_unix,
    short,
)
from seedrl.transport.slab import (
    PUBLISHED_NS,
    RTT_NS,
    SEQUENCE,
    STEP_NS,
    STOP,
    SUPERVISOR_LINE,
    GroupView,
    Slab,
    SlabLayout,
)


class GroupLink:
    """One leased group: its rows, and the two calls of a round trip."""

    def __init__(
        self, slab: Slab, bell: int, door: int, link: int, fields: dict[str, int], evaluation: bool
    ) -> None:
        group = fields["group"]
        self.group, self.size, self.evaluation = group, fields["size"], evaluation
        self.view: GroupView = slab.group_view(fields["start"], fields["size"], group)
        self._asked, self._answered = slab.asked[group], slab.answered[group]
        self._stop = slab.control[SUPERVISOR_LINE]
        self._bell, self._door = bell, door
        self._sequence = fields["base"]
        self._asked[SEQUENCE] = self._sequence
        self._asked[RTT_NS] = self._asked[STEP_NS] = 0
        self._sent_ns = self._answered_ns = 0
        self._poll = select.poll()
        self._poll.register(door, select.POLLIN)
        self._poll.register(link, select.POLLIN)
        self._link = link

    def publish(self) -> None:
        """Hands the group's rows to the engine: they are its own until `wait` returns."""
        now = time.monotonic_ns()
        asked = self._asked
        if self._answered_ns:
            asked[STEP_NS] = now - self._answered_ns
        asked[PUBLISHED_NS] = now
        self._sent_ns = now
        self._sequence += 1
        asked[SEQUENCE] = self._sequence
        os.eventfd_write(self._bell, 1)

    def wait(self) -> bool:
        """Sleeps until the actions are there (True), or the server ends the lease (False)."""
        answered, wanted = self._answered, self._sequence
        while answered[SEQUENCE] != wanted:
            for fd, _ in self._poll.poll():
                if fd == self._door:
                    doorbell.hush(fd)
                elif answered[SEQUENCE] != wanted:  # the link speaks only to say that it is over
                    return False
            if self._stop[STOP]:
                return False
        self._answered_ns = now = time.monotonic_ns()
        self._asked[RTT_NS] = now - self._sent_ns
        return True


class Link:
    """A worker's lease: its groups, the run's seed and a line for reports."""

    def __init__(
        self, connection: socket.socket, welcome: dict[str, Any], fds: list[int], evaluation: bool
    ) -> None:
        spec = EnvSpec.from_dict(welcome["spec"])
        layout = SlabLayout.of(spec, welcome["num_slots"], welcome["num_groups"])
        memory = mmap.mmap(fds[0], layout.nbytes)
        self._connection, self._fds = connection, fds
        self.spec, self.seed, self.worker = spec, int(welcome["seed"]), int(welcome["worker"])
        slab = Slab(memory, layout)
        self._control = slab.control[SUPERVISOR_LINE]
        self.groups = [
            GroupLink(slab, fds[1], door, connection.fileno(), fields, evaluation)
            for fields, door in zip(welcome["groups"], fds[2:], strict=True)
        ]

    @property
    def stopped(self) -> bool:
        """The server ended the run in good order; False after a lease that ended without (it was killed, say)."""
        return bool(self._control[STOP])

    def check(self) -> None:
        """Raises what the door has said at the lease's end: that this worker must not come back."""
        try:
            data = self._connection.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return
        message = msgpack.unpackb(data) if data else {}
        if message.get("type") == "cut":
            raise from_wire(message["error"])

    def send(self, report: dict[str, Any]) -> None:
        """Sends a report without waiting; one that finds the line full or closed is lost, never the worker's time."""
        packed = msgpack.packb(report)
        if len(packed) > MAX_MESSAGE_BYTES:
            packed = msgpack.packb(
                {"type": report.get("type"), "message": "a report too long to send"}
            )
        try:
            self._connection.send(packed, socket.MSG_DONTWAIT)
        except (BlockingIOError, BrokenPipeError, ConnectionError):
            pass

    def close(self) -> None:
        """Gives the seats back."""
        self.send({"type": "bye"})
        self._connection.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def connect(address: str, hello: dict[str, Any], *, timeout_s: float = 10.0) -> Link:
    """Asks the door at `address` for seats.

    Args:
        hello: groups (sizes), spec, pid, host, env, evaluation and optionally index and attempt; see the module.
    Raises: AddressError when nobody answers there; LeaseRefused, SpecError, ... as the door says.
    """
    path = parse_unix(address)
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.settimeout(timeout_s)
        try:
            with short(path) as name:
                connection.connect(name)
            connection.send(msgpack.packb({"type": "hello", "protocol": PROTOCOL, **hello}))
            data, fds, _, _ = socket.recv_fds(
                connection, MAX_MESSAGE_BYTES, 2 + MAX_GROUPS_PER_WORKER
            )
        except OSError as error:
            connection.close()
            raise AddressError(
                what=f"nobody answers at {address} ({error.strerror or error})", where=address,
                do="start the server first (seedrl serve CONFIG --bind ...), or mend the address",
            ) from None  # fmt: skip
        if not data:
            connection.close()
            raise AddressError(
                what=f"{address} closed the door", where=address, do="see the server's log"
            )
        answer = msgpack.unpackb(data)
        if answer.get("type") == "welcome" and answer.get("protocol") == PROTOCOL:
            connection.settimeout(None)
            return Link(connection, answer, fds, bool(hello.get("evaluation")))
        connection.close()
        for fd in fds:
            os.close(fd)
        if answer.get("retry") and time.monotonic() < deadline:  # seats of a dead worker that drain
            time.sleep(0.02)
            continue
        raise from_wire(answer.get("error", {"what": f"{address} gave no understandable answer"}))
