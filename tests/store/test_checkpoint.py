from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seedrl.errors import CheckpointError
from seedrl.spec import EnvSpec, Leaf
from seedrl.store import checkpoint as module_under_test
from seedrl.store.checkpoint import (
    Checkpoint,
    load_checkpoint,
    optimizer_state_from_tensors,
    optimizer_state_to_tensors,
    save_checkpoint,
)


def small(updates: int) -> Checkpoint:
    """A checkpoint whose every part tells its number of updates."""
    return Checkpoint(
        weights={"w": torch.full((100,), float(updates))},
        optimizer={"0.step": torch.tensor(float(updates))},
        counters={"updates": updates, "env_steps": 10 * updates},
    )


def number_in(checkpoint: Checkpoint) -> int:
    updates = checkpoint.updates
    assert (checkpoint.weights["w"] == updates).all()
    assert checkpoint.optimizer["0.step"] == updates
    assert checkpoint.counters["env_steps"] == 10 * updates
    return updates


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    path.unlink()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_all_that_was_saved_comes_back(tmp_path: Path) -> None:
    saved = Checkpoint(
        weights={
            "layer.weight": torch.randn(3, 4),
            "half": torch.randn(5, dtype=torch.bfloat16),
            "steps": torch.tensor(7),
            "flags": torch.tensor([True, False]),
            "sliced": torch.arange(10)[::2],
            "empty": torch.zeros(0, 2),
        },
        counters={"updates": 12, "env_steps": 1 << 60, "policy_version": 12, "time_s": 0.1},
        optimizer={"0.exp_avg": torch.randn(3, 4)},
        optimizer_about={"class": "Adam", "values": {}, "groups": [{"lr": 1e-3, "params": [0]}]},
        random={"cpu": torch.Generator().get_state()},
        config={"run": {"seed": 1}, "env": {"kwargs": {}}},
        spec={"action": []},
    )
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, keep=3))
    for part in ("weights", "optimizer", "random"):
        before, after = getattr(saved, part), getattr(loaded, part)
        assert before.keys() == after.keys()
        for name in before:
            assert (
                torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
            )
    for part in ("counters", "optimizer_about", "config", "spec"):
        assert getattr(saved, part) == getattr(loaded, part)
    assert loaded.skipped == [] and loaded.updates == 12


def test_tied_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    tensor = torch.randn(4)
    saved = Checkpoint(weights={"a": tensor, "b": tensor}, counters={"updates": 0})
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, keep=1))
    assert torch.equal(loaded.weights["a"], tensor) and torch.equal(loaded.weights["b"], tensor)


def test_the_newest_is_taken_and_the_last_few_are_kept(tmp_path: Path) -> None:
    for updates in (5, 10, 100, 1000):
        save_checkpoint(tmp_path / "checkpoints", small(updates), keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000000100",
        "step-000001000",
    ]
    assert number_in(load_checkpoint(tmp_path)) == 1000
    assert number_in(load_checkpoint(tmp_path / "checkpoints")) == 1000
    assert number_in(load_checkpoint(tmp_path / "checkpoints" / "step-000000100")) == 100


def test_saving_twice_at_the_same_update_never_touches_the_first(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, small(3), keep=2)
    again = small(3)
    again.config = {"second": True}
    second = save_checkpoint(tmp_path, again, keep=2)
    assert number_in(load_checkpoint(first)) == 3
    assert second != first and load_checkpoint(tmp_path).config == {"second": True}


def test_what_was_just_saved_is_kept_also_beside_a_newer_torn_one(tmp_path: Path) -> None:
    truncate(save_checkpoint(tmp_path, small(200), keep=1) / "weights.safetensors")
    save_checkpoint(tmp_path, small(150), keep=1)
    assert number_in(load_checkpoint(tmp_path)) == 150


