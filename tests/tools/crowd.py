"""Many remote workers in one process, at a pace: the protocol as docs/protocol.md has it, without environments."""

from __future__ import annotations

import os
import time
from typing import Any

import zmq

from seedrl.spec import EnvSpec
from seedrl.transport import wire
from seedrl.transport.slab import own_rows


class Member:
    """One connection with one group."""

    def __init__(self, context: zmq.Context, address: str, size: int, number: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 100
        self.socket.connect(address)
        self.size, self.number = size, number
        self.n, self.answered, self.sent_s, self.due_s = 0, 0, 0.0, 0.0
        self.seated = self.over = False
        self.hello()

    def hello(self) -> None:
        self.socket.send(wire.pack(
            "hello", v=wire.VERSION, token=os.urandom(16), spec=None, groups=[self.size], env=f"member {self.number}", host="crowd",
            pid=os.getpid(), evaluation=False,
        ))  # fmt: skip

    def hear(self) -> tuple[str, dict[str, Any], list[bytes]]:
        frames = self.socket.recv_multipart()
        kind, header = wire.unpack(frames[0])
        return kind, header, frames[1:]

    def seat(self, header: dict[str, Any]) -> None:
        spec = EnvSpec.from_dict(header["spec"])
        (self.view,) = own_rows(spec, [self.size])
        self.frames, self.seated = wire.Frames(spec, self.view), True
        self.view.first[...] = 1

    def step(self) -> None:
        self.n += 1
        self.sent_s = time.monotonic()
        self.socket.send_multipart(
            [
                wire.pack("step", g=0, n=self.n, rtt_ns=0, env_ns=0, ended=False),
                *self.frames.step(False),
            ]
        )
        self.view.first[...] = 0

    def leave(self) -> None:
        self.socket.send(wire.pack("bye"))
        self.socket.close()


class Crowd:
    """`count` members of `size` environments each. Steps take `period_s`; `rtt_s` collects every round trip."""

    def __init__(self, address: str, count: int, size: int, period_s: float) -> None:
        self.context = zmq.Context()
        self.period_s, self.rtt_s, self.refused = period_s, list[float](), list[str]()
        self.members = [Member(self.context, address, size, number) for number in range(count)]
        self.by_socket = {member.socket: member for member in self.members}
        self.poller = zmq.Poller()
        for member in self.members:
            self.poller.register(member.socket, zmq.POLLIN)

    def run(self, seconds: float) -> None:
        """Steps all members, each a `period_s` after its last step or as soon as it is answered."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            for socket, _ in self.poller.poll(2):
                member = self.by_socket[socket]
                kind, header, _ = member.hear()
                if kind == "welcome" and not member.seated:
                    member.seat(header)
                    member.due_s = now + self.period_s * member.number / len(self.members)
                elif kind == "answer" and header["n"] == member.n:
                    member.answered = member.n
                    self.rtt_s.append(time.monotonic() - member.sent_s)
                elif kind in ("refused", "ended", "stop"):
                    self.refused.append(f"{kind} {header}")
            for member in self.members:
                if member.seated and member.answered == member.n and now >= member.due_s:
                    member.due_s = max(member.due_s + self.period_s, now - self.period_s)
                    member.step()

    @property
    def late(self) -> int:
        """Members whose last step was not answered for a second."""
        now = time.monotonic()
        return sum(
            member.answered != member.n and now - member.sent_s > 1.0 for member in self.members
        )

    @property
    def steps(self) -> int:
        return sum(member.answered for member in self.members)

    def close(self) -> None:
        for member in self.members:
            member.leave()
        self.context.term()
