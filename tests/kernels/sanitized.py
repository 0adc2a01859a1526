"""Every launcher on odd shapes, with its kernel compiled under the address and undefined-behaviour sanitizers (see test_build.py).

Prints the kernels that ran, and then ends with an error that is to be seen.
"""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from csrc_free_kernels import build, priority, q_targets, returns
from csrc_free_kernels.ingest import launch_ingest_rows
from csrc_free_kernels.philox import launch_random_words
from csrc_free_kernels.sample import launch_sample_discrete
from csrc_free_kernels.state import launch_gather_state, launch_scatter_rows
from csrc_free_kernels.unroll import launch_gather_frames, launch_gather_rows
from tests.kernels.compilers import HostBackend, sources

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def exercise_returns(rows: int, columns: int) -> None:
    # each memory of its own, with an end that the sanitizer knows
    log_probs, rewards, values = (torch.randn(rows, columns) for _ in range(3))
    terminated, first = (torch.rand(rows, columns) < 0.3 for _ in range(2))
    returns.launch_vtrace_rows(log_probs, log_probs, rewards, values, terminated, first, 0.9)
    returns.launch_vtrace_rows(log_probs[1:].clone(), log_probs[1:].clone(), rewards.clone(), values.clone(), terminated, first, 0.9)  # fmt: skip
    returns.launch_vtrace(log_probs, log_probs, values, rewards, values, torch.zeros(columns))
    returns.launch_gae_rows(rewards, values, terminated, first, 0.9, 0.95)
    q_targets.launch_n_step(rewards, values, terminated, first, 0.9, 3)


def exercise_rows(slots: int, columns: int) -> None:
    """Leaves of rows of 1, 3, 4, 16 and 20 bytes; slots and rows at both edges and beyond."""

    def leaves(*lead: int) -> list[torch.Tensor]:
        small = [torch.zeros(*lead, size, dtype=torch.uint8) for size in (1, 3, 0)]
        return [*small, *(torch.zeros(*lead, size) for size in (1, 4, 5))]

    length, blocks = 3, slots + 1
    some = (torch.arange(columns) - 1) % (slots + 3) - 1
    first = torch.rand(columns) < 0.3
    places = torch.arange(columns) % (blocks * length + 2) - 1
    launch_gather_state(leaves(slots), leaves(1), some, first, leaves(columns))
    launch_scatter_rows(leaves(slots), some, leaves(columns))
    launch_scatter_rows(leaves(1), places + 2**40, leaves(columns))
    launch_ingest_rows(leaves(slots), leaves(columns), leaves(blocks * length), some, places)
    launch_ingest_rows(leaves(slots), leaves(columns), (), some, places)
    rows = torch.arange(2 * columns).view(2, columns) % (slots + 2) - 1
    launch_gather_rows(leaves(slots), rows, leaves(2, columns))
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        for size in (7, 8):
            frames = torch.zeros(slots, size, dtype=torch.uint8)
            into = torch.zeros(1, columns, 3, size, dtype=dtype)
            launch_gather_frames(frames, rows, rows < 1, into)


def exercise_draws(rows: int, columns: int) -> None:
    launch_random_words(torch.zeros(columns, 4, dtype=torch.int64), 2**64 - 1)
    slots, step = torch.arange(columns), torch.tensor([-1])
    for branches in ((1,), (2, 3), (5,) * 3):
        logits = torch.randn(columns, sum(branches))
        mask = (logits < 1).to(torch.uint8)
        launch_sample_discrete(logits, mask, branches, 3, slots, step, slots % 2 == 0)
        launch_sample_discrete(logits, None, branches, 3, slots, step)
    for capacity in (rows, priority.CHUNK * rows, priority.CHUNK * rows + 1):
        tree = priority.empty(capacity, slots.device)
        places = torch.tensor([-1, 0, 0, capacity - 1, capacity])
        priority.launch_set_priorities(*tree, places, torch.rand(5))
        priority.launch_draw_places(*tree, 3, 1, step, 5, 0.5)


def one_column_too_many() -> None:
    rewards, values = torch.zeros(2, 257), torch.zeros(2, 257)
    flags = torch.zeros(2, 257, dtype=torch.bool)
    outputs = torch.zeros(3, 1, 257).unbind(0)
    build.launch(
        returns.SOURCE, "gae_rows", rewards.device, 2, *map(build.pointer, (rewards, values, flags, flags)),
        ctypes.c_float(0.9), ctypes.c_float(1.0), ctypes.c_int64(1), ctypes.c_int64(258), *map(build.pointer, outputs),
    )  # fmt: skip


if __name__ == "__main__":
    backend = HostBackend(Path(sys.argv[1]), FLAGS)
    build.backend = lambda: backend
    priority.THREADS = 3  # on the CPU a block's threads are real ones
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(backend.library, sources()))
    for rows, columns in ((1, 3), (2, 1), (7, 257), (5, 0)):
        exercise_returns(rows, columns)
        exercise_rows(rows, columns)
        exercise_draws(rows, columns)
    print(*sorted(set(backend.launched)), flush=True)
    one_column_too_many()
