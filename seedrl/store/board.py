"""The board: what the engine counts, in shared memory for everybody to read. No word has two writers, and there is no lock.

counters  int64 [len(COUNTERS)], written by the engine
batches   int64 [BATCHES, 16]: a line for each batch, a ring that the counter `batches` counts
asks      int64 [ASKS, 4]: a line for each group of those batches, a ring that `asks_head` counts
episodes  float64 [EPISODES, 5 + S]: slot, evaluation, return, length, version, stats; a ring that `episodes_head` counts
histograms, one after the other, of `metrics.Histogram.words()` words each: written by the supervisor, which counts the
          lines of the batches there, so that measuring a batch costs the engine one line

The engine writes the lines of several batches at once, as the memory of the rings is cold every time; at the latest 10 ms later if it
has nothing else to do, for which its bell may have to be rung.
"""

from __future__ import annotations

import mmap
from itertools import chain

import numpy as np

from seedrl.metrics import Histogram

COUNTERS = (
    "acting", "batches", "rows_acted", "rows_stored", "env_steps", "evaluation_rows", "episodes_head", "interrupted_episodes",
    "dropped_worker_died", "dropped_detached", "dropped_shutdown", "blocked_room_ns", "blocked_ratio_ns", "blocked_lag_ns",
    "fired_full", "fired_all_ready", "fired_wait", "fired_hard_deadline", "live_slots", "unfinished_groups", "policy_version",
    "asks_head",
)  # fmt: skip
BLOCKED = tuple(
    name for name in COUNTERS if name.startswith("blocked_")
)  # what the actors waited for
HISTOGRAMS = ("rtt_ns", "wait_ns", "ingest_ns", "forward_ns", "answer_ns", "append_ns", "deschedule_ns", "batch_rows", "env_step_ns")  # fmt: skip
EPISODES = 1 << 14
BATCHES = 1 << 13  # a second and more of the smallest batches
ASKS = 1 << 15
TOGETHER = 32  # batches whose lines are written at once
_MANY_GROUPS = ASKS // 8 // TOGETHER  # a batch of more is written at once
OLDEST_NS, BEGIN_NS, INGESTED_NS, FORWARDED_NS, ANSWERED_NS, APPENDED_NS, CPU_NS, ROWS, GROUPS, ASKS_AT = range(10)  # fmt: skip
# the last two of the step before, as the worker measured them
ASK_GROUP, ASK_PUBLISHED_NS, ASK_RTT_NS, ASK_STEP_NS = range(4)
STAGES = {  # of a batch: the words of its line between which each lies
    "wait": (OLDEST_NS, BEGIN_NS), "ingest": (BEGIN_NS, INGESTED_NS), "forward": (INGESTED_NS, FORWARDED_NS),
    "answer": (FORWARDED_NS, ANSWERED_NS), "append": (ANSWERED_NS, APPENDED_NS),
}  # fmt: skip
ENGINE_STAGES = tuple(STAGES)[1:]  # those in which the engine is at work
_LINE_WORDS, _ASK_WORDS = 16, 4
_FIXED = 5
ASKED = slice(1, 4)  # of what a group asked, the words PUBLISHED_NS to STEP_NS of transport.slab


