"""The door: who may come in, who is shown out, and that nonsense harms nobody."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seedrl import host
from seedrl.errors import AddressError, LeaseRefused, ProtocolError, SeedrlError, SpecError
from seedrl.spec import spec_from_spaces
from seedrl.transport import attach, door, doorbell
from seedrl.transport.door import Door
from seedrl.transport.link import connect
from seedrl.transport.slab import (
    DOOR_EPOCH,
    DOOR_LINE,
    GENERATION,
    LEASED,
    SIZE,
    START,
    Slab,
    SlabLayout,
)

SLOTS = 8


def spec(size: int = 4):
    return spec_from_spaces(
        spaces.Box(-1, 1, (size,), np.float32),
        spaces.Discrete(2),
        action_mask=None,
        stats=(),
        env_id="x",
    )


class House:
    """A door with a slab behind it; `serve` answers whoever waits, in the test's own thread."""

    def __init__(self, path: Path) -> None:
        layout = SlabLayout.of(spec(), SLOTS, SLOTS)
        fd = host.memfd("slab", layout.nbytes)
        self.slab = Slab(host.map_shared(fd, layout.nbytes), layout)
        self.events: list[tuple[str, dict[str, Any]]] = []
        bells = [doorbell.make() for _ in range(SLOTS)]
        self.door = Door(path, self.slab, fd, doorbell.make(), bells, spec(), 7, SLOTS, self._heard)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.door.listener, selectors.EVENT_READ)

    def _heard(self, event: str, lease: Any, report: dict[str, Any]) -> None:
        self.events.append((event, report))
        if event in ("detached", "gone"):
            self.selector.unregister(lease.fd)

    def serve(self, seconds: float = 0.05) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                if key.fileobj is self.door.listener:
                    lease = self.door.accept()
                    if lease is not None:
                        self.selector.register(lease.fd, selectors.EVENT_READ)
                else:
                    self.door.hear(key.fd)
            self.slab.drained[:, 0] = self.slab.lease[:, GENERATION]  # the engine lets go at once
            self.door.collect()

    def call(self, hello: dict[str, Any]) -> Any:
        """`connect` in a thread, while this one serves."""
        import threading

        out: list[Any] = []

        def knock() -> None:
            try:
                out.append(
                    connect(
                        f"unix://{self.door.path}",
                        {"spec": spec().to_dict(), "pid": 1, "host": "h", **hello},
                        timeout_s=2.0,
                    )
                )
            except SeedrlError as error:
                out.append(error)

        thread = threading.Thread(target=knock)
        thread.start()
        while thread.is_alive():
            self.serve(0.02)
        thread.join()
        return out[0]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "door")
    yield made
    made.door.close()


def test_seats_are_leased_returned_and_leased_again(house: House) -> None:
    first = house.call({"groups": [3, 2]})
    assert [link.size for link in first.groups] == [3, 2] and first.seed == 7
    assert house.door.free_slots() == 3
    second = house.call({"groups": [3]})
    leased = house.slab.lease[house.slab.lease[:, LEASED] == 1]
    seats = [set(range(line[START], line[START] + line[SIZE])) for line in leased]
    assert sum(map(len, seats)) == len(set().union(*seats)) == 8, "no seat twice"
    refused = house.call({"groups": [1]})
    assert isinstance(refused, LeaseRefused) and "0 of 8" in refused.what
    first.close()
    house.serve()
    assert house.door.free_slots() == 5
    third = house.call({"groups": [5]})
    assert third.groups[0].size == 5
    assert len(set(house.slab.lease[:, GENERATION].tolist()) - {0}) >= 2
    second.close(), third.close()


def test_two_specs_the_second_is_refused_leaf_by_leaf(house: House) -> None:
    refused = house.call({"groups": [1], "spec": spec(6).to_dict()})
    assert isinstance(refused, SpecError) and "[6]" in refused.what and "[4]" in refused.what


def test_another_protocol_is_named(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    real = attach.PROTOCOL
    packed: list[Any] = []
    monkeypatch.setattr(
        attach.msgpack,
        "packb",
        lambda value, packb=msgpack.packb: packb(
            {**value, "protocol": 99} if value.get("type") == "hello" else value
        ),
    )
    refused = house.call({"groups": [1]})
    assert isinstance(refused, ProtocolError) and "99" in refused.what and str(real) in refused.what
    assert not packed


def test_a_worker_that_dies_frees_its_seats_without_a_word(house: House) -> None:
    link = house.call({"groups": [4]})
    os.close(os.dup(link._connection.fileno()))
    link._connection.close()
    house.serve()
    assert house.door.free_slots() == 8
    assert [event for event, _ in house.events][-1] == "detached"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    message=st.one_of(
        st.binary(max_size=300),
        st.builds(
            msgpack.packb,
            st.recursive(
                st.none() | st.integers(-(2**31), 2**31) | st.text(max_size=5),
                lambda x: st.lists(x, max_size=3),
            ),
        ),
        st.builds(
            lambda groups, spec_: msgpack.packb(
                {"type": "hello", "protocol": 1, "groups": groups, "spec": spec_}
            ),
            st.one_of(
                st.integers(-(2**63), 2**63 - 1),
                st.text(),
                st.lists(st.one_of(st.integers(-5, 2**40), st.text(max_size=3)), max_size=4),
            ),
            st.one_of(
                st.none(),
                st.just(spec().to_dict()),
                st.dictionaries(st.text(max_size=4), st.integers(-9, 9)),
            ),
        ),
    )
)
def test_nonsense_is_refused_and_leases_nothing(house: House, message: bytes) -> None:
    before = house.slab.control[DOOR_LINE, DOOR_EPOCH]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect(str(house.door.path))
        if message:
            caller.send(message)
        house.serve(0.01)
        answered = caller.recv(100_000) if message else b""
    house.serve(0.01)
    if message and msgpack.unpackb(answered)["type"] == "welcome":
        assert (
            house.slab.control[DOOR_LINE, DOOR_EPOCH] == before + 2
        )  # a hello that was right: leased, and given back
    else:
        assert house.slab.control[DOOR_LINE, DOOR_EPOCH] == before
    assert house.door.free_slots() == 8 and not house.door.leases


def test_callers_that_say_nothing_are_few_and_shown_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = []
    for _ in range(100):
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.connect(str(house.door.path))
        callers.append(caller)
        house.serve(0.002)
    assert len(house.door.leases) == door._MAX_SILENT
    monkeypatch.setattr(door, "_HELLO_S", 0.0)
    house.serve(0.05)
    assert not house.door.leases
    for caller in callers:
        caller.close()


def test_a_live_address_is_refused_and_a_dead_one_taken(house: House, tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=f"pid {os.getpid()}"):
        House(tmp_path / "door")
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(left))
    House(left).door.close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AddressError, match="no socket"):
        House(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_deep_folder_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120) / ("y" * 120)
    deep.mkdir(parents=True)
    made = House(deep / "door")
    link = made.call({"groups": [1]})
    assert link.groups[0].size == 1
    link.close()
    made.door.close()


@pytest.mark.parametrize("address", ["door", "tcp://x", "unix://", "://x", ""])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="unix://"):
        attach.parse_unix(address)


def test_the_slab_cannot_be_cut_under_the_engine(house: House) -> None:
    link = house.call({"groups": [1]})
    with pytest.raises(PermissionError):
        os.ftruncate(link._fds[0], 0)
    link.close()
