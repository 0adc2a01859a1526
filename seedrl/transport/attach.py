"""The door: how a local worker is given seats, both ends.

A Unix socket of type SEQPACKET carries one msgpack map a message, at most `MAX_MESSAGE_BYTES`:

    anybody -> door  {"type": "ctl", "verb", ...}, answered with one map
    worker -> door   {"type": "hello", "protocol", "groups": [E, ...], "spec", "pid", "host", "env", "evaluation", "index", "attempt"}
    door -> worker   {"type": "welcome", "protocol", "worker", "seed", "spec", "num_slots", "num_groups", "generation", "groups":
                      [{"group", "start", "size", "base"}]}   with the slab's, the engine's bell's and each group's bell's descriptors
                     {"type": "refused", "error": {...}, "retry": bool}
    worker -> door   {"type": "fault" | "failed" | "warning" | "bye", ...}       at any time after the welcome
    door -> worker   {"type": "cut", "error": {...}}: do not come back; or the socket closes: the lease is over either way

The socket's life is the lease: when a worker dies, however it dies, the kernel closes its end and the door revokes its seats.
The peer must run as the same user (SO_PEERCRED). Nothing is ever unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack

from seedrl.errors import (
    AddressError,
    SeedrlError,
    from_wire,
)

PROTOCOL = 1
MAX_MESSAGE_BYTES = (
    200_000  # below the default socket buffer, so that a message never blocks half-way
)
MAX_GROUPS_PER_WORKER = 64
_CONTROL_S = 5.0


def parse_unix(address: str) -> Path:
    """The path of `unix://PATH`; AddressError for any other form."""
    scheme, separator, path = address.partition("://")
    if scheme != "unix" or not separator or not path:
        raise AddressError(
            what=f"'{address}' is not an address that workers can attach to",
            where="address",
            do="use unix://PATH, for instance unix:///run/user/1000/seedrl.sock",
        )
    return Path(path)


@contextmanager
def short(path: Path) -> Iterator[str]:
    """A spelling of `path` that fits a socket address (108 bytes), however deep the folder lies."""
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise AddressError(
            what=f"no folder {path.parent} ({error.strerror})", where=f"unix://{path}",
            do="create the folder, or choose another address",
        ) from None  # fmt: skip
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def peer_pid(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows it."""
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return pid, uid


def knock(address: str, message: dict[str, Any]) -> socket.socket:
    """Says `message` at the door and does not wait: the answer comes on the socket returned, which does not block.

    Raises: AddressError when nobody listens; BlockingIOError when so many knock that this one must come again.
    """
    connection = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    )
    try:
        with short(parse_unix(address)) as name:
            connection.connect(name)
        connection.send(msgpack.packb(message))
    except BlockingIOError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise AddressError(
            what=f"nobody answers at {address} ({error.strerror or error})"
        ) from None
    return connection


def control(address: str, verb: str, **fields: Any) -> dict[str, Any]:
    """Asks a running server for a control verb; returns its answer.

    Raises: AddressError when nobody answers; what the server refuses it with.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with connection:
        connection.settimeout(_CONTROL_S)
        try:
            with short(parse_unix(address)) as name:
                connection.connect(name)
            connection.send(msgpack.packb({"type": "ctl", "verb": verb, **fields}))
            data = connection.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise AddressError(
                what=f"no server answers at {address} ({error.strerror or error})",
                where=address,
                do="give the unix:// address of a running server, or its run directory",
            ) from None
    answer: dict[str, Any] = msgpack.unpackb(data) if data else {"error": {"what": "no answer"}}
    if "error" in answer:
        raise from_wire(answer["error"])
    return answer


def report_failure(address: str, error: SeedrlError) -> None:
    """Tells the door at `address` why this worker will never say hello; does nothing when nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with connection, suppress(OSError, AddressError), short(parse_unix(address)) as name:
        connection.connect(name)
        connection.send(msgpack.packb({"type": "failed", **error.to_wire()}))
