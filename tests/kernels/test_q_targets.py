"""n-step targets, the rescaling, R2D2's sequences and priorities: published values, and naive loops on random rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csrc_free_kernels.q_targets import (  # fmt: skip
    n_step,
    q_targets,
    rescale,
    rescale_inverse,
    sequence_priority,
)
from seedrl.errors import ShapeError

FAMILIES = json.loads((Path(__file__).parents[1] / "cases" / "algorithms.json").read_text())["families"]  # fmt: skip
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def _cases(family: str) -> Any:
    return pytest.mark.parametrize("case", FAMILIES[family], ids=lambda case: case["name"])


def _near(got: torch.Tensor, right: Any, dtype: torch.dtype) -> None:
    np.testing.assert_allclose(got.numpy(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@_cases("n_step")
def test_n_step_equals_the_published_values(case: dict[str, Any], dtype: torch.dtype) -> None:
    given, right = case["inputs"], case["expected"]
    rewards, values = (torch.tensor(given[name], dtype=dtype) for name in ("rewards", "bootstrap_q"))  # fmt: skip
    terminated, truncated = (torch.tensor(given[name]) for name in ("terminated", "truncated"))
    out = n_step(rewards, values, terminated, terminated | truncated, given["gamma"], given["n"])
    assert out.targets.dtype == dtype
    _near(out.targets, right["targets"], dtype)
    assert out.steps_used.tolist() == right["steps_used"]


@DTYPES
@_cases("value_rescale")
def test_rescaling_and_its_inverse_equal_the_published_values(case: dict[str, Any], dtype: torch.dtype) -> None:  # fmt: skip
    given, right = case["inputs"], case["expected"]
    x, y = (torch.tensor(given[name], dtype=dtype) for name in "xy")
    for got, wanted in (
        (rescale(x, given["eps"]), right["h_of_x"]),
        (rescale_inverse(y, given["eps"]), right["h_inverse_of_y"]),
    ):
        # relative, near 0 too: where the usual form has lost all digits in float32
        np.testing.assert_allclose(got.numpy(), wanted, rtol=TOLERANCE[dtype] / 10, atol=0)


@given(st.floats(-1e6, 1e6, width=32), st.sampled_from([0.0, 1e-3, 1e-2]))
@settings(max_examples=300, deadline=None)
def test_the_inverse_inverts_in_float32(x: float, eps: float) -> None:
    there = rescale(torch.tensor(x, dtype=torch.float32), eps)
    assert rescale_inverse(there, eps).item() == pytest.approx(x, rel=3e-6, abs=1e-30)


@DTYPES
@_cases("r2d2_sequence")
def test_sequences_equal_the_published_values(case: dict[str, Any], dtype: torch.dtype) -> None:
    given, right = case["inputs"], case["expected"]
    q_online, q_target, rewards = (torch.tensor(given[name], dtype=dtype) for name in ("q_online", "q_target", "rewards"))  # fmt: skip
    flags = (torch.tensor(given[name]) for name in ("terminated", "truncated", "first"))
    out = q_targets(
        q_online, q_target, rewards, *flags, given["gamma"], n=given["n"], eps=given["eps"], burn_in=given["burn_in"],
    )  # fmt: skip
    _near(out.targets, right["targets"], dtype)
    assert out.mask.tolist() == right["mask"] and out.steps_used.tolist() == right["steps_used"]
    actions = torch.tensor(given["actions"])[:-1].unsqueeze(-1)
    td_errors = (out.targets - q_online[:-1].gather(-1, actions).squeeze(-1)) * out.mask
    _near(td_errors, right["td_errors"], dtype)
    _near(sequence_priority(td_errors, out.mask, given["eta"]), right["priorities"], dtype)
    _near(0.5 * td_errors.square().sum(0), right["losses"], dtype)


@_cases("r2d2_priority")
def test_priorities_equal_the_published_values(case: dict[str, Any]) -> None:
    given = case["inputs"]
    td_errors, mask = (torch.tensor(given[name], dtype=torch.float64) for name in ("td_errors", "mask"))  # fmt: skip
    _near(sequence_priority(td_errors, mask, given["eta"]), case["expected"]["priorities"], torch.float64)  # fmt: skip
    nothing = sequence_priority(td_errors, torch.zeros_like(mask))
    assert nothing.tolist() == [0.0] * mask.shape[1], "a sequence without a transition"


def _naive(
    online: np.ndarray, target: np.ndarray, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, first: np.ndarray,
    gamma: float, n: int, double: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """One row after the other, without rescaling."""
    rows, columns = rewards.shape
    targets, mask = np.zeros((rows - 1, columns)), np.zeros((rows - 1, columns))
    for b in range(columns):
        for t in range(rows - 1):
            if first[t + 1, b]:
                continue
            mask[t, b], total, weight, row = 1, 0.0, 1.0, t + 1
            while True:
                total += weight * rewards[row, b]
                weight *= gamma
                if terminated[row, b]:
                    break
                over = truncated[row, b] or row == rows - 1 or first[row + 1, b]
                if over or row == t + n:
                    best = (online if double else target)[row, b].argmax()
                    total += weight * target[row, b, best]
                    break
                row += 1
            targets[t, b] = total
    return targets, mask


@given(
    rows=st.integers(2, 9), n=st.integers(1, 10), double=st.booleans(), burn_in=st.integers(0, 3), seed=st.integers(0, 10_000),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_targets_equal_naive_loops(rows: int, n: int, double: bool, burn_in: int, seed: int) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    online, target = rng.normal(size=(2, rows, 3, 4))
    rewards = rng.normal(size=(rows, 3))
    ended = rng.random((rows, 3)) < 0.3
    terminated = ended & (rng.random((rows, 3)) < 0.5)
    first = np.vstack([rng.random((1, 3)) < 0.5, ended[:-1]])
    ended &= ~first  # an episode has a step
    terminated, truncated = terminated & ended, ended & ~terminated
    first[1:] = ended[:-1] | (
        rng.random((rows - 1, 3)) < 0.1
    )  # some were broken off without a flag
    terminated, truncated = terminated & ~first, truncated & ~first
    out = q_targets(
        *(torch.from_numpy(x) for x in (online, target, rewards, terminated, truncated, first)), 0.9,
        n=n, eps=None, burn_in=burn_in, double=double,
    )  # fmt: skip
    right, mask = _naive(online, target, rewards, terminated, truncated, first, 0.9, n, double)
    mask[:burn_in] = 0
    np.testing.assert_array_equal(out.mask.numpy(), mask)
    np.testing.assert_allclose(out.targets.numpy(), right * mask, rtol=1e-9, atol=1e-12)


def test_a_wrong_shape_is_named() -> None:
    q, row = torch.zeros(4, 2, 3), torch.zeros(4, 2)
    flag = row.bool()
    with pytest.raises(ShapeError, match="q_target"):
        q_targets(q, q[:-1], row, flag, flag, flag, 0.9)
    with pytest.raises(ShapeError, match="ended"):
        n_step(row, row, flag, flag[:-1], 0.9, 2)
