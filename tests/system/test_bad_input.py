"""Bad input: each gets one to three lines that say what, where and what to do, the exit code, and nothing started."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import overrides, seedrl

SHORT = overrides("CartPole-v1", {}, "run.max_seconds=1", "evaluation.episodes=0")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["batching.max_wait=5"], ["batching.max_wait", "max_wait_us"]),
        (["learner.learning_rate=fast"], ["learner.learning_rate", "fast"]),
        (["batching.min_batch=64", "batching.max_batch=32"], ["min_batch", "64", "32"]),
        (["batching.max_slots=4"], ["8", "4", "slots"]),
        (["batching.max_batch=3"], ["group of 4", "max_batch 3"]),
        (["env.id=CartPole-v7"], ["CartPole"]),
        (
            ["replay.capacity=1_000_000_000_000"],
            ["replay takes", "1000000000000 rows", "set at most"],
        ),
        (["env.id=CartPol-v1"], ["CartPole-v1"]),
        (["env.id=no_such_module:thing"], ["no_such_module"]),
        (["env.id=envs:NoSuchThing"], ["NoSuchThing"]),
        (["learner.device=cuda"], ["cuda", "learner.device"]),
        (["policy.name=no_such"], ["no_such"]),
        (["no-equals-sign"], ["no-equals-sign", "key=value"]),
    ],
)
def test_train_refuses(tmp_path: Path, more: list[str], words: list[str]) -> None:
    code, text = seedrl("train", "cartpole", *SHORT, *more, "--run-dir", "run", cwd=tmp_path)
    assert code == 2, text
    assert len(text.strip().splitlines()) <= 3 and "Traceback" not in text
    for word in words:
        assert word in text
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_missing_configuration_names_the_nearest(tmp_path: Path) -> None:
    code, text = seedrl("train", "cartpol", cwd=tmp_path)
    assert code == 2 and "cartpole" in text


def test_checkpoints_of_another_architecture_or_environment_are_refused(tmp_path: Path) -> None:
    code, text = seedrl("train", "cartpole", *SHORT, "--run-dir", "run", cwd=tmp_path)
    assert code == 0, text
    code, text = seedrl("train", "cartpole", *SHORT, "--run-dir", "run", cwd=tmp_path)
    assert code == 2 and "--resume" in text, "a run is not written over"
    code, text = seedrl(
        "train",
        "cartpole",
        *SHORT,
        "policy.hidden=[32]",
        "--run-dir",
        "run",
        "--resume",
        cwd=tmp_path,
    )
    assert code == 2 and "architecture" in text and "[32, 4]" in text
    code, text = seedrl(
        "train",
        "cartpole",
        *SHORT,
        "env.id=Acrobot-v1",
        "--run-dir",
        "run",
        "--resume",
        cwd=tmp_path,
    )
    assert code == 2 and "environment" in text and "[6]" in text
    code, text = seedrl("eval", "nowhere", cwd=tmp_path)
    assert code == 2 and "nowhere" in text
    (tmp_path / "weights.pt").write_bytes(b"\x80\x04garbage")
    code, text = seedrl("eval", "weights.pt", cwd=tmp_path)
    assert code == 2 and "pickle" in text


def test_attach_refuses_a_wrong_address_and_wrong_arguments(tmp_path: Path) -> None:
    for address in ("door", "tcp:/x", "unix://"):
        code, text = seedrl("attach", address, "--env", "CartPole-v1", cwd=tmp_path)
        assert code == 2 and "unix://PATH" in text and "tcp://HOST:PORT" in text
        assert "trying" not in text, "what is no address will not become one"
    code, text = seedrl("serve", "cartpole", "--bind", "door", cwd=tmp_path)
    assert code == 2 and "unix://PATH" in text and "tcp://" not in text, "--bind takes no other"
    code, text = seedrl(
        "attach", "unix://door", "--env", "CartPole-v1", "--env-kwargs", "{", cwd=tmp_path
    )
    assert code == 2 and "--env-kwargs" in text and "Traceback" not in text
    code, text = seedrl(
        "attach",
        "unix://door",
        "--env",
        "CartPole-v1",
        "--envs-per-worker",
        5,
        "--groups",
        2,
        cwd=tmp_path,
    )
    assert code == 2 and "groups" in text


def test_an_unknown_command_or_option_is_exit_2(tmp_path: Path) -> None:
    for arguments in (["trian"], ["train"], ["train", "cartpole", "--sede", "3"], ["eval"]):
        code, text = seedrl(*arguments, cwd=tmp_path)
        assert code == 2 and "Traceback" not in text
