"""The protocol of remote workers, version 1: what goes over ZeroMQ between a worker's DEALER and the gateway's ROUTER.

A message is a header, one msgpack map, and for rows one raw frame a leaf: little-endian, C order, no padding. `E` is the size of the
group, `A`, `M` and `S` come from the server's spec.

    worker -> gateway
      hello   v, token (16 random bytes), spec (nil: as the server's), groups [E, ...], env, host, pid, evaluation
      step    g (group, from 0), n (step of the group, from 1), rtt_ns, env_ns, ended, lz4   then the frames
              each observation leaf [E, ...] in the spec's order; reward float32 [E]; flags uint8 [E, 4] (terminated, truncated, first,
              interrupted); mask uint8 [E, M] where spec.action_mask is "info"; with `ended`: episode_return float64 [E],
              episode_length int64 [E], stats float32 [E, S] where there are stats
      ping    waits [n, ...]: of each group the step whose answer has not come, or 0; frames after it are ignored
      report  report (a fault, a warning or a failure, in words)
      bye
    gateway -> worker
      welcome v, worker, seed, spec, groups [n, ...] (newest step that was taken), resumed, heartbeat_ms, lease_ms, lz4 (bool)
      refused error {kind, what, where, do}, retry
      answer  g, n                                              then each action leaf [E, ...] in the spec's order
      pong    taken [n, ...]: of each group the newest step that was taken
      unknown the sender has no lease: say hello (again)
      ended   why: the lease is over; another hello begins anew
      stop    the run is over

    worker's states   SAYING HELLO -welcome-> SEATED -silence, "unknown"-> SAYING HELLO (same token)
                      any -stop, refused without retry-> OVER; any -"ended"-> SAYING HELLO (new token)
    of a group        step n sent -answer n-> step n + 1; a pong with taken < n: step n is sent again

The token names the lease: who says hello with it within `lease_ms` of being heard last has its seats back, whatever connection it
comes over. A step is taken when n is one more than the newest taken, so one that comes twice is taken once; its answer is sent
again when a ping still waits for it. Lengths and counts are compared with the spec before a byte reaches a slot.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from seedrl.errors import AddressError, ConfigError, ProtocolError
from seedrl.spec import INFO_MASK, EnvSpec
from seedrl.transport.slab import GroupView

VERSION = 1
MAX_HEADER_BYTES = 200_000  # a hello carries the spec
TOKEN_BYTES = 16
HEARTBEAT_S, LEASE_S = 1.0, 30.0
PROBE_BYTES = 1 << 17  # sent along with a ping to see how fast the link is
LEAST_PACKED_BYTES = 1 << 14  # of a group's step; smaller ones are not worth it
SLOW_BYTES_PER_S = 5e7  # a link of less is slower than LZ4
MAX_GROUPS = 64
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85
_KIND = "seedrl key 1"
_LARGE_BYTES = 1 << 14  # of a received frame: from here on it is copied once


# ---------------------------------------------------------------------------------------------------------- messages


def pack(kind: str, **fields: Any) -> bytes:
    """A header."""
    packed: bytes = msgpack.packb({"t": kind, **fields})
    return packed


def unpack(data: Any) -> tuple[str, dict[str, Any]]:
    """(type, fields) of a header. Raises: ProtocolError for anything that is none."""
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(what=f"a header of {len(data)} bytes")
    try:
        header = msgpack.unpackb(data, strict_map_key=True)
        return str(header["t"]), header
    except Exception:  # msgpack raises what it likes at nonsense
        raise ProtocolError(what="not a header of this protocol") from None


def receive(socket: Any, flags: int = 0) -> tuple[list[Any], Any]:
    """A message's frames, bytes or views of ZeroMQ's own memory where they are large; and the last of them as ZeroMQ has it.

    A frame knows whether one more follows; `recv_multipart` asks the socket each time, at twice the price. Raises: zmq.Again when there
    is no message.
    """
    frames: list[Any] = []
    more = True
    while more:
        frame = socket.recv(flags, False)
        frames.append(frame.bytes if len(frame) < _LARGE_BYTES else frame.buffer)
        more = frame.more
    return frames, frame


def integer(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`. Raises: ProtocolError naming it."""
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(
            what=f"'{name}' is {value!r:.60}, not a whole number from {low} to {high}"
        )
    return value


