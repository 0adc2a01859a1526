"""The bare loop under `seedrl bench`: nothing in it could be left out. What the product's speed is a ratio to.

Worker processes write rows into a shared slab, then a sequence number, ring one bell and sleep on their own; one engine process takes the
groups that ask, runs the policy once, samples, writes the actions and rings. No replay, no checks, no telemetry, no deadlines.
With `--transport zmq-ipc | zmq-tcp` rows and actions are messages of a DEALER and a ROUTER instead.

python benchmarks/floor.py [--workload S|A|L|C] [--workers 4] [--envs-per-worker 32] [--transport shm] [--seconds 5] [--step-us 0]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

Policy = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
WARM_UP_S, EPISODE_STEPS, ACTIONS = 0.5, 200, 6
SHAPES: dict[str, tuple[tuple[int, ...], Any, int]] = {
    "S": ((8,), np.float32, ACTIONS), "A": ((4, 84, 84), np.uint8, ACTIONS), "L": ((8,), np.float32, ACTIONS),
    "C": ((4,), np.float32, 2),
}  # fmt: skip


class Slab:
    """Columns [W, E, ...] in shared memory; words that two processes touch lie on cache lines of their own."""

    def __init__(self, workers: int, envs: int, shape: tuple[int, ...], dtype: Any) -> None:
        rows = (workers, envs)
        self.obs = self._column((*rows, *shape), dtype)
        self.reward = self._column(rows, np.float32)
        self.terminated, self.truncated, self.first = (
            self._column(rows, np.uint8) for _ in range(3)
        )
        self.action = self._column(rows, np.int64)
        self.asked, self.answered = (self._column((workers, 16), np.int64) for _ in range(2))
        self.stop = self._column((16,), np.int64)

    @staticmethod
    def _column(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape))
        memory = mmap.mmap(-1, count * np.dtype(dtype).itemsize)  # shared with forked processes
        return np.frombuffer(memory, dtype, count).reshape(shape)


def synthetic(slab: Slab, worker: int, step_us: float) -> Callable[[], None]:
    """The step of all environments of a worker: one copy of rows, and the processor time asked for."""
    obs, rng, busy_ns = slab.obs[worker], np.random.default_rng(worker), int(step_us * 1e3) * slab.obs.shape[1]  # fmt: skip
    shape = (4, *obs.shape)
    pool = (rng.integers(0, 256, shape) if obs.dtype == np.uint8 else rng.standard_normal(shape)).astype(obs.dtype)  # fmt: skip
    t = 0

    def step() -> None:
        nonlocal t
        if busy_ns:
            end = time.thread_time_ns() + busy_ns
            while time.thread_time_ns() < end:
                pass
        t += 1
        obs[...] = pool[t & 3]
        slab.reward[worker] = slab.action[worker]
        slab.truncated[worker], slab.first[worker] = t % EPISODE_STEPS == 0, t % EPISODE_STEPS == 1

    return step


def cartpoles(slab: Slab, worker: int) -> Callable[[], None]:
    """The same with Gymnasium's CartPole-v1 in next-step autoreset order."""
    import gymnasium

    envs = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in slab.obs[worker]]
    obs, reward, first = slab.obs[worker], slab.reward[worker], slab.first[worker]
    terminated, truncated = slab.terminated[worker], slab.truncated[worker]
    over = [True] * len(envs)

    def step() -> None:
        for i, (env, action) in enumerate(zip(envs, slab.action[worker].tolist(), strict=True)):
            if over[i]:
                obs[i], _ = env.reset()
                reward[i], terminated[i], truncated[i], first[i], over[i] = 0, 0, 0, 1, False
            else:
                obs[i], reward[i], terminated[i], truncated[i], _ = env.step(action)
                first[i], over[i] = 0, bool(terminated[i] or truncated[i])

    return step


