"""What limits a run, told from its figures: by four systems that are built to be limited by each of the four."""

from __future__ import annotations

import io
import json
import mmap
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from harness import Harness
from proxy import Proxy
from runs import Command, overrides, seedrl, settings
from seedrl.listen import Listen
from seedrl.store.board import BatchReader, Board
from seedrl.watch.page import page
from seedrl.watch.window import Shares, Window, verdict


def test_a_window_forgets_what_is_older_than_five_seconds() -> None:
    board, now = Board(mmap.mmap(-1, Board.nbytes(0)), 0), 100.0
    reader, window = BatchReader(board), Window(board, lambda: now)

    def batches(count: int, forward_ns: int) -> None:
        for _ in range(count):
            begin = int(now * 1e9)
            times = (begin - 1000, begin, begin + 100, begin + 100 + forward_ns, begin + 200 + forward_ns, begin + 300 + forward_ns, 10)  # fmt: skip
            board.log_batch(*times, 24, np.arange(2), np.full((2, 16), 10**6))
            board.add("env_steps", 24)
        board.write_batches()
        reader.count()

    batches(50, 10**9)
    for _ in range(10):
        now += 1.0
        window.tick()
        batches(100, 2 * 10**6)
    found = window.figures(2)
    assert found["window_s"] == pytest.approx(4.0)
    assert found["batches_per_s"] == pytest.approx(125) and found["steps_per_s"] == pytest.approx(3000)  # fmt: skip
    assert found["stage_us"]["forward"]["p50"] == pytest.approx(2000, rel=0.01)
    assert found["stage_us"]["forward"]["max"] == pytest.approx(2000, rel=0.01)
    assert found["batch_rows"] == {"32": 500}
    # 500 batches of 2 ms in 4 s; 1000 environment steps of 1 ms by two workers
    assert found["shares"]["engine"] == pytest.approx(0.25, rel=0.01)
    assert found["shares"]["workers"] == pytest.approx(0.125, rel=0.01)
    assert json.loads(json.dumps(found)) == found


def test_a_window_without_batches_has_no_figures() -> None:
    found = Window(Board(mmap.mmap(-1, Board.nbytes(0)), 0)).figures(0)
    assert found["rtt_us"]["p50"] is None and found["limited_by"] == "nothing" and found["batch_rows"] == {}  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "limit"),
    [
        (Shares(0.5, 0.9, 0.9, 0.9), "learner"), (Shares(0.1, 0.9, 0.3, 0.6), "engine"), (Shares(0.0, 0.3, 0.9, 0.6), "environments"),
        (Shares(0.0, 0.1, 0.1, 0.8), "transport"), (Shares(0.0, 0.5, 0.3, 0.2), "engine"), (Shares(0.0, 0.0, 0.0, 0.0), "nothing"),
    ],
)  # fmt: skip
def test_the_verdict(shares: Shares, limit: str) -> None:
    assert verdict(shares)[0] == limit


@pytest.mark.parametrize("limit", ["environments", "engine", "learner", "transport"])
def test_the_verdict_on_a_system_built_to_be_limited_by_it(tmp_path: Path, limit: str) -> None:
    step_us = 1000.0 if limit == "environments" else 0.0
    policy = {"name": "system_policies:slow_to_act"} if limit == "engine" else {"hidden": [16]}
    config = settings(
        "seedrl.synthetic:flat", {"step_us": step_us}, policy=policy, learner={"unroll_length": 8, "batch_size": 4},
        workers={"num": 1, "envs_per_worker": 4, "groups": 1},
    )  # fmt: skip
    listen = Listen("tcp://127.0.0.1:0") if limit == "transport" else None
    with Harness(config, tmp_path, num_slots=4, listen=listen) as run:
        if limit == "transport":
            run.start()
            quiet = {"drop": 0, "double": 0, "delay": 1.0, "longest_s": 0.04, "cut_every_s": 1e9}
            with Proxy(run.listener.address, **quiet) as proxy:
                run.begin_remote(proxy.address, 1)
                found = _after_seconds(run, learns=True)
        else:
            run.begin()
            found = _after_seconds(run, learns=limit != "learner")
    assert found["limited_by"] == limit, (found["why"], found["shares"])
    assert len(found["workers"]) == 1 and found["free_slots"] == 0
    if limit == "environments":
        assert found["workers"][0]["env_step_us"] > 3900  # four of them, a millisecond each
    if limit == "engine":
        assert found["stage_us"]["forward"]["p50"] > 9900
        assert found["waiting_slots"] in (0, 4)


def _after_seconds(run: Harness, *, learns: bool) -> dict:
    run.running = True
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        run.pump(0.01)
        while learns and run.reader.sample(4, timeout_s=0) is not None:
            pass
    return run.controls.figures()


def test_top_from_another_terminal(tmp_path: Path) -> None:
    more = overrides("CartPole-v1", {}, "run.max_seconds=600", "evaluation.episodes=0", "run.log_every_s=0.2")  # fmt: skip
    with Command("train", "cartpole", *more, "--run-dir", "run", cwd=tmp_path) as command:
        command.until("processes ")
        time.sleep(2.0)
        code, text = seedrl("top", "run", "--once", "--json", cwd=tmp_path)
        assert code == 0, text
        figures = json.loads(text.splitlines()[-1])
        assert figures["steps_per_s"] > 0 and figures["workers"][0]["env"] == "CartPole-v1"
        assert figures["limited_by"] in ("environments", "engine", "learner", "transport")
        code, text = seedrl("top", "run", "--once", cwd=tmp_path)
        assert code == 0 and "limited by: " in text and "8 of 8 slots taken" in text
        shown = io.StringIO()
        Console(file=shown, width=160, force_terminal=True).print(page(figures))
        for part in ("forward", "round trip", "rows of a batch", "CartPole-v1", "limited by"):
            assert part in shown.getvalue()
    code, text = seedrl("top", "run", "--once", cwd=tmp_path)
    assert code == 2 and "no server answers" in text
