"""Runs of the product as a user starts them, for tests of whole processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from seedrl.config import Config
from seedrl.policy.base import Policy, make_policy
from seedrl.run import Result, fit
from seedrl.spec import EnvSpec
from seedrl.store.checkpoint import load_checkpoint

SEEDRL = [sys.executable, "-m", "seedrl"]
MARK = "SEEDRL_TEST_MARK"
DEVICE = os.environ.get("SEEDRL_DEVICE", "cpu")  # `make gpu-check` sets it


class Command:
    """One command in a process group of its own, with a mark by which everything that it starts is found again."""

    def __init__(self, *arguments: object, cwd: Path, prefix: list[str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.output = cwd / f"output-{self.mark[:6]}.txt"
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(
                [*(prefix or SEEDRL), *map(str, arguments)], cwd=cwd, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                env={**os.environ, MARK: self.mark, "COLUMNS": "200"}, start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout_s: float = 90.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"did not end within {timeout_s} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, words: str, limit_s: float = 60.0) -> None:
        """Waits until the command has printed `words`."""
        deadline = time.monotonic() + limit_s
        while words not in self.text():
            assert time.monotonic() < deadline, f"'{words}' never came:\n{self.text()}"
            assert self.process.poll() is None or words in self.text(), (
                f"ended before '{words}':\n{self.text()}"
            )
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Every living process that this command started, itself included, however deep."""
        found, needle = [], f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if needle in (entry / "environ").read_bytes() and _state(entry) not in "ZX":
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def named(self, words: str) -> list[int]:
        """Those whose command line contains `words`."""
        found = []
        for pid in self.pids():
            try:
                if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    found.append(pid)
            except OSError:
                continue
        return found

    def all_gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pids():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def signal(self, number: int, *, group: bool = False) -> None:
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def kill_all(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill_all()


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


def seedrl(*arguments: object, cwd: Path, timeout_s: float = 90.0) -> tuple[int, str]:
    """Runs a command to its end; returns (exit code, all that it printed)."""
    with Command(*arguments, cwd=cwd) as command:
        return command.wait(timeout_s), command.text()


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def newest(run_dir: Path, name: str) -> Any:
    """The last figure of that name: a last record in which nothing was learnt has none of the rates."""
    return next(record[name] for record in reversed(records(run_dir)) if name in record)


def settings(
    env_id: str, kwargs: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    """A small configuration for one of the troublesome environments."""
    merged: dict[str, dict[str, Any]] = {
        "env": {"id": env_id, "kwargs": kwargs or {}},
        "workers": {"num": 1, "envs_per_worker": 8, "groups": 2},
        "evaluation": {"episodes": 16, "envs_per_worker": 8},
        "run": {"max_seconds": 2.0, "log_every_s": 0.2},
        "engine": {"device": DEVICE},
        "learner": {"device": DEVICE},
    }
    for name, section in sections.items():
        merged[name] = {**merged.get(name, {}), **section}
    return Config.model_validate(merged)


def overrides(env: str, kwargs: dict[str, Any] | None = None, *more: str) -> list[str]:
    """The same as arguments of `seedrl train cartpole`."""
    return [
        f"env.id={env}", f"env.kwargs={json.dumps(kwargs or {})}", "workers.num=1", "workers.envs_per_worker=8", "workers.groups=2",
        "evaluation.episodes=16", "evaluation.envs_per_worker=8", "run.max_seconds=2", "run.log_every_s=0.2", "run.stop_at_return=null", *more,
    ]  # fmt: skip


def play(
    tmp_path: Path, env_id: str, kwargs: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Result:
    """Trains from Python and evaluates; the run lies in tmp_path/run."""
    return fit(settings(env_id, kwargs, **sections), run_dir=tmp_path / "run")


def policy_of(run_dir: Path) -> Policy:
    """The policy of the newest checkpoint."""
    saved = load_checkpoint(run_dir)
    spec = EnvSpec.from_dict(saved.spec)
    policy = make_policy(Config.model_validate(saved.config).policy, spec)
    policy.load_state_dict(saved.weights)
    assert all(torch.isfinite(tensor).all() for tensor in saved.weights.values())
    return policy.eval()
