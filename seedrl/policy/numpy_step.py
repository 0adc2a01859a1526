"""Acting on the CPU in NumPy: the MLP of `nets.Default` with its LSTM or GRU, and the choice among n.

On a batch of a hundred rows a layer of 64 is some ten microseconds of arithmetic, and torch's calls around it are twice that
(docs/design/0007). `nets` and `heads` define what is right; the classes here read the parameters where torch keeps them, so weights that
are published in place are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seedrl.policy.heads import ILLEGAL, TINY, Heads
from seedrl.policy.nets import MLP, Default, Encoder, Flat, Recurrent
from seedrl.policy.normalise import LIMIT, Normalised
from seedrl.policy.values import ActionValues, ValueHeads
from seedrl.spec import Leaf

_Activation = Callable[..., Any]


def _relu(x: np.ndarray, out: np.ndarray) -> None:
    np.maximum(x, 0.0, out=out)


_ACTIVATIONS: dict[str, _Activation] = {"tanh": np.tanh, "relu": _relu}


def _view(parameter: Tensor) -> np.ndarray:
    view: np.ndarray = parameter.detach().numpy()
    return view


class _Linear:
    def __init__(self, weight: Tensor, bias: Tensor, max_rows: int) -> None:
        self._weight, self._bias = _view(weight).T, _view(bias)
        self._out = np.empty((max_rows, self._bias.size), np.float32)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        x = np.matmul(x, self._weight, out=self._out[: len(x)])
        x += self._bias
        return x


class _MLP:
    def __init__(self, mlp: MLP, max_rows: int) -> None:
        layers: list[Any] = [*mlp.layers]
        self._layers = [_Linear(layer.weight, layer.bias, max_rows) for layer in layers]
        self._activate = _ACTIVATIONS[mlp.activation]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        for layer in self._layers:
            x = layer(x)
            self._activate(x, out=x)
        return x


def _sigmoid(x: np.ndarray) -> None:
    """In place, by torch: one pass, where NumPy has none of its own."""
    torch.from_numpy(x).sigmoid_()


class _LSTM:
    """`nn.LSTMCell`: the gates are input, forget, cell and output, in this order."""

    def __init__(self, cell: nn.LSTMCell, max_rows: int) -> None:
        self._of_input = _Linear(cell.weight_ih, cell.bias_ih, max_rows)
        self._of_hidden = _Linear(cell.weight_hh, cell.bias_hh, max_rows)
        self._new = [np.empty((max_rows, cell.hidden_size), np.float32) for _ in range(2)]

    def __call__(self, x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
        hidden, cell = state
        gates = self._of_input(x)
        gates += self._of_hidden(hidden)
        size = cell.shape[1]
        candidate = gates[:, 2 * size : 3 * size]
        candidate *= 2.0  # tanh(x) = 2 sigmoid(2x) - 1: one pass over the four gates
        _sigmoid(gates)
        candidate *= 2.0
        candidate -= 1.0
        new_hidden, new_cell = (part[: len(x)] for part in self._new)
        np.multiply(gates[:, size : 2 * size], cell, out=new_cell)
        candidate *= gates[:, :size]
        new_cell += candidate
        np.tanh(new_cell, out=new_hidden)
        new_hidden *= gates[:, 3 * size :]
        return [new_hidden, new_cell]


class _GRU:
    """`nn.GRUCell`: the gates are reset, update and new, in this order."""

    def __init__(self, cell: nn.GRUCell, max_rows: int) -> None:
        self._of_input = _Linear(cell.weight_ih, cell.bias_ih, max_rows)
        self._of_hidden = _Linear(cell.weight_hh, cell.bias_hh, max_rows)
        self._new = np.empty((max_rows, cell.hidden_size), np.float32)

    def __call__(self, x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
        (hidden,) = state
        size = hidden.shape[1]
        of_input, of_hidden = self._of_input(x), self._of_hidden(hidden)
        gates, candidate = of_input[:, : 2 * size], of_hidden[:, 2 * size :]
        gates += of_hidden[:, : 2 * size]
        _sigmoid(gates)
        candidate *= gates[:, :size]
        candidate += of_input[:, 2 * size :]
        np.tanh(candidate, out=candidate)
        new = np.subtract(hidden, candidate, out=self._new[: len(x)])
        new *= gates[:, size:]
        new += candidate
        return [new]


class NumpyPolicy:
    """`Default` of one box leaf, linear layers with tanh or relu, and its core if it has one; or values of actions by it. See `of`."""

    def __init__(
        self, policy: Default, values: ActionValues | None, normalised: Normalised | None, flat: Flat, mlp: MLP, max_rows: int
    ) -> None:  # fmt: skip
        self._values = values
        self._returns: tuple[np.ndarray, np.ndarray] | None = None
        self._moments: tuple[np.ndarray, np.ndarray] | None = None
        if normalised is not None and normalised.returns is not None:
            self._returns = _view(normalised.returns.scale), _view(normalised.returns.centre)
        if normalised is not None and normalised.moments:
            (moments,) = normalised.moments.values()
            self._moments = _view(moments.centre).reshape(-1), _view(moments.inverse).reshape(-1)  # type: ignore[arg-type]
        self._encoder, self._core = _MLP(mlp, max_rows), None
        if policy.core is not None:
            cell = policy.core.cell
            self._core = (_LSTM if isinstance(cell, nn.LSTMCell) else _GRU)(cell, max_rows)  # type: ignore[arg-type]
        self._heads = _Linear(policy.heads.weight, policy.heads.bias, max_rows)
        self._value_encoder: _MLP | None = None
        if policy.value_encoder is not None:
            body: Any = policy.value_encoder.body
            self._value_encoder = _MLP(body, max_rows)
            self._value = _Linear(policy.value.weight, policy.value.bias, max_rows)
        self._scale: tuple[np.ndarray, np.ndarray] | None = None
        if flat.centre is not None and flat.spread is not None:
            self._scale = flat.centre.numpy().ravel(), flat.spread.numpy().ravel()
        self._flat = np.empty((max_rows, flat.count), np.float32)

    @staticmethod
    def of(policy: nn.Module, max_rows: int) -> NumpyPolicy | None:
        """None where the policy, which lies on the CPU, is another than these."""
        values = policy if type(policy) is ActionValues else None
        if values is not None:
            policy = values.policy
        normalised = policy if type(policy) is Normalised else None
        if normalised is not None:
            policy = normalised.policy
        if type(policy) is not Default or type(policy.core) not in (NoneType, Recurrent):
            return None
        encoder = policy.encoder
        if type(encoder) is not Encoder:
            return None
        flat, mlp = encoder.prepare, encoder.body
        if type(flat) is not Flat or flat.kind != "box" or type(mlp) is not MLP:
            return None
        if mlp.activation not in _ACTIVATIONS:
            return None
        return NumpyPolicy(policy, values, normalised, flat, mlp, max_rows)

    def __call__(
        self, obs: np.ndarray, state: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Acts on one row; all that it returns is valid until the next call.

        Args: obs [B, ...]; state: what enters the row, leaves float32 [B, size], none without a core.
        Returns: the head's inputs float32 [B, P], the value float32 [B], and the state that left the row.
        """
        count = len(obs)
        x = obs.reshape(count, -1)
        if self._moments is not None:
            flat = self._flat[:count]
            np.subtract(x, self._moments[0], out=flat, casting="unsafe")
            flat *= self._moments[1]
            x = np.clip(flat, -LIMIT, LIMIT, out=flat)
        elif self._scale is not None or x.dtype != np.float32:
            flat = self._flat[:count]
            flat[:] = x
            x = flat
            if self._scale is not None:
                x -= self._scale[0]
                x /= self._scale[1]
        hidden = self._encoder(x)
        if self._core is not None:
            state = self._core(hidden, state)
            hidden = state[0]
        out = self._heads(hidden)
        if self._value_encoder is not None:
            inputs, value = out, self._value(self._value_encoder(x))[:, 0]
        else:
            inputs, value = out[:, :-1], out[:, -1]
        if self._returns is not None:
            value = value * self._returns[0] + self._returns[1]
        if self._values is None:
            return inputs, value, state
        if self._values.dueling:
            inputs += (value - inputs.mean(1))[:, None]
        return inputs, inputs.max(1), state


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
    def of(heads: Heads, max_rows: int, seed: int) -> NumpyChoice | None:
        """None where the action is another than one choice."""
        if isinstance(heads, ValueHeads):
            return _NumpyGreedy(heads, max_rows, seed)
        action = heads.leaves
        return NumpyChoice(action[0], max_rows, seed) if len(action) == 1 and action[0].kind == "discrete" else None  # fmt: skip

    def sample(
        self,
        inputs: np.ndarray,
        mask: np.ndarray | None,
        best: np.ndarray | None,
        slots: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws by the Gumbel trick.

        Args:
            inputs: float32 [B, P]. mask: uint8 [B, P], or None. best: positions whose action is the likeliest one, or None.
            slots: int64 [B], for a choice that explores by slot.
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


class _NumpyGreedy(NumpyChoice):
    """The choice of the largest value, but for each slot's share of random ones: `values.ValueHeads`."""

    def __init__(self, heads: ValueHeads, max_rows: int, seed: int) -> None:
        super().__init__(heads.leaves[0], max_rows, seed)
        self._epsilon = heads.epsilon.numpy()

    def sample(
        self,
        inputs: np.ndarray,
        mask: np.ndarray | None,
        best: np.ndarray | None,
        slots: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        count = len(inputs)
        draws = self._draws[:count]
        if mask is not None:
            inputs = np.where(mask != 0, inputs, np.float32(ILLEGAL))
        greedy, epsilon = inputs.argmax(1), self._epsilon[slots]
        if best is not None:
            epsilon[best] = 0.0
        explores = self._rng.random(count, np.float32) < epsilon
        legal = inputs.shape[1] if mask is None else np.maximum(np.count_nonzero(mask, 1), 1)
        share, action = (1 - epsilon) + epsilon / legal, greedy
        if explores.any():
            self._rng.random(dtype=np.float32, out=draws)
            if mask is not None:
                draws += 1.0
                draws *= mask
            action = np.where(explores, draws.argmax(1), greedy)
            share -= (1 - epsilon) * (action != greedy)
        return action, np.log(share, dtype=np.float32)
