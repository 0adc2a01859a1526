"""Steps a second by transport: workers that cost nothing, an MLP of 64-64, rows appended to replay, nobody learning from them.

python benchmarks/network.py [--transports shm zmq-ipc zmq-tcp curve] [--workers 4] [--envs 32] [--seconds 8] [--floor PATH]

With --floor the bare loop (a script of that path that takes --transport and prints one JSON line) runs before each, for the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from seedrl import host
from seedrl.config import Config
from seedrl.listen import Listen
from seedrl.policy.base import Heads, make_policy
from seedrl.store.blocks import BlockStorage
from seedrl.store.memory import Shared, open_shared
from seedrl.store.plan import StorePlan
from seedrl.store.replay import ReplayReader
from seedrl.store.state import leaves
from seedrl.store.weights import Publisher, WeightsLayout
from seedrl.supervise import Supervisor
from seedrl.transport.slab import Phase
from seedrl.transport.wire import make_keys
from seedrl.worker.envs import probe_spec

ENV = "benchmarks.synthetic:Still"


class Bare(Supervisor):
    """A run whose rows are taken from the queue and forgotten."""

    def _start_learner(self) -> None:
        self._learner_ready = True

    def _hand_store_to_learner(self, ready: dict[str, Any], fds: list[int]) -> None:
        queue_fd, weights_fd, *replay_fd = fds
        policy = make_policy(self.config.policy, self.spec)
        heads = Heads(self.spec.action, self.config.policy.action_distribution)
        like = policy.initial_state(1)
        plan = StorePlan.of(
            self.config, self.spec, heads.stored_specs(), leaves(like), self.layout.num_slots
        )
        shared = Shared(replay_fd[0] if replay_fd else None, ready["replay_handle"])
        storage = BlockStorage(
            plan.blocks,
            open_shared(torch.device(ready["replay_device"]), plan.blocks.nbytes, shared),
        )
        control = host.map_shared(queue_fd, plan.queue.nbytes)
        self.reader = ReplayReader(
            storage, plan.queue, control, self._learner_bell, self._bell, like
        )
        weights = WeightsLayout.of(policy)
        publisher = Publisher(host.map_shared(weights_fd, weights.nbytes), weights)
        publisher.publish(policy, 0)
        self.reader.publish_version(0)


def measure(transport: str, workers: int, envs: int, seconds: float) -> dict[str, Any]:
    config = Config.model_validate({
        "env": {"id": ENV}, "workers": {"num": workers, "envs_per_worker": envs, "groups": 1},
        "policy": {"hidden": [64, 64]}, "learner": {"unroll_length": 20, "batch_size": workers * envs},
    })  # fmt: skip
    spec = probe_spec(ENV, {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key: list[str] = []
        listen = None
        if transport == "zmq-ipc":
            listen = Listen(f"ipc://{folder}/gate")
        elif transport == "zmq-tcp":
            listen = Listen("tcp://127.0.0.1:0")
        elif transport == "curve":
            make_keys(folder / "keys", "worker")
            listen, key = (
                Listen("tcp://127.0.0.1:0", folder / "keys"),
                ["--key", str(folder / "keys/worker.key")],
            )
        with Bare(config, spec, folder, num_slots=workers * envs, listen=listen) as run:
            run.start()
            address = run.listener.address if run.listener is not None else f"unix://{run.address}"
            for index in range(workers):
                run.children.start(f"worker {index}", "seedrl.worker.loop", [
                    "--address", address, "--env", ENV, "--envs", str(envs), "--check-steps", "0", "--parent", str(os.getpid()), *key,
                ], log=folder / f"worker-{index}.txt")  # fmt: skip
            while run.seats_taken < workers * envs:
                run.pump(0.01)
            run.enter(Phase.ACT)

            def act(for_s: float) -> tuple[float, float]:
                begin, steps = time.monotonic(), run.board.get("rows_acted")
                while time.monotonic() - begin < for_s:
                    run.pump(0)
                    run.reader.sample(workers * envs, timeout_s=0.02)
                return run.board.get("rows_acted") - steps, time.monotonic() - begin

            act(1.0)
            rtt = run.board.histograms["rtt_ns"].copy()
            steps, took_s = act(seconds)
            rtt = run.board.histograms["rtt_ns"].since(rtt)
    return {
        "transport": transport, "workers": workers, "envs_per_worker": envs, "steps_per_s": round(steps / took_s),
        "rtt_us": {f"p{p}": round(rtt.percentile(p) * 1e-3) for p in (50, 99)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--transports", nargs="+", default=["shm", "zmq-ipc", "zmq-tcp", "curve"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--floor", type=Path, default=None)
    arguments = parser.parse_args()
    for _ in range(arguments.repeats):
        for transport in arguments.transports:
            ours = measure(transport, arguments.workers, arguments.envs, arguments.seconds)
            if arguments.floor is not None and transport != "curve":
                ran = subprocess.run(
                    [sys.executable, str(arguments.floor), "--transport", transport, "--workers", str(arguments.workers),
                     "--envs", str(arguments.envs), "--seconds", str(arguments.seconds), "--policy", "mlp"],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                floor = json.loads(ran.stdout.splitlines()[-1])
                ours["floor_steps_per_s"] = round(floor["steps_per_s"])
                ours["ratio"] = round(ours["steps_per_s"] / floor["steps_per_s"], 3)
            print(json.dumps(ours), flush=True)


if __name__ == "__main__":
    main()
