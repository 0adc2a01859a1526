"""The page for Prometheus, read with the official client's parser."""

from __future__ import annotations

import json
import mmap
import re
import socket
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runs import Command, overrides, seedrl
from seedrl.errors import AddressError
from seedrl.store.board import BatchReader, Board
from seedrl.watch.prometheus import Figures, Page, parse

ROOT = Path(__file__).parents[2]


def fetch(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }  # fmt: skip


def test_the_page_says_what_the_board_says() -> None:
    board = Board(mmap.mmap(-1, Board.nbytes(0)), 0)
    reader, rng = BatchReader(board), np.random.default_rng(0)
    rtt_ns = []
    for number in range(700):
        asks = np.exp(rng.normal(13, 2, (3, 2))).astype(np.int64)
        rtt_ns += asks[:, 0].tolist()
        asked = np.pad(asks, ((0, 0), (2, 12)))  # the sequence and the time of asking before them
        board.log_batch(0, *np.cumsum(rng.integers(1, 10**6, 5)).tolist(), 10**6, 1 + number % 128, np.arange(3), asked)  # fmt: skip
    board.write_batches()
    reader.count()
    board.add("env_steps", 123_456)
    board.add("dropped_detached", 7)
    board.add("blocked_lag_ns", 2_500_000_000)
    record = {"return_mean": 12.5, "updates": 3, "note": "no number", "loss": None}
    page = Page("127.0.0.1:0", Figures(board, 64, lambda: record))
    try:
        found = fetch(page.address)
        record["return_mean"] = 13.5
        board.add("env_steps", 1)
        again = fetch(page.address)
    finally:
        page.close()
    assert found["seedrl_environment_steps_total", ()] == 123_456
    assert again["seedrl_environment_steps_total", ()] == 123_457
    assert found["seedrl_rows_dropped_total", (("reason", "detached"),)] == 7
    assert found["seedrl_blocked_seconds_total", (("by", "lag"),)] == 2.5
    assert found["seedrl_slots", ()] == 64
    assert found["seedrl_record", (("name", "return_mean"),)] == 12.5
    assert again["seedrl_record", (("name", "return_mean"),)] == 13.5
    assert ("seedrl_record", (("name", "note"),)) not in found
    name = "seedrl_round_trip_seconds"
    assert found[f"{name}_count", ()] == len(rtt_ns) == 2100
    assert found[f"{name}_sum", ()] == pytest.approx(sum(rtt_ns) * 1e-9)
    edges = {float(labels[0][1]): count for (key, labels), count in found.items() if key == f"{name}_bucket"}  # fmt: skip
    assert sorted(edges.values()) == [edges[edge] for edge in sorted(edges)]
    for edge, count in edges.items():
        assert np.sum(np.array(rtt_ns) <= edge * 1e9) <= count <= np.sum(np.array(rtt_ns) <= edge * 1e9 * (1 + 1 / 64) + 1)  # fmt: skip
    for stage in ("wait", "ingest", "forward", "answer", "append"):
        assert found["seedrl_batch_seconds_count", (("stage", stage),)] == 700
    rows = [1 + number % 128 for number in range(700)]
    assert found["seedrl_batch_rows_bucket", (("le", "64.0"),)] == sum(row <= 64 for row in rows)


def test_every_name_is_explained_and_the_dashboard_asks_for_no_other() -> None:
    board = Board(mmap.mmap(-1, Board.nbytes(0)), 0)
    text = (ROOT / "docs/metrics.md").read_text()
    names = set()
    for family in Figures(board, 1, dict).collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"`{name}" in text, name
        names |= {name, *(f"{name}_bucket" for _ in [0] if family.type == "histogram")}
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"] for name in re.findall(r"seedrl_\w+", target["expr"])}  # fmt: skip
    assert asked and asked <= names, asked - names


def test_a_run_serves_its_page_and_every_name_of_its_records_is_explained(tmp_path: Path) -> None:
    more = overrides("CartPole-v1", {}, "run.max_seconds=600", "evaluation.episodes=0", "run.log_every_s=0.2", "run.metrics_listen=127.0.0.1:0")  # fmt: skip
    with Command("train", "cartpole", *more, "--run-dir", "run", cwd=tmp_path) as command:
        command.until("figures for Prometheus at http://")
        address = re.search(r"http://(\S+)/metrics", command.text())[1]
        metrics = tmp_path / "run/metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert command.process.poll() is None, command.text()
            time.sleep(0.05)
        found = fetch(address)
        line = json.loads(metrics.read_text().splitlines()[-1])
    assert found["seedrl_environment_steps_total", ()] > 0
    assert found["seedrl_batch_seconds_count", (("stage", "forward"),)] > 0
    text = (ROOT / "docs/metrics.md").read_text()
    assert [name for name in line if f"`{name}`" not in text and not name.startswith("stat_")] == []
    assert ("seedrl_record", (("name", "steps_per_s"),)) in found


def test_an_address_that_cannot_be_had_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for wrong in ("9400", "host", "127.0.0.1:99999", "http://x:1"):
        with pytest.raises(AddressError, match="is not HOST:PORT"):
            parse(wrong)
    assert parse("[::1]:9400") == ("::1", 9400)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"run.metrics_listen=127.0.0.1:{taken.getsockname()[1]}"
        code, text = seedrl("train", "cartpole", listen, "--run-dir", "run", cwd=tmp_path)
    assert code == 2 and "run.metrics_listen" in text and "in use" in text, text
