"""Synchronous iterations through whole processes: one unroll of every environment by one version, whatever their speed, and after deaths."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import Harness
from ledger import Ledger, config_of
from runs import newest, play, records, seedrl
from seedrl.store.batch import Batch

UNROLL, ENVS = 20, 24


def _check(batch: Batch, version: int) -> None:
    """Each environment once; all rows by `version` but the bootstrap rows of the iteration before, and runs that began meanwhile."""
    assert sorted(batch.slots.tolist()) == list(range(ENVS))
    assert (batch.version[1:-1] == version).all()
    assert ((batch.version[0] == version) | (batch.version[0] == version - 1)).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_every_iteration_is_one_unroll_of_each_by_one_version(tmp_path: Path, groups: int) -> None:
    (tmp_path / "ids").mkdir()
    kwargs = {"folder": str(tmp_path / "ids"), "lengths": [1, 3, 7, 33], "jitter_us": 300}
    config = config_of(
        {"id": "system_envs:Echo", "kwargs": kwargs}, "answer", {"num": 3, "envs_per_worker": 8, "groups": groups},
        algorithm={"name": "ppo"}, learner={"unroll_length": UNROLL, "batch_size": ENVS},
    )  # fmt: skip
    with Harness(config, tmp_path, num_slots=ENVS) as run:
        run.begin()
        ledger = Ledger(UNROLL)
        for version in range(12):
            batch = run.sample(ENVS)
            ledger.check(batch)
            _check(batch, version)
            # everybody waits: nothing more is acted until there are new weights
            run.wait_for(lambda: run.board.get("rows_acted") == ENVS * (UNROLL * (version + 1) + 1))  # noqa: B023
            assert run.reader.sample(1, timeout_s=0.1) is None
            run.publish(version + 1)
        run.kill_worker(1)
        versions = range(12, 30)
        for version in (
            versions
        ):  # its successor may have begun in the middle; then the iterations are whole again
            batch = run.sample(ENVS)
            ledger.check(batch)
            run.publish(version + 1)
        for version in range(versions.stop, versions.stop + 3):
            _check(run.sample(ENVS), version)
            run.publish(version + 1)
        acted, read = run.finish()
    assert acted["acted"] == sum(acted[name] for name in ("stored", "worker_died", "detached", "shutdown"))  # fmt: skip
    assert acted["worker_died"] > 0
    assert acted["stored"] == sum(read.values())


def test_CartPole_gets_better_by_both_ways_of_ppo(tmp_path: Path) -> None:
    for synchronous in (True, False):
        result = play(
            tmp_path / str(synchronous), "CartPole-v1", algorithm={"name": "ppo", "synchronous": synchronous},
            learner={"batch_size": 8, "unroll_length": 32, "learning_rate": 1e-3}, run={"max_seconds": 60.0, "stop_at_return": 70.0},
        )  # fmt: skip
        # a stop ends the iteration that it comes into
        steps = [record.get("optimizer_steps", 0) for record in records(result.run_dir)]
        assert max(steps) == 16
        assert not synchronous or newest(result.run_dir, "lag_max") == 1
        assert newest(result.run_dir, "return_mean") >= 70, "a random policy's is 22"


def test_environments_that_come_and_go_are_refused_for_synchronous_iterations(tmp_path: Path) -> None:  # fmt: skip
    door = f"unix://{tmp_path}/door"
    code, text = seedrl("serve", "cartpole_ppo", "--bind", door, "--run-dir", "run", cwd=tmp_path)
    assert code == 2 and "algorithm.synchronous=false" in text and "come and go" in text
    assert not (tmp_path / "run").exists()