def make_policy(
    workload: str, workers: int, envs: int, shape: tuple[int, ...], actions: int
) -> Policy:
    """Plain eager torch on one thread: (obs [n, E, ...], first [n, E], groups [n]) -> sampled actions [n, E]."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if workload == "A":
        body = nn.Sequential(
            nn.Conv2d(shape[0], 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip
    else:
        body = nn.Sequential(nn.Linear(shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    core = nn.LSTMCell(64, 128) if workload == "L" else None
    head = nn.Linear(512 if workload == "A" else 128 if core else 64, actions)
    memory = [torch.zeros(workers, envs, 128) for _ in range(2)]

    @torch.inference_mode()
    def policy(obs: np.ndarray, first: np.ndarray, groups: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(obs).flatten(0, 1)
        x = body(x if x.dtype == torch.float32 else x.float() / 255)
        if core is not None:
            at = torch.from_numpy(groups)
            keep = (torch.from_numpy(first).flatten() == 0).float().unsqueeze(1)
            x, cell = core(x, tuple(part[at].flatten(0, 1) * keep for part in memory))
            for part, new in zip(memory, (x, cell), strict=True):
                part[at] = new.view(groups.size, envs, -1)
        logits = head(x)
        noise = torch.empty_like(logits).exponential_().log_()
        return (logits - noise).argmax(-1).view(groups.size, envs).numpy()  # type: ignore[no-any-return]

    return policy


class SharedMemory:
    """Bells are eventfds. The worker's side is `ask`, the engine's `ready`, `gather` and `answer`."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.bell, self.doors = os.eventfd(0), [os.eventfd(0) for _ in slab.asked]
        self.obs, self.first = np.empty_like(slab.obs), np.empty_like(slab.first)

    def ask(self, worker: int) -> None:
        asked, answered = self.slab.asked[worker], self.slab.answered[worker]
        asked[0] += 1
        os.eventfd_write(self.bell, 1)
        while answered[0] != asked[0] and not self.slab.stop[0]:
            os.eventfd_read(self.doors[worker])

    def ready(self) -> np.ndarray:
        while True:
            groups = np.flatnonzero(self.slab.asked[:, 0] != self.slab.answered[:, 0])
            if groups.size:
                return groups
            os.eventfd_read(self.bell)

    def gather(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        obs, first = self.obs[: groups.size], self.first[: groups.size]
        np.take(self.slab.obs, groups, axis=0, out=obs, mode="clip")
        np.take(self.slab.first, groups, axis=0, out=first, mode="clip")
        return obs, first

    def answer(self, groups: np.ndarray, actions: np.ndarray) -> None:
        self.slab.action[groups] = actions
        self.slab.answered[groups, 0] = self.slab.asked[groups, 0]
        for group in groups.tolist():
            os.eventfd_write(self.doors[group], 1)

    def end(self) -> None:
        for door in self.doors:
            os.eventfd_write(door, 1)


class Messages:
    """The same over ZeroMQ; the slab is each worker's own memory."""

    def __init__(self, slab: Slab, address: str) -> None:
        self.slab, self.address = slab, address
        self.obs, self.first = np.empty_like(slab.obs), np.empty_like(slab.first)
        self._router: Any = None
        self._dealer: Any = None

    def ask(self, worker: int) -> None:
        import zmq

        slab = self.slab
        if self._dealer is None:
            self._dealer = zmq.Context().socket(zmq.DEALER)
            self._dealer.identity, self._dealer.linger = b"%d" % (worker + 1), 0
            self._dealer.connect(self.address)
        columns = (slab.obs, slab.reward, slab.first, slab.terminated, slab.truncated)
        self._dealer.send_multipart([column[worker] for column in columns], copy=False)
        actions = self._dealer.recv()
        if actions:
            slab.action[worker] = np.frombuffer(actions, np.int64)

    def ready(self) -> np.ndarray:
        import zmq

        if self._router is None:
            self._router = zmq.Context().socket(zmq.ROUTER)
            self._router.bind(self.address)
        groups: list[int] = []
        while not groups or (len(groups) < len(self.obs) and self._router.events & zmq.POLLIN):
            name, obs, _, first, *_ = self._router.recv_multipart(copy=False)
            at = len(groups)
            self.obs[at] = np.frombuffer(obs, self.obs.dtype).reshape(self.obs.shape[1:])
            self.first[at] = np.frombuffer(first, np.uint8)
            groups.append(int(name.bytes) - 1)
        return np.array(groups)

    def gather(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.obs[: groups.size], self.first[: groups.size]

    def answer(self, groups: np.ndarray, actions: np.ndarray) -> None:
        for group, row in zip(groups.tolist(), actions, strict=True):
            self._router.send_multipart([b"%d" % (group + 1), row.tobytes()])

    def end(self) -> None:
        for number in range(len(self.obs)):
            self._router.send_multipart([b"%d" % (number + 1), b""])
        self._router.close(linger=500)


def work(worker: int, slab: Slab, line: Any, workload: str, step_us: float) -> None:
    step = cartpoles(slab, worker) if workload == "C" else synthetic(slab, worker, step_us)
    while not slab.stop[0]:
        step()
        line.ask(worker)


def measure(
    workload: str, workers: int, envs: int, transport: str, seconds: float, step_us: float
) -> dict[str, Any]:
    shape, dtype, actions = SHAPES[workload]
    slab = Slab(workers, envs, shape, dtype)
    with tempfile.TemporaryDirectory(prefix="floor-") as folder:
        line: Any
        if transport == "shm":
            line = SharedMemory(slab)
        elif transport == "zmq-ipc":
            line = Messages(slab, f"ipc://{folder}/engine")
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            line = Messages(slab, f"tcp://127.0.0.1:{port}")
        pids = []
        for worker in range(workers):
            pid = os.fork()  # before torch is imported
            if not pid:
                try:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                    work(worker, slab, line, workload, step_us)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os.kill(os.getppid(), signal.SIGTERM)  # no figure from fewer workers
                    os._exit(1)
            pids.append(pid)
        policy = make_policy(workload, workers, envs, shape, actions)
        rows, batches, counting = 0, 0, False
        begin = time.perf_counter()
        while True:
            groups = line.ready()
            line.answer(groups, policy(*line.gather(groups), groups))
            rows, batches, now = rows + groups.size * envs, batches + 1, time.perf_counter()
            if not counting and now - begin >= WARM_UP_S:
                rows, batches, begin, counting = 0, 0, now, True
            elif counting and now - begin >= seconds:
                break
        slab.stop[0] = 1
        line.end()
        for pid in pids:
            os.waitpid(pid, 0)
    return {
        "workload": workload, "transport": transport, "workers": workers, "envs_per_worker": envs, "step_us": step_us,
        "seconds": round(now - begin, 3), "steps_per_s": round(rows / (now - begin), 1), "mean_batch": round(rows / batches, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=sorted(SHAPES), default="S")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--envs-per-worker", type=int, default=32)
    parser.add_argument("--transport", choices=("shm", "zmq-ipc", "zmq-tcp"), default="shm")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step-us", type=float, default=0.0)
    given = parser.parse_args()
    print(json.dumps(measure(given.workload, given.workers, given.envs_per_worker, given.transport, given.seconds, given.step_us)))  # fmt: skip


if __name__ == "__main__":
    main()
