"""V-trace and GAE in plain PyTorch: the definition of correct, and the CPU path; and the launchers of returns.cu.

Each product over a trace is one multiply-add per row from the last to the first, over all columns at once; everything else is
computed for all rows together. Nothing here carries a gradient.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from csrc_free_kernels import build
from csrc_free_kernels.shapes import check_shapes

# exp(100) is infinite in float32. A clipped ratio never sees this bound; an unclipped one stays finite, also squared.
MAX_LOG_RATIO = 30.0
_THREADS = 64  # few columns are to be spread over many multiprocessors
SOURCE = build.Source("returns", (("MAX_LOG_RATIO", f"{MAX_LOG_RATIO}f"),))


class VTrace(NamedTuple):
    """`vs`, `pg_advantages`: float32 [T, B], without gradient."""

    vs: Tensor
    pg_advantages: Tensor


class VTraceRows(NamedTuple):
    """`vs`, `pg_advantages`, `mask`: float32 [T, B], without gradient; mask is 0 where row t to t + 1 is no transition."""

    vs: Tensor
    pg_advantages: Tensor
    mask: Tensor


class GAERows(NamedTuple):
    """`returns`, `advantages`, `mask`: float32 [T, B], without gradient; mask is 0 where row t to t + 1 is no transition."""

    returns: Tensor
    advantages: Tensor
    mask: Tensor


def vtrace(
    behaviour_log_probs: Tensor, target_log_probs: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor,
    bootstrap_value: Tensor, *, rho_bar: float | None = 1.0, c_bar: float | None = 1.0, rho_pg_bar: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTrace:  # fmt: skip
    """V-trace targets and advantages (Espeholt et al. 2018, arXiv 1802.01561, eq. 1, remarks 1 and 2, section 4.2).

    float64 input is computed in float64, any other in float32.

    Args:
        behaviour_log_probs, target_log_probs: float32 [T, B], of the action taken at row t.
        discounts: float32 [T, B], gamma; 0 where the step from row t terminated.
        rewards: float32 [T, B], of the step from row t to row t + 1.
        values: float32 [T, B], V at row t. bootstrap_value: float32 [B], V at row T.
        rho_bar, c_bar, rho_pg_bar: clips of the ratio in the targets, in the trace and in the advantages; None: not clipped.
        lambda_: multiplies the trace's ratios.
    Returns: `vs` and `pg_advantages`, float32 [T, B], without gradient.
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    check_shapes(
        behaviour_log_probs=(behaviour_log_probs, "T B"), target_log_probs=(target_log_probs, "T B"),
        discounts=(discounts, "T B"), rewards=(rewards, "T B"), values=(values, "T B"),
        bootstrap_value=(bootstrap_value, "B"),
    )  # fmt: skip
    with torch.no_grad():
        log_ratios = _wide(target_log_probs) - _wide(behaviour_log_probs)
        row_values = torch.cat([_wide(values), _wide(bootstrap_value).unsqueeze(0)])
        clips = (rho_bar, c_bar, rho_pg_bar)
        return _vtrace(
            log_ratios, _wide(discounts), _wide(rewards), row_values, None, clips, lambda_
        )


