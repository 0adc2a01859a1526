"""Encoders and cores: shapes for every kind of observation, recurrence against torch's own, images scaled once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from seedrl.config import Config
from seedrl.errors import ConfigError
from seedrl.policy.base import Heads, make_policy, zero_observation
from seedrl.policy.nets import Flat, Nested, Picture, Recurrent
from seedrl.spec import EnvSpec, Leaf, spec_from_spaces


def spec_of(observation: spaces.Space, action: spaces.Space | None = None) -> EnvSpec:
    return spec_from_spaces(
        observation, action or spaces.Discrete(3), action_mask=None, stats=(), env_id="x"
    )


def config(**policy):
    return Config.model_validate({"policy": policy}).policy


OBSERVATIONS = {
    "vector": spaces.Box(-1, 1, (4,), np.float32),
    "scalar": spaces.Box(-1, 1, (), np.float64),
    "discrete": spaces.Discrete(5, start=-2),
    "multi_discrete": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multi_binary": spaces.MultiBinary(6),
    "matrix": spaces.Box(-1, 1, (3, 4), np.float32),
    "minatar": spaces.Box(0, 1, (10, 10, 4), bool),
    "atari": spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "hwc": spaces.Box(0, 255, (64, 64, 3), np.uint8),
    "grey": spaces.Box(0, 255, (48, 48), np.uint8),
    "middle": spaces.Box(0, 1, (1, 28, 28), np.float32),
    "nested": spaces.Dict(
        {
            "cards": spaces.Tuple((spaces.Discrete(3), spaces.Discrete(5))),
            "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "flags": spaces.MultiBinary(6),
            "far": spaces.Box(-1000, 1000, (2,), np.float32),
        }
    ),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_value_of_its_own_shares_nothing_with_the_policy(name: str) -> None:
    spec = spec_of(OBSERVATIONS[name])
    policy = make_policy(config(separate_value=True), spec)
    inputs, value, _ = policy(zero_observation(spec, 3, 2), (), torch.zeros(3, 2, dtype=torch.bool))
    parameters = list(policy.parameters())
    of_inputs = torch.autograd.grad(inputs.sum(), parameters, retain_graph=True, allow_unused=True)
    of_value = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    used = [(a is not None, b is not None) for a, b in zip(of_inputs, of_value, strict=True)]
    assert set(used) == {(True, False), (False, True)}


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_the_default_policy_takes_every_kind_of_observation(name: str, core: str) -> None:
    spec = spec_of(OBSERVATIONS[name])
    policy = make_policy(config(core=core, core_size=16), spec)
    obs = zero_observation(spec, 3, 2)
    state = policy.initial_state(2)
    inputs, value, after = policy(obs, state, torch.zeros(3, 2, dtype=torch.bool))
    assert inputs.shape == (3, 2, 3) and value.shape == (3, 2)
    assert len(after) == {"none": 0, "gru": 1, "lstm": 2}[core]
    assert torch.softmax(inputs, -1).sub(1 / 3).abs().max() < 0.02, "nearly uniform at first"


@pytest.mark.parametrize("encoder", ["mlp", "nature", "impala", "nested"])
def test_each_encoder_by_name(encoder: str) -> None:
    spec = spec_of(OBSERVATIONS["atari"])
    inputs, _, _ = make_policy(config(encoder=encoder), spec)(
        zero_observation(spec, 1, 2), (), torch.ones(1, 2, dtype=torch.bool)
    )
    assert inputs.shape == (1, 2, 3)


@pytest.mark.parametrize(
    ("encoder", "name"),
    [("nature", "vector"), ("impala", "discrete"), ("mlp", "nested"), ("nature", "minatar")],
)
def test_an_encoder_that_cannot_take_the_observation_says_so(encoder: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(config(encoder=encoder), spec_of(OBSERVATIONS[name]))
    assert "policy.encoder" in caught.value.where


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_core_equals_torchs_and_begins_anew_at_first(kind: str) -> None:
    torch.manual_seed(0)
    core = Recurrent(kind, 5, 7)
    reference = (torch.nn.LSTM if kind == "lstm" else torch.nn.GRU)(5, 7)
    for name, weight in core.cell.named_parameters():
        getattr(reference, f"{name}_l0").data.copy_(weight)
    x, first = torch.randn(9, 3, 5), torch.zeros(9, 3, dtype=torch.bool)
    first[4, 1] = True
    out, state = core(x, core.initial_state(3), first)
    torch.testing.assert_close(out[:, [0, 2]], reference(x)[0][:, [0, 2]])
    torch.testing.assert_close(out[:4, 1], reference(x[:4])[0][:, 1])
    torch.testing.assert_close(out[4:, 1], reference(x[4:, 1:2])[0][:, 0])
    # row by row, as in acting, gives the same as the whole unroll, as in learning
    state_by_row = core.initial_state(3)
    for t in range(9):
        row, state_by_row = core(x[t : t + 1], state_by_row, first[t : t + 1])
        torch.testing.assert_close(row[0], out[t])
    torch.testing.assert_close(state_by_row, state)


def test_TwoImages_bytes_are_scaled_once_and_floats_are_left() -> None:
    pixels = torch.randint(0, 256, (2, 1, 16, 16), dtype=torch.uint8)
    byte = Picture(Leaf("observation", "uint8", (1, 16, 16), "box", (0.0,), (255.0,)))
    plain = Picture(Leaf("observation", "float32", (1, 16, 16), "box", (0.0,), (1.0,)))
    torch.testing.assert_close(byte(pixels), plain((pixels / 255).float()))
    assert byte(pixels).max() <= 1


def test_pictures_are_channels_first_whichever_way_they_come() -> None:
    chw = torch.randint(0, 256, (2, 3, 12, 20), dtype=torch.uint8)
    one = Picture(Leaf("o", "uint8", (3, 12, 20), "box", (0.0,), (255.0,)))
    other = Picture(Leaf("o", "uint8", (12, 20, 3), "box", (0.0,), (255.0,)))
    assert one.size == other.size == (3, 12, 20)
    torch.testing.assert_close(one(chw), other(chw.permute(0, 2, 3, 1)))


def test_flat_leaves_are_one_hots_and_scaled_boxes() -> None:
    (leaf,) = spec_of(spaces.MultiDiscrete([2, 3], start=[5, -1])).observation
    assert Flat(leaf)(torch.tensor([[6, -1], [5, 1]])).tolist() == [
        [0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1],
    ]
    (far,) = spec_of(
        spaces.Box(np.array([0, -1], np.float32), np.array([200, 1], np.float32))
    ).observation
    torch.testing.assert_close(Flat(far)(torch.tensor([[150.0, 0.3]])), torch.tensor([[0.5, 0.3]]))


def test_nested_parts_stand_side_by_side_in_leaf_order() -> None:
    spec = spec_of(OBSERVATIONS["nested"])
    nested = Nested(spec, config(hidden=[]))
    obs = zero_observation(spec, 2)
    assert isinstance(obs, dict)
    obs["observation.cards.1"] += 4
    assert nested(obs).shape == (2, 64 * 0 + nested.features)
    names = [leaf.name for leaf in spec.observation]
    begin = sum(part.features for part in list(nested.parts)[: names.index("observation.cards.1")])
    assert nested(obs)[0, begin : begin + 5].tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_policy_and_its_heads_make_no_tensor_on_another_device(name: str, core: str) -> None:
    """On the "meta" device torch refuses what would mix devices on a GPU."""
    action = spaces.Dict({
        "one": spaces.Discrete(3, start=2), "many": spaces.MultiDiscrete([2, 5]), "bits": spaces.MultiBinary(3),
        "box": spaces.Box(np.array([-1, -np.inf], np.float32), np.array([2, np.inf], np.float32)),
        "short": spaces.Box(0, 9, (2,), np.int16),
    })  # fmt: skip
    spec = spec_of(OBSERVATIONS[name], action)
    meta = torch.device("meta")
    policy = make_policy(config(core=core), spec).to(meta)
    heads = Heads(spec.action, "squashed")
    obs = zero_observation(spec, 3, 2)
    obs = {leaf: x.to(meta) for leaf, x in obs.items()} if isinstance(obs, dict) else obs.to(meta)
    first = torch.ones(3, 2, dtype=torch.bool, device=meta)
    inputs, value, state = policy(obs, policy.initial_state(2), first)
    mask = torch.ones(3, 2, heads.mask_size, dtype=torch.uint8, device=meta)
    actions, log_prob = heads.sample(inputs, mask)
    log_probs, entropy = heads.evaluate(inputs, actions, mask)
    made = [value, log_prob, log_probs, entropy, *state, *actions.values()]
    made += [*heads.to_env(actions).values(), *heads.mode(inputs, mask).values()]
    assert all(tensor.device == meta for tensor in made)
