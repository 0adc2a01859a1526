"""The gateway against peers of every kind, in one process: real slab, real door, a router that only notes what is sent."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seedrl import host
from seedrl.spec import spec_from_spaces
from seedrl.transport import doorbell, wire
from seedrl.transport.door import Door
from seedrl.transport.gateway import Gateway
from seedrl.transport.slab import BASE, LEASED, SEQUENCE, STOP, SUPERVISOR_LINE, Slab, SlabLayout

SLOTS, GROUPS = 12, 6
MESSAGES = int(os.environ.get("SEEDRL_FUZZ_MESSAGES", "100000"))
SPEC = spec_from_spaces(
    spaces.Dict({"x": spaces.Box(-1, 1, (3,), np.float32), "which": spaces.Discrete(4)}),
    spaces.Discrete(5), action_mask=None, stats=("score",), env_id="x",
)  # fmt: skip


class Router:
    """What the gateway needs of a socket."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.sent: list[tuple[bytes, dict[str, Any], list[bytes]]] = []

    def send(self, part: Any, flags: int) -> None:
        self.parts.append(part)
        if flags & zmq.SNDMORE:
            return
        identity, header, *frames = self.parts
        self.parts = []
        self.sent.append((identity, msgpack.unpackb(header), [bytes(frame) for frame in frames]))

    def getsockopt(self, option: int) -> int:
        return 0  # nothing has come

    def take(self, identity: bytes, kind: str) -> tuple[dict[str, Any], list[bytes]] | None:
        """The last message of that kind to `identity`; forgets all that was sent."""
        found = [
            (header, frames)
            for to, header, frames in self.sent
            if to == identity and header["t"] == kind
        ]
        self.sent.clear()
        return found[-1] if found else None