def vtrace_rows(
    behaviour_log_probs: Tensor, target_log_probs: Tensor, rewards: Tensor, values: Tensor, terminated: Tensor,
    first: Tensor, gamma: float, *, rho_bar: float | None = 1.0, c_bar: float | None = 1.0,
    rho_pg_bar: float | None = 1.0, lambda_: float = 1.0,
) -> VTraceRows:  # fmt: skip
    """V-trace on stored rows in Gymnasium's next-step order.

    Transition t goes from row t to row t + 1, with that row's reward. Where row t + 1 is `first` there is none: `vs` is V there
    and the advantage 0, and the transition before it bootstraps from V of the row, which is the last of its episode. That covers
    truncated episodes, and interrupted ones, which have no final row. A terminated step bootstraps from 0.

    Args:
        behaviour_log_probs, target_log_probs: float32 [T, B] or [R, B], of the action taken at row t; the last row's is not used.
        rewards: float32 [R, B], of the step that led to the row. values: float32 [R, B], V at the row.
        terminated: bool [R, B], of the step that led to the row. first: bool [R, B], the row begins an episode.
        gamma: discount of a step. The others: see `vtrace`.
    Returns: `vs`, `pg_advantages` and `mask`, float32 [T, B], without gradient.
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    num_rows = values.shape[0]
    behaviour_log_probs, target_log_probs = (
        log_probs[:-1] if log_probs.shape[:1] == (num_rows,) else log_probs
        for log_probs in (behaviour_log_probs, target_log_probs)
    )
    check_shapes(
        rewards=(rewards, "R B"), values=(values, "R B"), terminated=(terminated, "R B"), first=(first, "R B"),
        behaviour_log_probs=(behaviour_log_probs, f"{num_rows - 1} B"),
        target_log_probs=(target_log_probs, f"{num_rows - 1} B"),
    )  # fmt: skip
    with torch.no_grad():
        log_ratios = _wide(target_log_probs) - _wide(behaviour_log_probs)
        row_values = _wide(values)
        mask = first[1:].logical_not().to(row_values.dtype)
        discounts = terminated[1:].logical_not().to(row_values.dtype) * gamma
        clips = (rho_bar, c_bar, rho_pg_bar)
        vs, advantages = _vtrace(
            log_ratios, discounts, _wide(rewards[1:]), row_values, mask, clips, lambda_
        )
        return VTraceRows(vs, advantages, mask)


@torch.no_grad()
def gae_rows(
    rewards: Tensor, values: Tensor, terminated: Tensor, first: Tensor, gamma: float, lambda_: float
) -> GAERows:
    """GAE (Schulman et al. 2015, arXiv 1506.02438, eq. 16) on stored rows, which are read as by `vtrace_rows`.

    Args:
        rewards: float32 [R, B], of the step that led to the row. values: float32 [R, B], V at the row.
        terminated: bool [R, B], of the step that led to the row. first: bool [R, B], the row begins an episode.
        gamma: discount of a step. lambda_: weight of a longer sum.
    Returns: `returns`, V and the advantage, `advantages`, 0 where there is no transition, and `mask`: float32 [T, B].
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    check_shapes(
        rewards=(rewards, "R B"), values=(values, "R B"), terminated=(terminated, "R B"), first=(first, "R B"),
    )  # fmt: skip
    values, rewards = _wide(values), _wide(rewards)
    mask = first[1:].logical_not().to(values.dtype)
    discounts = terminated[1:].logical_not().to(values.dtype) * gamma
    deltas = (rewards[1:] + discounts * values[1:] - values[:-1]) * mask
    traces = discounts * lambda_ * mask
    advantages = torch.zeros_like(values)
    for t in range(values.shape[0] - 2, -1, -1):
        advantages[t] = deltas[t] + traces[t] * advantages[t + 1]
    return GAERows(values[:-1] + advantages[:-1], advantages[:-1], mask)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _clipped(ratios: Tensor, bar: float | None) -> Tensor:
    return ratios if bar is None else ratios.clamp(max=bar)


def _vtrace(
    log_ratios: Tensor, discounts: Tensor, rewards: Tensor, row_values: Tensor, mask: Tensor | None,
    clips: tuple[float | None, float | None, float | None], lambda_: float,
) -> VTrace:  # fmt: skip
    """All [T, B] but row_values [R, B]; where mask is 0 there is no transition."""
    rho_bar, c_bar, rho_pg_bar = clips
    values, next_values = row_values[:-1], row_values[1:]
    ratios = log_ratios.clamp(max=MAX_LOG_RATIO).exp()
    deltas = _clipped(ratios, rho_bar) * (rewards + discounts * next_values - values)
    traces = discounts * (_clipped(ratios, c_bar) * lambda_)
    if mask is not None:
        deltas, traces = deltas * mask, traces * mask
    excess = torch.zeros_like(row_values)  # vs - V, 0 at the last row
    rows = excess.unbind(0)
    for delta, trace, now, after in zip(
        reversed(deltas.unbind(0)),
        reversed(traces.unbind(0)),
        rows[-2::-1],
        rows[:0:-1],
        strict=True,
    ):
        torch.addcmul(delta, trace, after, out=now)
    next_vs = next_values + excess[1:]
    advantages = _clipped(ratios, rho_pg_bar) * (rewards + discounts * next_vs - values)
    if mask is not None:
        advantages = advantages * mask
    return VTrace(values + excess[:-1], advantages)


class _Clips(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in ("rho_bar", "c_bar", "rho_pg_bar", "lambda_"))  # fmt: skip


def _clips(*bars: float | None, lambda_: float) -> _Clips:
    return _Clips(*(math.inf if bar is None else bar for bar in bars), lambda_)


