"""Shards by policy: five against five, seats mapped by a table that changes with every episode; each row in its own policy's shard, once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from seedrl.dataset import kept_runs
from seedrl.errors import CheckpointError, ConfigError, ShapeError
from seedrl.shards import Shards

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float64)  # seat, episode, step
ACT = spaces.Discrete(10)
GAMES, SEATS = 3, 10


def a_shards(capacity: int = 60_000, **more: Any) -> Shards:
    return Shards(OBS, ACT, num_slots=GAMES * SEATS, capacity=capacity, **{"unroll_length": 4, **more})  # fmt: skip


class Games:
    """Five against five: in each episode of a game, one policy has the first five seats and one the others."""

    def __init__(self, shards: Shards, policies: list[int], seed: int = 0) -> None:
        self.shards, self.policies, self.rng = shards, policies, np.random.default_rng(seed)
        self.length = self.rng.integers(1, 15, GAMES)
        self.step = np.zeros(GAMES, int)
        self.episode = np.zeros(GAMES, int)
        self.table = np.zeros(GAMES * SEATS, int)
        self.rows: dict[int, Counter[tuple[int, int, int]]] = {p: Counter() for p in policies}
        for game in range(GAMES):
            self._seat(game)

    def _seat(self, game: int) -> None:
        teams = self.rng.choice(self.policies, 2)
        self.table[game * SEATS : (game + 1) * SEATS] = np.repeat(teams, SEATS // 2)

    def play(self, steps: int) -> None:
        for _ in range(steps):
            step, episode = np.repeat(self.step, SEATS), np.repeat(self.episode, SEATS)
            seat = np.arange(GAMES * SEATS)
            ended = step == np.repeat(self.length, SEATS)
            self.shards.append(
                policies=self.table, obs=np.stack([seat, episode, step], 1).astype(float), action=self.table, reward=step, terminated=ended,
                truncated=False, first=step == 0,
            )  # fmt: skip
            for policy, *row in zip(self.table.tolist(), seat.tolist(), episode.tolist(), step.tolist(), strict=True):  # fmt: skip
                self.rows[policy][tuple(row)] += 1
            over = self.step == self.length
            self.step = np.where(over, 0, self.step + 1)
            self.episode += over
            for game in np.flatnonzero(over).tolist():
                self.length[game] = self.rng.integers(1, 15)
                self._seat(game)


def kept_rows(shards: Shards, name: str) -> Counter[tuple[int, int, int]]:
    found: Counter[tuple[int, int, int]] = Counter()
    for run in kept_runs(shards[name]):
        found.update(map(tuple, run["obs/observation"].astype(int).tolist()))
        step, first = run["obs/observation"][:, 2], run["flags"][:, 2].astype(bool)
        follows = (step[1:] == step[:-1] + 1) & (run["obs/observation"][1:, 1] == run["obs/observation"][:-1, 1])  # fmt: skip
        assert (follows | first[1:]).all(), "the next row of the episode, or another one's first"
        assert (run["obs/observation"][:, 0] == run["obs/observation"][0, 0]).all()
    return found


def test_every_row_is_in_its_policys_shard_once() -> None:
    shards = a_shards()
    policies = [shards.add(name, capacity=14_400) for name in ("a", "b", "c")]
    games = Games(shards, policies)
    games.play(400)
    for name, policy in zip("abc", policies, strict=True):
        truth, kept = games.rows[policy], kept_rows(shards, name)
        assert shards.stats()[name]["appended_rows"] == sum(truth.values())
        assert kept <= truth and max(kept.values()) == 1
        # what no unroll is made of yet: less than one for each seat
        assert sum((truth - kept).values()) < 5 * GAMES * SEATS
        batch = shards[name].sample(64)
        assert batch is not None and (batch.actions["action"] == policy).all()
        assert batch.extras["learn"].all()


def test_a_retired_policys_blocks_are_free_and_its_rows_land_nowhere() -> None:
    shards = a_shards()
    policies = [shards.add(name, capacity=14_400) for name in ("a", "b", "c")]
    games, whole = Games(shards, policies), shards.stats()["free_rows"]
    games.play(100)
    before = {policy: rows.copy() for policy, rows in games.rows.items()}
    shards.retire("b")
    assert "b" not in shards and len(shards) == 2
    free = shards.stats()["free_rows"]
    assert free == whole + 14_400 + 30 * 2 * 16
    games.play(200)
    late = games.rows[1] - before[1]
    assert shards.stats()["retired_rows"] == sum(late.values()) > 0
    for name, policy in (("a", 0), ("c", 2)):
        assert kept_rows(shards, name) <= games.rows[policy]
    new = shards.add("d", capacity=free - 30 * 2 * 16)
    assert new == 3 and shards.stats()["free_rows"] == 0
    games.policies, games.rows[3] = [0, 2, 3], Counter()
    games.play(600)
    for name, policy in (("a", 0), ("c", 2), ("d", 3)):
        assert kept_rows(shards, name) <= games.rows[policy]
    with pytest.raises(ConfigError, match="no policy 'b'"):
        shards["b"]
    with pytest.raises(ConfigError, match="is or was a policy 'b'"):
        shards.add("b", capacity=100)


def test_a_frozen_policys_rows_are_not_stored_or_stored_without_being_learnt_from() -> None:
    shards = a_shards()
    policies = [shards.add(name, capacity=14_400) for name in ("a", "b")]
    games = Games(shards, policies)
    games.play(50)
    appended = shards.stats()["a"]["appended_rows"]
    shards.freeze("a")
    shards.freeze("b", keep_rows=True)
    before = {policy: rows.copy() for policy, rows in games.rows.items()}
    games.play(50)
    assert shards.stats()["a"]["appended_rows"] == appended
    assert shards.stats()["frozen_rows"] == sum((games.rows[0] - before[0]).values())
    learn = {tuple(row): bool(flag) for run in kept_runs(shards["b"]) for row, flag in zip(run["obs/observation"].astype(int).tolist(), run["extra/learn"], strict=True)}  # fmt: skip
    assert {row for row, flag in learn.items() if flag} <= set(before[1])
    assert {row for row, flag in learn.items() if not flag} <= set(games.rows[1] - before[1])
    assert set(learn.values()) == {True, False}
    shards.unfreeze("a")
    games.play(5)
    assert kept_rows(shards, "a") <= games.rows[0]


def test_a_seat_that_changes_within_an_episode_begins_a_new_run() -> None:
    shards = Shards(OBS, ACT, num_slots=1, capacity=4000, unroll_length=2)
    policies = [shards.add(name, capacity=500) for name in ("a", "b")]
    for step in range(40):
        shards.append(
            policies=[policies[step // 10 % 2]], obs=np.array([[0, 0, step]], float), action=0, reward=step, terminated=False, truncated=False,
            first=step == 0,
        )  # fmt: skip
    for name, begins in (("a", (0, 20)), ("b", (10, 30))):
        runs = [run["obs/observation"][:, 2].tolist() for run in kept_runs(shards[name])]
        assert runs == [list(range(begin, begin + 9)) for begin in begins]


def test_each_shard_has_a_ratio_and_a_version_of_its_own() -> None:
    shards = Shards(OBS, ACT, num_slots=2, capacity=4000, unroll_length=2)
    held = shards.add("held", capacity=500, samples_per_insert=1, batch_size=4)
    free = shards.add("free", capacity=500, max_lag=2)
    row = {"obs": np.zeros((2, 3)), "action": 0, "reward": 0.0, "terminated": False, "truncated": False, "first": False, "version": np.array([0, 5])}  # fmt: skip
    appended = 0
    while not shards.held_back([held, free]):
        shards.append(policies=[held, free], **row)
        appended += 1
        assert appended < 200
    assert shards.held_back([held, free]) == {"held": "ratio"}
    with pytest.raises(ConfigError, match="no row of 'held' may be appended now: ratio"):
        shards.append(policies=[held, free], **row)
    assert shards.stats()["free"]["appended_rows"] == appended, "nothing was appended, to either"
    shards["free"].publish_version(7)
    assert shards["free"].sample(2) is not None and shards["held"].sample(4) is not None
    shards["free"].publish_version(8)
    assert shards["free"].sample(2) is None
    assert shards["free"].stats()["blocked_by"] == "staleness"


def test_shards_go_on_after_a_restart_with_the_same_draws(tmp_path: Path) -> None:
    shards, other = a_shards(), a_shards()
    policies = [shards.add("a", capacity=9000, seed=3), shards.add("gone", capacity=900), shards.add("b", mode="prioritized", capacity=9000)]  # fmt: skip
    shards.retire("gone")
    games = Games(shards, [policies[0], policies[2]])
    games.play(300)
    shards.freeze("a")
    shards.end()
    shards.save(tmp_path)
    found = other.restore(tmp_path)
    assert found == {name: shards.stats()[name]["kept_rows"] // 4 for name in ("a", "b")}
    assert other.stats()["free_rows"] == shards.stats()["free_rows"]
    for one in (shards, other):
        Games(one, [policies[0], policies[2]], seed=5).play(50)
    for name in ("a", "b"):
        for _ in range(20):
            one, two = (every[name].sample(16) for every in (shards, other))
            assert one.items.tolist() == two.items.tolist()
            assert torch.equal(one.obs["observation"], two.obs["observation"])
    assert other.add("c", capacity=100) == 3
    with pytest.raises(ConfigError, match="is or was a policy 'gone'"):
        other.add("gone", capacity=100)
    with pytest.raises(CheckpointError, match="there are no shards"):
        a_shards().restore(tmp_path / "none")


@pytest.mark.parametrize(("do", "error", "said"), [
    (lambda s: s.add("x", capacity=10**9), ConfigError, "rows, those that are being filled included; 60000 are left"),
    (lambda s: s.add("x", capacity=1000, unroll_length=3), ConfigError, "unroll_length is of all shards"),
    (lambda s: s.append(policies=[0] * 3, first=True), ShapeError, "policies has the shape [3]; it must be [30]"),
    (lambda s: s.append(policies=[7] * 30, first=True), ConfigError, "there is no policy 7"),
    (lambda s: s.freeze("x"), ConfigError, "there is no policy 'x'"),
    (lambda s: Shards(OBS, ACT, num_slots=1, capacity=100, mode="uniform"), ConfigError, "mode is a shard's own"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(do: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        do(a_shards())


def test_the_shard_of_a_retired_policy_gives_nobody_elses_rows() -> None:
    shards = a_shards()
    policies = [shards.add("a", capacity=14_400)]
    Games(shards, policies).play(30)
    held = shards["a"]
    shards.retire("a")
    for do in (held.sample, held.end, held.held_back, lambda: held.update_priorities(np.array([0]), np.ones(1))):  # fmt: skip
        with pytest.raises(ConfigError, match="this policy was retired"):
            do()


@pytest.mark.parametrize("name", ["../evil", "", "free_rows", 3, ".hidden"])
def test_a_name_that_cannot_be_a_folder_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="no name of a policy"):
        a_shards().add(name, capacity=100)


@pytest.mark.parametrize("settings", [{"num_slots": 3}, {"device": "cpu"}, {"extras": {}}])
def test_what_all_shards_share_is_not_given_to_one(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is of all shards"):
        a_shards().add("x", capacity=100, **settings)
