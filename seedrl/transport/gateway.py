"""The gateway process: workers of other hosts, over ZeroMQ, in ordinary slots. The engine sees no difference.

`python -m seedrl.transport.gateway --channel FD`: everything it needs comes as one message of the supervisor. To the door it is a
local worker, one lease a peer; to a remote worker it is the server (`wire.py`). What a peer sends is checked against the spec
before a byte reaches a slot, so the worst that it can do is lose its own seats.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import uvloop
import zmq
import zmq.auth.thread
from zmq.utils.monitor import parse_monitor_message

from seedrl import host
from seedrl.errors import (
    AddressError,
    EnvError,
    LeaseRefused,
    ProtocolError,
    SeedrlError,
    from_wire,
)
from seedrl.spec import EnvSpec
from seedrl.transport import attach, doorbell, wire
from seedrl.transport.channel import Channel
from seedrl.transport.rows import RowChecks
from seedrl.transport.slab import (
    PUBLISHED_NS,
    RTT_NS,
    SEQUENCE,
    STEP_NS,
    STOP,
    SUPERVISOR_LINE,
    Slab,
    SlabLayout,
)

_TICK_S = 0.25
_DRAIN_MESSAGES = 256  # in a row, before doorbells and the clock have their turn
_QUEUE_MESSAGES = 64  # to and from a peer: it has one step a group under way
_MAX_CUT = 4096  # connections that are remembered as cut off
_MAX_PINGS = 64  # a second and peer
_LOG_BURST, _LOG_PER_S = 20.0, 1.0
_HANDSHAKE_MS = 5000
_DOOR_RETRY_S = 0.05
_GOODBYE_S = 0.5
_NOBLOCK, _MORE = (
    int(zmq.NOBLOCK),
    int(zmq.NOBLOCK | zmq.SNDMORE),
)  # as enums they cost a microsecond
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_LONGEST_NS = 10**15
_CONTROL_FIELDS = ("verb", "mode", "worker", "seconds")


class Seats:
    """One group of a peer: its rows in the slab, and where its steps stand."""

    def __init__(
        self, slab: Slab, spec: EnvSpec, fields: dict[str, int], door: int, where: str
    ) -> None:
        group = fields["group"]
        view = slab.group_view(fields["start"], fields["size"])
        self.frames, self.checks = wire.Frames(spec, view), RowChecks(spec, view, where)
        self.view, self.door, self.where = view, door, where
        self._asked, self._answered, self._base = (
            slab.asked[group],
            slab.answered[group],
            fields["base"],
        )
        self._asked[SEQUENCE] = self._base
        self._asked[RTT_NS] = self._asked[STEP_NS] = 0
        self.taken = 0  # newest step that went into the slab
        self._over = np.ones(fields["size"], bool)  # the next row must be a first one
        self._any_over = True
        self._flags = view.flags.reshape(-1).view(np.uint32)  # all four of a seat at once
        self._finite = np.empty(fields["size"], bool)

    @property
    def answered(self) -> bool:
        return bool(self.taken and self._answered[SEQUENCE] == self._base + self.taken)

    def take(self, frames: list[Any], ended: bool, packed: bool) -> None:
        """Puts a step's rows into the slab. Raises: SeedrlError naming what is wrong with them; the engine never sees those."""
        view = self.view
        self.frames.take_step(frames, ended, packed)
        np.isfinite(view.reward, out=self._finite)
        if np.count_nonzero(self._finite) != self._finite.size:
            raise EnvError(
                what="a reward is not finite", where=self.where, do="mend the environment"
            )
        if not self.checks.finite():
            seat, leaf = self.checks.not_finite()[0]
            raise EnvError(what=f"leaf '{leaf}' holds a number that is not finite", where=f"{self.where}, seat {seat}", do="mend the environment")  # fmt: skip
        self.checks.check_ranges()
        if not ended and not self._any_over and not np.count_nonzero(self._flags):
            self.checks.finish_masks(self._over)  # rows within their episodes, as most are
            return
        final = (view.terminated | view.truncated) != 0
        first = view.first != 0
        if (self._over & ~first).any() or (final & first).any():
            raise ProtocolError(
                what="the row after an episode's last one (and the very first) has `first` set, and no last row has", where=self.where,
                do="follow Gymnasium's next-step autoreset order",
            )  # fmt: skip
        if final.any() and not ended:
            raise ProtocolError(
                what="an episode ends, and its return and length are missing", where=self.where
            )
        self.checks.finish_masks(final)
        self._over, self._any_over = final, bool(final.any())

    def publish(self, bell: int, rtt_ns: int, env_ns: int) -> None:
        asked = self._asked
        asked[RTT_NS], asked[STEP_NS] = rtt_ns, env_ns
        asked[PUBLISHED_NS] = time.monotonic_ns()
        self.taken += 1
        asked[SEQUENCE] = self._base + self.taken
        os.eventfd_write(bell, 1)


