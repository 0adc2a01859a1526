"""What a Reverb server in this process takes for the batches of `replay.py`: 32 items of 41 rows of one 84x84 frame. Run by it."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.metadata import version

import numpy as np
import reverb
import tensorflow as tf

SLOTS, LENGTH, BATCH = 32, 40, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    given = parser.parse_args()
    rows = int(given.gigabytes * 1e9) // (84 * 84) // SLOTS
    signature = {
        "obs": tf.TensorSpec([LENGTH + 1, 84, 84], tf.uint8), "action": tf.TensorSpec([LENGTH + 1], tf.int64),
        "reward": tf.TensorSpec([LENGTH + 1], tf.float32), "flags": tf.TensorSpec([LENGTH + 1, 4], tf.uint8),
    }  # fmt: skip
    table = reverb.Table(
        "items", sampler=reverb.selectors.Uniform(), remover=reverb.selectors.Fifo(), max_size=rows * SLOTS // LENGTH,
        rate_limiter=reverb.rate_limiters.MinSize(1), signature=signature,
    )  # fmt: skip
    server = reverb.Server([table])
    client, rng = reverb.Client(f"localhost:{server.port}"), np.random.default_rng(0)
    for _ in range(SLOTS):
        with client.trajectory_writer(num_keep_alive_refs=LENGTH + 1) as writer:
            for number in range(rows):
                # noise, as its chunks are compressed
                writer.append({
                    "obs": rng.integers(0, 255, (84, 84), np.uint8), "action": np.int64(0), "reward": np.float32(0), "flags": np.zeros(4, np.uint8),
                })  # fmt: skip
                if number >= LENGTH and number % LENGTH == 0:
                    writer.create_item("items", 1.0, {name: column[-LENGTH - 1 :] for name, column in writer.history.items()})  # fmt: skip
            writer.flush()
    dataset = reverb.TrajectoryDataset.from_table_signature(
        f"localhost:{server.port}", "items", max_in_flight_samples_per_worker=2 * BATCH
    )
    batches = iter(dataset.batch(BATCH).prefetch(1))
    next(batches)
    found, end = [], time.perf_counter() + 4
    while time.perf_counter() < end or len(found) < 10:
        begin = time.perf_counter()
        next(batches)
        found.append(time.perf_counter() - begin)
    print(json.dumps({"reverb": version("dm-reverb"), "rows": rows * SLOTS, "sample_us": round(statistics.median(found) * 1e6)}))  # fmt: skip


if __name__ == "__main__":
    main()
