from __future__ import annotations

import os
from pathlib import Path

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from seedrl.errors import AddressError, ConfigError, ProtocolError
from seedrl.spec import spec_from_spaces
from seedrl.transport import wire
from seedrl.transport.slab import own_rows

SPEC = spec_from_spaces(
    spaces.Dict({
        "picture": spaces.Box(0, 255, (3, 4), np.uint8), "bits": spaces.Box(0, 1, (2,), bool),
        "which": spaces.Discrete(5, start=-1), "scalar": spaces.Box(-1, 1, (), np.float64),
    }),
    spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)]),
    action_mask="info", stats=("score",), env_id="x",
)  # fmt: skip


def rows(size: int) -> tuple[wire.Frames, object]:
    (view,) = own_rows(SPEC, [size])
    return wire.Frames(SPEC, view), view


@given(st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_step_and_its_answer_arrive_as_they_were(size: int, ended: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    (ours, mine), (theirs, other) = rows(size), rows(size)
    for array in [
        *mine.obs.values(),
        mine.reward,
        mine.flags,
        mine.mask,
        mine.episode_return,
        mine.episode_length,
        mine.stats,
    ]:
        array[...] = rng.integers(0, 2, array.shape).astype(array.dtype)
    theirs.take_step([bytes(frame) for frame in ours.step(ended)], ended)
    for name, array in mine.obs.items():
        np.testing.assert_array_equal(array, other.obs[name])
    for name in ("reward", "flags", "mask"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
    for name in ("episode_return", "episode_length", "stats"):
        assert np.array_equal(getattr(mine, name), getattr(other, name)) or not ended
    for array in other.action.values():
        array[...] = rng.integers(-3, 3, array.shape)
    ours.take_answer([bytes(frame) for frame in theirs.answer()])
    for name, array in other.action.items():
        np.testing.assert_array_equal(array, mine.action[name])


@pytest.mark.parametrize("which", range(7))
def test_a_frame_of_another_length_is_named_and_nothing_is_written(which: int) -> None:
    frames, view = rows(2)
    given_frames = [np.ones(frame.size, np.uint8) for frame in frames.step(False)]
    assert len(given_frames) == 7  # four leaves, reward, flags, mask
    given_frames[which] = given_frames[which][:-1]
    with pytest.raises(ProtocolError, match=r"the frame of .* has \d+ bytes, not \d+"):
        frames.take_step(given_frames, False)
    assert not any(
        array.any() for array in [*view.obs.values(), view.reward, view.flags, view.mask]
    )
    with pytest.raises(ProtocolError, match="6 frames after the header, where 7 belong"):
        frames.take_step(given_frames[1:], False)


def test_bytes_that_are_no_bits_are_refused() -> None:
    frames, _ = rows(2)
    given_frames = [np.zeros(frame.size, np.uint8) for frame in frames.step(False)]
    given_frames[5][3] = 2
    with pytest.raises(ProtocolError, match="neither 0 nor 1"):
        frames.take_step(given_frames, False)


@given(st.binary(max_size=100))
def test_what_is_no_header_is_refused_in_our_own_words(data: bytes) -> None:
    try:
        kind, fields = wire.unpack(data)
    except ProtocolError:
        return
    assert isinstance(kind, str) and isinstance(fields, dict)


def test_a_header_has_a_largest_size() -> None:
    with pytest.raises(ProtocolError, match="a header of"):
        wire.unpack(msgpack.packb({"t": "x" * wire.MAX_HEADER_BYTES}))


@pytest.mark.parametrize("value", [True, 0, 5, -1, 2.0, "3", None])
def test_a_number_is_whole_and_within_its_bounds(value: object) -> None:
    with pytest.raises(ProtocolError, match="'n' is"):
        wire.integer({"n": value}, "n", 1, 4)
    assert wire.integer({"n": 4}, "n", 1, 4) == 4


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://:5", "127.0.0.1:5", "tcp://a:70000", "tcp://a:0", "udp://a:1", "tcp://a:1/x", "ipc://", "unix:/x"])  # fmt: skip
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="tcp://HOST:PORT"):
        wire.is_remote(address)


def test_addresses() -> None:
    assert wire.parse_tcp("tcp://[::1]:5") == ("[::1]", 5) and wire.parse_tcp("tcp://*:80") == (
        "*",
        80,
    )
    assert wire.parse_tcp("tcp://h:0", listen=True) == ("h", 0)
    assert wire.is_remote("ipc:///tmp/x") and not wire.is_remote("unix:///tmp/x")
    loopback = {
        "localhost": True,
        "[::1]": True,
        "127.0.0.1": True,
        "*": False,
        "0.0.0.0": False,
        "10.0.0.1": False,
    }
    assert {host: wire.is_loopback(host) for host in loopback} == loopback


def test_keys_are_made_read_and_listed(tmp_path: Path) -> None:
    made = wire.make_keys(tmp_path / "k", "worker")
    assert [path.name for path in made] == ["server.key", "worker.key", "allowed.txt"]
    wire.make_keys(tmp_path / "k", "second")
    server, worker = (
        wire.load_key(tmp_path / "k/server.key"),
        wire.load_key(tmp_path / "k/worker.key"),
    )
    assert (
        worker.server == server.public
        and server.server is None
        and len({server.secret, worker.secret}) == 2
    )
    assert wire.load_allowed(tmp_path / "k/allowed.txt")[worker.public] == ("worker", False)
    assert len(wire.load_allowed(tmp_path / "k/allowed.txt")) == 2
    wire.make_keys(tmp_path / "k", "ops", admin=True)
    wire.make_keys(tmp_path / "k", "admin")  # a name is no right
    with (tmp_path / "k/allowed.txt").open("a") as file:
        file.write(f"{'a' * 40}\n{'b' * 40} my old laptop\n{'c' * 40} my new laptop admin\n")
    assert list(wire.load_allowed(tmp_path / "k/allowed.txt").values())[2:] == [
        ("ops", True), ("admin", False), ("", False), ("my old laptop", False), ("my new laptop", True),
    ]  # fmt: skip
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="there is a key for 'worker' already"):
        wire.make_keys(tmp_path / "k", "worker")
    with pytest.raises(ConfigError, match="is no name"):
        wire.make_keys(tmp_path / "k", "../x")


def test_a_key_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    wire.make_keys(tmp_path, "worker")
    key = tmp_path / "worker.key"
    os.chmod(key, 0o640)
    with pytest.raises(ConfigError, match="may be read by others") as caught:
        wire.load_key(key)
    assert "chmod 600" in caught.value.do
    with pytest.raises(ConfigError, match="No such file"):
        wire.load_key(tmp_path / "none.key")
    for text in (
        "",
        "{}",
        "[1]",
        '{"kind": "seedrl key 1", "public": "x", "secret": "y", "server": null}',
        "\0\1",
    ):
        (tmp_path / "bad.key").write_text(text)
        with pytest.raises(ConfigError, match="is no key of seedrl"):
            wire.load_key(tmp_path / "bad.key")
    (tmp_path / "allowed.txt").write_text("# who\n\nnot-a-key bob\n")
    with pytest.raises(ConfigError) as caught:
        wire.load_allowed(tmp_path / "allowed.txt")
    assert caught.value.where.endswith("allowed.txt:3")


def test_compressed_frames_arrive_as_they_were_and_a_bomb_does_not_burst() -> None:
    (ours, mine), (theirs, other) = rows(4), rows(4)
    for array in mine.obs.values():
        array[...] = np.random.default_rng(0).integers(0, 2, array.shape)
    packed = [bytes(frame) for frame in ours.packed_step(False)]
    theirs.take_step(packed, False, True)
    for name, array in mine.obs.items():
        np.testing.assert_array_equal(array, other.obs[name])
    import lz4.block

    for bad in (
        lz4.block.compress(bytes(1 << 24), store_size=False),
        b"",
        b"\xff" * 50,
        lz4.block.compress(b"x", store_size=False),
    ):
        with pytest.raises(ProtocolError, match="LZ4 block|bytes, not"):
            theirs.take_step([bad, *packed[1:]], False, True)
