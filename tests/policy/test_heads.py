"""Action heads against torch.distributions, and what an environment is promised of its actions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as D

from seedrl.errors import ShapeError
from seedrl.policy.heads import Heads
from seedrl.spec import spec_from_spaces, unflatten_actions

PLAIN = spaces.Box(-1, 1, (2,), np.float32)


def heads_of(space: spaces.Space, distribution: str = "squashed") -> Heads:
    spec = spec_from_spaces(PLAIN, space, action_mask=None, stats=(), env_id="x")
    return Heads(spec.action, distribution)  # type: ignore[arg-type]


SPACES = {
    "discrete": spaces.Discrete(5, start=-3),
    "multi_discrete": spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[1, 0], [-5, 7]])),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "box": spaces.Box(np.array([0, -2], np.float32), np.array([230, 0], np.float32)),
    "scalar": spaces.Box(-2.0, 2.0, (), np.float32),
    "float64": spaces.Box(-1e-3, 1.0, (3,), np.float64),
    "integers": spaces.Box(0, 255, (2, 2), np.uint8),
    "half open": spaces.Box(0.0, np.inf, (2,), np.float32),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "nested": spaces.Dict(
        {"a": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))), "b": spaces.MultiBinary(2)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("distribution", ["squashed", "clipped"])
@pytest.mark.parametrize("name", SPACES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]))
def test_every_action_is_inside_its_space_however_wild_the_inputs(
    name: str, distribution: str, seed: int, scale: float
) -> None:
    space = SPACES[name]
    heads = heads_of(space, distribution)
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(7, heads.num_inputs, generator=generator)
    sampled, log_prob = heads.sample(inputs, None, generator)
    assert torch.isfinite(log_prob).all() and log_prob.shape == (7,)
    for stored in (sampled, heads.mode(inputs, None)):
        for leaf, (dtype, shape) in heads.stored_specs().items():
            assert stored[leaf].dtype == dtype and tuple(stored[leaf].shape) == (7, *shape)
        columns = [action.numpy() for action in heads.to_env(stored).values()]
        for action in unflatten_actions(space)(columns):
            assert space.contains(action), action


def test_discrete_equals_torchs_categorical() -> None:
    heads, inputs = heads_of(SPACES["discrete"]), torch.randn(4, 3, 5)
    action = torch.randint(5, (4, 3))
    log_prob, entropy = heads.evaluate(inputs, {"action": action}, None)
    reference = D.Categorical(logits=inputs)
    torch.testing.assert_close(log_prob, reference.log_prob(action))
    torch.testing.assert_close(entropy, reference.entropy())
    assert heads.to_env({"action": torch.tensor([0, 4])})["action"].tolist() == [-3, 1]


def test_multi_discrete_equals_a_categorical_for_each_entry() -> None:
    heads, inputs = heads_of(SPACES["multi_discrete"]), torch.randn(6, 11)
    actions, drawn = heads.sample(inputs, None)
    log_prob, entropy = heads.evaluate(inputs, actions, None)
    parts = [D.Categorical(logits=part) for part in inputs.split([2, 3, 4, 2], -1)]
    flat = actions["action"].reshape(6, 4)
    torch.testing.assert_close(
        log_prob, sum(part.log_prob(flat[:, i]) for i, part in enumerate(parts))
    )
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))
    torch.testing.assert_close(drawn, log_prob)


def test_multi_binary_equals_a_bernoulli_for_each_bit() -> None:
    heads, inputs = heads_of(SPACES["multi_binary"]), torch.randn(5, 6)
    actions, drawn = heads.sample(inputs, None)
    reference = D.Independent(D.Bernoulli(logits=inputs), 1)
    log_prob, entropy = heads.evaluate(inputs, actions, None)
    torch.testing.assert_close(
        log_prob, reference.log_prob(actions["action"].reshape(5, 6).float())
    )
    torch.testing.assert_close(entropy, reference.entropy())
    torch.testing.assert_close(drawn, log_prob)


def test_a_box_is_a_gaussian_before_squashing() -> None:
    heads, inputs = heads_of(SPACES["box"]), torch.randn(5, 4)
    actions, drawn = heads.sample(inputs, None)
    raw = actions["action"]
    log_prob, entropy = heads.evaluate(inputs, actions, None)
    torch.testing.assert_close(drawn, log_prob)
    mode = heads.mode(inputs, None)["action"]
    torch.testing.assert_close(mode, inputs[:, :2])
    # the deviation follows from the density at the mean: log p(mean) = -sum(log std) - log(2 pi)
    at_mean = heads.log_prob(inputs, {"action": mode}, None)
    torch.testing.assert_close(entropy, 1 - at_mean)
    squashed = heads.to_env(actions)["action"]
    torch.testing.assert_close(squashed[:, 0], 115 + 115 * torch.tanh(raw[:, 0]))


def test_a_gaussian_sample_has_the_mean_and_deviation_of_its_density() -> None:
    heads = heads_of(SPACES["unbounded"])
    inputs = torch.tensor([[0.3, -0.7, 0.4, -1.0]]).expand(20_000, 4)
    raw = heads.sample(inputs, None, torch.Generator().manual_seed(3))[0]["action"]
    at_mean = heads.log_prob(inputs[:1], heads.mode(inputs[:1], None), None)
    product_of_std = torch.exp(-at_mean) / (2 * torch.pi)
    torch.testing.assert_close(raw.mean(0), inputs[0, :2], rtol=0, atol=0.03)
    torch.testing.assert_close(raw.std(0).prod(), product_of_std[0], rtol=0.05, atol=0)


def test_sampling_frequencies_are_the_probabilities() -> None:
    logits, draws = torch.tensor([2.0, 0.0, -1.0, 0.5]), 100_000
    heads = heads_of(spaces.Discrete(4))
    actions = heads.sample(logits.expand(draws, 4), None, torch.Generator().manual_seed(1))[0][
        "action"
    ]
    probabilities = torch.softmax(logits, 0)
    counts = torch.bincount(actions, minlength=4).double()
    deviation = (draws * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - draws * probabilities).abs() < 4 * deviation).all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1.0, 50.0, 1e6]))
def test_MaskedActions_are_those_of_the_masked_distribution(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = heads_of(spaces.Discrete(6))
    inputs = scale * torch.randn(32, 6, generator=generator)
    mask = torch.zeros(32, 6, dtype=torch.uint8)
    for row in range(32):
        legal = torch.randperm(6, generator=generator)[: 1 + row % 3]
        mask[row, legal] = 1
    actions, drawn = heads.sample(inputs, mask, generator)
    for action in (actions["action"], heads.mode(inputs, mask)["action"]):
        assert mask.gather(1, action[:, None]).all()
    log_prob, entropy = heads.evaluate(inputs, actions, mask)
    for row in range(32):
        legal = mask[row].bool()
        # in float32 it takes logits of a million less their sum's logarithm, which has lost what is behind the point
        reference = D.Categorical(logits=inputs[row, legal].double())
        place = int(legal[: int(actions["action"][row])].sum())
        torch.testing.assert_close(
            log_prob[row].double(), reference.log_prob(torch.tensor(place)), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(entropy[row].double(), reference.entropy(), rtol=1e-4, atol=1e-5)
        if legal.sum() == 1:
            assert log_prob[row] == 0 and entropy[row] == 0
    torch.testing.assert_close(drawn, log_prob)


def test_a_mask_speaks_of_the_discrete_leaves_alone() -> None:
    heads = heads_of(SPACES["nested"])
    assert heads.mask_size == 3
    mask = torch.tensor([[0, 0, 1]], dtype=torch.uint8).expand(50, 3)
    actions, _ = heads.sample(torch.randn(50, heads.num_inputs), mask)
    assert (actions["action.a.0"] == 2).all()


def test_inputs_of_the_wrong_width_are_named() -> None:
    with pytest.raises(ShapeError, match=r"inputs has the shape \[3, 4\]"):
        heads_of(spaces.Discrete(5)).log_prob(
            torch.zeros(3, 4), {"action": torch.zeros(3, dtype=torch.int64)}, None
        )
