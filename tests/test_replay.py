"""The store in a loop of one's own: Gymnasium's rows in, unrolls of exactly these rows out; and what cannot be, by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from seedrl.errors import CheckpointError, ConfigError, ShapeError
from seedrl.replay import ReplayStore

BOX, CHOICE = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)


def a_row(count: int, number: int, **more: Any) -> dict[str, Any]:
    row = {
        "obs": np.full((count, 2), number, np.float32), "action": np.full(count, number % 3), "reward": np.full(count, float(number)),
        "terminated": False, "truncated": False, "first": number == 0,
    }  # fmt: skip
    return row | more


def test_unrolls_of_CartPole_are_the_rows_that_the_environments_gave() -> None:
    envs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP})  # fmt: skip
    space, actions = envs.single_observation_space, envs.single_action_space
    store = ReplayStore(space, actions, num_slots=3, capacity=600, mode="uniform", unroll_length=5, burn_in=3, stride=2)  # fmt: skip
    rng, ledger = np.random.default_rng(0), []
    obs, _ = envs.reset(seed=1)
    reward, ended = np.zeros(3), np.zeros(3, bool)
    terminated = truncated = np.zeros(3, bool)
    first = np.ones(3, bool)
    for _ in range(400):
        action = rng.integers(0, 2, 3)
        ledger.append((obs, action, reward, terminated, first))
        store.append(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, first=first, value=obs[:, 0])  # fmt: skip
        obs, reward, terminated, truncated, _ = envs.step(action)
        first, ended = ended, terminated | truncated
    obs, action, reward, terminated, first = (np.stack(column) for column in zip(*ledger, strict=True))  # fmt: skip
    drawn = 0
    for _ in range(30):
        batch = store.sample(16)
        assert batch is not None
        for b, slot in enumerate(batch.slots.tolist()):
            rows = batch.obs["observation"][:, b].numpy()
            (begin,) = np.flatnonzero((obs[:, slot] == rows[3]).all(1))  # an observation is unique
            at = np.maximum(np.arange(begin - 3, begin + 6), 0)
            assert begin % 2 == 0
            np.testing.assert_array_equal(rows, obs[at, slot])
            np.testing.assert_array_equal(batch.actions["action"][:, b], action[at, slot])
            np.testing.assert_array_equal(batch.reward[:, b], reward[at, slot].astype(np.float32))
            np.testing.assert_array_equal(batch.terminated[:, b], terminated[at, slot])
            np.testing.assert_array_equal(batch.first[:, b], first[at, slot])
            np.testing.assert_array_equal(batch.value[:, b], obs[at, slot, 0])
            drawn += 1
    stats = store.stats()
    assert stats["appended_rows"] == 1200 and stats["drawn_rows"] == drawn * 2 == 960
    assert 600 <= stats["kept_rows"] <= 600 + 3 * 2 * 16  # the open blocks come on top


def test_the_state_of_an_unrolls_first_row_comes_with_it() -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=2, capacity=100, unroll_length=4, burn_in=2, state=(torch.zeros(1, 1),))  # fmt: skip
    for number in range(41):
        store.append(**a_row(2, number, state=(torch.full((2, 1), float(number)),)))
    batch = store.sample(20)
    assert batch is not None
    assert batch.state[0][:, 0].tolist() == batch.obs["observation"][0, :, 0].tolist()


def test_a_run_that_ended_is_followed_by_another_one() -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=1, capacity=100, unroll_length=3)
    for number in range(6):
        store.append(**a_row(1, number))
    assert store.end() == 3  # the bootstrap row and two more
    for number in range(100, 104):
        store.append(**a_row(1, number))
    batch = store.sample(40)
    assert batch is not None
    assert {int(rows[0]) for rows in batch.obs["observation"][:, :, 0].T} == {0, 100}


def test_leaves_go_by_the_spaces_own_keys_and_keep_their_dtypes() -> None:
    space = spaces.Dict({"deep": spaces.Box(0, 65_535, (2,), np.uint16), "flag": spaces.MultiBinary(3)})  # fmt: skip
    store = ReplayStore(space, CHOICE, num_slots=1, capacity=50, unroll_length=2)
    for _ in range(5):
        store.append(**a_row(1, 1, obs={"deep": np.uint16([[7, 65_535]]), "flag": np.int8([[1, 0, 1]])}))  # fmt: skip
    batch = store.sample(1)
    assert batch is not None
    assert batch.obs["observation.deep"].numpy().view(np.uint16)[0, 0].tolist() == [7, 65_535]
    assert batch.obs["observation.flag"][0, 0].tolist() == [1, 0, 1]


def test_ratio_and_queue_hold_back_and_say_so() -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=1, capacity=200, unroll_length=1, batch_size=4, samples_per_insert=1.0)  # fmt: skip
    number = 0
    while store.held_back() is None:
        store.append(**a_row(1, number))
        number += 1
    assert store.held_back() == "ratio"
    with pytest.raises(ConfigError, match="no row may be appended now: ratio"):
        store.append(**a_row(1, number))
    while store.sample() is not None:
        pass
    assert store.stats()["blocked_by"] == "ratio" and store.held_back() is None
    queue = ReplayStore(BOX, CHOICE, num_slots=1, mode="queue", unroll_length=2, batch_size=1)
    while queue.held_back() is None:
        queue.append(**a_row(1, 1))
    assert queue.held_back() == "room" and queue.sample(1) is not None
    assert queue.held_back() is None


def test_a_store_goes_on_from_a_folder(tmp_path: Path) -> None:
    def a_store() -> ReplayStore:
        return ReplayStore(BOX, CHOICE, num_slots=2, capacity=200, mode="prioritized", unroll_length=4)  # fmt: skip

    store, other = a_store(), a_store()
    assert other.restore(tmp_path / "nothing") is None
    for number in range(90):
        store.append(**a_row(2, number))
    batch = store.sample(8)
    assert batch is not None
    store.update_priorities(batch.items, np.arange(8.0))
    store.save(tmp_path / "kept")
    assert other.restore(tmp_path / "kept") == 2 * 22
    for _ in range(20):
        one, two = store.sample(8), other.sample(8)
        assert one is not None and two is not None
        assert one.items.tolist() == two.items.tolist()
        assert one.obs["observation"].equal(two.obs["observation"])
    with pytest.raises(ConfigError, match="appended already"):
        store.restore(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="another store"):
        ReplayStore(BOX, CHOICE, num_slots=2, capacity=300, unroll_length=4).restore(tmp_path / "kept")  # fmt: skip
    with pytest.raises(ConfigError, match="queue keeps no rows"):
        ReplayStore(BOX, CHOICE, num_slots=2, mode="queue").save(tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "nobody said how many.*capacity"), ({"capacity": 10, "unroll_length": 40}, "10 rows is less than 41"),
        ({"capacity": 99, "stride": 0}, "stride.*0|0.*stride"), ({"capacity": 99, "burn_in": 100}, "99 rows is less than 117"),
        ({"capacity": 99, "mode": "prioritized", "priority_exponent": -1}, "priority_exponent"),
        ({"capacity": 999, "samples_per_insert": 4.0, "ratio_tolerance": 1.0}, "for ever.*set at least 18"),
        ({"capacity": 99, "sise": 3}, "sise"), ({"mode": "queue", "max_uses": 2}, "max_uses.*queue has each once"),
        ({"capacity": 99, "priority_exponent": 0.5}, "priority_exponent.*uniform has none"), ({"capacity": 99, "stride": 17}, "17 rows, those between"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReplayStore(BOX, CHOICE, num_slots=1, **settings)
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


def test_a_row_of_another_shape_is_refused_by_name() -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=2, capacity=99)
    with pytest.raises(ShapeError, match=r"obs.observation has the shape \[2, 3\]; it must be \[2, 2\]"):  # fmt: skip
        store.append(**a_row(2, 0, obs=np.zeros((2, 3))))
    with pytest.raises(ShapeError, match="action has the leaves"):
        store.append(**a_row(2, 0, action={"torque": np.zeros(2)}))
    assert store.stats()["appended_rows"] == 0


def test_extras_lie_beside_their_rows() -> None:
    extras = {"teacher": (torch.float32, (4,)), "token": (torch.int32, ())}
    store = ReplayStore(BOX, CHOICE, num_slots=2, capacity=100, unroll_length=4, extras=extras)
    for number in range(50):
        teacher = np.full((2, 4), number + 0.5, np.float32)
        store.append(**a_row(2, number, extras={"teacher": teacher, "token": [number, -number]}))
    batch = store.sample(8)
    assert batch is not None and batch.extras["token"].dtype is torch.int32
    rows = batch.obs["observation"][..., 0]
    assert torch.equal(batch.extras["teacher"], (rows + 0.5)[..., None].expand(-1, -1, 4))
    assert torch.equal(batch.extras["token"].abs().float(), rows)
    some = batch.columns(torch.tensor([3, 1]))
    assert torch.equal(some.extras["token"], batch.extras["token"][:, [3, 1]])


@pytest.mark.parametrize(("extras", "said"), [
    ({}, "extras has the leaves []; there must be ['teacher']"),
    ({"teacher": np.zeros((2, 3))}, "extra.teacher has the shape [2, 3]; it must be [2, 4]"),
    ({"other": np.zeros((2, 4))}, "there must be ['teacher']"),
])  # fmt: skip
def test_extras_of_another_shape_are_refused_by_name(extras: dict[str, Any], said: str) -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=2, capacity=100, unroll_length=4, extras={"teacher": (torch.float32, (4,))})  # fmt: skip
    with pytest.raises(ShapeError, match=re.escape(said)):
        store.append(**a_row(2, 0, extras=extras))


@pytest.mark.parametrize(("state", "said"), [
    ((torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 1)), "leaf 0 of the state is torch.int64 [2, 3]; it must be torch.float32 [2, 3]"),
    ((torch.zeros(2, 3), torch.zeros(1, 1)), "leaf 1 of the state is torch.float32 [1, 1]; it must be torch.float32 [2, 1]"),
    ((torch.zeros(2, 3),), "the state has 1 leaves; it must have 2"),
])  # fmt: skip
def test_a_state_of_another_shape_is_refused_by_name(state: Any, said: str) -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=2, capacity=100, state=(torch.zeros(1, 3), torch.zeros(1, 1)))  # fmt: skip
    with pytest.raises(ShapeError, match=re.escape(said)):
        store.append(**a_row(2, 0, state=state))


@pytest.mark.parametrize("cross", [True, False])
def test_a_device_is_appended_to_and_drawn_from_like_the_host(cross: bool) -> None:
    """The CPU as if it were one: what a launch copies at once there, its twin does here."""
    spaces_ = spaces.Dict({"x": BOX, "image": spaces.Box(0, 255, (3, 2), np.uint8), "count": spaces.Box(0, 9, (), np.uint16)})  # fmt: skip
    stores = [
        ReplayStore(spaces_, CHOICE, num_slots=3, capacity=200, unroll_length=4, burn_in=1, state=(torch.zeros(1, 2),), cross_episodes=cross)
        for _ in range(2)
    ]  # fmt: skip
    stores[1]._storage.arrays = None
    rng = np.random.default_rng(0)
    for _ in range(60):
        obs = {"x": rng.normal(size=(3, 2)), "image": rng.integers(0, 255, (3, 3, 2)), "count": rng.integers(0, 9, 3)}  # fmt: skip
        flags = rng.random((3, 3)) < 0.2
        row = {"obs": obs, "action": rng.integers(0, 3, 3), "reward": rng.normal(size=3), "terminated": flags[0], "truncated": flags[1], "first": flags[2]}  # fmt: skip
        for store in stores:
            store.append(**row, state=(torch.from_numpy(rng.integers(0, 9, (3, 2))).float() * 0 + 3,))  # fmt: skip
    for _ in range(5):
        one, other = (store.sample(8) for store in stores)
        assert one is not None and other is not None
        assert other.terminated.is_contiguous() and other.first.is_contiguous()
        for mine, theirs in zip(one, other, strict=True):
            for a, b in zip(*((part.values() if isinstance(part, dict) else part if isinstance(part, tuple) else [part]) for part in (mine, theirs)), strict=True):  # fmt: skip
                assert a is b is None or np.array_equal(a, b)


@pytest.mark.parametrize(("slots", "said"), [
    ([0, 0], "slots are [0, 0]"), ([0, 7], "slots are [0, 7]"), ([0, -1], "slots are [0, -1]"), ([[0, 1]], "slots are [[0, 1]]"), ([0.5, 1], "slots are"),
])  # fmt: skip
def test_slots_that_cannot_be_are_refused_by_name(slots: Any, said: str) -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=2, capacity=100)
    for do in (lambda: store.append(**a_row(2, 0, slots=np.array(slots))), lambda: store.end(np.array(slots)), lambda: store.held_back(np.array(slots))):  # fmt: skip
        with pytest.raises(ShapeError, match=re.escape(said)):
            do()
    assert store.stats()["appended_rows"] == 0


@pytest.mark.parametrize(("row", "said"), [
    ({"first": np.zeros(3, bool)}, "first is bool [3]; it must be [2]"), ({"version": np.zeros(3)}, "version is float64 [3]"),
    ({"obs": None}, "obs.observation is object"), ({"obs": "x"}, "obs.observation is <U1"), ({"obs": [[1, 2], [3]]}, "no array can be made of it"),
])  # fmt: skip
def test_columns_that_cannot_be_are_refused_by_name(row: dict[str, Any], said: str) -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=2, capacity=100)
    with pytest.raises(ShapeError, match=re.escape(said)):
        store.append(**a_row(2, 0, **row))


@pytest.mark.parametrize(("settings", "said"), [
    ({"num_slots": 0}, "num_slots is 0"), ({"seed": -1}, "seed is -1"), ({"device": "foo"}, "no device 'foo'"), ({"device": "cuda:9"}, "no device 'cuda:9'"),
    ({"mode": "prioritized", "initial_priority": "acting"}, "no policy here"), ({"extras": {"e": (torch.bfloat16, ())}}, "the extra 'e'"),
    ({"extras": {"e": (np.float32, ())}}, "the extra 'e'"), ({"extras": {"e": (torch.float32, 3)}}, "the extra 'e'"),
    ({"mode": "recent", "capacity": 40, "unroll_length": 16}, "fewer unrolls than a batch of 32"),
])  # fmt: skip
def test_a_store_that_cannot_be_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ReplayStore(BOX, CHOICE, **{"num_slots": 2, "capacity": 100, **settings})


def test_batches_and_priorities_that_cannot_be_are_refused_by_name() -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=2, capacity=100, mode="prioritized", samples_per_insert=1.0, unroll_length=4, batch_size=4)  # fmt: skip
    for number in range(9):
        store.append(**a_row(2, number))
    for size in (0, -1, 2.5, 64):
        with pytest.raises(ConfigError, match=f"a batch of {size} unrolls"):
            store.sample(size)
    batch = store.sample(4)
    assert batch is not None
    for items, priorities in ((batch.items, np.ones(3)), (batch.items, 1.0), (batch.items, ["a"] * 4), (batch.items.astype(float), np.ones(4))):  # fmt: skip
        with pytest.raises(ShapeError, match="give batch.items"):
            store.update_priorities(items, priorities)
    store.update_priorities(batch.items.tolist(), torch.ones(4))


@pytest.mark.parametrize("priority", [0.0, 1e-300, 1e300, 1.7e308, np.float32(1e30)])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 10.0])
def test_any_finite_priority_can_be_drawn_by(priority: float, alpha: float) -> None:
    store = ReplayStore(BOX, CHOICE, num_slots=1, capacity=200, mode="prioritized", unroll_length=4, priority_exponent=alpha, importance_exponent=1.0)  # fmt: skip
    for number in range(101):
        store.append(**a_row(1, number))
    store.update_priorities(np.arange(25), np.full(25, priority))
    batch = store.sample(16)
    assert batch is not None and batch.weights is not None and batch.weights.tolist() == [1.0] * 16


def test_unsigned_observations_come_back_as_they_are() -> None:
    store = ReplayStore(spaces.Box(0, 65_535, (2,), np.uint16), CHOICE, num_slots=1, capacity=100, unroll_length=4)  # fmt: skip
    for number in range(20):
        store.append(**a_row(1, number, obs=np.full((1, 2), 40_000 + number)))
    batch = store.sample(4)
    assert batch is not None and batch.obs["observation"].dtype is torch.uint16
    assert int(batch.obs["observation"].int().min()) >= 40_000


def test_memory_for_batches_of_many_sizes_is_let_go() -> None:
    store = ReplayStore(spaces.Box(0, 255, (84, 84), np.uint8), CHOICE, num_slots=1, capacity=400, unroll_length=40, batch_size=40)  # fmt: skip
    for number in range(200):
        store.append(**a_row(1, number, obs=np.zeros((1, 84, 84), np.uint8)))
    for size in range(1, 41):
        store.sample(size)
    kept = store._reader._gather._buffers._pool
    assert len(kept) <= 8 and max(kept) == 40 * 41 * 84 * 84
