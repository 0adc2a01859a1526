"""Rows out of the store and into another one: each kept row once, in its order; Minari's own reader sees the episodes that were played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from seedrl.dataset import from_minari, kept_runs, load_npz, save_npz, to_minari
from seedrl.errors import ConfigError, SpecError
from seedrl.replay import ReplayStore

OBS = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "count": spaces.Box(0, 60_000, (), np.uint16), "step": spaces.Discrete(50)})  # fmt: skip
ACT = spaces.Tuple((spaces.Discrete(5, start=-2), spaces.Box(-1, 1, (2,), np.float64)))


def a_store(slots: int = 3, **more: Any) -> ReplayStore:
    return ReplayStore(OBS, ACT, num_slots=slots, **{"capacity": 4000, "unroll_length": 4, "stride": 2, **more})  # fmt: skip


def play(store: ReplayStore, steps: int, length: int) -> list[list[dict[str, Any]]]:
    """Episodes of `length` steps in every slot; returns the rows of each slot as they were appended."""
    slots, rows = store.num_slots, [[] for _ in range(store.num_slots)]
    for number in range(steps):
        at = number % (length + 1)
        row = {
            "obs": {
                "image": np.full((slots, 2, 2), number % 256), "count": np.arange(slots) * 10_000 + 40_000 + number % 1000,
                "step": np.full(slots, at),
            },
            "action": {"0": np.full(slots, at % 5), "1": np.full((slots, 2), at / 100)},
            "reward": np.arange(slots) + at, "terminated": at == length, "truncated": False, "first": at == 0,
        }  # fmt: skip
        store.append(**row)
        for slot in range(slots):
            rows[slot].append({"count": int(row["obs"]["count"][slot]), "step": at, "reward": float(slot + at)})  # fmt: skip
    return rows


def test_every_kept_row_comes_out_once_in_its_order() -> None:
    store = a_store()
    rows = play(store, 201, 6)
    store.end(np.array([1]))
    play(store, 50, 6)
    runs = list(kept_runs(store))
    assert len(runs) == 4  # the second slot's run was cut in two
    for slot, run in zip((0, 1, 1, 2), runs, strict=True):
        counts = [row["count"] for row in rows[slot]]
        found = run["obs/observation.count"].tolist()
        assert run["obs/observation.count"].dtype == np.uint16
        if slot == 1 and found[0] == counts[0] and run is runs[2]:
            continue  # the run that began anew
        assert found[: len(counts)] == counts[: len(found)]
        assert len(found) >= 201 - 2


def test_rows_of_which_blocks_were_overwritten_stay_out() -> None:
    store = a_store(capacity=100, block_length=5)
    rows = play(store, 1000, 6)
    for slot, run in enumerate(kept_runs(store)):
        found = [(row["count"], row["step"], row["reward"]) for row in rows[slot]][-run["reward"].size - 2 :]  # fmt: skip
        assert 30 <= run["reward"].size < 100
        mine = list(zip(run["obs/observation.count"].tolist(), run["obs/observation.step"].tolist(), run["reward"].tolist(), strict=True))  # fmt: skip
        assert any(found[i : i + len(mine)] == mine for i in range(3))


def test_a_file_of_rows_brings_the_same_rows_into_another_store(tmp_path: Path) -> None:
    store = a_store()
    play(store, 150, 9)
    count = save_npz(store, tmp_path / "rows.npz")
    other = a_store(slots=2)
    assert load_npz(other, tmp_path / "rows.npz") == count
    mine, theirs = list(kept_runs(store)), list(kept_runs(other))
    assert len(mine) == 3 and len(theirs) == 2, (
        "one that begins an episode follows another one in its slot"
    )
    for run in mine:
        count = len(run["reward"])
        (there, at), *others = [
            (one, at) for one in theirs for at in np.flatnonzero(one["obs/observation.count"] == run["obs/observation.count"][0]) if at + count <= len(one["reward"])
        ]  # fmt: skip
        assert not others
        for name, column in run.items():
            np.testing.assert_array_equal(there[name][at : at + count], column)


def test_a_file_of_other_spaces_or_of_no_rows_is_refused_by_name(tmp_path: Path) -> None:
    store = a_store()
    play(store, 60, 9)
    save_npz(store, tmp_path / "rows.npz")
    other = ReplayStore(spaces.Box(-1, 1, (2,)), ACT, num_slots=1, capacity=100)
    with pytest.raises(SpecError, match=r"leaf 'obs/observation' is missing there, float32 \[2\] here"):  # fmt: skip
        load_npz(other, tmp_path / "rows.npz")
    (tmp_path / "torn.npz").write_bytes((tmp_path / "rows.npz").read_bytes()[:400])
    (tmp_path / "text.npz").write_text("rows")
    for name in ("torn.npz", "text.npz", "none.npz"):
        with pytest.raises(SpecError, match="no file of rows"):
            load_npz(store, tmp_path / name)
    with pytest.raises(ConfigError, match="queue keeps no rows"):
        save_npz(a_store(mode="queue", capacity=None, stride=4), tmp_path / "no.npz")


def test_an_empty_store_makes_an_empty_file(tmp_path: Path) -> None:
    assert save_npz(a_store(), tmp_path / "rows.npz") == 0


@pytest.fixture
def minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return pytest.importorskip("minari")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Minari wishes for more metadata
def test_a_minari_dataset_has_the_episodes_that_were_played(minari: Any) -> None:
    store = a_store()
    play(store, 203, 9)  # twenty whole episodes a slot, and some rows
    dataset = to_minari(store, "tests/rows-v0")
    assert dataset.total_episodes == 3 * 20 and dataset.total_steps == 3 * 20 * 9
    for number, episode in enumerate(dataset.iterate_episodes()):
        slot = number // 20
        assert episode.observations["step"].tolist() == list(range(10))
        assert (episode.observations["count"] // 10_000 == slot + 4).all()
        assert episode.actions[0].tolist() == [at % 5 - 2 for at in range(9)]
        np.testing.assert_allclose(episode.actions[1][:, 0], np.arange(9) / 100, rtol=1e-6)
        assert episode.rewards.tolist() == [slot + at for at in range(1, 10)]
        assert episode.terminations.tolist() == [False] * 8 + [True]
    other = a_store(slots=4)
    assert from_minari(other, minari.load_dataset("tests/rows-v0")) == 60 * 10
    found: dict[tuple[int, int], int] = {}
    runs = list(kept_runs(other))
    assert len(runs) == 4  # episodes follow each other in their slots
    for run in runs:
        step, first = run["obs/observation.step"], run["flags"][:, 2].astype(bool)
        assert ((step[1:] == step[:-1] + 1) | first[1:]).all()
        filler = first & (step > 0)
        np.testing.assert_array_equal(run["action/action.0"][~filler & (step < 9)], step[~filler & (step < 9)] % 5)  # fmt: skip
        for count, number, ended in zip(run["obs/observation.count"][~filler].tolist(), step[~filler].tolist(), run["flags"][~filler, 0].tolist(), strict=True):  # fmt: skip
            assert (number == 9) == bool(ended)
            found[count, number] = found.get((count, number), 0) + 1
    assert len(found) == 600 and set(found.values()) == {1}, (
        "every row once, the last of each episode too"
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # Minari wishes for more metadata
def test_a_dataset_of_other_spaces_is_refused_by_name(minari: Any) -> None:
    store = a_store()
    play(store, 60, 9)
    dataset = to_minari(store, "tests/other-v0")
    other = ReplayStore(OBS, spaces.Discrete(2), num_slots=1, capacity=100)
    with pytest.raises(SpecError, match="action space is Tuple"):
        from_minari(other, dataset)


def test_a_batch_as_a_TensorDict_is_the_same_tensors() -> None:
    tensordict = pytest.importorskip("tensordict")
    env = gymnasium.make("CartPole-v1")
    state = (torch.zeros(1, 3), torch.zeros(1, 2))
    store = ReplayStore(env.observation_space, env.action_space, num_slots=2, capacity=500, mode="prioritized", unroll_length=5, state=state)  # fmt: skip
    for number in range(40):
        row = {"obs": np.full((2, 4), number), "action": 1, "reward": number, "terminated": False, "truncated": False, "first": number == 0}  # fmt: skip
        store.append(**row, state=(torch.full((2, 3), float(number)), torch.zeros(2, 2)))
    batch = store.sample(8)
    assert batch is not None and batch.weights is not None
    found = batch.to_tensordict()
    assert isinstance(found, tensordict.TensorDict) and found.batch_size == (6, 8)
    assert found["obs", "observation"].data_ptr() == batch.obs["observation"].data_ptr()
    assert torch.equal(found["reward"], batch.reward) and torch.equal(found["weights"][3], batch.weights)  # fmt: skip
    assert torch.equal(found["state", "0"][2], batch.state[0]) and "mask" not in found
    assert torch.equal(found["items"][0], torch.from_numpy(batch.items))
    assert torch.equal(found[:, 3]["obs", "observation"], batch.obs["observation"][:, 3])
