"""A line between the supervisor and one of its processes: msgpack maps and descriptors over a socket pair."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 200_000
_FDS_PER_MESSAGE = 200  # the kernel takes 253


class Channel:
    """One end. Messages keep their bounds (SEQPACKET); `receive` blocks unless the socket was made non-blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(ours), Channel(theirs)

    @staticmethod
    def from_fd(fd: int) -> Channel:
        return Channel(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends a map, and duplicates of `fds`, however many there are."""
        data = msgpack.packb({**message, "num_fds": len(fds)})
        socket.send_fds(self.socket, [data], list(fds[:_FDS_PER_MESSAGE]))
        for at in range(_FDS_PER_MESSAGE, len(fds), _FDS_PER_MESSAGE):
            socket.send_fds(self.socket, [b"\x80"], list(fds[at : at + _FDS_PER_MESSAGE]))

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next map and its descriptors; None when the other end is gone."""
        data, fds, _, _ = socket.recv_fds(self.socket, MAX_MESSAGE_BYTES, _FDS_PER_MESSAGE)
        if not data:
            return None
        message = msgpack.unpackb(data)
        while len(fds) < message["num_fds"]:
            more, extra, _, _ = socket.recv_fds(self.socket, 16, _FDS_PER_MESSAGE)
            if not more:
                return None
            fds += extra
        return message, fds

    def close(self) -> None:
        self.socket.close()


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
