"""Action heads: from the policy's numbers to actions, their log-probabilities and entropies, and what the environment gets.

An action has two forms. *Stored* is what replay keeps and log-probabilities are of: int64 counted from 0 (discrete kinds), int8
(multi_binary), the float32 sample before squashing or clipping (box; so nothing is ever inverted, and the squashing's Jacobian
cancels in the ratios of V-trace). *To the environment* is its own dtype, shape and range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from seedrl.errors import ShapeError
from seedrl.spec import Leaf

Distribution = Literal["squashed", "clipped"]

# As a logit: e^-1e9 is 0 in float32 and float64, 0 * -1e9 is 0 and not NaN, and all-illegal rows stay uniform and finite.
ILLEGAL = -1e9
TINY = 1e-30  # a draw of exactly 0 would make even an illegal action's score infinite
# A box's standard deviation, before squashing: [-1, 1] is the action's range there, so 2 is already wide.
_MIN_STD, _INITIAL_STD, _MAX_STD = 0.01, 0.5, 2.0
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_WIDEST = 1e9  # a box wider than this has bounds in name only: the policy's number is used as it is, cut at the bounds


class Head(Protocol):
    """The action of one leaf; `P` of its numbers, `M` of its mask (0 where no mask speaks of it)."""

    num_inputs: int
    mask_size: int
    stored: tuple[torch.dtype, tuple[int, ...]]

    def sample(
        self, inputs: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]: ...

    def mode(self, inputs: Tensor, mask: Tensor | None) -> Tensor: ...

    def evaluate(
        self, inputs: Tensor, action: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...

    def to_env(self, action: Tensor) -> Tensor: ...


def _torch_dtype(leaf: Leaf) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    return dtype


class _Discrete:
    """One choice among n."""

    def __init__(self, leaf: Leaf) -> None:
        self.num_inputs = self.mask_size = leaf.n[0]
        self.stored: tuple[torch.dtype, tuple[int, ...]] = (torch.int64, ())
        self._start, self._dtype = leaf.start[0] if leaf.start else 0, _torch_dtype(leaf)

    def _log_probs(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            inputs = inputs.masked_fill(mask == 0, ILLEGAL)
        return torch.log_softmax(inputs, -1)

    def sample(
        self, inputs: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        log_probs = self._log_probs(inputs, mask)
        action = _choose(log_probs, generator, mask is not None)
        return action.squeeze(-1), log_probs.gather(-1, action).squeeze(-1)

    def mode(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        return self._log_probs(inputs, mask).argmax(-1)

    def evaluate(
        self, inputs: Tensor, action: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        log_probs = self._log_probs(inputs, mask)
        chosen = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        return (action + self._start if self._start else action).to(self._dtype)


class _MultiDiscrete:
    """C choices, each among its own n; all at once, as [..., C, M] with M the largest n."""

    def __init__(self, leaf: Leaf) -> None:
        self.num_inputs = self.mask_size = sum(leaf.n)
        self.stored: tuple[torch.dtype, tuple[int, ...]] = (torch.int64, leaf.shape)
        self._dtype, self._shape = _torch_dtype(leaf), leaf.shape
        widest, counts = max(leaf.n), torch.tensor(leaf.n)
        within = torch.arange(widest).expand(len(leaf.n), widest)
        self._padding = within >= counts.unsqueeze(-1)
        self._equal = not bool(self._padding.any())
        starts = (counts.cumsum(0) - counts).unsqueeze(-1)
        self._index = (starts + within).masked_fill(self._padding, 0).flatten()
        start = torch.tensor(leaf.start or (0,) * len(leaf.n)).view(leaf.shape)
        self._start = start if bool(start.any()) else None

    def _table(self, flat: Tensor) -> Tensor:
        """[..., P] -> [..., C, M]; what stands in the padding means nothing."""
        if not self._equal:
            flat = flat.index_select(-1, self._index.to(flat.device))
        return flat.unflatten(-1, self._padding.shape)

    def _log_probs(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        table = self._table(inputs)
        if mask is not None:
            table = table.masked_fill(self._table(mask) == 0, ILLEGAL)
        if not self._equal:
            # lower than an illegal choice, so that a component without a legal one still stays inside the space
            table = table.masked_fill(self._padding.to(table.device), 2 * ILLEGAL)
        return torch.log_softmax(table, -1)

    def _shaped(self, action: Tensor) -> Tensor:
        return action.unflatten(-1, self._shape)

    def sample(
        self, inputs: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        log_probs = self._log_probs(inputs, mask)
        action = _choose(log_probs, generator, mask is not None or not self._equal)
        log_prob = log_probs.gather(-1, action).squeeze(-1).sum(-1)
        return self._shaped(action.squeeze(-1)), log_prob

    def mode(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        return self._shaped(self._log_probs(inputs, mask).argmax(-1))

    def evaluate(
        self, inputs: Tensor, action: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        log_probs = self._log_probs(inputs, mask)
        flat = action.reshape(*inputs.shape[:-1], -1, 1)
        chosen = log_probs.gather(-1, flat).squeeze(-1).sum(-1)
        return chosen, -(log_probs.exp() * log_probs).sum((-2, -1))

    def to_env(self, action: Tensor) -> Tensor:
        return (action if self._start is None else action + self._start.to(action.device)).to(
            self._dtype
        )


class _MultiBinary:
    """Independent bits; the input is the logit of each."""

    def __init__(self, leaf: Leaf) -> None:
        self.num_inputs, self.mask_size = leaf.size, 0
        self.stored = (torch.int8, leaf.shape)
        self._dtype, self._shape = _torch_dtype(leaf), leaf.shape

    def sample(
        self, inputs: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        uniform = torch.empty_like(inputs).uniform_(generator=generator)
        action = (uniform < torch.sigmoid(inputs)).to(torch.int8)
        return action.unflatten(-1, self._shape), _bits_log_prob(inputs, action)

    def mode(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        return (inputs > 0).to(torch.int8).unflatten(-1, self._shape)

    def evaluate(
        self, inputs: Tensor, action: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        log_prob = _bits_log_prob(inputs, action.reshape(inputs.shape))
        entropy = functional.softplus(inputs) - inputs * torch.sigmoid(inputs)
        return log_prob, entropy.sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        return action.to(self._dtype)


class _Box:
    """Independent Gaussians. The inputs are, for each entry, the mean, then for each entry the width.

    A bounded entry's [low, high] is [-1, 1] of the squashed (tanh) or clipped sample. Without both bounds the sample is the action,
    cut at the bound that there is.
    """

    def __init__(self, leaf: Leaf, distribution: Distribution) -> None:
        self.num_inputs, self.mask_size = 2 * leaf.size, 0
        self.stored = (torch.float32, leaf.shape)
        self._dtype, self._shape, self._squash = (
            _torch_dtype(leaf),
            leaf.shape,
            distribution == "squashed",
        )
        # float64 where float32 has fewer digits than the environment's dtype
        wide = leaf.dtype in ("float64", "int32", "uint32", "int64", "uint64")
        self._compute = torch.float64 if wide else torch.float32
        size = max(leaf.size, 1)
        low = np.resize(-math.inf if leaf.low is None else leaf.low, size).astype(np.float64)
        high = np.resize(math.inf if leaf.high is None else leaf.high, size).astype(np.float64)
        self._is_float = self._dtype.is_floating_point
        if not self._is_float:  # a bound inside a gap between two integers
            low, high = np.ceil(low), np.floor(high)
        scaled = high - low <= _WIDEST
        with np.errstate(invalid="ignore"):  # of infinite bounds, which are not scaled
            centre = np.where(scaled, low + (high - low) / 2, 0.0)
        half = np.where(scaled, (high - low) / 2, 1.0)
        bounds = [low, high] if np.isfinite([low, high]).any() else []
        self._scaled = torch.from_numpy(scaled).view(leaf.shape) if scaled.any() else None
        self._all_scaled = bool(scaled.all())
        self._centre, self._half = (
            torch.from_numpy(x).to(self._compute).view(leaf.shape) for x in (centre, half)
        )
        self._bounds = [torch.from_numpy(x).to(self._compute).view(leaf.shape) for x in bounds]

    def _mean_std(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, width = inputs.chunk(2, -1)
        low, high = math.log(_MIN_STD), math.log(_MAX_STD)
        share = (math.log(_INITIAL_STD) - low) / (high - low)
        offset = math.log(share / (1 - share))
        # smooth at both ends: a clamp would have no gradient there, and no way back
        log_std = low + (high - low) * torch.sigmoid(width + offset)
        return mean, log_std.exp(), log_std

    def _log_prob(self, noise: Tensor, log_std: Tensor) -> Tensor:
        return (-0.5 * noise.square() - log_std - _HALF_LOG_2PI).sum(-1)

    def sample(
        self, inputs: Tensor, mask: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        mean, std, log_std = self._mean_std(inputs)
        noise = torch.empty_like(mean).normal_(generator=generator)
        action = torch.addcmul(mean, std, noise)
        return action.float().reshape(*inputs.shape[:-1], *self._shape), self._log_prob(
            noise, log_std
        )

    def mode(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        mean = inputs.chunk(2, -1)[0].float()
        return mean.reshape(*inputs.shape[:-1], *self._shape)

    def evaluate(
        self, inputs: Tensor, action: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        mean, std, log_std = self._mean_std(inputs)
        noise = (action.reshape(mean.shape).to(mean.dtype) - mean) / std
        entropy = (log_std + (0.5 + _HALF_LOG_2PI)).sum(-1)
        return self._log_prob(noise, log_std), entropy

    def to_env(self, action: Tensor) -> Tensor:
        device, raw = action.device, action.to(self._compute)
        if self._scaled is not None:
            unit = torch.tanh(raw) if self._squash else raw.clamp(-1.0, 1.0)
            scaled = torch.addcmul(self._centre.to(device), self._half.to(device), unit)
            raw = scaled if self._all_scaled else torch.where(self._scaled.to(device), scaled, raw)
        if not self._is_float:
            raw = raw.round()
        elif raw.dtype != self._dtype:
            raw = raw.to(self._dtype)
        for bound, cut in zip(self._bounds, (torch.maximum, torch.minimum), strict=False):
            # last, in the environment's own dtype: rounding must not lead outside
            raw = cut(raw, bound.to(device, raw.dtype))
        if not self._is_float and self._dtype != torch.bool:
            limits = torch.iinfo(self._dtype)
            raw = raw.clamp(limits.min, limits.max) if not self._bounds else raw
        return raw.to(self._dtype)


def _choose(log_probs: Tensor, generator: torch.Generator | None, guarded: bool) -> Tensor:
    """One draw of each distribution along the last dimension, which is kept as 1: the Gumbel trick, from exponential draws."""
    draws = torch.empty_like(log_probs).exponential_(generator=generator)
    if guarded:
        draws.clamp_min_(TINY)
    scores = torch.sub(log_probs, draws.log_())
    return scores.argmax(-1, keepdim=True)


def _bits_log_prob(logits: Tensor, bits: Tensor) -> Tensor:
    return (logits * bits - functional.softplus(logits)).sum(-1)


class Heads:
    """The heads of every action leaf together, over one row of the policy's numbers.

    `num_inputs` is P, `mask_size` M: the choices of all discrete leaves, in order. Masks, where an environment has them, are
    uint8 [..., M]. Actions are dicts by leaf name, [...] and the leaf's stored shape.

    Args:
        action: the spec's action leaves. distribution: of boxes, "squashed" or "clipped".
    """

    def __init__(self, action: Sequence[Leaf], distribution: Distribution = "squashed") -> None:
        self.leaves = tuple(action)
        self._heads = {leaf.name: _head(leaf, distribution) for leaf in action}
        self._inputs = [head.num_inputs for head in self._heads.values()]
        self._masks = [head.mask_size for head in self._heads.values()]
        self.num_inputs, self.mask_size = sum(self._inputs), sum(self._masks)
        self._only = next(iter(self._heads.items())) if len(self._heads) == 1 else None

    def _parts(
        self, inputs: Tensor, mask: Tensor | None
    ) -> list[tuple[str, Head, Tensor, Tensor | None]]:
        """Each head with its own inputs and its own part of the mask."""
        if self._only is not None:
            name, head = self._only
            return [(name, head, inputs, mask if head.mask_size else None)]
        parts = inputs.split(self._inputs, -1)
        masks = [None] * len(parts) if mask is None else mask.split(self._masks, -1)
        return [
            (name, head, part, own if head.mask_size else None)
            for (name, head), part, own in zip(self._heads.items(), parts, masks, strict=True)
        ]

    def sample(
        self, inputs: Tensor, mask: Tensor | None, generator: torch.Generator | None = None, slots: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
        """Draws actions: inputs float32 [..., P], mask uint8 [..., M] or None -> (stored actions, log_prob float32 [...]).

        Args: slots: int64 [B], for heads that explore by slot.
        """
        actions, total = {}, None
        for name, head, part, own in self._parts(inputs, mask):
            actions[name], log_prob = head.sample(part, own, generator)
            total = log_prob if total is None else total + log_prob
        assert total is not None
        return actions, total

    def mode(self, inputs: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """The most likely actions, as stored; for a box the mean's."""
        return {name: head.mode(part, own) for name, head, part, own in self._parts(inputs, mask)}

    def evaluate(
        self, inputs: Tensor, actions: dict[str, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(log_prob, entropy), each float32 [...], of stored actions under inputs [..., P]; a box's entropy is the Gaussian's.

        Raises: ShapeError, naming what does not fit.
        """
        if inputs.shape[-1:] != (self.num_inputs,):
            raise ShapeError(
                what=f"inputs has the shape {list(inputs.shape)}; it must be [..., {self.num_inputs}]",
                do="give one number for each of Heads.num_inputs",
            )
        log_probs, entropies = [], []
        for name, head, part, own in self._parts(inputs, mask):
            log_prob, entropy = head.evaluate(part, actions[name], own)
            log_probs.append(log_prob)
            entropies.append(entropy)
        if len(log_probs) == 1:
            return log_probs[0], entropies[0]
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)

    def log_prob(self, inputs: Tensor, actions: dict[str, Tensor], mask: Tensor | None) -> Tensor:
        return self.evaluate(inputs, actions, mask)[0]

    @property
    def branches(self) -> tuple[int, ...]:
        """Sizes of all choices, in order, where there is nothing else to draw; else none."""
        chosen = all(isinstance(head, _Discrete | _MultiDiscrete) for head in self._heads.values())
        return tuple(n for leaf in self.leaves for n in leaf.n) if chosen else ()

    def of_branches(self, choices: Tensor) -> dict[str, Tensor]:
        """Stored actions from int64 [..., C], one number for each of `branches`."""
        parts = choices.split([len(leaf.n) for leaf in self.leaves], -1)
        return {
            leaf.name: part.reshape(*choices.shape[:-1], *head.stored[1])
            for leaf, head, part in zip(self.leaves, self._heads.values(), parts, strict=True)
        }

    def to(self, device: torch.device) -> Self:
        """The same heads, with their constants on the device."""
        for part in (self, *self._heads.values()):
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    setattr(part, name, value.to(device))
                elif isinstance(value, list) and value and isinstance(value[0], Tensor):
                    setattr(part, name, [each.to(device) for each in value])
        return self

    def to_env(self, actions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stored actions as the environment takes them: its dtype, start and range."""
        return {name: head.to_env(actions[name]) for name, head in self._heads.items()}

    def stored_specs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """(dtype, shape of a row) of each leaf as it is stored."""
        return {name: head.stored for name, head in self._heads.items()}


def _head(leaf: Leaf, distribution: Distribution) -> Head:
    if leaf.kind == "discrete":
        return _Discrete(leaf)
    if leaf.kind == "multi_discrete":
        return _MultiDiscrete(leaf)
    return _MultiBinary(leaf) if leaf.kind == "multi_binary" else _Box(leaf, distribution)
