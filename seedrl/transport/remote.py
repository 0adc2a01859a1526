"""A worker's end of the network: the calls of `link.Link`, over ZeroMQ (`wire.py`). Lost messages, lost connections and a server
that is away for less than the lease are healed in `wait`; nobody above notices more than the time.
"""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from seedrl.errors import AddressError, LeaseRefused, from_wire
from seedrl.spec import EnvSpec
from seedrl.transport import wire
from seedrl.transport.slab import GroupView, own_rows

_CONTROL_S = 5.0
_ATTEMPT_S = 2.0  # for a first answer
_HELLO_S, _LONGEST_HELLO_S = 0.1, 1.0  # between hellos: doubled, and never in step with others
_SILENT_HEARTBEATS = 3.0
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_PROBES = 3  # one alone is at the mercy of what else the machine does
_VAGUE_FAILURES = 3  # handshakes that end without a reason, before the key is blamed


class RemoteGroup:
    """One group: its rows are this process's own memory."""

    def __init__(self, link: RemoteLink, number: int, view: GroupView, evaluation: bool) -> None:
        self.view, self.size, self.evaluation = view, len(view.reward), evaluation
        self.frames = wire.Frames(link.spec, view)
        self._link, self._number = link, number
        self.sent = self.answered = 0
        self._ended = False
        self._rtt_ns = self._env_ns = self._sent_ns = self._answered_ns = 0

    def publish(self) -> None:
        """Sends the group's rows: they must not change until `wait` returns."""
        now = time.monotonic_ns()
        self._env_ns = now - self._answered_ns if self._answered_ns else 0
        self._sent_ns = now
        self.sent += 1
        self._ended = bool(self.view.flags[:, :2].any())
        self.send()

    def send(self) -> None:
        packed = self._link.packs
        header = wire.pack("step", g=self._number, n=self.sent, rtt_ns=self._rtt_ns, env_ns=self._env_ns, ended=self._ended, lz4=packed)  # fmt: skip
        frames = self.frames.packed_step(self._ended) if packed else self.frames.step(self._ended)
        self._link.send_frames(header, *frames)

    @property
    def waits(self) -> int:
        """The step whose answer has not come, or 0."""
        return self.sent if self.answered != self.sent else 0

    def wait(self) -> bool:
        """Sleeps until the actions are there (True), or the lease is over (False)."""
        while self.answered != self.sent:
            if not self._link.pump():
                return False
        return True

    def take(self, number: int, frames: list[Any]) -> None:
        """An answer; one that comes twice is none."""
        if number == self.sent and self.answered != number:
            self.frames.take_answer(frames)
            self.answered = number
            self._answered_ns = time.monotonic_ns()
            self._rtt_ns = self._answered_ns - self._sent_ns


