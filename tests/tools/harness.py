"""A run without the learner process: the test itself reads the store and publishes weights. All else is the real thing."""

from __future__ import annotations

import json
import os
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
from seedrl.store.replay import Batch, ReplayReader
from seedrl.store.state import leaves
from seedrl.store.weights import Publisher, WeightsLayout
from seedrl.supervise import Supervisor
from seedrl.transport.slab import Phase
from seedrl.worker.envs import probe_spec


class Harness(Supervisor):
    """`with Harness(config, tmp_path) as run: run.begin(); batch = run.sample(4)`."""

    def __init__(
        self, config: Config, run_dir: Path, num_slots: int, listen: Listen | None = None
    ) -> None:
        env = config.env
        spec = probe_spec(env.id, env.kwargs, env.action_mask, env.stats)
        self.said: list[str] = []
        super().__init__(
            config, spec, run_dir, num_slots=num_slots, listen=listen, on_message=self.said.append
        )

    def _start_learner(self) -> None:
        self._learner_ready = True

    def _hand_store_to_learner(self, ready: dict[str, Any], fds: list[int]) -> None:
        queue_fd, weights_fd, *replay_fd = fds
        self.policy = make_policy(self.config.policy, self.spec)
        heads = Heads(self.spec.action, self.config.policy.action_distribution)
        like = self.policy.initial_state(1)
        plan = StorePlan.of(
            self.config, self.spec, heads.stored_specs(), leaves(like), self.layout.num_slots
        )
        shared = Shared(replay_fd[0] if replay_fd else None, ready["replay_handle"])
        memory = open_shared(torch.device(ready["replay_device"]), plan.blocks.nbytes, shared)
        storage = BlockStorage(plan.blocks, memory)
        control = host.map_shared(queue_fd, plan.queue.nbytes)
        self.reader = ReplayReader(
            storage,
            plan.queue,
            control,
            self._learner_bell,
            self._bell,
            like,
            self.config.replay.max_lag,
        )
        weights = WeightsLayout.of(self.policy)
        self.publisher = Publisher(host.map_shared(weights_fd, weights.nbytes), weights)
        self.publish(0)

    def publish(self, version: int) -> None:
        self.publisher.publish(self.policy, version)
        self.reader.publish_version(version)

    def begin(self, workers: int | None = None, **kwargs) -> None:
        """Starts the engine and the configuration's workers, waits for them, and acts."""
        own = self.config.workers
        num = own.num if workers is None else workers
        self.start_workers(num, own.envs_per_worker, own.groups, **kwargs)
        self.start()
        self.wait_for(lambda: self.seats_taken >= num * own.envs_per_worker)
        self.enter(Phase.ACT)

    def begin_remote(self, address: str, workers: int, *more: str) -> None:
        """Starts workers that attach at `address`, the engine being up; waits for them, and acts."""
        own = self.config.workers
        for index in range(workers):
            self.children.start(
                f"remote {index}", "seedrl.worker.loop",
                ["--address", address, "--env", self.config.env.id, "--env-kwargs", json.dumps(self.config.env.kwargs),
                 "--envs", str(own.envs_per_worker), "--groups", str(own.groups), "--check-steps", "0", "--reconnect-s", "30",
                 "--parent", str(os.getpid()), *more],
                log=self._logs / f"remote-{index}.txt",
            )  # fmt: skip
        self.wait_for(lambda: self.seats_taken >= workers * own.envs_per_worker)
        self.enter(Phase.ACT)

    def wait_for(self, reached, limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while not reached():
            self.pump(0.005)
            assert time.monotonic() < deadline, "waited too long; " + "; ".join(self.said)

    def sample(self, batch_size: int, limit_s: float = 30.0) -> Batch:
        deadline = time.monotonic() + limit_s
        while (batch := self.reader.sample(batch_size, timeout_s=0.05)) is None:
            self.pump(0)
            assert time.monotonic() < deadline, "no batch; " + "; ".join(self.said)
        self.pump(0)
        return batch

    def finish(self) -> tuple[dict[str, int], dict[str, int]]:
        """Stops acting; returns the engine's and the reader's accounts."""
        self.enter(Phase.EVALUATE)
        self.wait_for(lambda: self.board.get("acting") == Phase.EVALUATE)
        return self.accounts(), self.reader.accounts()

    def kill_worker(self, index: int, number: int = 9) -> None:
        os.kill(self._workers[index].child.pid, number)
