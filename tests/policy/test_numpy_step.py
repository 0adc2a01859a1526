"""NumPy's acting step against its twin in torch: `nets.Default` and `heads.Heads` define what is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.config import PolicySection
from seedrl.policy.base import Heads, make_policy
from seedrl.policy.normalise import Normalised, as_seen, normalised_leaves
from seedrl.policy.numpy_step import NumpyChoice, NumpyPolicy
from seedrl.policy.values import ActionValues
from seedrl.spec import EnvSpec, spec_from_spaces

MAX_ROWS = 40
BOXES: dict[str, tuple[spaces.Box, Any]] = {
    "plain": (spaces.Box(-1, 1, (5,), np.float32), np.float32),
    "wide": (spaces.Box(np.float32([-100, -1, 0]), np.float32([300, 1, 2e9])), np.float32),
    "double": (spaces.Box(-50, 50, (2, 3), np.float64), np.float64),
    "bytes": (spaces.Box(0, 255, (6,), np.uint8), np.uint8),
    "one": (spaces.Box(-1, 1, (), np.float32), np.float32),
}  # fmt: skip


def a_spec(box: spaces.Box, action: spaces.Space[Any]) -> EnvSpec:
    return spec_from_spaces(box, action, action_mask=None, stats=(), env_id="none")


@given(
    kind=st.sampled_from(sorted(BOXES)), hidden=st.lists(st.integers(1, 9), max_size=3), activation=st.sampled_from(["tanh", "relu"]),
    rows=st.integers(1, MAX_ROWS), seed=st.integers(0, 999), separate=st.booleans(), core=st.sampled_from(["none", "lstm", "gru"]),
    valued=st.sampled_from([None, False, True]), normalised=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_network_is_torchs(
    kind: str,
    hidden: list[int],
    activation: str,
    rows: int,
    seed: int,
    separate: bool,
    core: str,
    valued: bool | None,
    normalised: bool,
) -> None:
    box, dtype = BOXES[kind]
    torch.manual_seed(seed)
    spec = a_spec(box, spaces.Discrete(4))
    leaves = normalised_leaves(spec) if normalised and dtype is not np.uint8 else []
    section = PolicySection(
        hidden=hidden, activation=activation, separate_value=separate, core=core, core_size=5  # type: ignore[arg-type]
    )  # fmt: skip
    policy = make_policy(section, as_seen(spec, leaves)).eval()
    if normalised:
        policy = Normalised(policy, leaves, returns=True)
    if valued is not None:
        policy = ActionValues(policy, dueling=valued).eval()
    fast = NumpyPolicy.of(policy, MAX_ROWS)
    assert fast is not None
    rng = np.random.default_rng(seed)
    # a core's gates turn the rounding of large sums into differences of their own
    spread = 1.0 if core == "none" else 0.2
    for _ in range(2):
        if normalised:
            moments: Any = policy.policy if valued is not None else policy
            seen = rng.uniform(0, 200, (9, *box.shape)).astype(dtype)
            moments.observe({"observation": torch.from_numpy(seen)}, torch.randn(9) * 3 + 1)
        with torch.no_grad():  # published weights arrive in place
            for parameter in policy.parameters():
                parameter.copy_(torch.from_numpy(rng.normal(0, spread, tuple(parameter.shape))))
        obs = rng.uniform(0, 200, (rows, *box.shape)).astype(dtype)
        state = [rng.normal(0, 3, (rows, 5)).astype(np.float32) for _ in policy.initial_state(rows)]
        entering = tuple(torch.from_numpy(leaf) for leaf in state)
        before = [leaf.copy() for leaf in (obs, *state)]
        with torch.no_grad():
            inputs, value, left = policy(torch.from_numpy(obs)[None], entering, torch.zeros(1, rows, dtype=torch.bool))  # fmt: skip
        found, found_value, found_left = fast(obs, state)
        scale = 1 + inputs.abs().max().item()
        np.testing.assert_allclose(found, inputs[0].numpy(), rtol=2e-5, atol=2e-5 * scale)
        np.testing.assert_allclose(found_value, value[0].numpy(), rtol=2e-5, atol=2e-5 * scale)
        for found_leaf, leaf in zip(found_left, left, strict=True):
            np.testing.assert_allclose(found_leaf, leaf.numpy(), rtol=2e-5, atol=2e-5)
        for kept, leaf in zip(before, (obs, *state), strict=True):
            np.testing.assert_array_equal(leaf, kept)  # they are stored afterwards


@pytest.mark.parametrize(
    ("settings_", "observation"),
    [
        ({"activation": "gelu"}, spaces.Box(-1, 1, (3,), np.float32)),
        ({}, spaces.Discrete(3)), ({}, spaces.Box(0, 255, (40, 40), np.uint8)),
        ({}, spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, (2,))})),
    ],
)  # fmt: skip
def test_other_networks_are_left_to_torch(
    settings_: dict[str, Any], observation: spaces.Space[Any]
) -> None:
    spec = spec_from_spaces(
        observation, spaces.Discrete(4), action_mask=None, stats=(), env_id="none"
    )
    policy = make_policy(PolicySection(**settings_), spec)
    assert NumpyPolicy.of(policy, MAX_ROWS) is None
    heir = type("Heir", (type(policy),), {})
    policy.__class__ = heir  # whoever derives from it may compute something else
    assert NumpyPolicy.of(policy, MAX_ROWS) is None


@given(
    rows=st.integers(1, MAX_ROWS), choices=st.integers(1, 9), start=st.integers(-3, 3), scale=st.sampled_from([0.1, 3.0, 80.0]),
    masked=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_choice_is_that_of_the_heads(
    rows: int, choices: int, start: int, scale: float, masked: bool, seed: int
) -> None:
    spec = a_spec(spaces.Box(-1, 1, (1,)), spaces.Discrete(choices, start=start))
    heads, rng = Heads(spec.action), np.random.default_rng(seed)
    choice = NumpyChoice.of(heads, MAX_ROWS, seed)
    assert choice is not None
    inputs = rng.normal(0, scale, (rows, choices)).astype(np.float32)
    mask = None
    if masked:
        mask = rng.integers(0, 2, (rows, choices)).astype(np.uint8)
        mask[np.arange(rows), rng.integers(0, choices, rows)] = 1
    best = np.flatnonzero(rng.integers(0, 2, rows))
    tensors = torch.from_numpy(inputs), None if mask is None else torch.from_numpy(mask)
    action, log_prob = choice.sample(inputs, mask, best if best.size else None, np.arange(rows))
    assert action.dtype == np.int64
    if mask is not None:
        assert mask[np.arange(rows), action].all()
    name = heads.leaves[0].name
    right = heads.log_prob(tensors[0], {name: torch.from_numpy(action)}, tensors[1]).numpy()
    np.testing.assert_allclose(log_prob, right, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(action[best], heads.mode(*tensors)[name].numpy()[best])
    want = heads.to_env({name: torch.from_numpy(action)})[name].numpy()
    found = choice.to_env({name: action})[name]
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)


def test_draws_follow_the_distribution() -> None:
    rows, probabilities = 40_000, np.array([0.5, 0.25, 0.15, 0.1, 0.0])
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(probabilities), -1e9).astype(np.float32)
    spec = a_spec(spaces.Box(-1, 1, (1,)), spaces.Discrete(5))
    choice = NumpyChoice.of(Heads(spec.action), rows, 7)
    assert choice is not None
    action, log_prob = choice.sample(np.repeat(logits[None], rows, 0), None, None, np.arange(rows))
    counts = np.bincount(action, minlength=5)
    assert counts[4] == 0
    expected = rows * probabilities[:4]
    chi_squared = float(((counts[:4] - expected) ** 2 / expected).sum())
    assert (
        chi_squared < 16.27
    )  # 0.1 % of draws from the right distribution are beyond it, 3 degrees of freedom
    np.testing.assert_allclose(log_prob, np.log(probabilities[action]), rtol=1e-5)
    again, _ = choice.sample(np.repeat(logits[None], rows, 0), None, None, np.arange(rows))
    assert (again != action).any()


def test_an_action_of_two_leaves_or_of_another_kind_is_left_to_the_heads() -> None:
    for action in (spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3]), spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)})):  # fmt: skip
        assert (
            NumpyChoice.of(Heads(a_spec(spaces.Box(-1, 1, (1,)), action).action), MAX_ROWS, 0)
            is None
        )
