"""Policies whose right answers are known, used as `policy.name: system_policies:NAME` in tests of whole processes."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from seedrl.policy.base import Policy

SURE = 1e4  # a logit that no noise overcomes


def _one_hot(choice: Tensor, num_inputs: int) -> Tensor:
    return SURE * torch.nn.functional.one_hot(choice.long() % num_inputs, num_inputs).float()


class _Known(Policy):
    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def initial_state(self, batch: int):
        return ()


class Answer(_Known):
    """Answers 3 * id + 1 to an observation that is the environment's id (BEHAVIOUR case 1)."""

    def forward(self, obs, state, first):
        return _one_hot(3 * obs[..., 0] + 1, self.num_inputs), obs[..., 0] + 0 * self.bias, state


class Noted(Answer):
    """`Answer`, with the observation of each row, and the number of its bytes, stored again beside it."""

    def extra_leaves(self):
        return {"again": (torch.float64, (3,)), "count": (torch.int64, ())}

    def forward(self, obs, state, first):
        again = obs.double()[..., :3]
        return *super().forward(obs, state, first), {"again": again, "count": obs[..., 2].long()}


class Stacked(_Known):
    """`Answer` to the newest of several frames, with all of them stored again beside the row as it was acted on."""

    def __init__(self, num_inputs: int, frames: int) -> None:
        super().__init__(num_inputs)
        self.frames = frames

    def extra_leaves(self):
        return {"seen": (torch.float32, (self.frames, 3))}

    def forward(self, obs, state, first):
        env = obs[..., -1, 0]
        return _one_hot(3 * env + 1, self.num_inputs), env + 0 * self.bias, state, {"seen": obs}


class Count(_Known):
    """Recurrent: the state grows by one a row, the action is the state that entered the row (cases 6, 7, 11)."""

    def initial_state(self, batch: int):
        return (torch.zeros(batch, 1),)

    def forward(self, obs, state, first):
        (count,) = state
        entered = []
        for t in range(first.shape[0]):
            count = torch.where(first[t, :, None], torch.zeros_like(count), count)
            entered.append(count[:, 0])
            count = count + 1
        entered_rows = torch.stack(entered)
        return _one_hot(entered_rows, self.num_inputs), entered_rows + 0 * self.bias, (count,)


class Tabular(_Known):
    """A value of its own for each entry of a one-hot observation, 0 at first; acts at random."""

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__(num_inputs)
        self.table = torch.nn.Parameter(torch.zeros(size))

    def forward(self, obs, state, first):
        return torch.zeros(*first.shape, self.num_inputs) + self.bias, obs @ self.table, state


class SlowToAct(_Known):
    """A pass takes ten milliseconds, asleep."""

    def forward(self, obs, state, first):
        time.sleep(0.01)
        return _one_hot(0 * obs[..., 0], self.num_inputs), obs[..., 0] + 0 * self.bias, state


class SlowToLearn(_Known):
    """Acts at once; a pass over an unroll takes ten seconds."""

    def forward(self, obs, state, first):
        if first.shape[0] > 1:
            time.sleep(10)
        return (
            torch.zeros(*first.shape, self.num_inputs) + self.bias,
            first.float() * self.bias,
            state,
        )


def slow_to_act(spec, num_inputs, config):
    return SlowToAct(num_inputs)


def answer(spec, num_inputs, config):
    return Answer(num_inputs)


def noted(spec, num_inputs, config):
    return Noted(num_inputs)


def stacked(spec, num_inputs, config):
    return Stacked(num_inputs, spec.observation[0].stack)


def count(spec, num_inputs, config):
    return Count(num_inputs)


def slow_to_learn(spec, num_inputs, config):
    return SlowToLearn(num_inputs)


def tabular(spec, num_inputs, config):
    return Tabular(num_inputs, spec.observation[0].shape[0])