class Field:
    """A gateway, the door behind it, and an engine that answers 2 * slot when told to."""

    def __init__(self, folder: Path) -> None:
        layout = SlabLayout.of(SPEC, SLOTS, GROUPS)
        slab_fd = host.memfd("slab", layout.nbytes)
        self.slab = Slab(host.map_shared(slab_fd, layout.nbytes), layout)
        self.bell, self.doors = doorbell.make(), [doorbell.make() for _ in range(GROUPS)]
        self.fds = [slab_fd, self.bell, *self.doors]
        self.door = Door(
            folder / "door",
            self.slab,
            slab_fd,
            self.bell,
            self.doors,
            SPEC,
            7,
            SLOTS,
            lambda *_: None,
        )
        self.router, self.log = Router(), []
        self.gateway = Gateway(
            self.router,
            self.slab,
            self.bell,
            SPEC,
            f"unix://{folder}/door",
            1.0,
            30.0,
            self.log.append,
        )

    async def settle(self) -> None:
        """Lets the door hear and speak."""
        for _ in range(4):
            while (lease := self.door.accept()) is not None:
                self.door.hear(lease.fd)
            for fd in list(self.door.leases):
                self.door.hear(fd)
            for group in range(GROUPS):
                if not self.slab.lease[group, LEASED]:
                    self.slab.drained[group, 0] = self.slab.lease[group, 0]
            self.door.collect()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def answer(self) -> None:
        for group in range(GROUPS):
            if self.slab.lease[group, LEASED] and self.slab.asked[group, SEQUENCE] > max(
                self.slab.answered[group, SEQUENCE], self.slab.lease[group, BASE]
            ):
                start, size = (int(x) for x in self.slab.lease[group, 2:4])
                self.slab.action["action"][start : start + size] = (
                    np.arange(start, start + size) % 5
                )
                self.slab.answered[group, SEQUENCE] = self.slab.asked[group, SEQUENCE]
                os.eventfd_write(self.doors[group], 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def close(self) -> None:
        for session in list(self.gateway.by_token.values()):
            self.gateway._end(session)
        self.door.close()
        for fd in self.fds:
            os.close(fd)


def run(folder: Path, play: Callable[[Field], Awaitable[None]]) -> None:
    async def main() -> None:
        field = Field(folder)
        try:
            await play(field)
        finally:
            field.close()

    asyncio.run(main())


class Peer:
    def __init__(self, field: Field, name: bytes, size: int = 2, groups: int = 1) -> None:
        self.field, self.name, self.size, self.groups = field, name, size, groups
        self.token, self.n = os.urandom(16), [0] * groups

    def say(self, kind: str, *frames: Any, **fields: Any) -> None:
        self.field.gateway.hear(self.name, [wire.pack(kind, **fields), *frames])

    async def hello(self, **more: Any) -> dict[str, Any] | None:
        fields = {
            "v": 1,
            "token": self.token,
            "spec": None,
            "groups": [self.size] * self.groups,
            "env": "e",
            "host": "h",
            "pid": 1,
            "evaluation": False,
            **more,
        }
        self.say("hello", **fields)
        await self.field.settle()
        sent = [header for to, header, _ in self.field.router.sent if to == self.name]
        return sent[-1] if sent else None

    def frames(self, first: bool = False, final: bool = False) -> list[bytes]:
        size = self.size
        flags = np.zeros((size, 4), np.uint8)
        flags[:, 2], flags[:, 0] = first, final
        frames = [np.full((size, 3), 0.5, np.float32), np.ones(size, np.int64)]
        order = {
            leaf.name: frame
            for leaf, frame in zip(
                sorted(SPEC.observation, key=lambda leaf: leaf.dtype), frames, strict=True
            )
        }
        rows = [order[leaf.name] for leaf in SPEC.observation]
        rows += [np.zeros(size, np.float32), flags]
        rows += (
            [np.zeros(size), np.zeros(size, np.int64), np.zeros((size, 1), np.float32)]
            if final
            else []
        )
        return [row.tobytes() for row in rows]

    def step(
        self,
        group: int = 0,
        *,
        n: int | None = None,
        first: bool | None = None,
        final: bool = False,
        **more: Any,
    ) -> None:
        if n is None:
            self.n[group] += 1
        number = self.n[group] if n is None else n
        fields = {"g": group, "n": number, "rtt_ns": 0, "env_ns": 0, "ended": final, **more}
        self.say("step", *self.frames(number == 1 if first is None else first, final), **fields)


def test_a_lease_a_step_an_answer_and_the_end(tmp_path: Path) -> None:
    async def play(field: Field) -> None:
        peer = Peer(field, b"p", size=3, groups=2)
        welcome = await peer.hello()
        assert (
            welcome["t"] == "welcome"
            and welcome["groups"] == [0, 0]
            and welcome["seed"] == 7
            and not welcome["resumed"]
        )
        peer.step(0)
        peer.step(1)
        await field.answer()
        answers = [
            (header["g"], header["n"], np.frombuffer(frames[0], np.int64).tolist())
            for _, header, frames in field.router.sent
            if header["t"] == "answer"
        ]
        starts = [
            seats.view.action["action"].tolist()
            for seats in field.gateway.by_token[peer.token].seats
        ]
        assert sorted(answers) == [(0, 1, starts[0]), (1, 1, starts[1])]
        assert field.door.free_slots() == SLOTS - 6
        peer.say("bye")
        await field.settle()
        assert (
            field.door.free_slots() == SLOTS
            and not field.gateway.by_token
            and not field.gateway.by_identity
        )

    run(tmp_path, play)


def test_a_step_that_comes_twice_is_taken_once_and_a_lost_answer_is_sent_again(
    tmp_path: Path,
) -> None:
    async def play(field: Field) -> None:
        peer = Peer(field, b"p")
        await peer.hello()
        group = next(iter(field.door.leases.values())).groups[0]
        base = int(field.slab.lease[group, BASE])
        peer.step()
        peer.step(n=1)
        assert field.slab.asked[group, SEQUENCE] == base + 1
        await field.answer()
        peer.step(n=1)
        assert field.slab.asked[group, SEQUENCE] == base + 1
        field.router.sent.clear()
        peer.say("ping", waits=[1])
        kinds = [header["t"] for _, header, _ in field.router.sent]
        assert kinds == ["pong", "answer"] and field.router.sent[0][1]["taken"] == [1]
        peer.step()
        assert field.slab.asked[group, SEQUENCE] == base + 2
        assert not field.log[1:]

    run(tmp_path, play)


def test_another_connection_with_the_token_has_the_seats_and_the_step_is_taken_once(
    tmp_path: Path,
) -> None:
    async def play(field: Field) -> None:
        peer = Peer(field, b"p")
        await peer.hello()
        peer.step()
        field.router.sent.clear()
        old, peer.name = peer.name, b"q"
        assert (await peer.hello())["t"] == "welcome"
        welcome, _ = field.router.take(b"q", "welcome")
        assert welcome["resumed"] and welcome["groups"] == [1]
        peer.step(n=1)
        await field.answer()
        assert field.router.take(b"q", "answer")[0]["n"] == 1
        field.gateway.hear(old, [wire.pack("ping", waits=[0])])  # the old connection is nobody
        assert field.router.take(old, "unknown") is not None
        assert field.door.free_slots() == SLOTS - 2

    run(tmp_path, play)


def test_silence_gives_the_seats_back_and_a_late_step_is_answered_with_unknown(
    tmp_path: Path,
) -> None:
    async def play(field: Field) -> None:
        peer = Peer(field, b"p")
        await peer.hello()
        field.gateway.by_token[peer.token].heard_s -= 31
        field.gateway.tick()
        await field.settle()
        assert field.router.take(b"p", "ended")[0]["why"] == "nothing was heard of it for 30 s"
        assert field.door.free_slots() == SLOTS and "nothing was heard" in field.log[-1]
        peer.step()
        assert field.router.take(b"p", "unknown") is not None

    run(tmp_path, play)


BAD: dict[str, tuple[Callable[[Peer], None], str]] = {
    "not msgpack": (lambda peer: peer.field.gateway.hear(peer.name, [b"\xc1"]), "not a header"),
    "no frames at all": (lambda peer: peer.field.gateway.hear(peer.name, []), "not a header"),
    "a frame too few": (
        lambda peer: peer.say("step", *peer.frames(True)[1:], g=0, n=1, rtt_ns=0, env_ns=0),
        "3 frames",
    ),
    "a short frame": (
        lambda peer: peer.say(
            "step", *[f[:-1] for f in peer.frames(True)], g=0, n=1, rtt_ns=0, env_ns=0
        ),
        "bytes, not",
    ),
    "no such group": (lambda peer: peer.step(0, g=1), "'g' is 1"),
    "a step ahead": (lambda peer: peer.step(n=2), "step 2 of a group whose step 0"),
    "the first row is not first": (lambda peer: peer.step(first=False), "first"),
    "a huge time": (lambda peer: peer.step(rtt_ns=1 << 62), "rtt_ns"),
    "a pickle": (
        lambda peer: peer.field.gateway.hear(peer.name, [b"\x80\x04\x95\x00."]),
        "not a header",
    ),
    "an unheard-of type": (lambda peer: peer.say("reboot"), "'reboot'"),
    "pings without end": (
        lambda peer: [peer.say("ping", waits=[0]) for _ in range(99)],
        "pings a second",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_peer_that_breaks_the_protocol_is_cut_off_with_one_reason_and_nobody_else_is(
    tmp_path: Path, name: str
) -> None:
    do, words = BAD[name]

    async def play(field: Field) -> None:
        good, bad = Peer(field, b"good"), Peer(field, b"bad")
        await good.hello()
        await bad.hello()
        said = len(field.log)
        do(bad)
        await field.settle()
        refused, _ = field.router.take(b"bad", "refused")
        assert re.search(words, refused["error"]["what"]) and not refused["retry"]
        assert len(field.log) == said + 1 and "cut off worker" in field.log[-1]
        assert field.door.free_slots() == SLOTS - 2
        bad.step(n=1)
        assert not field.router.sent, "nothing more of that connection is heard"
        good.step()
        await field.answer()
        assert field.router.take(b"good", "answer") is not None

    run(tmp_path, play)


@pytest.mark.parametrize(("column", "value", "words"), [("x", np.nan, "'observation.x'|'x'"), ("which", 9, "which"), ("reward", np.inf, "reward")])  # fmt: skip
def test_rows_that_the_engine_must_never_see(
    tmp_path: Path, column: str, value: float, words: str
) -> None:
    async def play(field: Field) -> None:
        peer = Peer(field, b"p")
        await peer.hello()
        frames = peer.frames(first=True)
        names = [leaf.name.rpartition(".")[2] for leaf in SPEC.observation] + ["reward"]
        at = names.index(column)
        dtype = np.int64 if column == "which" else np.float32
        bad = np.frombuffer(frames[at], dtype).copy()
        bad[-1] = value
        frames[at] = bad.tobytes()
        group = next(iter(field.door.leases.values())).groups[0]
        peer.say("step", *frames, g=0, n=1, rtt_ns=0, env_ns=0, ended=False)
        refused, _ = field.router.take(b"p", "refused")
        assert re.search(words, refused["error"]["what"]), refused
        assert field.slab.asked[group, SEQUENCE] == field.slab.lease[group, BASE], "never published"

    run(tmp_path, play)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"v": 0}, "speaks protocol 0, this server 1"), ({"v": None}, "speaks protocol None"), ({"token": b"short"}, "16 bytes"),
        ({"groups": [99]}, "at most 12"), ({"groups": []}, "groups"), ({"groups": [8, 8]}, "16 environments do not fit: 12 of 12"),
        ({"spec": {"observation": 3}}, "no spec"), ({"pid": "x"}, "'pid'"),
    ],
)  # fmt: skip
def test_a_hello_that_is_refused_is_told_why(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    async def play(field: Field) -> None:
        refused = await Peer(field, b"p").hello(**more)
        assert refused["t"] == "refused" and words in refused["error"]["what"], refused
        assert field.door.free_slots() == SLOTS and not field.gateway.by_token

    run(tmp_path, play)


def test_another_spec_is_refused_leaf_by_leaf(tmp_path: Path) -> None:
    other = spec_from_spaces(
        spaces.Dict({"x": spaces.Box(-1, 1, (4,), np.float32), "which": spaces.Discrete(4)}),
        spaces.Discrete(5),
        action_mask=None,
        stats=(),
        env_id="y",
    )

    async def play(field: Field) -> None:
        refused = await Peer(field, b"p").hello(spec=other.to_dict())
        assert (
            refused["t"] == "refused"
            and "[4] here" in refused["error"]["what"]
            and "[3] there" in refused["error"]["what"]
        )

    run(tmp_path, play)


def test_the_end_of_the_run_is_told_to_everybody(tmp_path: Path) -> None:
    async def play(field: Field) -> None:
        peer = Peer(field, b"p")
        await peer.hello()
        field.gateway.stop()
        assert (
            field.router.take(b"p", "stop") is None
        )  # not in good order: it may wait for the next server
        field.slab.control[SUPERVISOR_LINE, STOP] = 1
        field.gateway.stop()
        assert field.router.take(b"p", "stop") is not None

    run(tmp_path, play)


def test_strangers_fill_neither_log_nor_memory(tmp_path: Path) -> None:
    async def play(field: Field) -> None:
        for number in range(10_000):
            field.gateway.hear(b"%d" % number, [b"GET / HTTP/1.1\r\n"])
        assert (
            len(field.log) <= 25
            and len(field.gateway._cut) <= 4096
            and not field.gateway.by_identity
        )

    run(tmp_path, play)


# ----------------------------------------------------------------------------------------------------------- fuzz

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5), st.binary(max_size=20),
    st.lists(st.integers(-3, 20), max_size=4), st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
)  # fmt: skip
KINDS = ("hello", "step", "ping", "report", "bye", "welcome", "answer", "")
FIELDS = (
    "v",
    "token",
    "spec",
    "groups",
    "env",
    "host",
    "pid",
    "evaluation",
    "g",
    "n",
    "rtt_ns",
    "env_ns",
    "ended",
    "waits",
    "report",
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_fuzz_structured_messages_touch_nobody_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("f")

    async def play(field: Field) -> None:
        good, bad = Peer(field, b"good"), Peer(field, b"bad")
        await good.hello()
        await bad.hello()
        good.step()
        kept = snapshot(field, good)
        for _ in range(data.draw(st.integers(1, 8))):
            header = {
                "t": data.draw(st.sampled_from(KINDS)),
                **data.draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)),
            }
            frames = data.draw(
                st.lists(
                    st.one_of(st.sampled_from(bad.frames(True)), st.binary(max_size=30)), max_size=6
                )
            )
            field.gateway.hear(
                data.draw(st.sampled_from([b"bad", b"stranger"])), [msgpack.packb(header), *frames]
            )
        assert snapshot(field, good) == kept
        await field.answer()
        assert field.router.take(b"good", "answer") is not None

    run(folder, play)


