"""`seedrl tune` on real runs: what it writes is a configuration that keeps the limit in a new run, and nothing is lost when it is stopped."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from runs import Command, seedrl
from seedrl.alone import in_own_process
from seedrl.config import config_from, load_config

HELD = ("workers.groups=1", "batching.min_batch=1", "batching.max_batch=null", "batching.max_wait_us=0", "engine.threads=1")  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"


def test_the_choice_keeps_the_limit_in_a_new_run(tmp_path: Path) -> None:
    """Steps of 1 ms: eight environments in one group take 8 ms, which no limit of 5 ms on the round trip forbids; more workers do more."""
    args = ("cartpole", *HELD, "env.id=seedrl.synthetic:flat", "env.kwargs={step_us: 200}")
    code, text = seedrl(
        "tune", *args, "--p99-ms", 20, "--out", "tuned.yaml", "--budget-s", 30, "--trial-s", 1, "--max-workers", 2, "--max-envs", 4,
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, text
    tuned = load_config(str(tmp_path / "tuned.yaml"), [])
    assert tuned.workers.num == 2, "two workers, two cores: twice the steps of one\n" + text
    assert tuned.workers.groups == 1 and tuned.run.stop_at_return == 475, (
        "what was held, and the run's own ends, stay"
    )
    assert (tmp_path / "tuned.png").read_bytes().startswith(PNG)
    assert "one process" in text and "times as many here" in text
    new = seedrl(
        "bench", "--json", "--seconds", 3, "--step-us", 200, "--workers", 2, "--envs-per-worker", tuned.workers.envs_per_worker,
        f"batching.max_wait_us={tuned.batching.max_wait_us}", cwd=tmp_path,
    )  # fmt: skip
    figures = json.loads(new[1].splitlines()[-1])
    assert figures["rtt_us"]["p99"] <= 20_000
    code, text = seedrl(
        "train",
        "tuned.yaml",
        "run.max_seconds=1",
        "evaluation.episodes=0",
        "--run-dir",
        "run",
        cwd=tmp_path,
    )
    assert code == 0, text
    # the same request goes on where it stopped, and a limit that nothing can keep is said, and nothing written
    again = (
        "tune",
        *args,
        "--out",
        "tuned.yaml",
        "--budget-s",
        3,
        "--trial-s",
        1,
        "--max-workers",
        2,
        "--max-envs",
        4,
    )
    code, text = seedrl(*again, "--p99-ms", 20, cwd=tmp_path)
    assert code == 0 and "settings are known" in text, text
    before = (tmp_path / "tuned.yaml").read_text()
    code, text = seedrl(*again, "--p99-ms", 0.001, cwd=tmp_path)
    assert (
        code == 1 and "no setting kept" in text and (tmp_path / "tuned.yaml").read_text() == before
    )


def test_an_interrupt_keeps_the_best_so_far(tmp_path: Path) -> None:
    args = (
        "tune",
        "cartpole",
        *HELD,
        "--p99-ms",
        "1000",
        "--out",
        "tuned.yaml",
        "--budget-s",
        "300",
        "--trial-s",
        "1",
    )
    with Command(*args, cwd=tmp_path) as command:
        command.until("  best")
        time.sleep(1.0)
        command.signal(signal.SIGINT)
        assert command.wait(20) == 130, command.text()
        assert command.all_gone_within(5)
    assert load_config(str(tmp_path / "tuned.yaml"), []).workers.num >= 1
    assert "keeping the best so far" in command.text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--p99-ms", -1, "--out", "a.yaml"), "--p99-ms"), (("--p99-ms", "nan", "--out", "a.yaml"), "--p99-ms"),
        (("--p99-ms", 5, "--out", "a.txt"), "a.yaml"), (("--p99-ms", 5, "--out", "none/a.yaml"), "no folder"),
        (("--p99-ms", 5, "--out", "a.yaml", "--budget-s", 0), "--budget-s"), (("--p99-ms", 5, "--out", "a.yaml", "worker.num=1"), "workers.num"),
        ((*HELD, "workers.num=1", "workers.envs_per_worker=8", "--p99-ms", 5, "--out", "a.yaml"), "nothing is left to search"),
        (("env.id=CartPol-v1", "--p99-ms", 5, "--out", "a.yaml"), "CartPole"),
    ],
)  # fmt: skip
def test_a_wrong_request_starts_nothing(
    tmp_path: Path, arguments: tuple[object, ...], named: str
) -> None:
    code, text = seedrl("tune", "cartpole", *arguments, cwd=tmp_path)
    assert code == 2 and named in text and len(text.splitlines()) <= 3, text
    assert not list(tmp_path.glob("a.*"))


def test_one_process_acts_as_the_engine_does() -> None:
    """The loop that tune compares with steps every environment once a round: its pace is that of the steps."""
    config = config_from(["env.id=seedrl.synthetic:flat", "env.kwargs={step_us: 500}"])
    assert 1000 < in_own_process(config, 4, 1.0) <= 2000
