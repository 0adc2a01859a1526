"""The networks that come with seedrl: encoders (MLP, small CNN, Nature, IMPALA, nested), cores (none, LSTM, GRU), one policy of them.

An encoder takes one leaf [N, ...] in the environment's dtype and gives float32 [N, features]. Images are scaled once, here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from seedrl.errors import ConfigError
from seedrl.policy.base import Observation, Policy, State, register_policy
from seedrl.spec import EnvSpec, Leaf

if TYPE_CHECKING:
    from seedrl.config import PolicySection

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of a layer's fresh output: in place
    "tanh": torch.tanh_,
    "relu": torch.relu_,
    "elu": functional.elu_,
    "gelu": functional.gelu,
    "silu": partial(functional.silu, inplace=True),
}
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
_WIDE_BOUND = 10.0  # a vector's entry that may be larger is scaled to [-1, 1] by its bounds
_NO_BOUND = 1e6  # and one beyond this is unbounded in all but name
_SMALL_IMAGE = 20  # pixels a side: strides of 4 and 2 would leave nothing of it


def _orthogonal(layer: Layer, gain: float) -> Layer:
    """Orthogonal weights and no bias (Saxe et al. 2014, arXiv 1312.6120)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """Linear layers, each with its activation: [N, size] -> [N, features]. One module call, as acting counts them."""

    def __init__(self, size: int, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for width in hidden:
            self.layers.append(_orthogonal(nn.Linear(size, width), math.sqrt(2)))
            size = width
        self.features, self.activation = size, activation
        self._activate = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self._activate(functional.linear(x, layer.weight, layer.bias))  # type: ignore[arg-type]
        return x


# ---------------------------------------------------------------------------------------------------------- leaves


class Flat(nn.Module):
    """A leaf as a vector: choices as one-hots, bits as they are, boxes flattened; float32 [N, features]."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.begins: Tensor
        self.centre: Tensor | None
        self.spread: Tensor | None
        self.kind, self.count = leaf.kind, max(1, math.prod(leaf.shape))
        if leaf.kind in ("discrete", "multi_discrete"):
            counts = torch.tensor(leaf.n)
            begins = counts.cumsum(0) - counts - torch.tensor(leaf.start or (0,) * len(leaf.n))
            self.features = int(counts.sum())
            self.register_buffer("begins", begins, persistent=False)
        else:
            self.features = self.count
        centre = spread = None
        if leaf.kind == "box" and leaf.low is not None and leaf.high is not None:
            low, high = torch.tensor(leaf.low), torch.tensor(leaf.high)
            reach = torch.maximum(low.abs(), high.abs())
            wide = (reach > _WIDE_BOUND) & (reach < _NO_BOUND) & (high > low)
            if bool(wide.any()):
                centre = torch.where(wide, (low + high) / 2, torch.zeros_like(low))
                spread = torch.where(wide, (high - low) / 2, torch.ones_like(low))
        self.register_buffer("centre", centre, persistent=False)
        self.register_buffer("spread", spread, persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        if self.kind in ("discrete", "multi_discrete"):
            rows = obs.reshape(obs.shape[0], self.count).long() + self.begins
            zeros = torch.zeros(rows.shape[0], self.features, device=rows.device)
            return zeros.scatter_(1, rows, 1.0)
        flat = obs if obs.dim() == 2 else obs.reshape(obs.shape[0], self.count)
        if flat.dtype != torch.float32:
            flat = flat.float()
        if self.centre is None or self.spread is None:
            return flat
        return (flat - self.centre) / self.spread


class Picture(nn.Module):
    """An image leaf as float32 [N, C, H, W], bytes scaled to 0..1 once; HWC is told from CHW by where the fewest entries are.

    Frames of a stack are channels, as many as a frame has each.
    """

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        shape = _frame_shape(leaf)
        self.stacked, self.add_channel = leaf.stack > 1, len(shape) == 2
        self.last = len(shape) == 3 and shape[2] < shape[0]
        if self.add_channel:
            shape = (1, *shape)
        elif self.last:
            shape = (shape[2], *shape[:2])
        self.size = (leaf.stack * shape[0], shape[1], shape[2])
        byte = leaf.dtype == "uint8" and (leaf.high is None or max(leaf.high) > 1)
        self.scale = 1 / 255 if byte else None

    def forward(self, obs: Tensor) -> Tensor:
        if self.add_channel:
            obs = obs.unsqueeze(-3)
        elif self.last:
            obs = obs.movedim(-1, -3)
        if self.stacked:
            obs = obs.flatten(1, 2)
        picture = obs.float()
        return picture if self.scale is None else picture * self.scale


def is_image(leaf: Leaf) -> bool:
    """A box of two spatial dimensions of at least 7, and possibly channels."""
    shape = _frame_shape(leaf)
    if leaf.kind != "box" or len(shape) not in (2, 3):
        return False
    sides = sorted(shape)[-2:]
    return sides[0] >= 7 and (len(shape) == 3 or leaf.dtype == "uint8")


def _frame_shape(leaf: Leaf) -> tuple[int, ...]:
    return leaf.shape[1:] if leaf.stack > 1 else leaf.shape


# --------------------------------------------------------------------------------------------------------- encoders


def _flattened(
    body: nn.Sequential, size: tuple[int, int, int], width: int
) -> tuple[nn.Sequential, int]:
    """Appends a layer of `width` to convolutions over pictures of `size`."""
    try:
        with torch.no_grad():
            features = body(torch.zeros(1, *size)).flatten(1).shape[1]
    except RuntimeError as error:
        raise ConfigError(
            what=f"pictures of {list(size)} are too small for this encoder ({error})",
            where="policy.encoder",
            do="use policy.encoder=auto",
        ) from None
    return nn.Sequential(
        body, nn.Flatten(), _orthogonal(nn.Linear(features, width), math.sqrt(2)), nn.ReLU()
    ), width


def small_cnn(size: tuple[int, int, int], width: int) -> tuple[nn.Sequential, int]:
    """One convolution of 16 maps, as MinAtar's authors use (Young & Tian 2019, arXiv 1903.03176)."""
    convolution = _orthogonal(nn.Conv2d(size[0], 16, 3), math.sqrt(2))
    return _flattened(nn.Sequential(convolution, nn.ReLU()), size, width)


def nature_cnn(size: tuple[int, int, int], width: int = 512) -> tuple[nn.Sequential, int]:
    """The network of DQN (Mnih et al. 2015, Nature 518)."""
    layers: list[nn.Module] = []
    channels = size[0]
    for maps, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [_orthogonal(nn.Conv2d(channels, maps, kernel, stride), math.sqrt(2)), nn.ReLU()]
        channels = maps
    return _flattened(nn.Sequential(*layers), size, width)


class _Residual(nn.Module):
    def __init__(self, maps: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(maps, maps, 3, padding=1),
            nn.Conv2d(maps, maps, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.relu(self.first(functional.relu(x))))


def impala_cnn(size: tuple[int, int, int], width: int = 256) -> tuple[nn.Sequential, int]:
    """The residual network of IMPALA (Espeholt et al. 2018, figure 3, right)."""
    layers: list[nn.Module] = []
    channels = size[0]
    for maps in (16, 32, 32):
        layers += [
            nn.Conv2d(channels, maps, 3, padding=1),
            nn.MaxPool2d(3, 2, 1),
            _Residual(maps),
            _Residual(maps),
        ]
        channels = maps
    return _flattened(nn.Sequential(*layers, nn.ReLU()), size, width)


class Encoder(nn.Module):
    """One leaf -> features: `prepare` casts and scales, `body` is the network."""

    def __init__(self, prepare: nn.Module, body: nn.Module, features: int) -> None:
        super().__init__()
        self.prepare, self.body, self.features = prepare, body, features

    def forward(self, obs: Tensor) -> Tensor:
        encoded: Tensor = self.body(self.prepare(obs))
        return encoded


class Nested(nn.Module):
    """Each leaf by its kind, side by side, then the MLP over all of them."""

    def __init__(self, spec: EnvSpec, config: PolicySection) -> None:
        super().__init__()
        self.names = [leaf.name for leaf in spec.observation]
        parts = [
            _image_encoder(leaf, "auto", config)
            if is_image(leaf)
            else Encoder(flat := Flat(leaf), nn.Identity(), flat.features)
            for leaf in spec.observation
        ]
        self.parts = nn.ModuleList(parts)
        width = sum(part.features for part in parts)
        self.body = MLP(width, config.hidden, config.activation)
        self.features = self.body.features

    def forward(self, obs: Observation) -> Tensor:
        leaves = obs if isinstance(obs, dict) else {self.names[0]: obs}
        encoded = [part(leaves[name]) for name, part in zip(self.names, self.parts, strict=True)]
        out: Tensor = self.body(torch.cat(encoded, -1))
        return out


def _image_encoder(leaf: Leaf, kind: str, config: PolicySection) -> Encoder:
    picture = Picture(leaf)
    _, height, width = picture.size
    if kind == "auto":
        kind = (
            "small"
            if min(height, width) <= _SMALL_IMAGE
            else "nature"
            if min(height, width) >= 36
            else "impala"
        )
    if kind == "small":
        body, features = small_cnn(picture.size, config.hidden[-1] if config.hidden else 128)
    else:
        body, features = nature_cnn(picture.size) if kind == "nature" else impala_cnn(picture.size)
    return Encoder(picture, body, features)


def make_encoder(spec: EnvSpec, config: PolicySection) -> nn.Module:
    """The encoder that `policy.encoder` names, for the spec's observation; `features` is its width.

    Raises: ConfigError when that encoder cannot take this observation.
    """
    kind, leaves = config.encoder, spec.observation
    if kind == "nested" or (kind == "auto" and len(leaves) > 1):
        return Nested(spec, config)
    if len(leaves) > 1:
        raise ConfigError(
            what=f"the {kind} encoder takes one leaf, the observation has {len(leaves)}",
            where="policy.encoder",
            do="use policy.encoder=nested",
        )
    (leaf,) = leaves
    if kind in ("nature", "impala") or (kind == "auto" and is_image(leaf)):
        if not is_image(leaf):
            raise ConfigError(
                what=f"the {kind} encoder takes images, the observation is {leaf.text()}",
                where="policy.encoder",
                do="use policy.encoder=auto or mlp",
            )
        return _image_encoder(leaf, kind, config)
    flat = Flat(leaf)
    body = MLP(flat.features, config.hidden, config.activation)
    return Encoder(flat, body, body.features)


# ------------------------------------------------------------------------------------------------------------ cores


class Recurrent(nn.Module):
    """An LSTM or GRU over rows, begun anew at `first`; its state is a tuple of [B, size]."""

    def __init__(self, kind: str, inputs: int, size: int) -> None:
        super().__init__()
        self.cell: nn.LSTMCell | nn.GRUCell = (nn.LSTMCell if kind == "lstm" else nn.GRUCell)(
            inputs, size
        )
        self.parts, self.size = (2 if kind == "lstm" else 1), size
        for name, weight in self.cell.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(weight)
            else:
                nn.init.zeros_(weight)

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        device = self.cell.weight_hh.device
        return tuple(torch.zeros(batch, self.size, device=device) for _ in range(self.parts))

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...], first: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x float32 [T, B, inputs], state leaves [B, size], first bool [T, B] -> (float32 [T, B, size], state)."""
        keep = first.logical_not().to(x.dtype).unsqueeze(-1)
        rows = []
        for row, kept in zip(x.unbind(0), keep.unbind(0), strict=True):
            state = tuple(part.to(x.dtype) * kept for part in state)
            out = self.cell(row, state if self.parts == 2 else state[0])
            state = tuple(out) if self.parts == 2 else (out,)
            rows.append(state[0])
        return torch.stack(rows), state


# --------------------------------------------------------------------------------------------------------- the policy


class Default(Policy):
    """Encoder, core, and two linear layers on top: the distribution's inputs and the value, which may have an encoder of its own."""

    def __init__(self, spec: EnvSpec, num_inputs: int, config: PolicySection) -> None:
        super().__init__()
        self.encoder = make_encoder(spec, config)
        features: Any = self.encoder.features
        self.core = (
            None if config.core == "none" else Recurrent(config.core, features, config.core_size)
        )
        width = features if self.core is None else config.core_size
        self.value_encoder: nn.Module | None = None
        if config.separate_value:
            self.value_encoder = make_encoder(spec, config)
            self.value = _orthogonal(nn.Linear(features, 1), 1.0)
        shared = self.value_encoder is None
        self.heads = _orthogonal(
            nn.Linear(width, num_inputs + shared), 1.0
        )  # a shared value is the last
        with torch.no_grad():
            self.heads.weight[:num_inputs] *= 0.01  # nearly uniform at first

    def _encoded(self, encoder: nn.Module, obs: Observation, first: Tensor) -> Tensor:
        """Features float32 [T, B, n]. Large leaves of stored rows lie unroll by unroll, and are encoded so, without a copy."""
        rows, columns = first.shape
        if isinstance(obs, Tensor) and not obs.is_contiguous() and obs.transpose(0, 1).is_contiguous():  # fmt: skip
            by_unroll: Tensor = encoder(obs.transpose(0, 1).flatten(0, 1))
            return by_unroll.view(columns, rows, -1).transpose(0, 1)
        if isinstance(obs, dict):
            flat: Observation = {name: leaf.flatten(0, 1) for name, leaf in obs.items()}
        else:
            flat = obs.flatten(0, 1)
        encoded: Tensor = encoder(flat)
        return encoded.view(rows, columns, -1)

    @torch.no_grad()
    def rescale_value(self, factor: Tensor, offset: Tensor) -> None:
        """Changes the value's layer so that it gives factor * value + offset; both float32 []."""
        layer = self.heads if self.value_encoder is None else self.value
        layer.weight[-1:].mul_(factor)
        layer.bias[-1:].mul_(factor).add_(offset)

    def initial_state(self, batch: int) -> State:
        return () if self.core is None else self.core.initial_state(batch)

    def forward(
        self, obs: Observation, state: State, first: Tensor
    ) -> tuple[Tensor, Tensor, State]:
        x = self._encoded(self.encoder, obs, first)
        if self.core is not None:
            x, state = self.core(x, state, first)
        out = functional.linear(x, self.heads.weight, self.heads.bias)
        if self.value_encoder is not None:
            value = self.value(self._encoded(self.value_encoder, obs, first))
            return out, value.squeeze(-1), state
        return out[..., :-1], out[..., -1], state


@register_policy("none")
class Nothing(Policy):
    """Computes nothing: all actions are equally likely, and what a batch takes is the engine's own time (`seedrl bench`)."""

    def __init__(self, spec: EnvSpec, num_inputs: int, config: PolicySection) -> None:
        super().__init__()
        self.inputs: Tensor
        self.register_buffer("inputs", torch.zeros(num_inputs))

    def forward(
        self, obs: Observation, state: State, first: Tensor
    ) -> tuple[Tensor, Tensor, State]:
        inputs = self.inputs.expand(*first.shape, -1)
        return inputs, inputs[..., 0], state


@register_policy("default")
def default(spec: EnvSpec, num_inputs: int, config: PolicySection) -> Policy:
    return Default(spec, num_inputs, config)
