"""What TorchRL's replay buffer takes for the batches of `replay.py`: 32 slices of 41 rows of one 84x84 frame. Run by it."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

SLOTS, ROWS, BATCH = 32, 41, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    capacity = int(given.gigabytes * 1e9) // (84 * 84) // SLOTS
    torch.set_num_threads(given.threads)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity * SLOTS), batch_size=BATCH * ROWS,
        sampler=SliceSampler(slice_len=ROWS, traj_key="slot", strict_length=True, cache_values=True),
    )  # fmt: skip
    for slot in range(SLOTS):
        buffer.extend(TensorDict({
            "obs": torch.randint(0, 255, (capacity, 84, 84), dtype=torch.uint8), "action": torch.zeros(capacity, dtype=torch.int64),
            "reward": torch.zeros(capacity), "flags": torch.zeros(capacity, 4, dtype=torch.uint8), "log_prob": torch.zeros(capacity),
            "value": torch.zeros(capacity), "version": torch.zeros(capacity, dtype=torch.int64),
            "slot": torch.full((capacity,), slot),
        }, [capacity]))  # fmt: skip
    buffer.sample()
    found, end = [], time.perf_counter() + 4
    while time.perf_counter() < end or len(found) < 10:
        begin = time.perf_counter()
        buffer.sample()
        found.append(time.perf_counter() - begin)
    print(json.dumps({"torchrl": "TensorDictReplayBuffer, SliceSampler", "rows": capacity * SLOTS, "sample_us": round(statistics.median(found) * 1e6)}))  # fmt: skip


if __name__ == "__main__":
    main()