@build.launcher_of(vtrace)
@torch.no_grad()
def launch_vtrace(
    behaviour_log_probs: Tensor, target_log_probs: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor,
    bootstrap_value: Tensor, *, rho_bar: float | None = 1.0, c_bar: float | None = 1.0, rho_pg_bar: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTrace:  # fmt: skip
    """`vtrace` in one launch, for float32. Raises: ShapeError; ArgumentError for another dtype or device."""
    inputs = {
        "behaviour_log_probs": behaviour_log_probs, "target_log_probs": target_log_probs, "discounts": discounts,
        "rewards": rewards, "values": values, "bootstrap_value": bootstrap_value,
    }  # fmt: skip
    sizes = check_shapes(
        **{name: (x, "B" if name == "bootstrap_value" else "T B") for name, x in inputs.items()}
    )
    device = build.check_arguments(**{name: (x, torch.float32) for name, x in inputs.items()})
    vs, advantages = torch.empty_like(values), torch.empty_like(values)
    build.launch(
        SOURCE, "vtrace", device, build.blocks_for(sizes["B"], _THREADS), *map(build.pointer, inputs.values()),
        _clips(rho_bar, c_bar, rho_pg_bar, lambda_=lambda_), ctypes.c_int64(sizes["T"]), ctypes.c_int64(sizes["B"]),
        build.pointer(vs), build.pointer(advantages), threads=_THREADS,
    )  # fmt: skip
    return VTrace(vs, advantages)


@build.launcher_of(vtrace_rows)
@torch.no_grad()
def launch_vtrace_rows(
    behaviour_log_probs: Tensor, target_log_probs: Tensor, rewards: Tensor, values: Tensor, terminated: Tensor,
    first: Tensor, gamma: float, *, rho_bar: float | None = 1.0, c_bar: float | None = 1.0,
    rho_pg_bar: float | None = 1.0, lambda_: float = 1.0,
) -> VTraceRows:  # fmt: skip
    """`vtrace_rows` in one launch, for float32. Raises: ShapeError; ArgumentError for another dtype or device."""
    sizes = check_shapes(
        values=(values, "R B"),
        rewards=(rewards, "R B"),
        terminated=(terminated, "R B"),
        first=(first, "R B"),
    )
    steps, columns = sizes["R"] - 1, sizes["B"]
    for name, log_probs in (("behaviour", behaviour_log_probs), ("target", target_log_probs)):
        rows = sizes["R"] if log_probs.shape[:1] == (sizes["R"],) else steps
        check_shapes(**{f"{name}_log_probs": (log_probs, f"{rows} {columns}")})
    device = build.check_arguments(
        values=(values, torch.float32), behaviour_log_probs=(behaviour_log_probs, torch.float32),
        target_log_probs=(target_log_probs, torch.float32), rewards=(rewards, torch.float32),
        terminated=(terminated, torch.bool), first=(first, torch.bool),
    )  # fmt: skip
    vs, advantages, mask = (values.new_empty(steps, columns) for _ in range(3))
    build.launch(
        SOURCE, "vtrace_rows", device, build.blocks_for(columns, _THREADS),
        *map(build.pointer, (behaviour_log_probs, target_log_probs, rewards, values, terminated, first)),
        ctypes.c_float(gamma), _clips(rho_bar, c_bar, rho_pg_bar, lambda_=lambda_), ctypes.c_int64(steps), ctypes.c_int64(columns),
        *map(build.pointer, (vs, advantages, mask)), threads=_THREADS,
    )  # fmt: skip
    return VTraceRows(vs, advantages, mask)


@build.launcher_of(gae_rows)
@torch.no_grad()
def launch_gae_rows(
    rewards: Tensor, values: Tensor, terminated: Tensor, first: Tensor, gamma: float, lambda_: float
) -> GAERows:
    """`gae_rows` in one launch, for float32. Raises: ShapeError; ArgumentError for another dtype or device."""
    sizes = check_shapes(
        rewards=(rewards, "R B"), values=(values, "R B"), terminated=(terminated, "R B"), first=(first, "R B"),
    )  # fmt: skip
    device = build.check_arguments(
        values=(values, torch.float32), rewards=(rewards, torch.float32), terminated=(terminated, torch.bool), first=(first, torch.bool),
    )  # fmt: skip
    steps, columns = sizes["R"] - 1, sizes["B"]
    returns, advantages, mask = (values.new_empty(steps, columns) for _ in range(3))
    build.launch(
        SOURCE, "gae_rows", device, build.blocks_for(columns, _THREADS),
        *map(build.pointer, (rewards, values, terminated, first)), ctypes.c_float(gamma), ctypes.c_float(lambda_),
        ctypes.c_int64(steps), ctypes.c_int64(columns), *map(build.pointer, (returns, advantages, mask)), threads=_THREADS,
    )  # fmt: skip
    return GAERows(returns, advantages, mask)
