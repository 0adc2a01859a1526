"""Targets of Q-learning on sequences in plain PyTorch: n steps, double, rescaled; the definition of correct, and the CPU path.

Nothing here carries a gradient. float64 input is computed in float64, any other in float32.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from csrc_free_kernels import build
from csrc_free_kernels.shapes import check_shapes

SOURCE = build.Source("q_targets")


class NStep(NamedTuple):
    """`targets` float32 [T, B]; `steps_used` int64 [T, B], rewards in each."""

    targets: Tensor
    steps_used: Tensor


class QTargets(NamedTuple):
    """`targets`, rescaled, `mask` float32 [T, B] and `steps_used` int64 [T, B]: all 0 where row t to t + 1 is no transition."""

    targets: Tensor
    mask: Tensor
    steps_used: Tensor


@torch.no_grad()
def n_step(rewards: Tensor, bootstrap_q: Tensor, terminated: Tensor, ended: Tensor, gamma: float, n: int) -> NStep:  # fmt: skip
    """Sum of up to `n` discounted rewards and the value of the observation that they led to (Sutton and Barto, 2018, eq. 7.1).

    Args:
        rewards: float32 [T, B], of step t. bootstrap_q: float32 [T, B], value of the observation that step t led to.
        terminated: bool [T, B], that value counts 0. ended: bool [T, B], terminated, truncated or broken off: no further steps.
        gamma: discount of a step. n: at least 1; less where the episode ends, or row T - 1 is reached.
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    check_shapes(
        rewards=(rewards, "T B"), bootstrap_q=(bootstrap_q, "T B"), terminated=(terminated, "T B"), ended=(ended, "T B"),
    )  # fmt: skip
    rewards, bootstrap_q = _wide(rewards), _wide(bootstrap_q)
    values = bootstrap_q * terminated.logical_not()
    rows = rewards.shape[0]
    last = torch.zeros_like(ended)
    last[-1:] = True
    stops = ended | last
    targets, going = torch.zeros_like(rewards), torch.ones_like(ended)
    steps_used = torch.zeros_like(ended, dtype=torch.int64)
    for i in range(min(n, rows)):
        now, begins = going[: rows - i], slice(0, rows - i)
        stop = now & stops[i:] if i < n - 1 else now
        targets[begins] += gamma**i * (now * rewards[i:] + gamma * (stop * values[i:]))
        steps_used[begins] += now
        going[begins] = now & ~stop
        going[rows - i :] = False
    return NStep(targets, steps_used)


def rescale(x: Tensor, eps: float = 1e-3) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018, arXiv 1805.11593), exact in float32 near 0 as well.

    sqrt(1 + a) - 1 is taken as a / (sqrt(1 + a) + 1), which loses no digits.
    """
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def rescale_inverse(y: Tensor, eps: float = 1e-3) -> Tensor:
    """The x of which `rescale` is y; eps 0 is allowed.

    With s = sqrt(|x| + 1) - 1, |y| = s + eps (s^2 + 2 s): the root is taken in the form without a difference of near numbers,
    s = 2 |y| / (1 + 2 eps + sqrt((1 + 2 eps)^2 + 4 eps |y|)), and x = sign(y) s (s + 2).
    """
    size, b = y.abs(), 1 + 2 * eps
    s = 2 * size / (b + (b * b + 4 * eps * size).sqrt())
    return y.sign() * s * (s + 2)


@torch.no_grad()
def q_targets(
    q_online: Tensor, q_target: Tensor, rewards: Tensor, terminated: Tensor, truncated: Tensor, first: Tensor, gamma: float, *,
    n: int = 1, eps: float | None = 1e-3, burn_in: int = 0, double: bool = True,
) -> QTargets:  # fmt: skip
    """Targets of stored rows in Gymnasium's next-step order: R2D2's (Kapturowski et al. 2019, section 2.3), and those of DQN.

    Transition t goes from row t to row t + 1, with that row's reward. Where row t + 1 is `first` there is none, and the one before it
    bootstraps from its own last row. A terminated step bootstraps from 0, a truncated one from its real last observation.

    Args:
        q_online, q_target: float32 [R, B, A]; an illegal action's is so low that it is never the largest.
        rewards: float32 [R, B], of the step that led to the row. terminated, truncated, first: bool [R, B].
        n: steps of a target. eps: of the rescaling; None: none. burn_in: first rows, whose transitions count 0.
        double: the online network chooses the action that the target network values (van Hasselt et al. 2016, eq. 4).
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    check_shapes(
        q_online=(q_online, "R B A"), q_target=(q_target, "R B A"), rewards=(rewards, "R B"), terminated=(terminated, "R B"),
        truncated=(truncated, "R B"), first=(first, "R B"),
    )  # fmt: skip
    chosen = (q_online if double else q_target)[1:].argmax(-1, keepdim=True)
    values = _wide(q_target[1:].gather(-1, chosen).squeeze(-1))
    if eps is not None:
        values = rescale_inverse(values, eps)
    broken = torch.zeros_like(first[1:])
    broken[:-1] = first[
        2:
    ]  # the next row begins an episode: this one is the last, whatever its flags say
    ended = terminated[1:] | truncated[1:] | broken
    targets, steps_used = build.run(n_step, rewards[1:], values, terminated[1:], ended, gamma, n)
    if eps is not None:
        targets = rescale(targets, eps)
    counts = first[1:].logical_not()
    counts[:burn_in] = False
    return QTargets(targets * counts, counts.to(targets.dtype), steps_used * counts)


@torch.no_grad()
def sequence_priority(td_errors: Tensor, mask: Tensor, eta: float = 0.9) -> Tensor:
    """eta max |td| + (1 - eta) mean |td| over what the mask counts (Kapturowski et al. 2019, section 2.3): float32 [B] of [T, B]."""
    check_shapes(td_errors=(td_errors, "T B"), mask=(mask, "T B"))
    sizes = td_errors.abs() * mask
    return eta * sizes.amax(0) + (1 - eta) * sizes.sum(0) / mask.sum(0).clamp_min(1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@build.launcher_of(n_step)
@torch.no_grad()
def launch_n_step(rewards: Tensor, bootstrap_q: Tensor, terminated: Tensor, ended: Tensor, gamma: float, n: int) -> NStep:  # fmt: skip
    """`n_step` in one launch, for float32. Raises: ShapeError; ArgumentError for another dtype or device."""
    sizes = check_shapes(
        rewards=(rewards, "T B"), bootstrap_q=(bootstrap_q, "T B"), terminated=(terminated, "T B"), ended=(ended, "T B"),
    )  # fmt: skip
    device = build.check_arguments(
        rewards=(rewards, torch.float32), bootstrap_q=(bootstrap_q, torch.float32), terminated=(terminated, torch.bool),
        ended=(ended, torch.bool),
    )  # fmt: skip
    targets, steps_used = torch.empty_like(rewards), torch.empty_like(rewards, dtype=torch.int64)
    build.launch(
        SOURCE, "n_step", device, build.blocks_for(rewards.numel()),
        *map(build.pointer, (rewards, bootstrap_q, terminated, ended)), ctypes.c_double(gamma), ctypes.c_int64(n),
        ctypes.c_int64(sizes["T"]), ctypes.c_int64(sizes["B"]), build.pointer(targets), build.pointer(steps_used),
    )  # fmt: skip
    return NStep(targets, steps_used)