class Peer:
    """One remote worker's lease; its connection may change."""

    def __init__(self, token: bytes, identity: bytes, hello: dict[str, Any]) -> None:
        self.token, self.identity, self.hello = token, identity, hello
        self.heard_s = time.monotonic()
        self.door: socket.socket | None = None  # the lease, to the supervisor's door
        self.retry_s = 0.0  # when to knock again, while seats of others drain
        self.knocking_since_s = self.heard_s
        self.welcome: dict[str, Any] = {}
        self.seats: list[Seats] = []
        self.pings = 0

    @property
    def name(self) -> str:
        who = f"{self.hello['host']} pid {self.hello['pid']}"
        return f"worker {self.welcome['worker']} ({who})" if self.welcome else f"worker at {who}"


class Gateway:
    """All peers. One thread, never blocks; `hear` takes a message, `_ring` an answer, `tick` the clock."""

    def __init__(
        self, router: zmq.Socket[bytes], slab: Slab, bell: int, spec: EnvSpec, door: str, heartbeat_s: float, lease_s: float, log: Any,
        is_admin: Callable[[Any], bool] = lambda frame: False,
    ) -> None:  # fmt: skip
        self._is_admin = is_admin
        self.router, self.slab, self.bell, self.spec, self.door = router, slab, bell, spec, door
        self.heartbeat_s, self.lease_s, self._log = heartbeat_s, lease_s, log
        self.by_token: dict[bytes, Peer] = {}
        self.by_identity: dict[bytes, Peer] = {}
        self._cut: OrderedDict[bytes, None] = OrderedDict()
        self._stop = slab.control[SUPERVISOR_LINE]
        self._draining = self.over = False
        self._tokens, self._tokens_s, self._unsaid = _LOG_BURST, time.monotonic(), 0
        self._loop = asyncio.get_running_loop()

    # --------------------------------------------------------------------------------------------------- messages in

    def drain(self) -> None:
        """Takes what has come. ZeroMQ's descriptor only tells of changes: whoever has sent something looks here again."""
        if self.over:
            return
        self._draining = False
        for _ in range(_DRAIN_MESSAGES):
            if not self.router.getsockopt(_EVENTS) & _READABLE:  # type: ignore[operator]
                return  # a look costs a third of the exception
            (identity, *frames), frame = wire.receive(self.router, _NOBLOCK)
            self.hear(identity, frames, frame)
        self.drain_soon()

    def drain_soon(self) -> None:
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self.drain)

    def hear(self, identity: bytes, frames: list[Any], frame: Any = None) -> None:
        """One message of the connection `identity`. Whatever is in it, only its sender can come to harm.

        Args: frame: one of its frames as ZeroMQ has it, which knows the key of the handshake.
        """
        peer = self.by_identity.get(identity)
        try:
            kind, header = wire.unpack(frames[0] if frames else b"")
            if peer is not None and kind == "step":
                peer.heard_s = time.monotonic()
                self._step(peer, header, frames[1:])
            elif identity in self._cut:
                return
            elif kind == "hello":
                self._hello(identity, header)
            elif kind == "ctl":
                self._ctl(identity, header, frame)
            elif peer is None:
                self._send(identity, wire.pack("unknown"))
            else:
                peer.heard_s = time.monotonic()
                self._other(peer, kind, header)
        except SeedrlError as error:
            self.cut(identity, error)
        except (
            Exception
        ) as error:  # what a stranger may send is without end; a fault of ours shows in the log
            self.cut(
                identity, ProtocolError(what=f"not understood: {type(error).__name__}: {error}")
            )

    def _step(self, peer: Peer, header: dict[str, Any], frames: list[Any]) -> None:
        if not peer.seats:
            return  # its welcome is under way
        seats = peer.seats[wire.integer(header, "g", 0, len(peer.seats) - 1)]
        number = wire.integer(header, "n", 1, 2**31 - 1)
        if number == seats.taken + 1 and (not seats.taken or seats.answered):
            rtt_ns, env_ns = (
                wire.integer(header, name, 0, _LONGEST_NS) for name in ("rtt_ns", "env_ns")
            )
            seats.take(frames, header.get("ended") is True, header.get("lz4") is True)
            seats.publish(self.bell, rtt_ns, env_ns)
        elif number > seats.taken:
            raise ProtocolError(
                what=f"step {number} of a group whose step {seats.taken} is not answered yet"
            )
        # else it came twice

    def _other(self, peer: Peer, kind: str, header: dict[str, Any]) -> None:
        if kind == "ping":
            peer.pings += 1
            if peer.pings > _MAX_PINGS:
                raise ProtocolError(what=f"more than {_MAX_PINGS} pings a second")
            if not peer.seats:
                return
            waits = header.get("waits")
            if not isinstance(waits, list) or len(waits) != len(peer.seats):
                raise ProtocolError(what="a ping names no step for each group")
            self._send(
                peer.identity, wire.pack("pong", taken=[seats.taken for seats in peer.seats])
            )
            for number, (seats, wanted) in enumerate(zip(peer.seats, waits, strict=True)):
                if wanted == seats.taken and seats.answered:
                    self._answer(peer, number)
        elif kind == "report":
            report = header.get("report")
            if isinstance(report, dict) and report.get("type") in ("fault", "warning", "failed"):
                self._tell_door(peer, report)
        elif kind == "bye":
            self._tell_door(peer, {"type": "bye"})
            self._end(peer)
        else:
            raise ProtocolError(what=f"a message of type {kind!r:.40}")

    def _ctl(self, identity: bytes, header: dict[str, Any], frame: Any) -> None:
        """Passes a control verb on to the supervisor, if an admin asks for it."""
        if not self._is_admin(frame):
            raise LeaseRefused(
                what="control verbs need an admin's key", where="--key",
                do="make one with seedrl keys DIR --admin NAME, or use the Unix socket on the server's host",
            )  # fmt: skip
        message = {"type": "ctl"} | {
            name: header[name] for name in _CONTROL_FIELDS if name in header
        }
        try:
            line = attach.knock(self.door, message)
        except BlockingIOError:
            busy = AddressError(what="the server's door is busy", do="ask again")
            self._send(identity, wire.pack("ctl", answer={"error": busy.to_wire()}))
            return
        self._loop.add_reader(line.fileno(), self._ctl_answered, identity, line)

    def _ctl_answered(self, identity: bytes, line: socket.socket) -> None:
        try:
            data = line.recv(attach.MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._loop.remove_reader(line.fileno())
        line.close()
        answer = msgpack.unpackb(data) if data else {"error": AddressError(what="the server's door is closed").to_wire()}  # fmt: skip
        self._send(identity, wire.pack("ctl", answer=answer))

    def _tell_door(self, peer: Peer, report: dict[str, Any]) -> None:
        if peer.door is not None:
            packed = msgpack.packb(report)
            try:
                if len(packed) <= attach.MAX_MESSAGE_BYTES:
                    peer.door.send(packed, socket.MSG_DONTWAIT)
            except OSError:  # full or closed: a report is never worth a wait
                pass

    # ---------------------------------------------------------------------------------------------------- peers

    def _hello(self, identity: bytes, header: dict[str, Any]) -> None:
        if header.get("v") != wire.VERSION:
            self._refuse(identity, ProtocolError(
                what=f"the worker speaks protocol {header.get('v')!r:.20}, this server {wire.VERSION}",
                do="install the same version of seedrl on both sides",
            ), False)  # fmt: skip
            return
        token = header.get("token")
        if not isinstance(token, bytes) or len(token) != wire.TOKEN_BYTES:
            raise ProtocolError(what=f"'token' is not {wire.TOKEN_BYTES} bytes")
        peer = self.by_token.get(token)
        if peer is not None:  # a new connection, or the welcome was lost
            self.by_identity.pop(peer.identity, None)
            peer.identity, peer.heard_s = identity, time.monotonic()
            self.by_identity[identity] = peer
            if peer.seats:
                self._welcome(peer, resumed=True)
            return
        if identity in self.by_identity:
            self._end(self.by_identity[identity])
        groups = header.get("groups")
        if not isinstance(groups, list) or not 0 < len(groups) <= wire.MAX_GROUPS or not all(type(size) is int and 0 < size <= self.slab.layout.num_slots for size in groups):  # fmt: skip
            raise ProtocolError(what=f"'groups' is {groups!r:.60}, not 1 to {wire.MAX_GROUPS} sizes of at most {self.slab.layout.num_slots}")  # fmt: skip
        try:
            spec = self.spec if header["spec"] is None else EnvSpec.from_dict(header["spec"])
        except Exception:
            raise ProtocolError(what="'spec' is no spec") from None
        hello = {
            "groups": groups, "spec": spec.to_dict(), "pid": wire.integer(header, "pid", 0, 2**31), "host": f"{header.get('host')!s:.60}",
            "env": f"{header.get('env')!s:.200}", "evaluation": header.get("evaluation") is True,
        }  # fmt: skip
        peer = Peer(token, identity, hello)
        self.by_token[token] = self.by_identity[identity] = peer
        self._knock(peer)

    def _knock(self, peer: Peer) -> None:
        """Asks the door for seats; its answer comes to `_door_speaks`."""
        peer.retry_s = 0.0
        hello = {"type": "hello", "protocol": attach.PROTOCOL, **peer.hello}
        try:
            peer.door = attach.knock(self.door, hello)
        except (
            BlockingIOError
        ):  # a crowd; a worker that has waited too long is sent away to come again
            if not self._knock_later(peer):
                busy = AddressError(what="the server's door is busy")
                self._refuse(peer.identity, busy, True)
                self._end(peer)
            return
        self._loop.add_reader(peer.door.fileno(), self._door_speaks, peer)

    def _door_speaks(self, peer: Peer) -> None:
        door = peer.door
        assert door is not None
        try:
            data, fds, _, _ = socket.recv_fds(door, attach.MAX_MESSAGE_BYTES, 2 + wire.MAX_GROUPS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if peer.welcome:  # it speaks no more, it only closes: the lease is over
            doorbell_close(fds)
            if data:  # the last thing that it says
                self._refuse(peer.identity, from_wire(msgpack.unpackb(data)["error"]), False)
                self._end(peer)
                return
            stopped = bool(self._stop[STOP])
            message = (
                wire.pack("stop")
                if stopped
                else wire.pack("ended", why="the server ended the lease")
            )
            self._send(peer.identity, message)
            self._end(peer)
            return
        answer = msgpack.unpackb(data) if data else {}
        if answer.get("type") == "welcome":
            peer.welcome = answer
            doorbell_close(fds[:2])  # the slab and the engine's bell are here already
            where = peer.name
            for fields, fd in zip(answer["groups"], fds[2:], strict=True):
                seats = Seats(self.slab, self.spec, fields, fd, f"{where}, group {len(peer.seats)}")
                peer.seats.append(seats)
                self._loop.add_reader(fd, self._ring, peer, len(peer.seats) - 1)
            self._welcome(peer, resumed=False)
            self._say(
                f"{where}: {sum(len(seats.view.reward) for seats in peer.seats)} slots for {peer.hello['env']}"
            )
            return
        doorbell_close(fds)
        self._loop.remove_reader(door.fileno())
        door.close()
        peer.door = None
        if answer.get("retry") and self._knock_later(peer):
            return
        error = answer.get("error") or AddressError(what="the server's door is closed").to_wire()
        self._send(peer.identity, wire.pack("refused", error=error, retry=not data))
        self._end(peer)

    def _knock_later(self, peer: Peer) -> bool:
        """Whether the peer has not been knocking for too long already."""
        if time.monotonic() - peer.knocking_since_s > self.heartbeat_s * 10:
            return False
        peer.retry_s = time.monotonic() + _DOOR_RETRY_S
        self._loop.call_later(_DOOR_RETRY_S, self._knock_again, peer)
        return True

    def _knock_again(self, peer: Peer) -> None:
        if peer.retry_s and peer.token in self.by_token:
            self._knock(peer)

    def _welcome(self, peer: Peer, *, resumed: bool) -> None:
        self._send(peer.identity, wire.pack(
            "welcome", v=wire.VERSION, worker=peer.welcome["worker"], seed=peer.welcome["seed"], spec=self.spec.to_dict(),
            groups=[seats.taken for seats in peer.seats], resumed=resumed, heartbeat_ms=int(self.heartbeat_s * 1e3),
            lease_ms=int(self.lease_s * 1e3), lz4=wire.has_lz4(),
        ))  # fmt: skip

    def _end(self, peer: Peer) -> None:
        """Forgets a peer; closing its line to the door gives the seats back."""
        self.by_token.pop(peer.token, None)
        if self.by_identity.get(peer.identity) is peer:
            del self.by_identity[peer.identity]
        peer.retry_s = 0.0
        for seats in peer.seats:
            self._loop.remove_reader(seats.door)
            os.close(seats.door)
        peer.seats = []
        if peer.door is not None:
            self._loop.remove_reader(peer.door.fileno())
            peer.door.close()
            peer.door = None

    def _refuse(self, identity: bytes, error: SeedrlError, retry: bool) -> None:
        self._send(identity, wire.pack("refused", error=error.to_wire(), retry=retry))

    def cut(self, identity: bytes, error: SeedrlError) -> None:
        """Shows a peer out that does not keep to the protocol: it is told why, and nothing more of that connection is heard."""
        peer = self.by_identity.get(identity)
        where = peer.name if peer is not None else f"connection {identity.hex()}"
        self._say(f"cut off {where}: {error.what}")
        error.where = error.where or where
        self._refuse(identity, error, False)
        if peer is not None:
            self._tell_door(peer, {"type": "warning", "message": f"cut off: {error.what}"})
            self._end(peer)
        self._cut[identity] = None
        if len(self._cut) > _MAX_CUT:
            self._cut.popitem(last=False)

    # --------------------------------------------------------------------------------------------------- messages out

    def _ring(self, peer: Peer, number: int) -> None:
        seats = peer.seats[number]
        doorbell.hush(seats.door)
        if seats.answered:
            self._answer(peer, number)
        elif self._stop[STOP]:
            self._send(peer.identity, wire.pack("stop"))

    def _answer(self, peer: Peer, number: int) -> None:
        seats = peer.seats[number]
        header = wire.pack("answer", g=number, n=seats.taken)
        self._send(peer.identity, header, *seats.frames.answer())

    def _send(self, identity: bytes, *frames: Any) -> None:
        """Sends without waiting. What a peer has no room for is lost to it alone: its ping asks again."""
        send = self.router.send
        try:
            send(identity, _MORE)
            for frame in frames[:-1]:
                send(frame, _MORE)
            send(frames[-1], _NOBLOCK)
        except zmq.ZMQError:  # gone, or it does not read
            pass
        self.drain_soon()

    # ---------------------------------------------------------------------------------------------------------- clock

    def tick(self) -> None:
        now = time.monotonic()
        if self._unsaid and self._tokens >= 1:
            self._say(f"and {self._unsaid} more lines that were not written")
            self._unsaid = 0
        for peer in list(self.by_token.values()):
            peer.pings = 0
            if now - peer.heard_s > self.lease_s:
                why = f"nothing was heard of it for {self.lease_s:g} s"
                self._say(f"{peer.name}: {why}; its seats are given back")
                self._tell_door(peer, {"type": "warning", "message": why})
                self._send(peer.identity, wire.pack("ended", why=why))
                self._end(peer)
        self.drain_soon()

    def stop(self) -> None:
        """Tells every worker that the run is over, where that is so; otherwise they wait for the next server here."""
        if self._stop[STOP]:
            for peer in list(self.by_token.values()):
                self._send(peer.identity, wire.pack("stop"))

    def _say(self, text: str) -> None:
        """A line of the log; strangers cannot fill the disk with them."""
        now = time.monotonic()
        self._tokens = min(_LOG_BURST, self._tokens + (now - self._tokens_s) * _LOG_PER_S)
        self._tokens_s = now
        if self._tokens < 1:
            self._unsaid += 1
            return
        self._tokens -= 1
        self._log(text)


def doorbell_close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---------------------------------------------------------------------------------------------------------- process


class _AllowList:
    """Who may come in, for ZeroMQ's authenticator; the file is read anew each time, so that it can grow and shrink."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def callback(self, domain: str, key: bytes) -> bool:
        try:
            return key.decode() in wire.load_allowed(self._path)
        except SeedrlError:
            return False

    def is_admin(self, frame: Any) -> bool:
        """Whether the frame came over a connection whose handshake proved an admin's key."""
        try:
            found = wire.load_allowed(self._path).get(frame.get("User-Id"))
        except (SeedrlError, zmq.ZMQError):
            return False
        return found is not None and found.admin


def open_router(
    context: zmq.Context[Any], listen: str, keys: Path | None, max_frame_bytes: int
) -> zmq.Socket[bytes]:
    """The bound socket. Raises: AddressError when the address cannot be had, ConfigError for a key file that is wrong."""
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    router.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
    router.setsockopt(zmq.MAXMSGSIZE, max(max_frame_bytes, wire.MAX_HEADER_BYTES))
    router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPV6, int("[" in listen))
    if keys is not None:
        own = wire.load_key(keys / "server.key")
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = own.public.encode(), own.secret.encode()
    try:
        router.bind(listen)
    except zmq.ZMQError as error:
        router.close()
        raise AddressError(
            what=f"cannot listen at {listen}: {error.strerror or error}", where="--listen",
            do="stop whoever has that port (ss -ltnp shows it), or choose another",
        ) from None  # fmt: skip
    return router


def watch_handshakes(router: zmq.Socket[bytes], gateway: Gateway) -> zmq.Socket[bytes]:
    """Handshakes that fail go to the log: strangers, wrong keys."""
    failed: dict[int, str] = {
        zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not on the allow-list",
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak ZeroMQ, or has no key for this server",
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up during the handshake",
    }
    monitor: Any = router.get_monitor_socket(sum(int(event) for event in failed))

    def heard() -> None:
        while True:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            why = failed.get(event["event"])
            if why is not None:
                gateway._say(f"refused a connection: {why}")

    asyncio.get_running_loop().add_reader(monitor.fileno(), heard)
    heard()
    return monitor


async def serve(start: dict[str, Any], fds: list[int], channel: Channel) -> None:
    """Runs until SIGTERM, or until the supervisor is gone."""
    spec = EnvSpec.from_dict(start["spec"])
    layout = SlabLayout.of(spec, start["num_slots"], start["num_groups"])
    slab_fd, bell = fds
    slab = Slab(host.map_shared(slab_fd, layout.nbytes), layout)
    keys = Path(start["keys"]) if start["keys"] else None
    allow_list = None
    if keys is not None:
        wire.load_allowed(keys / "allowed.txt")
        allow_list = _AllowList(keys / "allowed.txt")
    column = max(
        [array.nbytes for array in slab.obs.values()]
        + [layout.num_slots * 8 * max(1, len(spec.stats))]
    )
    context: zmq.Context[Any] = zmq.Context(1)
    authenticator = None
    if allow_list is not None:
        authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=allow_list)
    router = open_router(context, start["listen"], keys, column)
    gateway = Gateway(
        router, slab, bell, spec, start["door"], start["heartbeat_s"], start["lease_s"],
        lambda text: print(text, file=sys.stderr, flush=True),
        *([] if allow_list is None else [allow_list.is_admin]),
    )  # fmt: skip
    monitor = watch_handshakes(router, gateway)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor says when it is over
    loop.add_reader(int(router.getsockopt(zmq.FD)), gateway.drain)
    channel.send({"type": "ready", "address": router.getsockopt_string(zmq.LAST_ENDPOINT)})
    gateway.drain()
    while not over.is_set():
        try:
            await asyncio.wait_for(over.wait(), _TICK_S)
        except TimeoutError:
            gateway.tick()
    gateway.stop()
    deadline = time.monotonic() + _GOODBYE_S
    while gateway.by_token and time.monotonic() < deadline:
        await asyncio.sleep(0.01)  # a connection that closes too soon takes unread words with it
    gateway.over = True
    loop.remove_reader(int(router.getsockopt(zmq.FD)))
    loop.remove_reader(monitor.fileno())
    router.setsockopt(zmq.LINGER, 500)
    router.disable_monitor()
    monitor.close()
    router.close()
    if authenticator is not None:
        authenticator.stop()
    context.term()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    host.die_with_parent(arguments.parent)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    channel = Channel.from_fd(arguments.channel)
    try:
        received = channel.receive()
        if received is None:
            return 1
        uvloop.run(serve(*received, channel))
        return 0
    except SeedrlError as error:
        channel.send({"type": "failed", **error.to_wire()})
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        channel.send(
            {
                "type": "failed",
                **ProtocolError(
                    what=f"the gateway failed: {type(error).__name__}: {error}"
                ).to_wire(),
            }
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
