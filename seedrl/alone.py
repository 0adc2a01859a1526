"""What one process does that steps its environments and the policy in turn: what the engine has to beat.

The same groups and the same acting step as everywhere, over rows of this process's own memory: no other process, no handover, no
replay. Where environments cost next to nothing, it wins; `seedrl tune` says so.

`python -m seedrl.alone --envs N --seconds S`, the configuration as JSON on standard input, prints {"steps_per_s": ...}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np
import torch

from seedrl.config import Config
from seedrl.engine.step import PolicyStep
from seedrl.errors import RunError
from seedrl.policy.agent import make_agent
from seedrl.spec import EnvSpec
from seedrl.transport.slab import Slab, SlabLayout
from seedrl.worker.loop import Worker, env_arguments
from seedrl.worker.loop import parser as worker_parser

_WARM_UP_S = 0.5


def acting(config: Config, spec: EnvSpec, slab: Slab, envs: int) -> PolicyStep:
    """The policy's step over the rows of `slab`."""
    torch.set_num_threads(config.engine.threads)
    policy, heads = make_agent(config, spec, envs)
    return PolicyStep(
        policy.eval(),
        heads,
        slab,
        envs,
        config.run.seed,
        greedy=False,
        frame_stack=config.env.frame_stack,
    )


def measure(config: Config, envs: int, seconds: float) -> float:
    """Environment steps a second of `envs` environments, each a row of every batch.

    Raises: what making an environment or a policy raises.
    """
    given = [
        "--address",
        "none",
        "--index",
        "0",
        *env_arguments(config.env, config.env.action_mask, envs, 1),
    ]
    worker = Worker(worker_parser().parse_args(given))
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


def in_own_process(config: Config, envs: int, seconds: float) -> float:
    """`measure` in a process of its own. `config.env.action_mask` must name the mask, where there is one.

    Raises: RunError with the last thing that it said, when it fails.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "seedrl.alone", "--envs", str(envs), "--seconds", str(seconds)],
        input=json.dumps(config.model_dump(mode="json", by_alias=True)), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if ran.returncode:
        raise RunError(what=(ran.stderr.strip().splitlines() or ["no output"])[-1])
    steps_per_s: float = json.loads(ran.stdout.splitlines()[-1])["steps_per_s"]
    return steps_per_s


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
