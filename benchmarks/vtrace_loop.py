"""The plain loop that seedrl is compared with: one process, 32 CartPoles, V-trace, until 475 over the last 100 episodes.

    python benchmarks/vtrace_loop.py --seed 1 [--step-us 200 [--sleep]] [--json]

It steps its environments one after the other, runs the policy on all of them at once, and learns after every 16 steps. The loss is
the product's own, so that what differs is the system.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque

import numpy as np
import torch
from slow_cartpole import make
from torch import nn

from seedrl.config import Algorithm
from seedrl.learn.actor_critic import actor_critic_loss
from seedrl.policy.heads import Heads
from seedrl.spec import Leaf

ENVS, UNROLL, SOLVED, WINDOW = 32, 16, 475.0, 100


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.logits, self.value = nn.Linear(64, 2), nn.Linear(64, 1)
        for layer, gain in (
            (self.body[0], 2**0.5),
            (self.body[2], 2**0.5),
            (self.logits, 0.01),
            (self.value, 1.0),
        ):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(obs)
        return self.logits(x), self.value(x).squeeze(-1)


def train(
    seed: int, step_us: float, sleep: bool, max_seconds: float
) -> tuple[Net, dict[str, float]]:
    torch.manual_seed(seed)
    envs = [make(step_us, sleep) for _ in range(ENVS)]
    net, algorithm = Net(), Algorithm(gamma=0.98)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3, eps=1e-5, fused=True)
    heads = Heads((Leaf("action", "int64", (), "discrete", n=(2,), start=(0,)),))
    obs = np.stack([env.reset(seed=seed * 1000 + i)[0] for i, env in enumerate(envs)])
    reward, terminated, truncated = (
        np.zeros(ENVS, np.float32),
        np.zeros(ENVS, bool),
        np.zeros(ENVS, bool),
    )
    first, over, returns = np.ones(ENVS, bool), np.zeros(ENVS, bool), np.zeros(ENVS)
    recent: deque[float] = deque(maxlen=WINDOW)
    steps, begin = 0, time.monotonic()
    rows: list[tuple[torch.Tensor, ...]] = []
    while time.monotonic() - begin < max_seconds:
        now = torch.from_numpy(obs.copy())
        with torch.inference_mode():
            logits, _ = net(now)
            actions, log_prob = heads.sample(logits, None)
        flags = (torch.from_numpy(array.copy()) for array in (reward, terminated, truncated, first))
        rows.append((now, actions["action"].clone(), log_prob.clone(), *flags))
        if len(rows) == UNROLL + 1:
            seen, acted, behaviour, rewards, ends, cuts, firsts = (
                torch.stack(c) for c in zip(*rows, strict=True)
            )
            logits, values = net(seen)
            loss = actor_critic_loss(
                heads=heads, inputs=logits, values=values, actions={"action": acted}, masks=None, behaviour_log_probs=behaviour,
                rewards=rewards, terminated=ends, truncated=cuts, first=firsts, algorithm=algorithm,
            )  # fmt: skip
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
            rows = rows[-1:]
            if len(recent) == WINDOW and np.mean(recent) >= SOLVED:
                break
        for i, (env, action) in enumerate(zip(envs, actions["action"].tolist(), strict=True)):
            if over[i]:
                obs[i], _ = env.reset()
                reward[i], terminated[i], truncated[i], first[i], over[i], returns[i] = (
                    0,
                    False,
                    False,
                    True,
                    False,
                    0,
                )
                continue
            obs[i], reward[i], terminated[i], truncated[i], _ = env.step(action)
            first[i], over[i] = False, terminated[i] or truncated[i]
            returns[i] += reward[i]
            steps += 1
            if over[i]:
                recent.append(returns[i])
    seconds = time.monotonic() - begin
    return net, {"seconds": seconds, "env_steps": steps, "training_mean": float(np.mean(recent))}


def evaluate(net: Net, episodes: int, seed: int) -> float:
    """Mean return of greedy episodes, in environments without the extra cost."""
    env, returns = make(0.0), []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed * 1000 + 500 + episode)
        total, over = 0.0, False
        while not over:
            with torch.inference_mode():
                action = int(net(torch.from_numpy(obs))[0].argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--step-us", type=float, default=0.0)
    parse.add_argument("--sleep", action="store_true")
    parse.add_argument("--max-seconds", type=float, default=300.0)
    parse.add_argument("--episodes", type=int, default=20)
    parse.add_argument("--json", action="store_true")
    arguments = parse.parse_args()
    torch.set_num_threads(1)
    net, figures = train(arguments.seed, arguments.step_us, arguments.sleep, arguments.max_seconds)
    figures |= {
        "seed": arguments.seed,
        "evaluation_mean": evaluate(net, arguments.episodes, arguments.seed),
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(
            f"seed {arguments.seed}: {figures['training_mean']:.0f} over the last {WINDOW} episodes after {figures['seconds']:.1f} s, "
            f"{figures['env_steps']} steps; greedy {figures['evaluation_mean']:.1f}"
        )


if __name__ == "__main__":
    main()
