"""Spaces to named leaves and back, and the difference of two specs."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from seedrl.errors import SpecError
from seedrl.spec import EnvSpec, flatteners, spec_from_spaces, unflatten, unflatten_actions

LEAF_SPACES = st.one_of(
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-5, 5)),
    st.builds(lambda n: spaces.MultiDiscrete(np.array(n)), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    st.builds(spaces.MultiBinary, st.integers(1, 6)),
    st.builds(
        lambda shape, dtype: spaces.Box(0, 1, tuple(shape), dtype),
        st.lists(st.integers(1, 3), max_size=3),
        st.sampled_from([np.float32, np.float64, np.uint8, np.int16, np.uint16, np.int64, bool]),
    ),
)  # fmt: skip
SPACES = st.recursive(
    LEAF_SPACES,
    lambda inner: st.one_of(
        st.builds(lambda parts: spaces.Tuple(tuple(parts)), st.lists(inner, min_size=1, max_size=3)),
        st.builds(spaces.Dict, st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)  # fmt: skip
PLAIN = spaces.Discrete(2)


def spec(
    observation: spaces.Space, action: spaces.Space = PLAIN, mask: str | None = None
) -> EnvSpec:
    return spec_from_spaces(observation, action, action_mask=mask, stats=("score",), env_id="x")


@settings(max_examples=100, deadline=None)
@given(space=SPACES, seed=st.integers(0, 2**31))
def test_leaves_go_out_and_come_back_equal(space: spaces.Space, seed: int) -> None:
    space.seed(seed)
    value = space.sample()
    leaves = [np.asarray(getter(value)) for getter in flatteners(space)]
    named = spec(space).observation
    assert len(leaves) == len(named) == len({leaf.name for leaf in named})
    for leaf, array in zip(named, leaves, strict=True):
        assert array.dtype == leaf.dtype and array.shape == leaf.shape
    assert space.contains(unflatten(space, leaves))
    columns = [np.stack([leaf] * 2) for leaf in leaves]
    for action in unflatten_actions(space)(columns):
        assert space.contains(action)
    again = EnvSpec.from_dict(msgpack.unpackb(msgpack.packb(spec(space).to_dict())))
    assert again == spec(space) and again.difference(spec(space)) == []


def test_names_and_order_are_fixed() -> None:
    names = [leaf.name for leaf in spec(envs.NestedSpaces().observation_space).observation]
    assert names == [
        "observation.camera", "observation.cards.0", "observation.cards.1", "observation.flags", "observation.grid", "observation.position",
    ]  # fmt: skip
    assert spec(spaces.Box(0, 1, ())).observation[0].name == "observation"


def test_bounds_are_kept_entry_by_entry() -> None:
    (leaf,) = spec(
        spaces.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 5], np.float32))
    ).observation
    assert leaf.low == (0.0, -math.inf) and leaf.high == (math.inf, 5.0)
    (leaf,) = spec(spaces.Box(-np.inf, np.inf, (2,))).observation
    assert leaf.low is None and leaf.high is None


def test_a_difference_is_told_leaf_by_leaf() -> None:
    here = spec(spaces.Dict({"camera": spaces.Box(0, 255, (84, 84), np.uint8), "extra": PLAIN}))
    there = spec(
        spaces.Dict({"camera": spaces.Box(0, 1, (84, 84), np.float32)}), spaces.Discrete(3)
    )
    text = "; ".join(there.difference(here))
    assert "observation.camera" in text and "float32 [84, 84]" in text and "uint8 [84, 84]" in text
    assert "observation.extra" in text and "action" in text


@pytest.mark.parametrize("kind", ["text", "sequence", "graph"])
def test_unsupported_spaces_are_named_by_path_and_type(kind: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(envs.UnsupportedSpaces(kind).observation_space)
    assert "observation.note" in str(caught.value) and kind.capitalize() in str(caught.value)
    assert "Box" in caught.value.do


def test_masks() -> None:
    env = envs.MaskedActions()
    masked = spec(env.observation_space, env.action_space, "observation.action_mask")
    assert masked.mask_size == 6
    with pytest.raises(SpecError, match="acton_mask"):
        spec(env.observation_space, env.action_space, "observation.acton_mask")
    assert (
        spec(
            PLAIN,
            spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1), spaces.MultiDiscrete([2, 4]))),
            "info",
        ).mask_size
        == 9
    )