def snapshot(field: Field, peer: Peer) -> bytes:
    """Every byte of the peer's seats, and its control words."""
    session = field.gateway.by_token[peer.token]
    view = session.seats[0].view
    group = session.welcome["groups"][0]["group"]
    arrays = [
        *view.obs.values(),
        *view.action.values(),
        view.reward,
        view.flags,
        view.episode_return,
        view.stats,
        field.slab.asked[group],
        field.slab.lease[group],
    ]
    return b"".join(array.tobytes() for array in arrays)


def test_fuzz_a_hundred_thousand_mutated_messages(tmp_path: Path) -> None:
    """Whole messages with bytes flipped, cut, doubled and swapped: no crash, no growth, nobody else's seats."""
    rng = random.Random(1)

    def mutate(frames: list[bytes]) -> list[bytes]:
        frames = list(frames)
        for _ in range(rng.randint(1, 3)):
            if not frames:
                return [rng.randbytes(rng.randint(0, 40))]
            at = rng.randrange(len(frames))
            what = rng.randrange(6)
            data = bytearray(frames[at])
            if what == 0 and data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            elif what == 1:
                data = data[: rng.randint(0, len(data))]
            elif what == 2:
                data += rng.randbytes(rng.randint(1, 9))
            elif what == 3:
                frames.insert(at, bytes(data))
            elif what == 4:
                frames.pop(at)
                continue
            frames[at] = bytes(data)
        return frames

    async def play(field: Field) -> None:
        good = Peer(field, b"good")
        await good.hello()
        good.step()
        kept = snapshot(field, good)
        bad = Peer(field, b"bad-0")
        for number in range(MESSAGES):
            hello = {
                "v": 1,
                "token": bad.token,
                "spec": None,
                "groups": [2],
                "env": "e",
                "host": "h",
                "pid": 1,
                "evaluation": False,
            }
            message = rng.choice([
                [wire.pack("hello", **hello)], [wire.pack("step", g=0, n=1, rtt_ns=0, env_ns=0, ended=False), *bad.frames(True)],
                [wire.pack("ping", waits=[1])], [wire.pack("report", report={"type": "fault"})], [wire.pack("bye")],
            ])  # fmt: skip
            field.gateway.hear(bad.name, mutate(message))
            if number % 50 == 0:
                await field.settle()
                field.gateway.tick()
                field.router.sent.clear()
                bad = Peer(field, b"bad-%d" % number)
                await bad.hello()
        await field.settle()
        assert snapshot(field, good) == kept
        assert len(field.gateway.by_token) <= 8 and len(field.door.leases) <= 8
        assert len(field.log) < 60 + MESSAGES / 100
        await field.answer()
        assert field.router.take(b"good", "answer") is not None

    run(tmp_path, play)


def test_when_all_come_at_once_everybody_is_seated(tmp_path: Path) -> None:
    """More than the door's backlog takes: who finds no room knocks again."""

    async def play(field: Field) -> None:
        field.door.listener.listen(1)
        peers = [Peer(field, name.encode()) for name in "abcdef"]
        settle, field.settle = field.settle, lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        for peer in peers:
            await peer.hello()
        assert sum(peer.door is None for peer in field.gateway.by_token.values()) >= 2
        await settle()
        asked = Peer(field, b"operator")
        field.gateway._is_admin = lambda frame: True
        for _ in range(3):
            asked.say("ctl", verb="status")  # one that finds no room is told so
        assert field.router.take(b"operator", "ctl")[0]["answer"]["error"]["what"] == "the server's door is busy"  # fmt: skip
        for _ in range(20):
            await asyncio.sleep(0.02)
            await settle()
        welcomed = [peer for peer in field.gateway.by_token.values() if peer.seats]
        assert len(welcomed) == len(peers)

    run(tmp_path, play)