class Frames:
    """The raw frames of one group's steps and answers, over its rows: local ones of a worker, or those of the slab.

    Args: names of the frames, for messages, are those of the protocol.
    """

    def __init__(self, spec: EnvSpec, view: GroupView) -> None:
        step = [
            (f"observation leaf '{leaf.name}'", view.obs[leaf.name]) for leaf in spec.observation
        ]
        step += [("reward", view.reward), ("flags", view.flags)]
        if view.mask is not None and spec.action_mask == INFO_MASK:
            step.append(("mask", view.mask))
        ended = [("episode_return", view.episode_return), ("episode_length", view.episode_length)]
        if spec.stats:
            ended.append(("stats", view.stats))
        self._step, self._ended = _flat(step), _flat(ended)
        self._num_leaves = len(spec.observation)
        self._answer = _flat(
            [(f"action leaf '{leaf.name}'", view.action[leaf.name]) for leaf in spec.action]
        )
        bits = [array for name, array in step if array.dtype == bool or name in ("flags", "mask")]
        self._bits = [(array.view(np.uint8), np.empty(array.shape, bool)) for array in bits]
        self.nbytes = sum(array.nbytes for _, array in self._step)

    def step(self, ended: bool) -> list[np.ndarray]:
        """The frames of a step: uint8 views of the rows, not copies."""
        frames = [array for _, array in self._step]
        return frames + [array for _, array in self._ended] if ended else frames

    def packed_step(self, ended: bool) -> list[Any]:
        """The same with the observation leaves compressed (LZ4 blocks)."""
        frames: list[Any] = [*self.step(ended)]
        leaves = [_lz4().compress(frame, store_size=False) for frame in frames[: self._num_leaves]]
        return leaves + frames[self._num_leaves :]

    def answer(self) -> list[np.ndarray]:
        return [array for _, array in self._answer]

    def take_step(self, frames: list[Any], ended: bool, packed: bool = False) -> None:
        """Copies a step's frames into the rows. Raises: ProtocolError before a byte is written when a length differs."""
        if packed:
            leaves = zip(self._step[: self._num_leaves], frames[: self._num_leaves], strict=False)
            frames = [
                *(_unpacked(*leaf, frame) for leaf, frame in leaves),
                *frames[self._num_leaves :],
            ]
        self._take(self._step + self._ended if ended else self._step, frames)
        for bits, beyond in self._bits:
            if np.count_nonzero(bits) and np.count_nonzero(np.greater(bits, 1, out=beyond)):
                raise ProtocolError(
                    what="a flag, a mask or a bool leaf holds a byte that is neither 0 nor 1"
                )

    def take_answer(self, frames: list[Any]) -> None:
        self._take(self._answer, frames)

    @staticmethod
    def _take(wanted: list[tuple[str, np.ndarray]], frames: list[Any]) -> None:
        if len(frames) != len(wanted):
            raise ProtocolError(
                what=f"{len(frames)} frames after the header, where {len(wanted)} belong"
            )
        for (name, array), frame in zip(wanted, frames, strict=True):
            if len(frame) != array.nbytes:
                raise ProtocolError(
                    what=f"the frame of {name} has {len(frame)} bytes, not {array.nbytes}"
                )
        for (_, array), frame in zip(wanted, frames, strict=True):
            array.data[:] = frame  # a memoryview takes bytes at half an array's cost


def has_lz4() -> bool:
    """Whether this side can compress (the extra `lz4`)."""
    return importlib.util.find_spec("lz4") is not None


def _lz4() -> Any:
    import lz4.block

    return lz4.block


def _unpacked(name: str, array: np.ndarray, frame: Any) -> bytes:
    """At most as many bytes as the leaf has: a bomb does not burst."""
    if not has_lz4():
        raise ProtocolError(what="compressed frames, and no lz4 is installed here")
    try:
        unpacked: bytes = _lz4().decompress(frame, uncompressed_size=array.nbytes)
    except Exception:  # of a library in C
        raise ProtocolError(
            what=f"the frame of {name} is no LZ4 block of {array.nbytes} bytes"
        ) from None
    return unpacked


def _flat(arrays: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    return [(name, array.reshape(-1).view(np.uint8)) for name, array in arrays]


# ---------------------------------------------------------------------------------------------------------- addresses


def parse_tcp(address: str, *, listen: bool = False) -> tuple[str, int]:
    """(host, port) of `tcp://HOST:PORT`, also `tcp://[::1]:PORT`; to `listen` at, port 0 is any free one.

    Raises: AddressError for any other form.
    """
    found = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\[\]/:\s]+):(\d{1,5})", address)
    if found is None or not (0 if listen else 1) <= int(found[2]) < 65536:
        raise AddressError(
            what=f"'{address}' is no address of the form tcp://HOST:PORT", where="address",
            do="for instance tcp://*:5555" if listen else "tcp://127.0.0.1:5555, say; on the server's own host also unix://PATH",
        )  # fmt: skip
    return found[1], int(found[2])


