"""Drawing from the store: bandwidth against a plain copy of the same bytes, host time as the store grows, beside TorchRL's replay buffer.

python benchmarks/replay.py [--gigabytes 1 2 4] [--repeats 3] [--peer]
python benchmarks/replay.py --behind [--step-ms 20]

Batches of [T=40, B=32] unrolls of one 84x84 frame a row, from a store on the CPU. The copy is of as many bytes between two arrays
that are in memory already. --peer installs TorchRL and Reverb into build/peers and asks TensorDictReplayBuffer for slices, a Reverb server for items of 41 rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from peers import ENVIRONMENT, HERE, interpreter

from seedrl.replay import ReplayStore

FRAME, SLOTS, LENGTH, BATCH = (84, 84), 32, 40, 32
ROWS = LENGTH + 1


def filled(gigabytes: float, mode: str) -> ReplayStore:
    capacity = int(gigabytes * 1e9) // (84 * 84)
    store = ReplayStore(
        spaces.Box(0, 255, FRAME, np.uint8), spaces.Discrete(6), num_slots=SLOTS, capacity=capacity, mode=mode, unroll_length=LENGTH,
        batch_size=BATCH,
    )  # fmt: skip
    frames = np.random.default_rng(0).integers(0, 255, (SLOTS, *FRAME), np.uint8)
    for _ in range(-(-capacity // SLOTS)):
        store.append(obs=frames, action=0, reward=0.0, terminated=False, truncated=False, first=False)  # fmt: skip
    return store


def behind(kind: str, compress: bool, step_ms: float) -> dict[str, Any]:
    """A draw while the learner works `step_ms` between two of them: all on the device, or nine tenths of it behind."""
    gib = {"device": {}, "memory": {"host_gib": 0.9}, "file": {"file_gib": 0.9}}[kind]
    capacity = int((1.0 if kind == "device" else 0.1) * 1e9) // (84 * 84)
    store = ReplayStore(
        spaces.Box(0, 255, FRAME, np.uint8), spaces.Discrete(6), num_slots=SLOTS, capacity=capacity, mode="uniform", unroll_length=LENGTH,
        batch_size=BATCH, compress=compress and kind != "device", **gib,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (SLOTS, *FRAME), np.uint8)
    for number in range(int(1e9) // (84 * 84) // SLOTS):
        frames[:, number % 84] = rng.integers(
            0, 255, (SLOTS, 84), np.uint8
        )  # a row of a frame that moves
        store.append(obs=frames, action=0, reward=0.0, terminated=False, truncated=False, first=False)  # fmt: skip
        if number % 32 == 0 and kind != "device":
            store._reader._take_in()  # type: ignore[attr-defined]
            while not store._reader.tiers.idle():  # type: ignore[attr-defined]
                time.sleep(0.001)
    work, found = torch.randn(256, 256), []
    for _ in range(150):
        begin = time.perf_counter()
        store.sample()
        drawn = time.perf_counter()
        found.append(drawn - begin)
        while time.perf_counter() - drawn < step_ms * 1e-3:
            torch.mm(work, work)
    stats = store.stats()
    return {
        "kept_in": kind, "compress": compress, "kept_rows": stats["kept_rows"], "lost_blocks": stats.get("tier_lost_blocks", 0),
        "compression": round(stats.get("tier_compression", 1.0), 1), "sample_us": round(statistics.median(found[20:]) * 1e6),
    }  # fmt: skip


def timed(call: Callable[[], Any], seconds: float = 2.0) -> float:
    """Median microseconds of a call."""
    call()
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 20:
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found) * 1e6


def copied() -> float:
    """Microseconds of a plain copy of a batch's frames, each time from another place."""
    source = np.ones((64, ROWS * BATCH, *FRAME), np.uint8)
    into, turn = np.ones_like(source[0]), iter(range(10**9))
    return timed(lambda: np.copyto(into, source[next(turn) % 64]))


def draws_alone(store: ReplayStore) -> float:
    """Microseconds of a draw without its copy: what the host does to choose and to check."""
    gather = store._reader._gather
    batch = store.sample()

    def nothing(rows: np.ndarray, state_at: np.ndarray, slots: np.ndarray, items: np.ndarray) -> Any:  # fmt: skip
        return batch._replace(items=items)  # type: ignore[union-attr]

    store._reader._gather = nothing  # type: ignore[assignment]
    took = timed(store.sample, 1.0)
    store._reader._gather = gather
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--modes", nargs="+", default=["uniform", "prioritized"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch, in the store and in TorchRL"
    )
    parser.add_argument("--behind", action="store_true", help="rows behind the device instead")
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="of the learner, between two draws"
    )
    parser.add_argument("--peer", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.behind:
        for turn in range(given.repeats):
            for kind, compress in (("device", False), ("memory", False), ("memory", True), ("file", False), ("file", True)):  # fmt: skip
                print(json.dumps({"turn": turn, **behind(kind, compress, given.step_ms)}), flush=True)  # fmt: skip
        return
    for mode in given.modes:
        for gigabytes in given.gigabytes:
            store = filled(gigabytes, mode)
            ratios, sample_us, copy_us = [], [], []
            for _ in range(given.repeats):
                sample_us.append(timed(store.sample))
                copy_us.append(copied())
                ratios.append(copy_us[-1] / sample_us[-1])
            print(json.dumps({
                "mode": mode, "gigabytes": gigabytes, "unrolls": store.stats()["kept_rows"] // LENGTH,
                "sample_us": round(statistics.median(sample_us)), "copy_us": round(statistics.median(copy_us)),
                "share_of_copy": round(statistics.median(ratios), 2), "host_us": round(draws_alone(store)),
            }), flush=True)  # fmt: skip
            del store
    peers = (("torchrl", "replay_peer.py", ["--threads", str(given.threads)]), ("reverb", "reverb_peer.py", []))  # fmt: skip
    for name, script, more in peers if given.peer else ():
        python = interpreter(name)
        for gigabytes in given.gigabytes if python is not None else ():
            command = [str(python), str(HERE / script), "--gigabytes", str(gigabytes), *more]
            subprocess.run(command, check=False, env=ENVIRONMENT)


if __name__ == "__main__":
    main()