class RemoteLink:
    """A lease over the network. See `connect`."""

    def __init__(self, address: str, hello: dict[str, Any], key: Path | None) -> None:
        self._address, self._hello = (
            address,
            {**hello, "token": os.urandom(wire.TOKEN_BYTES), "v": wire.VERSION},
        )
        self._key = wire.load_key(key) if key is not None else None
        if self._key is not None and self._key.server is None:
            raise LeaseRefused(
                what="the key is a server's own",
                where=str(key),
                do="give a worker's key (seedrl keys DIR makes both)",
            )
        self._context: zmq.Context[Any] = zmq.Context(1)
        self.stopped = False  # the server ended the run in good order
        self._over = False
        self.groups: list[RemoteGroup] = []
        self.spec: EnvSpec
        self.seed = self.worker = 0
        self._heartbeat_s, self._lease_s = wire.HEARTBEAT_S, wire.LEASE_S
        self._open()
        self._pinged_s = time.monotonic()
        self._unheard_s: float | None = None  # since when something was asked that nothing answers
        self.round_trip_s: float | None = None  # of the first sign of life
        self.bytes_per_s: float | None = None  # of the link, where that was measured
        self.packs, self._probes = False, 0  # whether frames are compressed; measurements to come
        self._hello_due_s: float | None = 0.0
        self._hello_pause_s = _HELLO_S

    def _open(self) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 64), (zmq.RCVHWM, 64), (zmq.IPV6, 1), (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 1000)):  # fmt: skip
            self._socket.setsockopt(option, value)
        if self._key is not None:
            assert self._key.server is not None
            self._socket.curve_serverkey = self._key.server.encode()
            self._socket.curve_publickey = self._key.public.encode()
            self._socket.curve_secretkey = self._key.secret.encode()
        self._monitor: Any = self._socket.get_monitor_socket(
            int(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        )  # fmt: skip
        self._socket.setsockopt(zmq.RCVTIMEO, int(self._heartbeat_s * 1e3))
        self._vague = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._shut()
            raise AddressError(
                what=f"cannot connect to {self._address}: {error.strerror or error}", where=self._address,
                do="use tcp://HOST:PORT of a running server",
            ) from None  # fmt: skip

    def _shut(self, linger_ms: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    @property
    def measured(self) -> bool:
        """Seated, and what there was to measure of the link is known."""
        return self.round_trip_s is not None and not self._probes

    # ---------------------------------------------------------------------------------------------------------- in

    def pump(self, timeout_s: float | None = None) -> bool:
        """Sleeps until something happens, or something is due; takes what has come. False once the lease is over."""
        now = time.monotonic()
        if self._hello_due_s is None and self.measured and timeout_s is None:
            return self._await_message(now)
        due = self._due_s(now)
        wait_s = max(0.0, due - now)
        if timeout_s is not None:
            wait_s = min(wait_s, timeout_s)
        events = dict(self._poller.poll(math.ceil(1e3 * wait_s)))
        if self._monitor in events:
            self._handshake_failed()
        if self._socket in events:
            self._unheard_s = None
            while True:
                try:
                    self._take(wire.receive(self._socket, _NOBLOCK)[0])
                except zmq.Again:
                    break
        self._do_what_is_due(time.monotonic())
        return not self._over

    def _await_message(self, now: float) -> bool:
        """The same for a worker that is seated and has nothing to say: one call of ZeroMQ, at most a heartbeat long."""
        if now - self._pinged_s < self._heartbeat_s:
            try:
                frames, _ = wire.receive(self._socket)
            except zmq.Again:
                pass
            else:
                self._unheard_s = None
                self._take(frames)
        self._do_what_is_due(time.monotonic())
        return not self._over

    def _take(self, frames: list[Any]) -> None:
        kind, header = wire.unpack(frames[0])
        if kind == "answer" and self.groups:
            group = self.groups[wire.integer(header, "g", 0, len(self.groups) - 1)]
            group.take(wire.integer(header, "n", 1, 2**31 - 1), frames[1:])
        elif kind == "pong" and self.groups:
            if not self.measured:
                self._measure(time.monotonic() - self._pinged_s)
            for group, taken in zip(self.groups, header["taken"], strict=True):
                if group.waits > taken:
                    group.send()
        elif kind == "welcome":
            self._welcome(header)
        elif kind == "unknown":  # a new connection, a new server, or a hello that is under way
            if self._hello_due_s is None:
                self._hello_due_s, self._hello_pause_s = 0.0, _HELLO_S
        elif kind == "stop":
            self._over = self.stopped = True
        elif kind == "ended":
            self._over = True
        elif kind == "refused":
            error = from_wire(header["error"])
            if not header.get("retry"):
                raise error
            self._hello_due_s = time.monotonic() + self._hello_pause_s

    def _welcome(self, header: dict[str, Any]) -> None:
        self._hello_due_s = None
        if not self.groups:
            self.spec = EnvSpec.from_dict(header["spec"])
            self._can_pack = bool(header.get("lz4")) and wire.has_lz4()
            self.seed, self.worker = int(header["seed"]), int(header["worker"])
            self._socket.setsockopt(zmq.RCVTIMEO, header["heartbeat_ms"])
            self._heartbeat_s, self._lease_s = (
                header["heartbeat_ms"] * 1e-3,
                header["lease_ms"] * 1e-3,
            )
            sizes: list[int] = self._hello["groups"]
            evaluation = bool(self._hello.get("evaluation"))
            self.groups = [
                RemoteGroup(self, number, view, evaluation)
                for number, view in enumerate(own_rows(self.spec, sizes))
            ]
            self._pinged_s = time.monotonic()
            self._ask(self._pinged_s, wire.pack("ping", waits=[0] * len(sizes)))
            return
        if not header.get("resumed") and any(group.sent for group in self.groups):
            self._over = (
                True  # the seats of before are lost: a new lease, and episodes from their beginning
            )
            return
        for group, taken in zip(self.groups, header["groups"], strict=True):
            if group.waits > taken:
                group.send()

    def _measure(self, took_s: float) -> None:
        """The round trip; then, where frames are large and both sides can, how fast the link carries them: the best of a few."""
        if self.round_trip_s is None:
            self.round_trip_s = took_s
            largest = max(group.frames.nbytes for group in self.groups)
            self._probes = _PROBES if self._can_pack and largest >= wire.LEAST_PACKED_BYTES else 0
        else:
            rate = wire.PROBE_BYTES / max(took_s - self.round_trip_s, 1e-6)
            self.bytes_per_s = max(rate, self.bytes_per_s or 0.0)
            self._probes -= 1
            self.packs = not self._probes and self.bytes_per_s < wire.SLOW_BYTES_PER_S
        if self._probes:
            self._pinged_s = time.monotonic()
            self._ask(self._pinged_s, wire.pack("ping", waits=[0] * len(self.groups)), os.urandom(wire.PROBE_BYTES))  # fmt: skip

    def _handshake_failed(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise LeaseRefused(
                what=f"the server at {self._address} refuses this key: it is not on its allow-list", where="--key",
                do="put its public key into allowed.txt of the server's key folder (seedrl keys DIR --worker NAME makes a new one)",
            )  # fmt: skip
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            what = (
                "it encrypts, and this worker has no key"
                if self._key is None
                else "it does not encrypt, and this worker has a key"
            )
            raise LeaseRefused(
                what=f"the handshake with {self._address} failed: something else listens there, or {what}", where="--key",
                do="give the key that was made for this server" if self._key is None else "leave --key out, or start the server with --keys DIR",
            )  # fmt: skip
        self._vague += 1
        if self._vague >= _VAGUE_FAILURES:
            what = (
                "this worker has no key"
                if self._key is None
                else "the key was made for another server"
            )
            raise LeaseRefused(
                what=f"{self._address} hangs up during the handshake: {what}", where="--key",
                do="give the key that was made for this server (seedrl keys DIR)",
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- clock, out

    def _due_s(self, now: float) -> float:
        if self._hello_due_s is not None:
            return self._hello_due_s
        return self._pinged_s + self._heartbeat_s

    def _do_what_is_due(self, now: float) -> None:
        if self._over:
            return
        if self._hello_due_s is not None:
            if now >= self._hello_due_s:
                self._ask(now, wire.pack("hello", **self._hello))
                self._hello_due_s = now + self._hello_pause_s * random.uniform(0.5, 1.5)
                self._hello_pause_s = min(2 * self._hello_pause_s, _LONGEST_HELLO_S)
            if (
                self.groups
                and self._unheard_s is not None
                and now - self._unheard_s > self._lease_s
            ):
                self._over = True  # the caller begins anew, and says that nobody answers
            return
        if now - self._pinged_s >= self._heartbeat_s:
            self._pinged_s = now
            self._ask(now, wire.pack("ping", waits=[group.waits for group in self.groups]))
        if (
            self._unheard_s is not None
            and now - self._unheard_s > _SILENT_HEARTBEATS * self._heartbeat_s
        ):
            self._shut()  # a connection that looks whole and is not
            self._open()
            self._hello_due_s, self._hello_pause_s = now, _HELLO_S

    def _ask(self, now: float, *message: bytes) -> None:
        if self._unheard_s is None:
            self._unheard_s = now
        self.send_frames(*message)

    def send_frames(self, *frames: Any) -> None:
        """Sends without waiting; what finds no connection is lost, and asked for by the next ping."""
        send = self._socket.send
        try:
            for frame in frames[:-1]:
                send(frame, _MORE)
            send(frames[-1], _NOBLOCK)
        except zmq.Again:
            pass

    def control(self, message: bytes, timeout_s: float) -> dict[str, Any]:
        """Asks for a control verb over a link that nobody sits at. Raises: as of the function `control`."""
        self.send_frames(message)
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            events = dict(self._poller.poll(math.ceil(1e3 * left_s)))
            if self._monitor in events:
                self._handshake_failed()
            if self._socket in events:
                kind, header = wire.unpack(wire.receive(self._socket)[0][0])
                if kind == "refused":
                    raise from_wire(header["error"])
                if kind == "ctl":
                    answer: dict[str, Any] = header["answer"]
                    return answer
        raise AddressError(
            what=f"no server answers at {self._address}", where=self._address,
            do="give the address that a running server listens at",
        )  # fmt: skip

    def check(self) -> None:
        """A server that wants this worker not to come back has said so in `pump`, which raised it."""

    def send(self, report: dict[str, Any]) -> None:
        self.send_frames(wire.pack("report", report=report))

    def close(self) -> None:
        """Gives the seats back."""
        self.send_frames(wire.pack("bye"))
        self._shut(200)
        self._context.term()


def connect(
    address: str, hello: dict[str, Any], *, key: Path | None, timeout_s: float = _ATTEMPT_S
) -> RemoteLink:
    """Asks the server at `tcp://HOST:PORT` for seats.

    Args: hello: as of `link.connect`. key: the worker's key file, where the server has keys.
    Raises: AddressError when nobody answers; LeaseRefused, SpecError, ... as the server says.
    """
    link = RemoteLink(address, hello, key)
    try:
        begin = time.monotonic()
        while not link.measured:
            if not link.pump(0.1) or time.monotonic() - begin > timeout_s:
                raise AddressError(
                    what=f"nobody answers at {address}", where=address,
                    do="start the server first (seedrl serve CONFIG --listen ...), or mend the address",
                )  # fmt: skip
    except BaseException:
        link.close()
        raise
    return link


def control(address: str, verb: str, *, key: Path, **fields: Any) -> dict[str, Any]:
    """Asks the server at `tcp://HOST:PORT` for a control verb; returns its answer. See `attach.control`.

    Args: key: an admin's.
    Raises: AddressError when nobody answers; LeaseRefused for another key; what the server refuses the verb with.
    """
    link = RemoteLink(address, {}, key)
    try:
        answer = link.control(wire.pack("ctl", verb=verb, **fields), _CONTROL_S)
    finally:
        link.close()
    if "error" in answer:
        raise from_wire(answer["error"])
    return answer
