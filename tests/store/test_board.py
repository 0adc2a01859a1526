"""The board's lines of batches, and the reader that counts them: against histograms that were told directly."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from seedrl.metrics import Histogram
from seedrl.store.board import ASKS, BATCHES, HISTOGRAMS, TOGETHER, BatchReader, Board
from seedrl.transport.slab import LINE_WORDS, PUBLISHED_NS, RTT_NS, STEP_NS


@pytest.fixture
def board() -> Board:
    return Board(mmap.mmap(-1, Board.nbytes(0)), 0)


def log(board: Board, number: int, groups: int, told: dict[str, Histogram] | None) -> None:
    """A batch whose figures all differ."""
    rng = np.random.default_rng(number)
    wait, ingest, forward, answer, append = rng.integers(1, 10**7, 5).tolist()
    begin = 10**9 * number
    cpu = (ingest + forward + answer + append) // 2 if number % 3 else 10**9  # a clock may disagree
    times = np.cumsum([begin, ingest, forward, answer, append]).tolist()
    asks = rng.integers(1, 10**8, (groups, 2))
    asked = np.zeros((groups, LINE_WORDS), np.int64)
    asked[:, PUBLISHED_NS], asked[:, RTT_NS], asked[:, STEP_NS] = begin, *asks.T
    board.log_batch(begin - wait, *times, cpu, number, np.arange(groups), asked)
    if told is not None:
        values = {"wait_ns": wait, "ingest_ns": ingest, "forward_ns": forward, "answer_ns": answer, "append_ns": append, "batch_rows": number}  # fmt: skip
        for name, value in values.items():
            told[name].add(value)
        told["deschedule_ns"].add(max(0, times[-1] - begin - cpu))
        for rtt, step in asks.tolist():
            told["rtt_ns"].add(rtt)
            told["env_step_ns"].add(step)


def count(board: Board, reader: BatchReader) -> None:
    board.write_batches()
    reader.count()


def test_fired_counts_every_reason_at_once(board: Board) -> None:
    for number, reason in enumerate(("full", "all_ready", "wait", "hard_deadline")):
        board.add(f"fired_{reason}", 10**number)
    assert board.fired == 1111 and board.get("batches") == 0


def same(board: Board, told: dict[str, Histogram]) -> None:
    for name, histogram in told.items():
        np.testing.assert_array_equal(board.histograms[name]._words, histogram._words, name)


def test_what_is_counted_is_what_was_logged(board: Board) -> None:
    reader, told = BatchReader(board), {name: Histogram() for name in HISTOGRAMS}
    number = 0
    for round_ in range(40):  # past the end of both rings
        for _ in range(400):
            log(board, number, 1 + number % 9, told)
            number += 1
        if round_ % 3 != 1:
            count(board, reader)
    count(board, reader)
    assert number > BATCHES and board.get("asks_head") > 2 * ASKS
    assert board.get("batches") == number and reader.lost == 0
    same(board, told)


def test_a_reader_that_comes_too_late_says_what_it_lost(board: Board) -> None:
    reader, told = BatchReader(board), {name: Histogram() for name in HISTOGRAMS}
    for number in range(BATCHES + 500):
        log(board, number, 1, told if number >= 500 + TOGETHER else None)
    count(board, reader)
    assert reader.lost == 500 + TOGETHER  # the oldest lines of a full ring may be half overwritten
    same(board, told)


def test_large_batches_fill_the_ring_of_asks_first(board: Board) -> None:
    reader, told, groups = BatchReader(board), {name: Histogram() for name in HISTOGRAMS}, 1000
    kept = ASKS // 2 // groups
    for number in range(100):
        log(board, number, groups, told if number >= 100 - kept else None)
    count(board, reader)
    assert 100 - kept <= reader.lost <= 100 - kept + 1
    if reader.lost == 100 - kept:
        same(board, told)
    for number in range(100, 100 + kept // 2):
        log(board, number, groups, None)
    lost = reader.lost
    count(board, reader)
    assert reader.lost == lost
