"""V-trace a second time, by the sums of its definition, one column and one row at a time, in float64; slow on purpose.

Shares nothing with the product: eq. 1 of arXiv 1802.01561 as it is printed (a sum of discounted temporal differences, each with the
product of the trace ratios before it), and rows by cutting them into episodes first.
"""

from __future__ import annotations

from math import exp, inf

import numpy as np

Array = np.ndarray


def _clip(ratio: float, bar: float | None) -> float:
    return min(ratio, inf if bar is None else bar)


def naive_vtrace(
    behaviour_log_probs: Array,
    target_log_probs: Array,
    discounts: Array,
    rewards: Array,
    values: Array,
    bootstrap_value: Array,
    rho_bar: float | None,
    c_bar: float | None,
    rho_pg_bar: float | None,
    lambda_: float,
) -> tuple[Array, Array]:
    """All float64 [T, B] but bootstrap_value [B]; returns vs and pg_advantages, float64 [T, B]."""
    steps, columns = np.shape(rewards)
    vs, advantages = np.zeros((steps + 1, columns)), np.zeros((steps, columns))
    for b in range(columns):
        value = [*np.asarray(values)[:, b], float(np.asarray(bootstrap_value)[b])]
        ratio = [exp(target_log_probs[t][b] - behaviour_log_probs[t][b]) for t in range(steps)]
        for s in range(steps):
            total = value[s]
            for t in range(s, steps):
                weight = 1.0
                for i in range(s, t):
                    weight *= discounts[i][b] * lambda_ * _clip(ratio[i], c_bar)
                difference = rewards[t][b] + discounts[t][b] * value[t + 1] - value[t]
                total += weight * _clip(ratio[t], rho_bar) * difference
            vs[s, b] = total
        vs[steps, b] = value[steps]
        for s in range(steps):
            target = rewards[s][b] + discounts[s][b] * vs[s + 1, b]
            advantages[s, b] = _clip(ratio[s], rho_pg_bar) * (target - value[s])
    return vs[:-1], advantages


def naive_vtrace_rows(
    behaviour_log_probs: Array,
    target_log_probs: Array,
    rewards: Array,
    values: Array,
    terminated: Array,
    first: Array,
    gamma: float,
    rho_bar: float | None,
    c_bar: float | None,
    rho_pg_bar: float | None,
    lambda_: float,
) -> tuple[Array, Array, Array]:
    """All [R, B]; each column is cut before its `first` rows and each piece is a `naive_vtrace` of its own, ended by its last row.

    Returns: vs, pg_advantages and mask, float64 [R - 1, B].
    """
    rows, columns = np.shape(rewards)
    vs = np.array(values, np.float64)[:-1].copy()
    advantages, mask = np.zeros((rows - 1, columns)), np.zeros((rows - 1, columns))
    for b in range(columns):
        cuts = [0, *(k for k in range(1, rows) if first[k][b]), rows]
        for start, stop in zip(cuts, cuts[1:], strict=False):
            if stop - start < 2:
                continue
            at, led = slice(start, stop - 1), slice(start + 1, stop)
            column = [
                np.asarray(x, np.float64)[:, b : b + 1]
                for x in (behaviour_log_probs, target_log_probs)
            ]
            discounts = gamma * (1 - np.asarray(terminated, np.float64)[led, b : b + 1])
            piece = naive_vtrace(
                column[0][at],
                column[1][at],
                discounts,
                np.asarray(rewards, np.float64)[led, b : b + 1],
                np.asarray(values, np.float64)[at, b : b + 1],
                np.asarray(values, np.float64)[stop - 1, b : b + 1],
                rho_bar,
                c_bar,
                rho_pg_bar,
                lambda_,
            )
            vs[at, b : b + 1], advantages[at, b : b + 1] = piece
            mask[at, b] = 1
    return vs, advantages, mask
