"""What every row that the store hands out must be, for the environments of `system_envs`."""

from __future__ import annotations

from collections import defaultdict

import torch

from runs import DEVICE
from seedrl.config import Config


def config_of(env: dict, policy: str, workers: dict, **sections) -> Config:
    return Config(
        env={"check": "strict", "check_steps": 0, **env},
        policy={"name": f"system_policies:{policy}"},
        workers=workers,
        engine={"device": DEVICE},
        **{"learner": {"unroll_length": 20, "batch_size": 8}, **sections},
    )


def check_rows(batch, answers: int = 256) -> None:
    """Each unroll is rows of one environment, one after the other, with their own actions, rewards and flags."""
    obs = batch.obs["observation"].double()
    env, episode, step = obs[..., 0], obs[..., 1], obs[..., 2]
    first, ended = batch.first, batch.terminated | batch.truncated
    # one environment an unroll, and each action is that environment's answer
    assert (env == env[0]).all()
    assert (batch.actions["action"] == (3 * env + 1) % answers).all()
    # reward and flags are of the step that led to the row
    assert (
        batch.reward == torch.where(first, torch.zeros(()).double(), 1000 * env + step).float()
    ).all()
    assert ((step == 0) == first).all()
    assert (
        not (batch.terminated & (episode % 2 == 1)).any()
        and not (batch.truncated & (episode % 2 == 0)).any()
    )
    # consecutive: the next step of the episode, or the first row of the next one after an end
    follows = torch.where(
        ended[:-1],
        (episode[1:] == episode[:-1] + 1) & first[1:],
        (episode[1:] == episode[:-1]) & (step[1:] == step[:-1] + 1),
    )
    assert follows.all()


class Ledger:
    """Follows every row that the store hands out: whole, in order, once."""

    def __init__(self, unroll: int) -> None:
        self.unroll, self.rows = unroll, 0
        self.last: dict[int, tuple[float, float, float]] = {}
        self.seen: dict[float, set[tuple[float, float]]] = defaultdict(set)

    def check(self, batch, answers: int = 256) -> None:
        check_rows(batch, answers)
        obs = batch.obs["observation"].double()
        for b, slot in enumerate(batch.slots.tolist()):
            head, tail = tuple(obs[0, b].tolist()), tuple(obs[-1, b].tolist())
            if slot in self.last and self.last[slot][0] == head[0]:
                assert self.last[slot] == head, (
                    "the bootstrap row of one unroll is the first of the next"
                )
            self.last[slot] = tail
            rows = {(row[1], row[2]) for row in obs[:-1, b].tolist()}
            assert len(rows) == self.unroll and not rows & self.seen[head[0]], "no row twice"
            self.seen[head[0]] |= rows
            self.rows += self.unroll