def is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")


def is_remote(address: str, *, listen: bool = False) -> bool:
    """Whether it is reached over ZeroMQ. Raises: AddressError when it is no address at all."""
    scheme, _, path = address.partition("://")
    if scheme in ("unix", "ipc") and path:
        return scheme == "ipc"
    parse_tcp(address, listen=listen)
    return True


# --------------------------------------------------------------------------------------------------------------- keys


@dataclass(frozen=True)
class Keys:
    """A CURVE key pair, each 40 characters of Z85; a worker's file also holds its server's public key."""

    public: str
    secret: str
    server: str | None = None


class Allowed(NamedTuple):
    """Who holds a key of the allow-list; an admin may also control the server."""

    name: str
    admin: bool


def make_keys(folder: Path, worker: str, *, admin: bool = False) -> list[Path]:
    """Makes `server.key` in `folder` unless it is there, and WORKER.key with its line in `allowed.txt`; returns what was written.

    Raises: ConfigError when there is a key of that name already.
    """
    import zmq

    def pair() -> tuple[str, str]:
        public, secret = zmq.curve_keypair()
        return public.decode(), secret.decode()

    if re.fullmatch(r"[\w.-]{1,60}", worker) is None or worker in ("server", "allowed"):
        raise ConfigError(
            what=f"'{worker}' is no name for a key",
            where="--admin" if admin else "--worker",
            do="use letters, digits, . - _",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        server_path, worker_path, allowed = (
            folder / "server.key",
            folder / f"{worker}.key",
            folder / "allowed.txt",
        )
        if worker_path.exists():
            raise ConfigError(
                what=f"there is a key for '{worker}' already", where=str(worker_path),
                do="give --worker NAME for another one, or delete it and its line in allowed.txt",
            )  # fmt: skip
        written = []
        if not server_path.exists():
            _write_key(server_path, Keys(*pair()))
            written.append(server_path)
        server = load_key(server_path)
        keys = Keys(*pair(), server.public)
        _write_key(worker_path, keys)
        with allowed.open("a") as file:
            file.write(f"{keys.public} {worker}{' admin' if admin else ''}\n")
        return [*written, worker_path, allowed]
    except OSError as error:
        raise ConfigError(
            what=f"cannot write the keys: {error.strerror}",
            where=str(folder),
            do="choose a folder that you may write to",
        ) from None


def _write_key(path: Path, keys: Keys) -> None:
    text = json.dumps(
        {"kind": _KIND, "public": keys.public, "secret": keys.secret, "server": keys.server}
    )
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")


def load_key(path: Path) -> Keys:
    """Raises: ConfigError when the file is missing, no key, or may be read by others."""
    try:
        mode = path.stat().st_mode
        fields = json.loads(path.read_text())
        keys = Keys(fields["public"], fields["secret"], fields["server"])
        whole = fields["kind"] == _KIND and all(
            _KEY.fullmatch(key) for key in (keys.public, keys.secret, keys.server or keys.public)
        )
    except OSError as error:
        raise ConfigError(what=f"cannot read the key: {error.strerror}", where=str(path), do="make one with seedrl keys DIR") from None  # fmt: skip
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ConfigError(
            what="the file is no key of seedrl", where=str(path), do="make one with seedrl keys DIR"
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            what="the key may be read by others", where=str(path), do=f"chmod 600 {path}"
        )
    return keys


def load_allowed(path: Path) -> dict[str, Allowed]:
    """By public key, who may attach: a line is KEY NAME, or KEY NAME admin. Raises: ConfigError naming the line that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(what=f"cannot read the allow-list: {error.strerror}", where=str(path), do="make it with seedrl keys DIR") from None  # fmt: skip
    allowed = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            key, _, name = line.strip().partition(" ")
            if _KEY.fullmatch(key) is None:
                raise ConfigError(
                    what="no public key and name",
                    where=f"{path}:{number}",
                    do="one KEY NAME a line, or KEY NAME admin",
                )
            *words, last = name.split() or [""]
            admin = bool(words) and last == "admin"
            allowed[key] = Allowed(" ".join(words if admin else [*words, last]), admin)
    return allowed
