"""The Policy contract and the registry of policies by name.

A policy is an `nn.Module` with two methods, time first: acting is one row (T = 1), learning R = T + 1 rows.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seedrl.errors import ConfigError
from seedrl.policy.heads import Heads
from seedrl.spec import EnvSpec, RowSpecs

if TYPE_CHECKING:
    from seedrl.config import PolicySection

__all__ = [
    "Factory",
    "Heads",
    "Observation",
    "Policy",
    "State",
    "imported",
    "make_policy",
    "register_policy",
]

State = Any  # a tensor, or a tuple, list or dict of states; each tensor [B, ...]
Observation = Tensor | dict[str, Tensor]
Factory = Callable[[EnvSpec, int, Any], nn.Module]
_TRIED = 2  # columns of the row that a new policy is tried on


class Policy(nn.Module):
    """What the engine and the learner ask of a network."""

    def initial_state(self, batch: int) -> State:
        """The state that enters an episode's first row: a nest of tensors [batch, ...], or () for none."""
        return ()

    def extra_leaves(self) -> RowSpecs:
        """What the policy wants stored beside each row (another head's value, say): dtype and shape of a row, by name."""
        return {}

    def forward(
        self, obs: Observation, state: State, first: Tensor
    ) -> tuple[Tensor, Tensor, State] | tuple[Tensor, Tensor, State, dict[str, Tensor]]:
        """Runs rows in their order.

        Args:
            obs: [T, B, ...] in the environment's dtype; a dict by leaf name when the spec has several leaves.
            state: the state entering row 0, leaves [B, ...].
            first: bool [T, B]; the state that enters such a row is the initial one, whatever came before.
        Returns: distribution inputs float32 [T, B, P], value float32 [T, B], and the state that left the last row; where there are
            `extra_leaves` these as well, [T, B, ...] each by name.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward")


_FACTORIES: dict[str, Factory] = {}


def register_policy(name: str) -> Callable[[Factory], Factory]:
    """Decorates a factory `(spec, num_inputs, config) -> Policy`; `policy.name` finds it once its module is imported."""

    def register(factory: Factory) -> Factory:
        _FACTORIES[name] = factory
        return factory

    return register


def make_policy(config: PolicySection, spec: EnvSpec) -> Policy:
    """The policy that the configuration names, tried on a batch of zeros.

    Raises: ConfigError when there is none of that name, or when it does not keep the contract: which output, and how.
    """
    factory = _find(config.name)
    heads = Heads(spec.action, config.action_distribution)
    policy: Any = factory(spec, heads.num_inputs, config)
    _try(policy, spec, heads.num_inputs, config.name)
    return policy  # type: ignore[no-any-return]


def _find(name: str) -> Factory:
    if name in _FACTORIES:
        return _FACTORIES[name]
    module_name, separator, attribute = name.rpartition(":")
    if separator:
        return imported(module_name, attribute, f"policy.name {name}", "(spec, num_inputs, config) -> policy")  # fmt: skip
    importlib.import_module("seedrl.policy.nets")  # registers those that come with seedrl
    if name in _FACTORIES:
        return _FACTORIES[name]
    near = difflib.get_close_matches(name, _FACTORIES, n=1)
    do = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        what=f"there is no policy '{name}'",
        where="policy.name",
        do=f"{do}known: {', '.join(sorted(_FACTORIES))}; your own is module:callable",
    )


def imported(module_name: str, attribute: str, where: str, signature: str) -> Callable[..., Any]:
    """The callable of the user's own module. Raises: ConfigError, at `where`, when there is none."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            what=f"there is no module '{error.name}'",
            where=where,
            do="install it, or put its folder on PYTHONPATH; the working folder is on it already",
        ) from None
    factory = getattr(module, attribute, None)
    if not callable(factory):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise ConfigError(
            what=f"module '{module_name}' has no callable '{attribute}'",
            where=where,
            do=f"did you mean {near[0]}?" if near else f"name a function {signature}",
        )
    return factory  # type: ignore[no-any-return]


def extra_leaves_of(policy: nn.Module) -> RowSpecs:
    """`Policy.extra_leaves`, none where the module has no such method."""
    found: Any = getattr(policy, "extra_leaves", dict)
    return dict(found())


def require_extras(
    extras: dict[str, Tensor], declared: RowSpecs, lead: tuple[int, ...], where: str
) -> None:  # fmt: skip
    """Raises: ConfigError when what forward gave is not what `extra_leaves` declares: which leaf."""
    if sorted(extras) != sorted(declared):
        raise ConfigError(
            what=f"forward gives the extras {sorted(extras)}; extra_leaves declares {sorted(declared)}", where=where,
            do="give each that is declared, and no other",
        )  # fmt: skip
    for name, (dtype, shape) in declared.items():
        leaf = extras[name]
        if leaf.dtype is not dtype or leaf.shape != (*lead, *shape):
            raise ConfigError(
                what=f"the extra '{name}' is {leaf.dtype} {list(leaf.shape)}; extra_leaves declares {dtype} {[*lead, *shape]}", where=where,
                do="keep to one dtype and shape",
            )  # fmt: skip


def zero_observation(spec: EnvSpec, *lead: int) -> Observation:
    """An observation of zeros (the smallest value of a choice), [*lead, ...] a leaf."""
    leaves = {}
    for leaf in spec.observation:
        obs = torch.zeros(*lead, *leaf.shape, dtype=getattr(torch, leaf.dtype))
        if any(leaf.start):
            obs += torch.tensor(leaf.start, dtype=obs.dtype).view(leaf.shape)
        leaves[leaf.name] = obs
    return leaves if len(leaves) > 1 else next(iter(leaves.values()))


def _try(policy: Any, spec: EnvSpec, num_inputs: int, name: str) -> None:
    where = f"policy.name {name}"
    initial_state: Any = getattr(policy, "initial_state", None)
    if not isinstance(policy, nn.Module) or not callable(initial_state):
        raise ConfigError(
            what=f"the policy is a {type(policy).__name__}, not an nn.Module with initial_state",
            where=where,
            do="derive it from seedrl.policy.base.Policy",
        )
    first = torch.ones(1, _TRIED, dtype=torch.bool)
    with torch.no_grad():
        out = policy(zero_observation(spec, 1, _TRIED), initial_state(_TRIED), first)
    declared = extra_leaves_of(policy)
    wanted = "(inputs, value, state, extras)" if declared else "(inputs, value, state)"
    if not isinstance(out, tuple) or len(out) != (4 if declared else 3):
        given = f"{len(out)} things" if isinstance(out, tuple) else type(out).__name__
        raise ConfigError(
            what=f"forward gives {given}, not {wanted}",
            where=where,
            do="return these, and declare in extra_leaves what else is to be stored",
        )
    inputs, value, _, *extras = out
    if extras:
        require_extras(extras[0], declared, (1, _TRIED), where)
    for what, tensor, shape in (
        ("inputs", inputs, (1, _TRIED, num_inputs)),
        ("value", value, (1, _TRIED)),
    ):
        if (
            not isinstance(tensor, Tensor)
            or tuple(tensor.shape) != shape
            or not tensor.is_floating_point()
        ):
            given = (
                f"{tensor.dtype} {list(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise ConfigError(
                what=f"forward's {what} is {given}, not float {list(shape)} for one row of two columns",
                where=where,
                do="see docs/policy.md: [T, B, P] and [T, B], time first",
            )
