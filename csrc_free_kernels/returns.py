"""V-trace in plain PyTorch: the definition of correct, and the CPU path.

Each product over a trace is one multiply-add per row from the last to the first, over all columns at once; everything else is
computed for all rows together. Nothing here carries a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csrc_free_kernels.shapes import check_shapes

# exp(100) is infinite in float32. A clipped ratio never sees this bound; an unclipped one stays finite, also squared.
MAX_LOG_RATIO = 30.0


class VTrace(NamedTuple):
    """`vs`, `pg_advantages`: float32 [T, B], without gradient."""

    vs: Tensor
    pg_advantages: Tensor


class VTraceRows(NamedTuple):
    """`vs`, `pg_advantages`, `mask`: float32 [T, B], without gradient; mask is 0 where row t to t + 1 is no transition."""

    vs: Tensor
    pg_advantages: Tensor
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