@pytest.mark.parametrize("damage", [truncate, remove, flip_a_bit])
@pytest.mark.parametrize("name", ["weights.safetensors", "training.safetensors", "checkpoint.json"])
def test_a_torn_newest_is_skipped_and_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    save_checkpoint(tmp_path, small(1), keep=3)
    newest = save_checkpoint(tmp_path, small(2), keep=3)
    damage(newest / name)
    loaded = load_checkpoint(tmp_path)
    assert number_in(loaded) == 1
    assert len(loaded.skipped) == 1
    assert loaded.skipped[0].startswith(f"step-000000002: {name}")
    with pytest.raises(CheckpointError, match=f"torn checkpoint: {name}"):
        load_checkpoint(newest)


def test_when_all_are_torn_each_is_named(tmp_path: Path) -> None:
    for updates in (1, 2):
        truncate(save_checkpoint(tmp_path, small(updates), keep=3) / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"every checkpoint is torn: step-000000002.*0001"):
        load_checkpoint(tmp_path)


def test_an_empty_directory_or_none_at_all_has_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", tmp_path / "step-000000001"):
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_a_future_format_is_refused_and_not_taken_for_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, small(1), keep=3)
    monkeypatch.setattr(module_under_test, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="format 1; this version reads 2"):
        load_checkpoint(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["BOMB"],))


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_is_refused_and_never_executed(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_off = tmp_path / "went_off"
    monkeypatch.setenv("BOMB", str(went_off))
    path = tmp_path / "model.pt"
    if writer == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), path)
    with pytest.raises(CheckpointError, match="pickle"):
        load_checkpoint(path)
    # nor where it poses as a file of a checkpoint, with a right checksum
    inside = save_checkpoint(tmp_path, small(1), keep=1)
    shutil.copy(path, inside / "weights.safetensors")
    about = json.loads((inside / "checkpoint.json").read_text())
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    about["files"]["weights.safetensors"] = {"bytes": len(content), "sha256": digest}
    del about["checksum"]
    about["checksum"] = module_under_test._checksum(about)
    (inside / "checkpoint.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_checkpoint(inside)
    assert not went_off.exists()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="a checkpoint is a directory"):
        load_checkpoint(tmp_path / "notes.txt")


def spec_of(*shape: int) -> EnvSpec:
    observation = Leaf(name="observation", dtype="float32", shape=shape, kind="box")
    action = Leaf(name="action", dtype="int64", shape=(), kind="discrete", n=(2,), start=(0,))
    return EnvSpec(
        (observation,), (action,), action_mask=None, mask_size=0, stats=(), env_id="Test-v0"
    )


def test_another_architecture_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    weights, spec = nn.Linear(4, 2).state_dict(), spec_of(4)
    saved = Checkpoint(weights, counters={"updates": 1}, spec=spec.to_dict())
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, keep=1))
    same, wider, other = nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(4, 2, bias=False)
    loaded.load_into(same, spec)
    assert torch.equal(same.weight, weights["weight"])
    before = wider.weight.clone()
    with pytest.raises(CheckpointError, match=r"weight: float32 \[3, 4\] here, float32 \[2, 4\]"):
        loaded.load_into(wider, spec)
    assert torch.equal(wider.weight, before)
    with pytest.raises(CheckpointError, match=r"bias: absent here, float32 \[2\] there"):
        loaded.load_into(other, spec)


def test_another_spec_is_refused_leaf_by_leaf(tmp_path: Path) -> None:
    module = nn.Linear(4, 2)
    saved = Checkpoint(module.state_dict(), counters={"updates": 1}, spec=spec_of(4).to_dict())
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, keep=1))
    with pytest.raises(CheckpointError, match=r"observation: float32 \[8\] here, float32 \[4\]"):
        loaded.load_into(module, spec_of(8))


class PlainConfig:
    """Stands for a Config: what a checkpoint wants of it is `model_dump`."""

    def model_dump(self, mode: str) -> dict[str, Any]:
        return {"run": {"seed": 1}}


