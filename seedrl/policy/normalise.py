"""Observations and returns brought to mean 0 and deviation 1 by what was seen so far: moments are buffers of the policy, so that they travel
with its weights to the engine and into checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seedrl.errors import ConfigError
from seedrl.policy.base import Observation, Policy, State, extra_leaves_of
from seedrl.spec import EnvSpec, Leaf, RowSpecs

LIMIT = 10.0  # deviations beyond which an observation is cut
_LEAST = 1e-4  # of a deviation: what never changes is not blown up


class Moments(nn.Module):
    """Mean and variance of all that was seen, entry by entry; batches are merged exactly (Chan et al. 1983, eq. 2.1).

    count float64 [], mean and squares (sum of squared deviations) float64 [...]; centre, scale and inverse float32 [...]: what is used.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    centre: Tensor
    scale: Tensor
    inverse: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        for name in ("mean", "squares"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(shape))
        for name in ("scale", "inverse"):
            self.register_buffer(name, torch.ones(shape))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Takes in `x` [n, ...]; what is not finite would spoil the moments for good, and is left to whoever checks it."""
        count = x.shape[0]
        if not count:
            return
        x = x.double()
        mean = x.mean(0)
        squares = (x - mean).square().sum(0)
        total = self.count + count
        delta = mean - self.mean
        self.squares += squares + delta.square() * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count.copy_(total)
        deviation = (self.squares / total).sqrt().clamp_min(_LEAST)
        self.centre.copy_(self.mean)
        self.scale.copy_(deviation)
        self.inverse.copy_(1 / deviation)


class Normalised(Policy):
    """A policy that sees normalised observations, or whose value is that of normalised returns; what leaves it is in the rewards' own units.

    Where the policy can `rescale_value`, its values stay what they were when the moments move (PopArt: van Hasselt et al. 2016, arXiv 1602.07714).

    Args: leaves: of the observation, those that are normalised. returns: whether the value is.
    """

    def __init__(self, policy: Policy, leaves: list[Leaf], returns: bool) -> None:
        super().__init__()
        self.policy = policy
        self.moments = nn.ModuleDict({_key(leaf.name): Moments(leaf.shape) for leaf in leaves})
        self.returns = Moments(()) if returns else None

    def initial_state(self, batch: int) -> State:
        return self.policy.initial_state(batch)

    def extra_leaves(self) -> RowSpecs:
        return extra_leaves_of(self.policy)

    def forward(self, obs: Observation, state: State, first: Tensor) -> Any:
        if isinstance(obs, dict):
            obs = {name: self._leaf(name, leaf) for name, leaf in obs.items()}
        elif self.moments:
            obs = self._leaf(next(iter(self.moments)), obs)
        inputs, value, *rest = self.policy(obs, state, first)
        if self.returns is not None:
            value = value * self.returns.scale + self.returns.centre
        return inputs, value, *rest

    def _leaf(self, name: str, leaf: Tensor) -> Tensor:
        if _key(name) not in self.moments:
            return leaf
        moments: Any = self.moments[_key(name)]
        return ((leaf.float() - moments.centre) * moments.inverse).clamp(-LIMIT, LIMIT)

    def observe(self, obs: dict[str, Tensor], returns: Tensor | None) -> None:
        """Takes in observations [n, ...] by leaf, and returns float32 [m] where the value is theirs."""
        for name, leaf in obs.items():
            if _key(name) in self.moments:
                self.moments[_key(name)].update(leaf)  # type: ignore[operator]
        if self.returns is not None and returns is not None:
            scale, centre = self.returns.scale.clone(), self.returns.centre.clone()
            self.returns.update(returns)
            rescale: Any = getattr(self.policy, "rescale_value", None)
            if rescale is not None:
                now = self.returns
                rescale(scale / now.scale, (centre - now.centre) / now.scale)


def normalised_leaves(spec: EnvSpec) -> list[Leaf]:
    """Those that are normalised: boxes of floats. Raises: ConfigError when there are none."""
    found = [leaf for leaf in spec.observation if leaf.kind == "box" and "float" in leaf.dtype]
    if not found:
        kinds = ", ".join(leaf.text() for leaf in spec.observation)
        raise ConfigError(
            what=f"no leaf of the observation is a box of floats: {kinds}", where="policy.normalise_observations",
            do="leave it out: bytes are scaled and choices are one-hot already",
        )  # fmt: skip
    return found


def as_seen(spec: EnvSpec, leaves: list[Leaf]) -> EnvSpec:
    """The spec as the policy sees it behind the normalisation: float32 without bounds."""
    names = {leaf.name for leaf in leaves}
    observation = tuple(
        replace(leaf, dtype="float32", low=None, high=None) if leaf.name in names else leaf for leaf in spec.observation
    )  # fmt: skip
    return replace(spec, observation=observation)


def _key(name: str) -> str:
    return name.replace(".", "/")  # a module's name has no dots
