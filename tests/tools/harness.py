"""A run without the learner process: the test itself reads the store and publishes weights. All else is the real thing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from seedrl.config import Config
from seedrl.learn.loop import open_store
from seedrl.listen import Listen
from seedrl.policy.agent import make_agent
from seedrl.store.batch import Batch
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
        self.policy, _ = make_agent(self.config, self.spec)
        self.reader, self.publisher = open_store(
            self.config, self.spec, self.policy, self.layout.num_slots, ready, fds, self._learner_bell, self._bell
        )  # fmt: skip
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
