"""What README and docs tell a user to write and to type works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from runs import seedrl

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def _commands(page: Path) -> list[str]:
    text = page.read_text()
    return [
        line.strip().partition("   #")[0].strip()
        for line in text.splitlines()
        if re.match(r" {4}seedrl \w", line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize(
    ("page", "command"), [(page, command) for page in PAGES for command in _commands(page)], ids=str
)
def test_every_command_shown_is_understood(
    page: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed as the shell and the command line do, and its configuration read; nothing is started."""
    import seedrl.cli as cli
    from seedrl.config import load_config

    arguments = shlex.split(command)[1:]
    called = []
    monkeypatch.setattr(cli, "_run", lambda run, *given: called.append((run.__name__, given)))
    if "CONFIG" in arguments or "RUN_DIR" in arguments:
        return
    if "--help-config" in arguments:
        return
    cli.app(arguments, standalone_mode=False)
    name, given = called[0]
    if name in ("train", "serve"):
        load_config(given[0], given[1])


def test_the_environment_of_the_docs_trains(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_blocks("docs/environment.md")[0])
    (command,) = [
        line for line in _commands(ROOT / "docs/environment.md") if "mine:Corridor" in line
    ]
    more = ["run.max_seconds=2", "evaluation.episodes=4", "workers.num=1", "--run-dir", "run"]
    code, text = seedrl(*shlex.split(command)[1:], *more, cwd=tmp_path)
    assert code == 0 and "greedy evaluation: 4 episodes" in text, text
    assert "stat_distance" in (tmp_path / "run/metrics.jsonl").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/policy.md"])
def test_the_policies_of_the_docs_train(tmp_path: Path, page: str) -> None:
    (tmp_path / "mine.py").write_text(_blocks(page)[0])
    (command,) = [line for line in _commands(ROOT / page) if "policy.name=mine:" in line]
    more = ["run.max_seconds=2", "evaluation.episodes=4", "workers.num=1", "--run-dir", "run"]
    code, text = seedrl(*shlex.split(command)[1:], *more, cwd=tmp_path)
    assert code == 0 and "greedy evaluation: 4 episodes" in text, text


def test_options_that_no_other_test_turns_work_together(tmp_path: Path) -> None:
    more = [
        "learner.precision=bfloat16", "learner.optimizer=rmsprop", "learner.learning_rate=1e-3", "policy.core=gru", "policy.core_size=32",
        "learner.burn_in=8", "learner.unroll_length=12", "replay.block_length=4", "evaluation.slots=4", "env.reward_clip=1",
        "workers.num=1", "workers.groups=4", "batching.max_batch=8", "algorithm.lambda=0.9", "algorithm.normalise_advantages=true",
        "run.max_seconds=4", "evaluation.episodes=4", "run.log_every_s=0.3", "learner.max_grad_norm=1",
    ]  # fmt: skip
    code, text = seedrl("train", "cartpole", *more, "--run-dir", "run", cwd=tmp_path)
    assert code == 0 and "greedy evaluation: 4 episodes" in text, text
    assert "evaluation_return_mean" in (tmp_path / "run/metrics.jsonl").read_text()
