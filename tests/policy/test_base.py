"""The contract of a policy, and what is said of one that breaks it."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
from torch import nn

from seedrl.config import Config
from seedrl.errors import ConfigError
from seedrl.policy.base import Policy, make_policy, register_policy
from seedrl.spec import spec_from_spaces

SPEC = spec_from_spaces(
    spaces.Box(-1, 1, (4,)), spaces.Discrete(3), action_mask=None, stats=(), env_id="x"
)


def policy_config(name: str):
    return Config.model_validate({"policy": {"name": name}}).policy


class Fixed(Policy):
    def __init__(self, inputs: tuple[int, ...], value: tuple[int, ...], count: int = 3) -> None:
        super().__init__()
        self.out = [torch.zeros(inputs), torch.zeros(value), ()][:count]

    def forward(self, obs, state, first):
        return tuple(self.out)


def _register(name: str, made: object) -> None:
    register_policy(name)(lambda spec, num_inputs, config: made)  # type: ignore[arg-type,return-value]


def test_a_registered_policy_is_found() -> None:
    made = Fixed((1, 2, 3), (1, 2))
    _register("fixed", made)
    assert make_policy(policy_config("fixed"), SPEC) is made


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Fixed((2, 1, 3), (1, 2)), ["inputs", "[2, 1, 3]", "[1, 2, 3]"]),
        (Fixed((1, 2, 5), (1, 2)), ["inputs", "[1, 2, 5]"]),
        (Fixed((1, 2, 3), (1, 2, 1)), ["value", "[1, 2, 1]", "[1, 2]"]),
        (Fixed((1, 2, 3), (1, 2), 2), ["(inputs, value, state)"]),
        (nn.Linear(4, 3), ["Linear", "initial_state"]),
    ],
)
def test_a_policy_that_breaks_the_contract_is_refused_by_name(
    made: object, words: list[str]
) -> None:
    _register("broken", made)
    with pytest.raises(ConfigError) as caught:
        make_policy(policy_config("broken"), SPEC)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [("defualt", "default"), ("no_module:x", "no_module"), ("system_policies:answr", "answer")],
)
def test_a_policy_that_is_not_there_is_named_with_the_nearest(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_policy(policy_config(name), SPEC)
