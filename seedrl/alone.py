"""What one process does that steps its environments and the policy in turn: what the engine has to beat.

The same groups and the same acting step as everywhere, over rows of this process's own memory: no other process, no handover, no
replay. Where environments cost next to nothing, it wins; `seedrl tune` says so.

`python -m seedrl.alone --envs N --seconds S`, the configuration as JSON on standard input, prints {"steps_per_s": ...}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
import torch

from seedrl.config import Config
from seedrl.engine.step import PolicyStep
from seedrl.policy.base import Heads, make_policy
from seedrl.spec import EnvSpec
from seedrl.transport.slab import Slab, SlabLayout
from seedrl.worker.loop import Worker
from seedrl.worker.loop import parser as worker_parser

_WARM_UP_S = 0.5


def worker_for(config: Config, envs: int) -> Worker:
    """A worker with `envs` environments in one group, not attached to anybody."""
    env = config.env
    return Worker(worker_parser().parse_args([
        "--address", "none", "--env", env.id, "--env-kwargs", json.dumps(env.kwargs), "--envs", str(envs), "--groups", "1",
        "--on-nan", env.on_nan, "--index", "0", *(["--action-mask", env.action_mask] if env.action_mask else []),
        *(part for name in env.stats for part in ("--stat", name)),
    ]))  # fmt: skip


def acting(config: Config, spec: EnvSpec, slab: Slab, envs: int) -> PolicyStep:
    """The policy's step over the rows of `slab`."""
    torch.set_num_threads(config.engine.threads)
    policy = make_policy(config.policy, spec).eval()
    heads = Heads(spec.action, config.policy.action_distribution)
    return PolicyStep(policy, heads, slab, envs, config.run.seed, greedy=False)


def measure(config: Config, envs: int, seconds: float) -> float:
    """Environment steps a second of `envs` environments, each a row of every batch.

    Raises: what making an environment or a policy raises.
    """
    worker = worker_for(config, envs)
    try:
        spec = worker.build()
        layout = SlabLayout.of(spec, envs, 1)
        slab = Slab(np.zeros(layout.nbytes, np.uint8), layout)
        worker.seat(spec, [slab.group_view(0, envs)])
        (group,) = worker.groups
        step, rows = acting(config, spec, slab, envs), np.arange(envs)
        group.reset()

        def act(seconds: float) -> float:
            rounds, begin = 0, time.perf_counter()
            while time.perf_counter() < begin + seconds:
                step.ingest(rows)
                step.forward(rows, None)
                step.answer(rows)
                group.step()
                group.faults.clear()
                rounds += 1
            return envs * rounds / (time.perf_counter() - begin)

        with torch.inference_mode():
            act(_WARM_UP_S)
            return act(seconds)
    finally:
        worker.close()


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--envs", type=int, required=True)
    arguments.add_argument("--seconds", type=float, required=True)
    given = arguments.parse_args()
    config = Config.model_validate(json.load(sys.stdin))
    print(json.dumps({"steps_per_s": measure(config, given.envs, given.seconds)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
