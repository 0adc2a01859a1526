"""Microseconds of the engine's thread for one batch, by stage: workers that are always ready, rows appended, nobody else running.

python benchmarks/engine.py [--policy mlp|lstm|cnn] [--envs 32] [--groups 1 2 4] [--batches 2000] [--device cuda] [--precision bfloat16]
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np
import torch
from gymnasium import spaces

from seedrl import host
from seedrl.config import Config
from seedrl.engine.batcher import Rule
from seedrl.engine.loop import Engine
from seedrl.engine.step import PolicyStep, state_leaves
from seedrl.policy.base import Heads, make_policy
from seedrl.spec import spec_from_spaces
from seedrl.store.blocks import BlockStorage
from seedrl.store.board import BATCHES, BatchReader, Board
from seedrl.store.memory import require_device
from seedrl.store.plan import StorePlan
from seedrl.transport import doorbell
from seedrl.transport.slab import (
    BASE,
    DOOR_EPOCH,
    DOOR_LINE,
    GENERATION,
    LEASED,
    PHASE,
    PUBLISHED_NS,
    SEQUENCE,
    SIZE,
    START,
    SUPERVISOR_LINE,
    Phase,
    Slab,
    SlabLayout,
)  # fmt: skip

POLICIES = {
    "mlp": {"hidden": [64, 64]},
    "lstm": {"hidden": [64, 64], "core": "lstm", "core_size": 128},
    "cnn": {"encoder": "nature"},
}
STAGES = ("ingest_ns", "forward_ns", "answer_ns", "append_ns")


def measure(
    policy_name: str, num_groups: int, envs: int, batches: int, device: str = "cpu", precision: str = "float32"
) -> dict[str, float]:  # fmt: skip
    box = spaces.Box(0, 255, (4, 84, 84), np.uint8) if policy_name == "cnn" else spaces.Box(-1, 1, (8,), np.float32)  # fmt: skip
    spec = spec_from_spaces(box, spaces.Discrete(6), action_mask=None, stats=(), env_id="none")
    slots = num_groups * envs
    config = Config.model_validate({
        "env": {"id": "none"}, "policy": POLICIES[policy_name], "learner": {"unroll_length": 20, "batch_size": slots},
    })  # fmt: skip
    layout = SlabLayout.of(spec, slots, num_groups)
    slab = Slab(host.map_shared(host.memfd("slab", layout.nbytes), layout.nbytes), layout)
    board = Board(host.map_shared(host.memfd("board", Board.nbytes(0)), Board.nbytes(0)), 0)
    counted = BatchReader(board)
    bell, doors = doorbell.make(), [doorbell.make() for _ in range(num_groups)]
    torch.set_num_threads(1)
    place = require_device(device, "--device")
    policy, heads = make_policy(config.policy, spec).eval().to(place), Heads(spec.action)
    plan = StorePlan.of(config, spec, heads.stored_specs(), state_leaves(policy), slots)
    memory = torch.zeros(plan.blocks.nbytes, dtype=torch.uint8, device=place)
    storage = BlockStorage(plan.blocks, memory)
    control = host.map_shared(host.memfd("control", plan.control.nbytes), plan.control.nbytes)
    writer = plan.writer(storage, control, bell)
    reader = plan.reader(storage, control, bell, bell, policy.initial_state(1))
    step = PolicyStep(policy, heads, slab, slots, 0, False, place, place, precision=precision)
    engine = Engine(slab, bell, doors, board, step, Rule(slots, 1, 0, 0), writer, None, None)
    for group in range(num_groups):
        line = slab.lease[group]
        line[[START, SIZE, BASE, GENERATION]] = group * envs, envs, 1 << 32, 1
        line[LEASED] = 1
        slab.asked[group, SEQUENCE] = 1 << 32
    slab.control[DOOR_LINE, DOOR_EPOCH] += 1
    slab.control[SUPERVISOR_LINE, PHASE] = Phase.ACT
    took_ns, before = 0, {}
    assert batches < BATCHES
    for number in range(batches + 200):
        if number == 200:  # the first ones warm up
            board.write_batches()
            counted.count()
            before = {name: board.histograms[name].copy() for name in STAGES}
            took_ns = 0
        slab.asked[:, PUBLISHED_NS] = time.monotonic_ns()
        slab.asked[:, SEQUENCE] += 1
        os.eventfd_write(bell, 1)
        begin = time.perf_counter_ns()
        engine.step()
        took_ns += time.perf_counter_ns() - begin
        while reader.sample(slots, timeout_s=0) is not None:
            pass
    board.write_batches()
    counted.count()
    stages = {name: board.histograms[name].since(before[name]) for name in STAGES}
    means = {name.replace("_ns", "_us"): round(h.mean * 1e-3, 1) for name, h in stages.items()}
    total = took_ns / batches * 1e-3
    rest = round(total - sum(means.values()), 1)
    return {"rows": slots, "total_us": round(total, 1), **means, "wait_and_measure_us": rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="mlp")
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    for groups in arguments.groups:
        found = measure(arguments.policy, groups, arguments.envs, arguments.batches, arguments.device, arguments.precision)  # fmt: skip
        print(json.dumps({"policy": arguments.policy, **found}), flush=True)


if __name__ == "__main__":
    main()
