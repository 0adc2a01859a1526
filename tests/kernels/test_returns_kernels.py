"""Returns as kernels, run on the CPU, against their twins; GAE's twin against the sum of its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csrc_free_kernels import build, q_targets, returns
from seedrl.errors import ShapeError

pytestmark = pytest.mark.usefixtures("on_host")
SIZES = {"rows": st.integers(1, 20), "columns": st.integers(0, 300), "seed": st.integers(0, 2**32 - 1)}  # fmt: skip
BARS = st.none() | st.floats(0.1, 3.0)


def _rows(rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    over = torch.rand(shape, generator=draw) < 0.3
    terminated = over & (torch.rand(shape, generator=draw) < 0.5)
    first = torch.rand(shape, generator=draw) < 0.3
    behaviour, target, rewards, values = torch.randn(4, *shape, generator=draw)
    return {
        "behaviour_log_probs": -behaviour.abs(), "target_log_probs": -3 * target.abs(), "rewards": rewards, "values": values,
        "terminated": terminated, "first": first,
    }  # fmt: skip


def _near(got: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(got, right, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)


@settings(max_examples=40)
@given(**SIZES, bars=st.tuples(BARS, BARS, BARS), lambda_=st.floats(0, 1), gamma=st.floats(0, 1))
def test_the_kernels_of_vtrace_equal_their_twins(
    rows: int, columns: int, seed: int, bars: tuple[float | None, ...], lambda_: float, gamma: float
) -> None:
    given = _rows(rows, columns, seed)
    clips = dict(zip(("rho_bar", "c_bar", "rho_pg_bar"), bars, strict=True), lambda_=lambda_)
    got = returns.launch_vtrace_rows(**given, gamma=gamma, **clips)
    _near(got, returns.vtrace_rows(**given, gamma=gamma, **clips))
    behaviour, target, rewards, values = list(given.values())[:4]
    discounts = given["terminated"].logical_not() * gamma
    plain = (behaviour, target, discounts, rewards, values, values.new_ones(columns))
    _near(returns.launch_vtrace(*plain, **clips), returns.vtrace(*plain, **clips))


@settings(max_examples=40)
@given(**SIZES, lambda_=st.floats(0, 1), gamma=st.floats(0, 1))
def test_the_kernel_of_gae_equals_its_twin(
    rows: int, columns: int, seed: int, lambda_: float, gamma: float
) -> None:
    given = list(_rows(rows, columns, seed).values())[2:]
    _near(returns.launch_gae_rows(*given, gamma, lambda_), returns.gae_rows(*given, gamma, lambda_))


@settings(max_examples=40)
@given(**SIZES, n=st.integers(1, 25), gamma=st.floats(0, 1))
def test_the_kernel_of_n_step_equals_its_twin(
    rows: int, columns: int, seed: int, n: int, gamma: float
) -> None:
    rewards, values, terminated, ended = list(_rows(rows, columns, seed).values())[2:]
    given = (rewards, values, terminated, ended | terminated, gamma, n)
    _near(q_targets.launch_n_step(*given), q_targets.n_step(*given))


@settings(max_examples=40)
@given(rows=st.integers(2, 9), seed=st.integers(0, 10_000), lambda_=st.floats(0, 1))
def test_gae_equals_the_sum_of_its_definition(rows: int, seed: int, lambda_: float) -> None:
    given = [
        leaf.double() if leaf.is_floating_point() else leaf
        for leaf in list(_rows(rows, 3, seed).values())[2:]
    ]
    rewards, values, terminated, first = (leaf.numpy() for leaf in given)
    got, gamma = returns.gae_rows(*given, 0.9, lambda_), 0.9
    for b in range(3):
        for t in range(rows - 1):
            total, weight = 0.0, 1.0
            for k in range(t, rows - 1):
                if first[k + 1, b]:
                    break
                going = 0.0 if terminated[k + 1, b] else gamma
                total += weight * (rewards[k + 1, b] + going * values[k + 1, b] - values[k, b])
                weight *= going * lambda_
            assert got.advantages[t, b].item() == pytest.approx(total, rel=1e-9, abs=1e-12)
            assert got.returns[t, b].item() == pytest.approx(values[t, b] + total, rel=1e-9, abs=1e-12)  # fmt: skip
            assert got.mask[t, b] == 1 - first[t + 1, b]


def test_the_kernel_of_vtrace_keeps_a_nan_and_bounds_a_ratio() -> None:
    given = _rows(4, 2, 0)
    given["first"][:] = False
    given["behaviour_log_probs"][1, 0] = -200.0
    given["target_log_probs"][1, 1] = np.nan
    got = returns.launch_vtrace_rows(**given, gamma=0.9, rho_bar=None)
    assert got.vs[:, 0].isfinite().all() and got.vs[:2, 1].isnan().all() and got.vs[2, 1].isfinite()
    _near(got, returns.vtrace_rows(**given, gamma=0.9, rho_bar=None))


def test_arguments_that_a_kernel_cannot_take_are_named() -> None:
    given = _rows(3, 4, 0)
    for name, wrong, says in (
        ("rewards", given["rewards"].double(), "rewards is float64; it must be float32"),
        ("first", given["first"].to(torch.uint8), "first is uint8; it must be bool"),
        ("values", given["values"].t().contiguous().t(), r"values has the strides \[1, 3\]"),
        ("terminated", given["terminated"].to("meta"), "terminated is on meta, values on cpu"),
    ):
        with pytest.raises(build.ArgumentError, match=says) as raised:
            returns.launch_vtrace_rows(**{**given, name: wrong}, gamma=0.9)
        assert isinstance(raised.value, ValueError)
    with pytest.raises(ShapeError, match="first"):
        returns.launch_vtrace_rows(**{**given, "first": given["first"][1:]}, gamma=0.9)
    with pytest.raises(ShapeError, match="target_log_probs"):
        returns.launch_vtrace_rows(**{**given, "target_log_probs": torch.zeros(7, 4)}, gamma=0.9)
