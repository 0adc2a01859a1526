"""The board: what the engine counts, in shared memory for everybody to read. One writer, no lock.

counters  int64 [len(COUNTERS)]
histograms, one after the other, of `metrics.Histogram.words()` words each
episodes  float64 [EPISODES, 5 + S]: slot, evaluation, return, length, version, stats; a ring that `episodes_head` counts
"""

from __future__ import annotations

import mmap

import numpy as np

from seedrl.metrics import Histogram

COUNTERS = (
    "acting", "batches", "rows_acted", "rows_stored", "env_steps", "evaluation_rows", "episodes_head", "interrupted_episodes",
    "dropped_worker_died", "dropped_detached", "dropped_shutdown", "blocked_room_ns", "blocked_lag_ns",
    "fired_full", "fired_all_ready", "fired_wait", "fired_hard_deadline", "live_slots", "unfinished_groups", "policy_version",
)  # fmt: skip
HISTOGRAMS = ("rtt_ns", "wait_ns", "ingest_ns", "forward_ns", "answer_ns", "append_ns", "deschedule_ns", "batch_rows", "env_step_ns")  # fmt: skip
EPISODES = 1 << 14
_FIXED = 5


class Board:
    """Views of the board's memory; `counter[name]` is written by the engine alone."""

    def __init__(self, memory: mmap.mmap, num_stats: int) -> None:
        words = np.frombuffer(memory, np.int64)
        self._counters = words[: len(COUNTERS)]
        self.at = {name: i for i, name in enumerate(COUNTERS)}
        at, size = len(COUNTERS), Histogram.words()
        self.histograms = {}
        for name in HISTOGRAMS:
            self.histograms[name] = Histogram(words[at : at + size])
            at += size
        width = _FIXED + num_stats
        self.episodes = words[at : at + EPISODES * width].view(np.float64).reshape(EPISODES, width)

    @staticmethod
    def nbytes(num_stats: int) -> int:
        return 8 * (
            len(COUNTERS) + len(HISTOGRAMS) * Histogram.words() + EPISODES * (_FIXED + num_stats)
        )

    def get(self, name: str) -> int:
        return int(self._counters[self.at[name]])

    def set(self, name: str, value: int) -> None:
        self._counters[self.at[name]] = value

    def add(self, name: str, value: int) -> None:
        self._counters[self.at[name]] += value

    def log_episodes(
        self, slots: np.ndarray, evaluation: np.ndarray, returns: np.ndarray, lengths: np.ndarray, version: int,
        stats: np.ndarray,
    ) -> None:  # fmt: skip
        """Adds ended episodes: arrays [E], stats [E, S]."""
        head = self.get("episodes_head")
        rows = np.arange(head, head + slots.size) % EPISODES
        ring = self.episodes
        ring[rows, 0], ring[rows, 1], ring[rows, 2], ring[rows, 3] = (
            slots,
            evaluation,
            returns,
            lengths,
        )
        ring[rows, 4] = version
        ring[rows, _FIXED:] = stats
        self.set("episodes_head", head + slots.size)


class EpisodeReader:
    """Reads the board's ring of episodes from where it stands now."""

    def __init__(self, board: Board) -> None:
        self._board, self._seen = board, board.get("episodes_head")

    def read(self) -> np.ndarray:
        """float64 [E, 5 + S], the episodes that ended since the last call; the oldest are lost when over EPISODES did."""
        head = self._board.get("episodes_head")
        begin, self._seen = max(self._seen, head - EPISODES), head
        return self._board.episodes[np.arange(begin, head) % EPISODES].copy()