class Board:
    """Views of the board's memory."""

    def __init__(self, memory: mmap.mmap, num_stats: int) -> None:
        words = np.frombuffer(memory, np.int64)
        # plain ints in and out: a fifth of the time of an array's scalars
        self._counters = memoryview(words[: len(COUNTERS)].data)
        self.at = {name: i for i, name in enumerate(COUNTERS)}
        at, size = len(COUNTERS), Histogram.words()
        self.batches = words[at : at + BATCHES * _LINE_WORDS].reshape(BATCHES, _LINE_WORDS)
        at += self.batches.size
        self.asks = words[at : at + ASKS * _ASK_WORDS].reshape(ASKS, _ASK_WORDS)
        at += self.asks.size
        self.histograms = {}
        for name in HISTOGRAMS:
            self.histograms[name] = Histogram(words[at : at + size])
            at += size
        # the batches not written yet, in lists of fixed length: half the time that struct.pack_into or array.array take among other work
        self._kept = 0
        self._lines: list[tuple[int, ...]] = [()] * TOGETHER
        self._groups, self._asked = ([np.zeros(0, np.int64)] * TOGETHER for _ in range(2))
        width = _FIXED + num_stats
        self.episodes = words[at : at + EPISODES * width].view(np.float64).reshape(EPISODES, width)

    @staticmethod
    def nbytes(num_stats: int) -> int:
        return 8 * (
            len(COUNTERS)
            + BATCHES * _LINE_WORDS
            + ASKS * _ASK_WORDS
            + len(HISTOGRAMS) * Histogram.words()
            + EPISODES * (_FIXED + num_stats)
        )

    def get(self, name: str) -> int:
        return self._counters[self.at[name]]

    def set(self, name: str, value: int) -> None:
        self._counters[self.at[name]] = value

    def add(self, name: str, value: int) -> None:
        self._counters[self.at[name]] += value

    @property
    def fired(self) -> int:
        """Batches so far; the counter `batches` is of those whose lines are written."""
        return sum(self._counters[_FIRED])

    def log_batch(
        self, oldest_ns: int, begin_ns: int, ingested_ns: int, forwarded_ns: int, answered_ns: int, appended_ns: int, cpu_ns: int,
        rows: int, groups: np.ndarray, asked: np.ndarray,
    ) -> None:  # fmt: skip
        """Adds a batch, to be written with others: of so many rows, of these groups, int64 [G], and what they asked, int64 [G, 16]."""
        kept, size = self._kept, groups.size
        self._groups[kept], self._asked[kept] = groups, asked
        self._lines[kept] = (
            oldest_ns, begin_ns, ingested_ns, forwarded_ns, answered_ns, appended_ns, cpu_ns, rows, size,
        )  # fmt: skip
        self._kept = kept + 1
        if self._kept == TOGETHER or size > _MANY_GROUPS:
            self.write_batches()

    def write_batches(self) -> None:
        """Writes and counts the batches that `log_batch` was told of."""
        kept = self._kept
        if not kept:
            return
        groups = np.concatenate(self._groups[:kept])
        asks = groups.size
        head = self._counters[_ASKS_HEAD]
        at = head % ASKS
        if at + asks > ASKS:  # they lie side by side
            head, at = head + ASKS - at, 0
        into = self.asks[at : at + asks]
        into[:, ASK_GROUP] = groups
        into[:, ASK_PUBLISHED_NS:] = np.concatenate(self._asked[:kept])[:, ASKED]
        number = self._counters[_BATCHES]
        words = np.fromiter(chain.from_iterable(self._lines[:kept]), np.int64, kept * ASKS_AT)
        words = words.reshape(kept, ASKS_AT)
        sizes, lines = words[:, GROUPS], np.arange(number, number + kept) % BATCHES
        self.batches[lines, :ASKS_AT] = words
        self.batches[lines, ASKS_AT] = head + sizes.cumsum() - sizes
        self._counters[_ASKS_HEAD] = head + asks
        self._counters[_BATCHES] = number + kept
        self._kept = 0

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


_FIRED = slice(COUNTERS.index("fired_full"), COUNTERS.index("fired_hard_deadline") + 1)
_BATCHES, _ASKS_HEAD = COUNTERS.index("batches"), COUNTERS.index("asks_head")


class BatchReader:
    """Counts the batches' lines in the histograms: the one that writes those. `lost` are lines overwritten before they were read."""

    def __init__(self, board: Board) -> None:
        self._board, self._seen, self.lost = board, board.get("batches"), 0

    def count(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts what came since the last call: to be called more often than the engine can fill the ring.

        Returns: the lines of those batches [n, 16], and of their groups [m, 4]: copies.
        """
        board = self._board
        head = board.get("batches")
        # the lines from `head` on may be half written: they stand where the oldest ones of a full ring stood
        begin = max(self._seen, head - BATCHES + TOGETHER)
        lines = board.batches[np.arange(begin, head) % BATCHES]
        groups, first = lines[:, GROUPS], lines[:, ASKS_AT]
        within = np.arange(int(groups.sum())) - np.repeat(np.cumsum(groups) - groups, groups)
        at = np.repeat(first, groups) + within
        asks = board.asks[at % ASKS]
        # not what the engine has overwritten meanwhile, or may be overwriting now
        whole = np.arange(begin, head) >= board.get("batches") - BATCHES + TOGETHER
        whole &= first > board.get("asks_head") - ASKS // 2
        asks, lines = asks[np.repeat(whole, groups)], lines[whole]
        self.lost += head - self._seen - len(lines)
        self._seen = head
        if not len(lines):
            return lines, asks
        histograms = board.histograms
        for stage, (start, end) in STAGES.items():
            histograms[f"{stage}_ns"].add_many(lines[:, end] - lines[:, start])
        busy = lines[:, APPENDED_NS] - lines[:, BEGIN_NS] - lines[:, CPU_NS]
        histograms["deschedule_ns"].add_many(busy)
        histograms["batch_rows"].add_many(lines[:, ROWS])
        histograms["rtt_ns"].add_many(asks[:, ASK_RTT_NS])
        histograms["env_step_ns"].add_many(asks[:, ASK_STEP_NS])
        return lines, asks


class EpisodeReader:
    """Reads the board's ring of episodes from where it stands now."""

    def __init__(self, board: Board) -> None:
        self._board, self._seen = board, board.get("episodes_head")

    def read(self) -> np.ndarray:
        """float64 [E, 5 + S], the episodes that ended since the last call; the oldest are lost when over EPISODES did."""
        head = self._board.get("episodes_head")
        begin, self._seen = max(self._seen, head - EPISODES), head
        return self._board.episodes[np.arange(begin, head) % EPISODES].copy()
