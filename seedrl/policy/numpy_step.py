"""Acting on the CPU in NumPy: the MLP of `nets.Default`, and the choice among n.

On a batch of a hundred rows a layer of 64 is some ten microseconds of arithmetic, and torch's calls around it are twice that
(docs/design/0007). `nets` and `heads` define what is right; both classes here read the parameters where torch keeps them, so weights that
are published in place are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from seedrl.policy.heads import ILLEGAL, TINY
from seedrl.policy.nets import MLP, Default, Encoder, Flat
from seedrl.spec import Leaf

if TYPE_CHECKING:
    from torch import nn

_Activation = Callable[..., Any]


def _relu(x: np.ndarray, out: np.ndarray) -> None:
    np.maximum(x, 0.0, out=out)


_ACTIVATIONS: dict[str, _Activation] = {"tanh": np.tanh, "relu": _relu}


def _view(parameter: Tensor) -> np.ndarray:
    view: np.ndarray = parameter.detach().numpy()
    return view


class _Chain:
    """The layers of an MLP, and a linear one after them."""

    def __init__(self, mlp: MLP, head: Any, max_rows: int) -> None:
        layers: list[Any] = [*mlp.layers, head]
        self._layers = [(_view(layer.weight).T, _view(layer.bias)) for layer in layers]
        self._activate = _ACTIVATIONS[mlp.activation]
        self._outs = [np.empty((max_rows, bias.size), np.float32) for _, bias in self._layers]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        count, last = len(x), len(self._layers) - 1
        for number, (weight, bias) in enumerate(self._layers):
            x = np.matmul(x, weight, out=self._outs[number][:count])
            x += bias
            if number < last:
                self._activate(x, out=x)
        return x


class NumpyMLP:
    """`Default` of one box leaf, linear layers with tanh or relu, no core. See `of`."""

    def __init__(self, policy: Default, flat: Flat, mlp: MLP, max_rows: int) -> None:
        self._chain, self._value_chain = _Chain(mlp, policy.heads, max_rows), None
        if policy.value_encoder is not None:
            body: Any = policy.value_encoder.body
            self._value_chain = _Chain(body, policy.value, max_rows)
        self._scale: tuple[np.ndarray, np.ndarray] | None = None
        if flat.centre is not None and flat.spread is not None:
            self._scale = flat.centre.numpy().ravel(), flat.spread.numpy().ravel()
        self._flat = np.empty((max_rows, flat.count), np.float32)

    @staticmethod
    def of(policy: nn.Module, max_rows: int) -> NumpyMLP | None:
        """None where the policy, which lies on the CPU, is another than these."""
        if type(policy) is not Default or policy.core is not None:
            return None
        encoder = policy.encoder
        if type(encoder) is not Encoder:
            return None
        flat, mlp = encoder.prepare, encoder.body
        if type(flat) is not Flat or flat.kind != "box" or type(mlp) is not MLP:
            return None
        if mlp.activation not in _ACTIVATIONS:
            return None
        return NumpyMLP(policy, flat, mlp, max_rows)

    def __call__(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """obs [B, ...] -> the head's inputs float32 [B, P] and the value float32 [B]; both valid until the next call."""
        count = len(obs)
        x = obs.reshape(count, -1)
        if self._scale is not None or x.dtype != np.float32:
            flat = self._flat[:count]
            flat[:] = x
            x = flat
            if self._scale is not None:
                x -= self._scale[0]
                x /= self._scale[1]
        out = self._chain(x)
        if self._value_chain is not None:
            return out, self._value_chain(x)[:, 0]
        return out[:, :-1], out[:, -1]


class NumpyChoice:
    """The head of one discrete leaf. See `of`.

    Args: leaf: of the action. seed: of the draws.
    """

    def __init__(self, leaf: Leaf, max_rows: int, seed: int) -> None:
        self.name, self._start, self._dtype = (
            leaf.name,
            leaf.start[0] if leaf.start else 0,
            leaf.dtype,
        )
        self._rng = np.random.Generator(np.random.SFC64(seed))
        self._draws = np.empty((max_rows, leaf.n[0]), np.float32)
        self._log_probs, self._lane = np.empty_like(self._draws), np.arange(max_rows)

    @staticmethod
    def of(action: tuple[Leaf, ...], max_rows: int, seed: int) -> NumpyChoice | None:
        """None where the action is another than one choice."""
        return NumpyChoice(action[0], max_rows, seed) if len(action) == 1 and action[0].kind == "discrete" else None  # fmt: skip

    def sample(
        self, inputs: np.ndarray, mask: np.ndarray | None, best: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws by the Gumbel trick.

        Args:
            inputs: float32 [B, P]. mask: uint8 [B, P], or None. best: positions whose action is the likeliest one, or None.
        Returns: action int64 [B], counted from 0, and its log-probability float32 [B].
        """
        count = len(inputs)
        draws, log_probs = self._draws[:count], self._log_probs[:count]
        if mask is not None:
            inputs = np.where(mask != 0, inputs, np.float32(ILLEGAL))
        np.subtract(inputs, np.maximum.reduce(inputs, 1)[:, None], out=log_probs)
        self._rng.standard_exponential(dtype=np.float32, out=draws)
        np.log(np.maximum(draws, TINY, out=draws), out=draws)
        action = np.subtract(log_probs, draws, out=draws).argmax(1)
        if best is not None:
            action[best] = log_probs[best].argmax(1)
        chosen = log_probs[self._lane[:count], action]
        total = np.add.reduce(np.exp(log_probs, out=log_probs), 1)
        chosen -= np.log(total, out=total)
        return action, chosen

    def to_env(self, actions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As the environment takes it: its dtype and start."""
        action = actions[self.name]
        if self._start:
            action = action + self._start
        return {self.name: action.astype(self._dtype, copy=False)}
