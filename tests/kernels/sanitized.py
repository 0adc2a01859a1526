"""Every launcher on odd shapes, with its kernel compiled under the address and undefined-behaviour sanitizers (see test_build.py).

Prints the kernels that ran.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from csrc_free_kernels import build, q_targets, returns
from tests.kernels.compilers import HostBackend

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def exercise_returns(rows: int, columns: int) -> None:
    log_probs, rewards, values = torch.randn(3, rows, columns).unbind(0)
    terminated, first = torch.rand(2, rows, columns).lt(0.3).unbind(0)
    returns.launch_vtrace_rows(log_probs, log_probs, rewards, values, terminated, first, 0.9)
    returns.launch_vtrace_rows(log_probs[1:].clone(), log_probs[1:].clone(), rewards.clone(), values.clone(), terminated, first, 0.9)  # fmt: skip
    returns.launch_vtrace(log_probs, log_probs, values, rewards, values, torch.zeros(columns))
    returns.launch_gae_rows(rewards, values, terminated, first, 0.9, 0.95)
    q_targets.launch_n_step(rewards, values, terminated, first, 0.9, 3)


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
    if len(sys.argv) > 2:
        one_column_too_many()
    for rows, columns in ((1, 3), (2, 1), (7, 257), (5, 0)):
        exercise_returns(rows, columns)
    print(*sorted(set(backend.launched)))
