"""V-trace against published and hand-computed values, and against a naive second implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csrc_free_kernels.returns import vtrace, vtrace_rows
from csrc_free_kernels.shapes import check_shapes
from seedrl.errors import ShapeError
from tests.tools.naive_vtrace import naive_vtrace, naive_vtrace_rows

CASES = json.loads((Path(__file__).parents[1] / "cases" / "algorithms.json").read_text())[
    "families"
]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
CLIPS = ("rho_bar", "c_bar", "rho_pg_bar", "lambda_")
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float64", "float32"])


def cases(family: str) -> Any:
    return pytest.mark.parametrize("case", CASES[family], ids=lambda case: case["name"])


def assert_near(got: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    np.testing.assert_allclose(
        got.numpy(), np.asarray(expected), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def tensors(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    flags = ("terminated", "truncated", "first")
    return {
        key: torch.tensor(value, dtype=torch.bool if key in flags else dtype)
        if isinstance(value, list)
        else value
        for key, value in inputs.items()
    }


@DTYPES
@cases("vtrace")
def test_vtrace_equals_the_published_case(case: dict[str, Any], dtype: torch.dtype) -> None:
    got = vtrace(**tensors(case["inputs"], dtype))
    assert_near(got.vs, case["expected"]["vs"], dtype)
    assert_near(got.pg_advantages, case["expected"]["pg_advantages"], dtype)


@DTYPES
@cases("vtrace_rows")
def test_vtrace_rows_equals_the_published_case(case: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = tensors(case["inputs"], dtype)
    del inputs["truncated"]  # the `first` row that follows says as much
    got = vtrace_rows(**inputs)
    for name, value in got._asdict().items():
        assert_near(value, case["expected"][name], dtype)


@cases("vtrace")
def test_naive_vtrace_equals_the_published_case(case: dict[str, Any]) -> None:
    got = naive_vtrace(**case["inputs"])
    for value, name in zip(got, ("vs", "pg_advantages"), strict=True):
        np.testing.assert_allclose(value, case["expected"][name], rtol=1e-9, atol=1e-9)


@cases("vtrace_rows")
def test_naive_vtrace_rows_equals_the_published_case(case: dict[str, Any]) -> None:
    inputs = {key: value for key, value in case["inputs"].items() if key != "truncated"}
    got = naive_vtrace_rows(**inputs)
    for value, name in zip(got, ("vs", "pg_advantages", "mask"), strict=True):
        np.testing.assert_allclose(value, case["expected"][name], rtol=1e-9, atol=1e-9)


bars = st.none() | st.floats(0.1, 3.0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 12), columns=st.integers(1, 4), rho_bar=bars, c_bar=bars,
    rho_pg_bar=bars, lambda_=st.floats(0, 1), gamma=st.floats(0, 1), ends=st.floats(0, 1),
)  # fmt: skip
def test_vtrace_equals_the_naive_sums_on_random_input(
    seed: int, steps: int, columns: int, rho_bar: float | None, c_bar: float | None, rho_pg_bar: float | None,
    lambda_: float, gamma: float, ends: float,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    clips = {"rho_bar": rho_bar, "c_bar": c_bar, "rho_pg_bar": rho_pg_bar, "lambda_": lambda_}
    behaviour, target = -rng.exponential(1.0, (2, steps + 1, columns))
    rewards, values = rng.normal(size=(2, steps + 1, columns))
    discounts = gamma * (rng.random((steps, columns)) >= ends)
    plain = (behaviour[:-1], target[:-1], discounts, rewards[1:], values[:-1], values[-1])
    got = vtrace(*map(torch.from_numpy, plain), **clips)
    for ours, theirs in zip(got, naive_vtrace(*plain, **clips), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)

    # rows: a row may be final (terminated, truncated) or break off; the row after it is `first` in all three cases
    over = rng.random((steps + 1, columns)) < ends
    terminated = over & (rng.random(over.shape) < 0.5)
    first = np.vstack([rng.random((1, columns)) < 0.5, over[:-1]])
    terminated &= ~first
    rewards[first] = 0
    rows = (behaviour, target, rewards, values, terminated, first)
    got_rows = vtrace_rows(*map(torch.from_numpy, rows), gamma, **clips)
    for ours, theirs in zip(got_rows, naive_vtrace_rows(*rows, gamma, **clips), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def column(*numbers: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)


def test_behaviour_13_vtrace_by_hand() -> None:
    got = vtrace(
        column(0, 0),
        column(2, 0.5).log(),
        column(0.9, 0.9),
        column(1, 2),
        column(1, 0.5),
        torch.tensor([2.0]),
    )
    assert_near(got.vs, [[2.935], [2.15]], torch.float32)
    assert_near(got.pg_advantages, [[1.935], [1.65]], torch.float32)


def test_behaviour_14_ratio_1_gives_the_n_step_return() -> None:
    rewards, values = column(1, -2, 3, 0.5), column(9, -9, 4, 2)
    same = torch.full((4, 1), -0.7)
    got = vtrace(same, same, torch.full((4, 1), 0.9), rewards, values, torch.tensor([10.0]))
    returns, after = [], 10.0
    for reward in (0.5, 3, -2, 1):
        after = reward + 0.9 * after
        returns.append([after])
    assert_near(got.vs, returns[::-1], torch.float32)


def test_behaviour_14_lambda_0_gives_one_step_targets() -> None:
    rewards, values = column(1, -2, 3), column(9, -9, 4)
    got = vtrace(
        torch.zeros(3, 1),
        column(0.5, 3, 1).log(),
        torch.full((3, 1), 0.9),
        rewards,
        values,
        torch.tensor([10.0]),
        lambda_=0.0,
    )
    expected = [9 + 0.5 * (1 + 0.9 * -9 - 9), -2 + 0.9 * 4, 3 + 0.9 * 10]
    assert_near(got.vs, [[x] for x in expected], torch.float32)


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("bar", [1.0, None])
def test_behaviour_14_log_ratios_of_100_are_finite_in_float32(
    log_ratio: float, bar: float | None
) -> None:
    shape = (5, 3)
    got = vtrace(
        torch.zeros(shape), torch.full(shape, log_ratio), torch.full(shape, 0.99), torch.ones(shape),
        torch.full(shape, -3.0), torch.ones(3), rho_bar=bar, rho_pg_bar=bar,
    )  # fmt: skip
    assert got.vs.isfinite().all() and got.vs.square().isfinite().all()
    assert got.pg_advantages.isfinite().all()


@DTYPES
def test_behaviour_15_no_advantage_leaks_over_a_truncation(dtype: torch.dtype) -> None:
    values = column(1, 1, 1, 100, 100, 100, dtype=dtype)
    first = column(1, 0, 0, 1, 0, 0).bool()
    zero = torch.zeros_like(values)
    got = vtrace_rows(zero, zero, zero, values, first & False, first, 1.0)
    assert (got.pg_advantages == 0).all()
    assert torch.equal(got.vs, values[:-1])
    assert got.mask.flatten().tolist() == [1, 1, 0, 1, 1]


def test_an_interrupted_episode_joins_no_other() -> None:
    rewards = column(0, 1, 0, 1, 1)
    first = column(1, 0, 1, 0, 0).bool()  # row 1 was the last that came; no flag on it
    zero, nothing = torch.zeros(5, 1), torch.zeros(5, 1).bool()
    got = vtrace_rows(zero, zero, rewards, column(0, 7, 50, 50, 50), nothing, first, 1.0)
    assert got.mask.flatten().tolist() == [1, 0, 1, 1]
    assert got.vs.flatten().tolist() == [8, 7, 52, 51]


def test_no_gradient_flows_through_targets_and_advantages() -> None:
    ones = torch.ones(3, 2, requires_grad=True)
    got = vtrace(ones, ones, ones, ones, ones, torch.ones(2, requires_grad=True))
    rows = vtrace_rows(
        ones, ones, ones, ones, torch.zeros(3, 2).bool(), torch.zeros(3, 2).bool(), 0.9
    )
    assert not any(value.requires_grad for value in (*got, *rows))


def test_bfloat16_input_is_computed_in_float32() -> None:
    half = torch.ones(3, 2, dtype=torch.bfloat16)
    got = vtrace(half, half, half, half, half, half[0])
    assert got.vs.dtype == got.pg_advantages.dtype == torch.float32


def test_rows_take_log_probs_of_all_rows_or_of_transitions() -> None:
    generator = torch.Generator().manual_seed(1)
    behaviour, target, rewards, values = torch.randn(4, 6, 2, generator=generator)
    flags = torch.zeros(6, 2).bool()
    whole = vtrace_rows(behaviour, target, rewards, values, flags, flags, 0.9)
    cut = vtrace_rows(behaviour[:-1], target[:-1], rewards, values, flags, flags, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_a_wrong_shape_is_named_with_the_expected_one() -> None:
    good = torch.zeros(3, 2)
    with pytest.raises(
        ShapeError, match=r"rewards has the shape \[2, 3\]; it must be \[T, B\]"
    ) as raised:
        vtrace(good, good, good, torch.zeros(2, 3), good, torch.zeros(2))
    assert "T = 3, B = 2" in str(raised.value)
    with pytest.raises(ShapeError, match="bootstrap_value"):
        vtrace(good, good, good, good, good, torch.zeros(3))
    with pytest.raises(ShapeError, match="first"):
        vtrace_rows(good, good, good, good, good.bool(), torch.zeros(2, 2).bool(), 0.9)
    with pytest.raises(ShapeError, match="target_log_probs"):
        vtrace_rows(good, torch.zeros(5, 2), good, good, good.bool(), good.bool(), 0.9)


def test_check_shapes_knows_numbers_and_trailing_dimensions() -> None:
    assert check_shapes(x=(torch.zeros(2, 3, 4, 5), "T B ..."), y=(torch.zeros(2, 7), "T 7")) == {
        "T": 2,
        "B": 3,
    }
    with pytest.raises(ShapeError, match="y has the shape"):
        check_shapes(y=(torch.zeros(2, 6), "T 7"))
    with pytest.raises(ShapeError, match="x has the shape"):
        check_shapes(x=(torch.zeros(2), "T B ..."))
