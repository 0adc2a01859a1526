"""One group against the troublesome environments: what each row holds, and what is said of faults."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import envs
from seedrl.errors import EnvError
from seedrl.spec import EnvSpec
from seedrl.transport.slab import own_rows
from seedrl.worker.envs import spec_of
from seedrl.worker.group import Group, RebuildBudget, Rules, VectorGroup, seat_seed


class Table:
    """A group over ordinary memory, with the rows that it published."""

    def __init__(
        self, make: Any, size: int = 3, *, on_nan: str = "error", rebuilds: int = 3, mask: str | None = None, stats: tuple[str, ...] = (), vector: bool = False,
    ) -> None:  # fmt: skip
        made = [make()] if vector else [make() for _ in range(size)]
        self.spec: EnvSpec = spec_of(made[0], "x", mask, stats)
        self.view = own_rows(self.spec, [size])[0]
        rules = Rules(on_nan, RebuildBudget(rebuilds), "worker 3")
        build, envs_ = (VectorGroup, made[0]) if vector else (Group, made)
        self.group: Any = build(
            envs_,
            self.spec,
            self.view,
            make=make,
            seed=lambda *seat: seat_seed(7, False, 0, *seat),
            rules=rules,
            group=1,
        )
        self.group.reset()

    def step(self, action: Any = 0) -> dict[str, np.ndarray]:
        next(iter(self.view.action.values()))[...] = action
        self.group.step()
        return self.row()

    def row(self) -> dict[str, np.ndarray]:
        names = (
            "reward",
            "terminated",
            "truncated",
            "first",
            "interrupted",
            "episode_return",
            "episode_length",
        )
        return {name: getattr(self.view, name).copy() for name in names} | {
            name: value.copy() for name, value in self.view.obs.items()
        }


def test_GhostStep_rows_follow_the_next_step_order() -> None:
    table = Table(envs.GhostStep)
    for episode in range(3):
        first = table.row() if episode == 0 else table.step()
        assert (
            (first["first"] == 1).all()
            and (first["reward"] == 0).all()
            and (first["episode_length"] == 0).all()
        )
        for t in range(1, 8):
            row = table.step()
            assert (row["first"] == 0).all() and (row["reward"] == 1).all()
            assert (row["terminated"] == (t == 7)).all() and (row["truncated"] == 0).all()
            assert (row["episode_return"] == t).all() and (row["episode_length"] == t).all()


@pytest.mark.parametrize("kind", ["python", "int", "bool", "float64", "zero_d", "one_element"])
def test_RewardTypes_are_one_number_a_seat(kind: str) -> None:
    table = Table(lambda: envs.RewardTypes(kind), 32)
    assert table.step()["reward"].tolist() == [1.0] * 32


def test_RewardTypes_two_elements_are_refused_by_shape_and_seat() -> None:
    with pytest.raises(EnvError) as caught:
        Table(lambda: envs.RewardTypes("two_elements")).step()
    assert "(2,)" in str(caught.value) and "seat 0" in str(caught.value)


def test_ShapeChanges_names_leaf_shapes_and_seat_and_touches_no_neighbour() -> None:
    table = Table(lambda: envs.ShapeChanges(at=4))
    for _ in range(3):
        table.step()
    table.view.obs["observation"][...] = 7
    with pytest.raises(EnvError) as caught:
        table.step()
    text = str(caught.value)
    assert (
        "observation" in text
        and "[5]" in text
        and "[4]" in text
        and "seat 0" in text
        and "worker 3" in text
    )
    assert (table.view.obs["observation"] == 7).all()


class WrongDtype(envs.Case):
    def observe(self) -> np.ndarray:
        return np.zeros(4, np.float64) if self.t > 2 else np.zeros(4, np.float32)


class HoldsText(envs.Case):
    def observe(self) -> Any:
        return "nothing" if self.t > 1 else np.zeros(4, np.float32)


@pytest.mark.parametrize(("env", "word"), [(WrongDtype, "float64"), (HoldsText, "observation")])
def test_an_observation_of_another_dtype_is_refused_and_not_cast(env: Any, word: str) -> None:
    table = Table(env)
    with pytest.raises(EnvError, match=word):
        for _ in range(4):
            table.step()


@pytest.mark.parametrize("kind", ["mirrored", "transposed", "unit_axis", "inplace"])
def test_FlippedViews_rows_hold_the_pixels_of_their_step(kind: str) -> None:
    table = Table(lambda: envs.FlippedViews(kind), 2)
    row, column = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    seen = [table.row()["observation"]] + [table.step()["observation"] for _ in range(5)]
    for t, pictures in enumerate(seen):
        for picture in pictures:
            np.testing.assert_array_equal(picture[0], (10 * row + column + t) % 256)


@pytest.mark.parametrize("where", ["reward", "observation"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_NotFinite_drops_that_episode_alone_or_ends_the_worker(
    tmp_path: Any, where: str, value: str
) -> None:
    def make() -> Any:
        return envs.NotFinite(where, value, at=4, flag=str(tmp_path / "flag"))

    table = Table(make, on_nan="drop_episode")
    rows = [table.step() for _ in range(4)]
    assert rows[3]["interrupted"].tolist() == [1, 0, 0] and rows[3]["first"].tolist() == [1, 0, 0]
    assert np.isfinite(rows[3]["observation"]).all() and np.isfinite(rows[3]["reward"]).all()
    (fault,) = table.group.faults
    assert (fault["kind"], fault["seat"], fault["episode"], fault["step"]) == (
        "not_finite",
        0,
        0,
        4,
    )
    assert where in fault["message"]
    (tmp_path / "flag").unlink()
    with pytest.raises(EnvError, match=f"{where}(.|\n)*seat 0, episode 0, step 4(.|\n)*on_nan"):
        strict = Table(make)
        for _ in range(4):
            strict.step()


def test_RaisesInStep_rebuilds_the_seat_with_its_own_message(tmp_path: Any) -> None:
    table = Table(lambda: envs.RaisesInStep(at=3, flag=str(tmp_path / "flag")))
    rows = [table.step() for _ in range(12)]
    assert rows[2]["interrupted"].tolist() == [1, 0, 0] and rows[2]["first"].tolist() == [1, 0, 0]
    assert [int(row["terminated"][1]) for row in rows].index(1) == 9, "the others never stop"
    (fault,) = table.group.faults
    assert (
        fault["message"] == "ValueError: simulator lost its licence"
        and fault["env"] == "RaisesInStep"
    )
    assert "raise ValueError" in fault["traceback"] and fault["kind"] == "raised"


def test_RaisesInStep_for_ever_ends_after_the_budget_with_the_first_traceback() -> None:
    table = Table(lambda: envs.RaisesInStep(at=1), rebuilds=5)
    with pytest.raises(EnvError) as caught:
        for _ in range(100):
            table.step()
    assert "simulator lost its licence" in caught.value.what and "6 faults" in caught.value.where
    assert "raise ValueError" in caught.value.traceback_text
    assert len(table.group.faults) == 6


def test_MaskedActions_masks_stand_beside_their_own_row() -> None:
    for where, mask in (("observation", "observation.action_mask"), ("info", "info")):
        table = Table(lambda where=where: envs.MaskedActions(where), mask=mask)
        for _ in range(25):
            for seat, env in enumerate(table.group.envs):
                if not table.group._over[seat]:
                    assert table.view.mask[seat].tolist() == env.mask.tolist()
            table.step(table.view.mask.argmax(1))


def test_RawReturn_and_named_statistics() -> None:
    table = Table(envs.RawReturn, stats=("lives",))
    rows = [table.step() for _ in range(9)]
    assert (
        rows[8]["episode_return"].tolist() == [24.0] * 3
        and rows[8]["episode_length"].tolist() == [9] * 3
    )
    assert table.view.stats[:, 0].tolist() == [0.0] * 3


def test_SeedEcho_seats_differ_and_a_seed_is_for_the_first_reset_alone() -> None:
    a, b = Table(envs.SeedEcho), Table(envs.SeedEcho)
    drawn = []
    for _ in range(3):
        np.testing.assert_array_equal(a.row()["observation"], b.row()["observation"])
        drawn += a.row()["observation"].tolist()
        for _ in range(4):
            a.step(), b.step()
    assert len({tuple(row) for row in drawn}) == 9
    assert (
        len(
            {
                seat_seed(s, e, w, i)
                for s in (1, 2)
                for e in (False, True)
                for w in range(4)
                for i in range(8)
            }
        )
        == 128
    )


def _vector(mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    return SyncVectorEnv([envs.GhostStep] * 3, autoreset_mode=mode)


def test_a_native_vector_environment_gives_the_same_rows() -> None:
    single, vector = Table(envs.GhostStep), Table(_vector, vector=True)
    for _ in range(20):
        for name, value in single.row().items():
            np.testing.assert_array_equal(value, vector.row()[name], err_msg=name)
        single.step(), vector.step()


def test_a_vector_environment_of_another_autoreset_mode_is_refused_by_name() -> None:
    with pytest.raises(EnvError, match="SameStep"):
        Table(lambda: _vector(AutoresetMode.SAME_STEP), vector=True)


def test_ScalarSpaces_actions_arrive_without_a_dimension() -> None:
    table = Table(envs.ScalarSpaces)
    row = table.step(np.array([0.1, 0.2, 0.3], np.float32))
    assert row["observation"].shape == (3,) and np.isfinite(row["reward"]).all()


def test_CartPole_by_gymnasium_alone_gives_the_same_episode() -> None:
    table = Table(lambda: gymnasium.make("CartPole-v1"), 1)
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=seat_seed(7, False, 0, 0))
    for t in range(200):
        np.testing.assert_array_equal(table.row()["observation"][0], obs)
        action = t % 2
        row = table.step(action)
        obs, reward, terminated, truncated, _ = env.step(action)
        assert (row["reward"][0], bool(row["terminated"][0]), bool(row["truncated"][0])) == (
            reward,
            terminated,
            truncated,
        )
        if terminated or truncated:
            return
    pytest.fail("no end")


@pytest.mark.parametrize("over", [False, True])
def test_after_a_lost_lease_an_episode_may_go_on_where_it_stood(over: bool) -> None:
    bench = Table(envs.GhostStep, size=2)  # seven steps an episode
    for _ in range(7 if over else 3):
        bench.step()
    before, (bench.view,) = bench.view, own_rows(bench.spec, [2])
    bench.group.bind(bench.view)
    bench.group.go_on(before)
    row = bench.row()
    assert (row["first"] == 1).all() and not row["terminated"].any() and (row["reward"] == 0).all()
    assert (row["episode_length"] == (0 if over else 3)).all()
    lengths = [int(bench.step()["episode_length"][0]) for _ in range(4)]
    assert lengths == ([1, 2, 3, 4] if over else [4, 5, 6, 7])
    assert bench.row()["terminated"].any() != over
