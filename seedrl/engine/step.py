"""The policy step: rows of the slab in, actions and everything that is worth storing out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seedrl.engine.frames import FrameHistory
from seedrl.policy.base import require_extras
from seedrl.policy.numpy_step import NumpyChoice, NumpyPolicy
from seedrl.policy.values import ACTING_VALUES, ValueHeads, masked
from seedrl.spec import BEST_VALUE, TAKEN_VALUE, RowSpecs
from seedrl.store.batch import FIRST
from seedrl.store.blocks import Columns, torch_dtype
from seedrl.store.state import State, StateStore, leaves, rebuild
from seedrl.transport.slab import Slab

if TYPE_CHECKING:
    from seedrl.policy.base import Heads, Policy

_CPU = torch.device("cpu")


class Forward:
    """The policy's forward pass over a batch in the precision that is asked for; states, numbers and values keep their dtypes.

    Args: extras: what the policy declares beside its numbers.
    """

    def __init__(
        self, policy: Policy, device: torch.device, precision: str, extras: RowSpecs
    ) -> None:
        self._policy, self._device, self._extras = policy, device, extras
        self._narrow: torch.dtype | None = (
            None if precision == "float32" else getattr(torch, precision)
        )

    def __call__(
        self, obs: Any, state: State, first: Tensor, entering: list[Tensor]
    ) -> tuple[Tensor, Tensor, State, dict[str, Tensor]]:
        """Args: as of `Policy.forward`, obs a dict even of one leaf or that leaf; entering: the leaves of `state`."""
        if isinstance(obs, dict) and len(obs) == 1:
            (obs,) = obs.values()
        with nullcontext() if self._narrow is None else torch.autocast(self._device.type, self._narrow):  # fmt: skip
            inputs, value, new, *more = self._policy(obs, state, first)
        extras: dict[str, Tensor] = {}
        if self._extras:
            (extras,) = more
            require_extras(extras, self._extras, tuple(first.shape), "the policy")
        if self._narrow is not None:
            kept = [leaf.to(of.dtype) for leaf, of in zip(leaves(new), entering, strict=True)]
            return inputs.float(), value.float(), rebuild(new, kept), extras
        return inputs, value, new, extras


def added_values(
    inputs: Tensor, mask: Tensor | None, actions: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What first priorities are made of: values of the best legal and of the taken action, [1, B] each, of values [1, B, n]."""
    (taken,) = actions.values()
    taken_value = inputs.gather(-1, taken.unsqueeze(-1)).squeeze(-1)
    return {BEST_VALUE: masked(inputs, mask).amax(-1), TAKEN_VALUE: taken_value}


@dataclass(frozen=True)
class _Window:
    """The first `count` rows of every buffer: made once for a size of batch, as each view of a tensor costs microseconds."""

    gathers: list[tuple[np.ndarray, np.ndarray]]  # the slab's leaf, and where its rows go
    copies: list[tuple[Tensor, Tensor]]  # device, host: what the device needs
    flags: np.ndarray  # uint8 [B, 4]
    events: np.ndarray  # uint32 [B]: the four flags as one number
    first_host: np.ndarray  # bool [B]
    host_obs: Any  # NumPy's [B, ...] of the first leaf, where the policy acts on the host
    frames: list[Tensor]  # [B, ...] of each leaf
    stacks: list[Tensor]  # [B, F, ...] of each leaf, where frames are stacked
    host_mask: np.ndarray | None  # uint8 [B, M]
    obs: dict[str, Tensor] | Tensor  # [1, B, ...]: time first
    first: Tensor  # bool [1, B]
    mask: Tensor | None  # uint8 [1, B, M]
    columns: Columns


