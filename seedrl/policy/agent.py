"""The policy that a configuration asks for, and the heads that turn its numbers into actions."""

from __future__ import annotations

from seedrl.config import Config
from seedrl.policy.base import Heads, Policy, extra_leaves_of, make_policy
from seedrl.policy.normalise import Normalised, as_seen, normalised_leaves
from seedrl.policy.values import ACTING_VALUES, ActionValues, ValueHeads, epsilon_ladder, spread
from seedrl.spec import EnvSpec, RowSpecs


def make_agent(config: Config, spec: EnvSpec, num_slots: int = 1) -> tuple[Policy, Heads]:
    """Args: spec: of the environment, which sends single frames; the policy sees `env.frame_stack` of them. num_slots: over which exploration is spread. Raises: ConfigError, of `make_policy`, and for an action that cannot be valued."""
    policy, algorithm = _make_policy(config, spec.stacked(config.env.frame_stack)), config.algorithm
    if not algorithm.values_actions:
        return policy, Heads(spec.action, config.policy.action_distribution)
    ladder = epsilon_ladder(algorithm.epsilon, algorithm.epsilon_exponent, num_slots)
    epsilon = ladder[spread(num_slots)]
    heads = ValueHeads(spec.action, epsilon, algorithm.name)
    return ActionValues(policy, algorithm.dueling), heads


def _make_policy(config: Config, spec: EnvSpec) -> Policy:
    returns = config.algorithm.normalise_returns
    leaves = normalised_leaves(spec) if config.policy.normalise_observations else []
    if not leaves and not returns:
        return make_policy(config.policy, spec)
    return Normalised(make_policy(config.policy, as_seen(spec, leaves)), leaves, returns)


def stored_extras(config: Config, policy: Policy) -> RowSpecs:
    """What is stored beside each row: the policy's own leaves, and the values that first priorities are made of."""
    extras = extra_leaves_of(policy)
    return extras | ACTING_VALUES if config.replay.initial_priority == "acting" else extras