OPTIMIZERS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda module: torch.optim.Adam(module.parameters(), lr=3e-3, eps=1e-5),
    lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-3, alpha=0.99, momentum=0.1),
]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        module(torch.full((2, 3), float(step + 1))).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_goes_on_exactly_as_without_the_stop(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    module = nn.Linear(3, 2)
    optimizer = make(module)
    train(module, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 1 / 3  # a schedule's doing
    config: Any = PlainConfig()
    counters = {"updates": 3, "policy_version": 4}
    saved = Checkpoint.of(module, optimizer, config, spec_of(3), counters=counters)
    path = save_checkpoint(tmp_path, saved, keep=1)
    train(module, optimizer, 3)
    drawn = torch.rand(3)
    loaded, resumed = load_checkpoint(path), nn.Linear(3, 2)
    resumed_optimizer = make(resumed)
    loaded.load_into(resumed, spec_of(3))
    loaded.load_optimizer(resumed_optimizer)
    assert (loaded.updates, loaded.policy_version) == (3, 4)
    assert loaded.config == {"run": {"seed": 1}}
    assert resumed_optimizer.param_groups[0]["lr"] == 1 / 3
    assert torch.equal(torch.rand(3), drawn)
    train(resumed, resumed_optimizer, 3)
    assert torch.equal(module.weight, resumed.weight) and torch.equal(module.bias, resumed.bias)


def test_another_optimiser_is_refused() -> None:
    module = nn.Linear(3, 2)
    adam, rmsprop = (make(module) for make in OPTIMIZERS)
    train(module, adam, 1)
    tensors, about = optimizer_state_to_tensors(adam)
    with pytest.raises(CheckpointError, match="optimiser is Adam, not RMSprop"):
        optimizer_state_from_tensors(rmsprop, tensors, about)
    with pytest.raises(CheckpointError, match="other parameters"):
        other = OPTIMIZERS[0](nn.Linear(3, 2, bias=False))
        optimizer_state_from_tensors(other, tensors, about)
    with pytest.raises(CheckpointError, match=r"0.exp_avg is \[2, 3\], its parameter \[4, 3\]"):
        optimizer_state_from_tensors(OPTIMIZERS[0](nn.Linear(3, 4)), tensors, about)


def test_a_whole_checkpoint_can_be_read_between_any_two_steps_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash leaves is the directory as it is between two calls to the system."""
    save_checkpoint(tmp_path, small(1), keep=1)
    seen: list[int | None] = []

    def watched(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not seen or seen[-1] is not None:
                seen.append(None)  # while looking, our own calls are not looked at
                seen[-1] = number_in(load_checkpoint(tmp_path))
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
        watched(name)
    save_checkpoint(tmp_path, small(2), keep=1)
    instants = [number for number in seen if number is not None]
    assert instants == sorted(instants) and seen[0] == 1 and seen[-1] == 2
    assert len(seen) >= 10


INSTANTS = int(os.environ.get("SEEDRL_TORN_INSTANTS", "10"))  # `make truths` tries 50
_SAVER = """
import os, sys, torch
from pathlib import Path
from seedrl.store.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
torch.set_num_threads(1)
directory = Path(sys.argv[1])
start = torch.zeros(100)
def save_without_end(updates):
    while True:
        updates += 1
        save_checkpoint(directory, Checkpoint(
            weights={"w": start + updates}, optimizer={"0.step": torch.tensor(float(updates))},
            counters={"updates": updates, "env_steps": 10 * updates}), keep=2)
        os.write(1, b"%d\\n" % updates)
for line in sys.stdin:  # one saver for each line, all from this process: torch is imported once
    pid = os.fork()
    if pid == 0:
        save_without_end(int(line))
    os.write(1, b"pid %d\\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"gone\\n")
"""


def test_after_kill_9_at_any_instant_what_was_saved_last_is_there(tmp_path: Path) -> None:
    instants = random.Random(1)
    known = 0
    command = [sys.executable, "-c", _SAVER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(INSTANTS):
            print(known, file=process.stdin, flush=True)
            pid = 0
            while pid == 0 or known == 0:  # until it runs and, the first time, has saved once
                line = process.stdout.readline()
                if line.startswith("pid"):
                    pid = int(line.split()[1])
                else:
                    known = int(line)
            time.sleep(instants.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "gone\n":
                known = int(line)
            found = number_in(load_checkpoint(tmp_path))
            assert found in (known, known + 1)  # one more, if it died before saying so
            known = found
        process.stdin.close()
    save_checkpoint(tmp_path, small(known + 1), keep=2)
    assert len(list(tmp_path.iterdir())) == 2  # nothing unfinished is left