class PolicyStep:
    """Gathers ready rows, runs the policy once, samples; the same step for acting, evaluation and `seedrl eval`.

    Everything is allocated here, for `max_rows`; after that a step makes only the policy's own tensors. On the CPU the rows that are
    gathered from the slab are what the policy reads; elsewhere they are pinned, and copied to the device once a leaf.

    Args:
        policy: on the device. store_device: where `columns` go, the policy's device or the cpu.
        apart: whether the device has memory of its own; None: unless it is the cpu.
        extras: what is stored beside each row: the policy's own, and values of the action if they are among them.
        precision: of the forward pass: "float32", "bfloat16" or "float16". compiled: whether the policy is, by torch.
        frame_stack: frames that the policy sees at once; the slab has single ones.
    """

    depth = 1  # batches in flight

    def __init__(
        self, policy: Policy, heads: Heads, slab: Slab, max_rows: int, seed: int, greedy: bool,
        device: torch.device = _CPU, store_device: torch.device = _CPU, apart: bool | None = None,
        extras: RowSpecs | None = None, precision: str = "float32", compiled: bool = False,
        frame_stack: int = 1,
    ) -> None:  # fmt: skip
        self.policy, self.heads, self._slab, self._greedy = policy, heads, slab, greedy
        self.greedy_for_all = (
            False  # a server without a learner: every row is played as an evaluation is
        )
        self._device, self._explores = device, isinstance(heads, ValueHeads)
        self._apart = device.type != "cpu" if apart is None else apart
        self._store_apart = self._apart and store_device == device
        self._host: Callable[[Any], np.ndarray] = _row_from_device if self._apart else _row
        self._kept: Callable[[Any], Any] = (
            _row_on_device if self._store_apart else self._host
        )  # what the policy made, as the store takes it
        self.states = StateStore(policy.initial_state(1), slab.layout.num_slots, device)
        self._generator = torch.Generator(device).manual_seed(seed)
        # where small layers are, their calls cost more than they do
        plain = precision == "float32" and not compiled and not self._apart
        self._fast = NumpyPolicy.of(policy, max_rows) if plain else None
        self._choice = None if self._apart else NumpyChoice.of(heads, max_rows, seed)
        self._stage: dict[str, np.ndarray] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._frames = {name: self._staged(f"obs/{name}", leaf, max_rows) for name, leaf in slab.obs.items()}  # fmt: skip
        self._seen = self._frames  # by the policy
        self._history: FrameHistory | None = None
        if frame_stack > 1:
            frames = [_indexable(torch.from_numpy(leaf))[0] for leaf in slab.obs.values()]
            self._history = FrameHistory(frames, slab.layout.num_slots, frame_stack, device)
            self._seen = {name: frame.new_empty(max_rows, frame_stack, *frame.shape[1:]) for name, frame in self._frames.items()}  # fmt: skip
        reward = self._staged("reward", slab.reward, max_rows, self._store_apart)
        flags = self._staged("flags", slab.flags, max_rows, self._store_apart)
        self._mask = self._staged("mask", slab.mask, max_rows) if slab.mask.shape[1] else None
        self._sources = {name: self._source(name) for name in self._stage}
        # what the store gets is the stage under the dtype that it stores (uint16 as int16, say)
        self._columns: Columns = {"version": torch.zeros(max_rows, dtype=torch.int64)}
        if self._store_apart:
            staged = {f"obs/{name}": leaf for name, leaf in self._frames.items()}
            staged |= {"reward": reward, "flags": flags}
            staged |= {} if self._mask is None else {"mask": self._mask}
            self._columns = {name: leaf.to(device) for name, leaf in self._columns.items()}
        else:
            staged = {name: torch.from_numpy(stage) for name, stage in self._stage.items()}
        for name, leaf in staged.items():
            self._columns[name] = _indexable(leaf)
        if not self._store_apart:
            self._columns = {name: leaf.numpy() for name, leaf in self._columns.items()}
        begins = self._on_device(torch.zeros(max_rows, dtype=torch.bool))
        self._first_host, self._first = begins[0], begins[1].unsqueeze(0)
        self._windows: dict[int, _Window] = {}  # at most `max_rows` of them
        # what the step made: tensors [1, B, ...], or NumPy's [B, ...]
        self.actions: dict[str, Any] = {}
        self._log_prob: Any = None
        self._value: Any = None
        self._extras: dict[str, Any] = {}
        self._of_policy = {
            name: about for name, about in (extras or {}).items() if name not in ACTING_VALUES
        }
        self._keeps_values = BEST_VALUE in (extras or {})
        self._forward = Forward(policy, device, precision, self._of_policy)
        self._state_in: list[Tensor] = []
        self.eventful = True  # whether any row of the batch has a flag
        self.flags = self._stage["flags"]  # uint8 [max_rows, 4]

    def _staged(self, name: str, source: np.ndarray, max_rows: int, needed: bool = True) -> Tensor:
        """A buffer of `max_rows` rows that `ingest` fills, as the tensor that the device has of it when it is `needed` there."""
        empty = torch.from_numpy(np.zeros((max_rows, *source.shape[1:]), source.dtype))
        if not needed:
            self._stage[name] = empty.numpy()
            return empty
        self._stage[name], on_device = self._on_device(empty)
        return on_device

    def _on_device(self, empty: Tensor) -> tuple[np.ndarray, Tensor]:
        """Memory of the host, and the tensor that the device has of it after each `ingest`: the same where it is not apart."""
        if not self._apart:
            return empty.numpy(), empty
        pinned = empty.pin_memory() if self._device.type == "cuda" else empty
        on_device = torch.empty_like(empty, device=self._device)
        self._copies.append((on_device, pinned))
        return pinned.numpy(), on_device

    def _source(self, name: str) -> np.ndarray:
        if name.startswith("obs/"):
            return self._slab.obs[name[4:]]
        source: np.ndarray = getattr(self._slab, name)
        return source

    def ingest(self, rows: np.ndarray) -> None:
        """Copies the rows `rows` int64 [B] of every leaf out of the slab: one copy a leaf."""
        window = self._windows.get(rows.size)
        if window is None:
            window = self._windows[rows.size] = self._make_window(rows.size)
        self._window = window
        for source, staged in window.gathers:
            source.take(rows, 0, staged, "clip")
        self.eventful = bool(window.events.any())
        if self.eventful:
            np.not_equal(window.flags[:, FIRST], 0, out=window.first_host)
        else:
            window.first_host.fill(False)
        for on_device, host in window.copies:  # the answer, which is waited for, comes after them
            on_device.copy_(host, non_blocking=True)
        if self._history is not None:
            slots = torch.from_numpy(rows).to(self._device)
            self._history.push(slots, window.first[0], window.frames, window.stacks)

    def _make_window(self, count: int) -> _Window:
        obs = {name: leaf[:count].unsqueeze(0) for name, leaf in self._seen.items()}
        flags = self.flags[:count]
        frames, stacks = ([_indexable(leaf[:count]) for leaf in part.values()] for part in (self._frames, self._seen))  # fmt: skip
        seen = next(iter(self._seen.values()))
        return _Window(
            gathers=[(source, self._stage[name][:count]) for name, source in self._sources.items()],
            copies=[(on_device[:count], host[:count]) for on_device, host in self._copies],
            flags=flags, events=flags.view(np.uint32)[:, 0], first_host=self._first_host[:count],
            host_obs=seen[:count].numpy() if seen.device.type == "cpu" else None,
            frames=frames, stacks=stacks,
            host_mask=None if self._mask is None else self._stage["mask"][:count],
            obs=obs if len(obs) > 1 else next(iter(obs.values())),
            first=self._first[:, :count], mask=None if self._mask is None else self._mask[None, :count],
            columns={name: column[:count] for name, column in self._columns.items()},
        )  # fmt: skip

    def forward(self, rows: np.ndarray, evaluation: np.ndarray | None) -> None:
        """Runs the policy on the ingested rows; keeps actions and state.

        Args: rows int64 [B]; evaluation: positions in the batch that are evaluation slots, or None.
        """
        window = self._window
        state, self._state_in = self.states.gather(rows, window.first_host)
        if self._fast is not None:
            entering = [leaf.numpy() for leaf in self._state_in]
            numbers, self._value, left = self._fast(window.host_obs, entering)
            inputs, new = torch.from_numpy(numbers[None]), [torch.from_numpy(leaf) for leaf in left]
        else:
            inputs, self._value, new, self._extras = self._forward(
                window.obs, state, window.first, self._state_in
            )
        self.states.scatter(rows, new)
        best = np.arange(rows.size) if self.greedy_for_all else evaluation if self._greedy else None
        if self._choice is not None:
            numbers = _row(inputs)
            action, self._log_prob = self._choice.sample(numbers, window.host_mask, best, rows)
            self.actions = {self._choice.name: action}
            if self._keeps_values:
                legal = None if window.host_mask is None else window.host_mask != 0
                self._extras[BEST_VALUE] = numbers.max(1, initial=-np.inf, where=True if legal is None else legal)  # fmt: skip
                self._extras[TAKEN_VALUE] = np.take_along_axis(numbers, action[:, None], 1)[:, 0]
            return
        mask = window.mask
        slots = torch.from_numpy(rows).to(self._device) if self._explores else None
        actions, self._log_prob = self.heads.sample(inputs, mask, self._generator, slots)
        if best is not None:
            at = torch.from_numpy(best).to(self._device)
            likeliest = self.heads.mode(
                inputs.index_select(1, at), None if mask is None else mask.index_select(1, at)
            )
            for name, drawn in actions.items():
                drawn.index_copy_(1, at, likeliest[name])
        self.actions = actions
        if self._keeps_values:
            self._extras = {**self._extras, **added_values(inputs, mask, actions)}

    def answer(self, rows: np.ndarray) -> None:
        """Writes the actions, as the environments want them, into the slab."""
        head: Any = self.heads if self._choice is None else self._choice
        wanted: dict[str, Any] = head.to_env(self.actions)
        for name, actions in wanted.items():
            self._slab.action[name][rows] = self._host(actions)

    def columns(self, version: int, keep: np.ndarray | None) -> tuple[Columns, list[Tensor]]:
        """What the store appends: all row leaves [B, ...] and the leaves of the state entering the rows.

        Args: keep: positions of the batch to store (the others are evaluation rows), or None for all.
        """
        columns, kept = dict(self._window.columns), self._kept
        (columns["version"].fill_ if self._store_apart else columns["version"].fill)(version)
        for name, action in self.actions.items():
            columns[f"action/{name}"] = kept(action)
        columns["log_prob"], columns["value"] = kept(self._log_prob), kept(self._value)
        for name, leaf in self._extras.items():
            columns[f"extra/{name}"] = kept(leaf)
        states = self._state_in
        if keep is not None:
            at = torch.from_numpy(keep).to(self._device)
            columns = {
                name: column[at if self._store_apart else keep] for name, column in columns.items()
            }
            states = [leaf.index_select(0, at) for leaf in states]
        return columns, states


def _row(leaf: Tensor | np.ndarray) -> np.ndarray:
    """[1, B, ...] -> [B, ...], as all of these; what NumPy made is that already."""
    row: np.ndarray = leaf if isinstance(leaf, np.ndarray) else leaf.numpy()[0]
    return row


def _row_from_device(leaf: Tensor) -> np.ndarray:
    return _row(leaf.cpu())


def _row_on_device(leaf: Tensor) -> Tensor:
    return leaf[0]


def _indexable(leaf: Tensor) -> Tensor:
    """The same bytes under a dtype that torch can index."""
    return leaf.view(torch_dtype(_name_of(leaf.dtype)))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_leaves(policy: Policy) -> list[Tensor]:
    """The leaves of the policy's initial state for one slot."""
    state: State = policy.initial_state(1)
    return leaves(state)
