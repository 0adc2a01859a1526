"""One peer's acting on one workload, run by that peer's own interpreter: prints {"steps_per_s": ...}. See `peers.py`.

python benchmarks/peer.py async|subproc|loop|torchrl --workload S|L|A|C [--envs 32] [--seconds 5] [--step-us 0]

All act with the same network in plain torch on one thread, sample, and store nothing. Each gets what its documentation recommends.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from peer_envs import MAKE
from torch import Tensor, nn

ACTIONS = {"S": 6, "L": 6, "A": 6, "C": 2}


class Network(nn.Module):
    """MLP 64-64, with an LSTM of 128 for L, the DQN paper's CNN for A; logits and a value from one layer."""

    def __init__(self, workload: str) -> None:
        super().__init__()
        self.frames = workload == "A"
        if self.frames:
            self.body: nn.Module = nn.Sequential(
                nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(),
                nn.Linear(3136, 512), nn.ReLU(),
            )  # fmt: skip
        else:
            self.body = nn.Sequential(nn.Linear(4 if workload == "C" else 8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())  # fmt: skip
        width = 512 if self.frames else 64
        self.core = nn.LSTMCell(width, 128) if workload == "L" else None
        self.head = nn.Linear(width if self.core is None else 128, ACTIONS[workload] + 1)

    def forward(
        self, obs: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Any]:
        x = self.body(obs.float() / 255 if self.frames else obs)
        if self.core is not None:
            state = self.core(x, state)
            x = state[0]
        logits = self.head(x)[..., :-1]
        noise = torch.empty_like(logits).exponential_().log_()
        return (logits - noise).argmax(-1), state


def timed(step: Callable[[], int], seconds: float) -> float:
    """Environment steps a second, after half a second of warming up."""
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        step()
    rows, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        rows += step()
    return rows / (time.perf_counter() - begin)


def acting(workload: str, envs: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(observations [N, ...], who begins [N]) -> actions [N]."""
    network = Network(workload)
    memory = [torch.zeros(envs, 128), torch.zeros(envs, 128)]

    def act(obs: np.ndarray, first: np.ndarray) -> np.ndarray:
        if network.core is None:
            return network(torch.from_numpy(obs))[0].numpy()
        keep = torch.from_numpy(1.0 - first.astype(np.float32)).unsqueeze(1)
        actions, state = network(torch.from_numpy(obs), (memory[0] * keep, memory[1] * keep))
        memory[:] = state
        return actions.numpy()

    return act


def gymnasium_vector(kind: str, workload: str, envs: int, seconds: float, step_us: float) -> float:
    from gymnasium import vector

    make = [partial(MAKE[workload], step_us)] * envs
    env = (
        vector.AsyncVectorEnv(make, shared_memory=True)
        if kind == "async"
        else vector.SyncVectorEnv(make)
    )
    act = acting(workload, envs)
    last = [env.reset(seed=0)[0], np.ones(envs, bool)]

    def step() -> int:
        obs, _, terminated, truncated, _ = env.step(act(*last))
        last[:] = obs, terminated | truncated
        return envs

    found = timed(step, seconds)
    env.close()
    return found


def subproc(workload: str, envs: int, seconds: float, step_us: float) -> float:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([partial(MAKE[workload], step_us)] * envs, start_method="fork")
    act = acting(workload, envs)
    last = [env.reset(), np.ones(envs, bool)]

    def step() -> int:
        obs, _, done, _ = env.step(act(*last))
        last[:] = obs, done
        return envs

    found = timed(step, seconds)
    env.close()
    return found


class _ForTensorDict(nn.Module):
    def __init__(self, workload: str) -> None:
        super().__init__()
        self.network = Network(workload)

    def forward(self, observation: Tensor, *memory: Tensor) -> Any:
        if not memory:
            return self.network(observation)[0]
        is_init, hidden, cell = memory
        keep = (~is_init).float()
        one = observation.ndim == 1
        state = tuple((part * keep).unsqueeze(0) if one else part * keep for part in (hidden, cell))
        action, after = self.network(observation.unsqueeze(0) if one else observation, state)
        return tuple(part.squeeze(0) if one else part for part in (action, *after))


def _torchrl_policy(workload: str) -> Any:
    from tensordict.nn import TensorDictModule

    torch.set_num_threads(1)
    recurrent = workload == "L"  # the state travels with each environment's rows, as TorchRL has it
    return TensorDictModule(
        _ForTensorDict(workload), in_keys=["observation", *(("is_init", "hidden", "cell") if recurrent else ())],
        out_keys=["action", *((("next", "hidden"), ("next", "cell")) if recurrent else ())],
    )  # fmt: skip


def _torchrl_env(workload: str, step_us: float) -> Any:
    from torchrl.data import Unbounded
    from torchrl.envs import Compose, GymWrapper, InitTracker, TensorDictPrimer, TransformedEnv

    env = GymWrapper(MAKE[workload](step_us), categorical_action_encoding=True)
    if workload != "L":
        return env
    state = {name: Unbounded(shape=(128,)) for name in ("hidden", "cell")}
    return TransformedEnv(env, Compose(InitTracker(), TensorDictPrimer(state, default_value=0.0)))


def torchrl(
    workload: str, envs: int, seconds: float, step_us: float, variant: dict[str, Any]
) -> float:
    """AsyncBatchedCollector with its inference server."""
    from torchrl.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(
        [partial(_torchrl_env, workload, step_us)] * envs, policy_factory=partial(_torchrl_policy, workload),
        frames_per_batch=envs * 20, total_frames=-1, **variant,
    )  # fmt: skip
    batches = iter(collector)
    found = timed(lambda: next(batches).numel(), seconds)
    collector.shutdown()
    return found


# the ways in which TorchRL offers it; the table takes the fastest
TORCHRL = {
    "threads": {"env_backend": "threading", "transport": "driver"},
    "processes": {"env_backend": "multiprocessing", "transport": "auto"},
    "grouped": {"env_backend": "multiprocessing", "transport": "driver", "envs_per_worker": 16},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("peer", choices=("async", "subproc", "loop", "torchrl"))
    parser.add_argument("--workload", choices=tuple(MAKE), required=True)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step-us", type=float, default=0.0)
    parser.add_argument("--variant", choices=tuple(TORCHRL), default="processes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = given.workload, given.envs, given.seconds, given.step_us
    with torch.inference_mode() if given.peer != "torchrl" else torch.no_grad():
        if given.peer == "torchrl":
            found = torchrl(*task, TORCHRL[given.variant])
        elif given.peer == "subproc":
            found = subproc(*task)
        else:
            found = gymnasium_vector(given.peer, *task)
    print(json.dumps({"steps_per_s": round(found, 1)}))


if __name__ == "__main__":
    main()
