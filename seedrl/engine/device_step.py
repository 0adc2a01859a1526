"""The policy step on a GPU, whose part of a batch is one graph for each size of batch.

A batch costs the host a copy of a few words a row, the launch of a graph and a copy of the actions, whatever the policy; frames cross the
bus once, out of the slab into the batch and into replay. The host need not wait for it: two batches may be in flight, so that the next one
is chosen and queued while the device works.

Sizes are padded to those of `buckets`: the slot, the row and the place of a row of padding are -1, where nothing is read or written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from csrc_free_kernels.build import kernel_or_twin, run
from csrc_free_kernels.ingest import ingest_rows
from csrc_free_kernels.sample import sample_discrete
from csrc_free_kernels.state import scatter_rows
from seedrl.engine.frames import FrameHistory
from seedrl.engine.step import Forward, added_values
from seedrl.errors import ConfigError
from seedrl.policy.values import ACTING_VALUES, ValueHeads
from seedrl.spec import BEST_VALUE, RowSpecs
from seedrl.store.batch import FIRST
from seedrl.store.blocks import BlockStorage, Places, torch_dtype
from seedrl.store.state import StateStore, leaves
from seedrl.transport.slab import Slab

if TYPE_CHECKING:
    from seedrl.policy.base import Heads, Policy

# the words of a row, int64 each
_SLOT, _ROW, _STATE_PLACE, _GREEDY, _VERSION = range(5)
_FEWEST = 8  # rows of the smallest bucket, by default
_WARM_UP = 3  # runs before a capture: libraries allocate in the first ones
Actions = dict[str, Tensor]  # as the environments want them, [size, ...]


def buckets_up_to(max_rows: int, given: Sequence[int] = ()) -> list[int]:
    """Sizes of batches, rising: `given` and the largest; by default halves of it, down to 8 rows or so."""
    if given:
        return sorted({*(size for size in given if size < max_rows), max_rows})
    sizes = [max_rows]
    while sizes[-1] > _FEWEST:
        sizes.append(-(-sizes[-1] // 2))
    return sizes[::-1]


class _Flight:
    """Memory of the host for one batch on its way, and how to know that it is back."""

    def __init__(self, size: int, actions: Actions, device: torch.device) -> None:
        self.words = _pinned(torch.full((5, size), -1), device)
        self.numbers = self.words.numpy()
        self.actions = {name: _pinned(torch.empty_like(leaf, device="cpu"), device) for name, leaf in actions.items()}  # fmt: skip
        self.landed = torch.cuda.Event() if device.type == "cuda" else None


@dataclass(frozen=True)
class _Bucket:
    """Batches of up to `size` rows."""

    size: int
    words: Tensor  # int64 [5, size], on the device
    replay: Callable[[], Actions]
    flights: tuple[_Flight, _Flight]  # in turn


class DeviceStep:
    """`PolicyStep` for a device with memory of its own, where kernels can be had.

    What the step makes is stored by itself (`storage`), where `places` says, so that nothing of it comes back but actions.

    Args:
        policy, heads: on the device. storage: the rows of replay there, or None where nothing is stored.
        extras: what is stored beside each row. precision: of the forward pass: "float32", "bfloat16" or "float16".
        buckets: see `buckets_up_to`. graphs: whether the step is captured, which no policy stands that looks at its numbers on the host.
        frame_stack: frames that the policy sees at once; the slab has single ones.
    Raises: ConfigError when it cannot be captured.
    """

    depth = 2  # batches in flight

    def __init__(
        self, policy: Policy, heads: Heads, slab: Slab, max_rows: int, seed: int, greedy: bool, device: torch.device,
        storage: BlockStorage | None, *, extras: RowSpecs | None = None, precision: str = "float32", buckets: Sequence[int] = (),
        graphs: bool = True, frame_stack: int = 1,
    ) -> None:  # fmt: skip
        self.policy, self.heads, self._slab, self._greedy, self._seed = policy, heads.to(device), slab, greedy, seed  # fmt: skip
        self.greedy_for_all = False
        self._device, self._storage, self._graphs = device, storage, graphs
        self.states = StateStore(policy.initial_state(1), slab.layout.num_slots, device)
        self._of_policy = {
            name: about for name, about in (extras or {}).items() if name not in ACTING_VALUES
        }
        self._keeps_values = BEST_VALUE in (extras or {})
        self._forward = Forward(policy, device, precision, self._of_policy)
        self._explores, self._branches = isinstance(heads, ValueHeads), heads.branches
        self._generator = torch.Generator(device).manual_seed(seed)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._sources, self._staged = self._stage(max_rows)
        self._history: FrameHistory | None = None
        if frame_stack > 1:
            frames = {name: leaf for name, leaf in self._staged.items() if name.startswith("obs/")}
            self._history = FrameHistory([leaf[0] for leaf in frames.values()], slab.layout.num_slots, frame_stack, device)  # fmt: skip
            self._stacks = {
                name: leaf.unsqueeze(1).repeat(1, frame_stack, *(1 for _ in leaf.shape[1:])) for name, leaf in frames.items()
            }  # fmt: skip
        stored = {} if storage is None else storage.rows
        self._copied = [stored[name] for name in self._staged] if stored else []
        self._made = {name: leaf for name, leaf in stored.items() if name not in self._staged}
        self.flags = np.zeros((max_rows, slab.flags.shape[1]), np.uint8)
        self._flags = [self.flags, self.flags.copy()]  # in turn, as flights are
        self.eventful = True
        self._in_flight: deque[tuple[_Flight, int]] = deque()
        self._turn = 0
        self._pool: Any = None  # of the graphs' memory, which run one after the other
        self._sizes = np.array(buckets_up_to(max_rows, buckets))
        # the largest first: the others find its memory
        with torch.inference_mode():
            self._buckets = {size: self._bucket(size) for size in self._sizes[::-1].tolist()}

    def _stage(self, max_rows: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Leaves of the slab, under the dtypes in which they are stored, and room for a batch of each on the device."""
        slab = self._slab
        sources = {f"obs/{name}": leaf for name, leaf in slab.obs.items()}
        sources |= {"mask": slab.mask} if slab.mask.shape[1] else {}
        sources["flags"] = slab.flags
        if self._storage is not None:
            sources["reward"] = slab.reward
        found, staged = [], {}
        for name, leaf in sources.items():
            dtype = torch_dtype(leaf.dtype.name)
            found.append(torch.from_numpy(leaf).view(dtype))
            # rows of padding, too, are seen by the policy
            staged[name] = (
                found[-1][:1].to(self._device).repeat(max_rows, *(1 for _ in leaf.shape[1:]))
            )
        return found, staged

    # ------------------------------------------------------------------------------------------------- on the host

    def ingest(self, rows: np.ndarray) -> None:
        """Looks at the flags of the rows int64 [B]; the device copies all leaves in `forward`."""
        self.flags = self._flags[self._turn]
        flags = self.flags[: rows.size]
        self._slab.flags.take(rows, 0, flags, "clip")
        self.eventful = bool(flags.any())

    def forward(
        self, rows: np.ndarray, evaluation: np.ndarray | None, places: Places | None = None, training: np.ndarray | None = None,
        version: int = 0,
    ) -> None:  # fmt: skip
        """Queues the whole batch: what it stores, and its actions. `answer` waits for it.

        Args:
            rows: int64 [B], slots. evaluation: positions in the batch that are evaluation slots, or None.
            places: where the rows at positions `training` (None: all) are stored; None: nothing is. version: of the policy.
        """
        bucket = self._buckets[int(self._sizes[np.searchsorted(self._sizes, rows.size)])]
        flight = bucket.flights[self._turn]
        self._turn ^= 1
        words = flight.numbers
        words[:_GREEDY], words[_GREEDY], words[_VERSION] = -1, self.greedy_for_all, version
        words[_SLOT, : rows.size] = rows
        if evaluation is not None and self._greedy:
            words[_GREEDY, evaluation] = 1
        if places is not None:
            kept = places.kept if training is None else training[places.kept]
            words[_ROW, slice(rows.size) if training is None else training] = places.rows
            words[_STATE_PLACE, kept] = places.states
        bucket.words.copy_(flight.words, non_blocking=True)
        for name, made in bucket.replay().items():
            flight.actions[name].copy_(made, non_blocking=True)
        if flight.landed is not None:
            flight.landed.record()
        self._in_flight.append((flight, rows.size))

    def answer(self, rows: np.ndarray) -> None:
        """Waits for the oldest batch in flight, of which `rows` are the slots, and writes its actions into the slab.

        After it, what that batch stored is there for every process.
        """
        flight, count = self._in_flight.popleft()
        if flight.landed is not None:
            flight.landed.synchronize()
        for name, actions in flight.actions.items():
            self._slab.action[name][rows] = actions.numpy()[:count]

    # ----------------------------------------------------------------------------------------------- on the device

    def _bucket(self, size: int) -> _Bucket:
        words = torch.full((5, size), -1, device=self._device)
        actions = self._run(words)
        replay: Callable[[], Actions] = lambda: self._run(words)  # noqa: E731
        if self._graphs:
            replay = self._captured(words)
            actions = replay()
        flights = tuple(_Flight(size, actions, self._device) for _ in range(2))
        return _Bucket(size, words, replay, flights)  # type: ignore[arg-type]

    def _captured(self, words: Tensor) -> Callable[[], Actions]:
        """The step as a graph, tried on padding alone. Weights are read where they lie: they change in place."""
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        try:
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    self._run(words)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph, pool=self._pool):
                actions = self._run(words)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                what=f"the policy's step cannot be captured in a CUDA graph: {error}", where="engine.graphs, policy.name",
                do="let forward neither look at numbers (.item(), if tensor:) nor move tensors between devices, or set engine.graphs=false",
            ) from error  # fmt: skip
        self._pool = graph.pool()

        def replay() -> Actions:
            graph.replay()
            return actions

        return replay

    def _run(self, words: Tensor) -> Actions:
        """All of a batch whose rows `words`, int64 [5, B], describes; nothing here looks at a number or makes one of the host's."""
        slots, rows, places, greedy, version = words
        size, best = slots.numel(), greedy == 1
        staged = {name: leaf[:size] for name, leaf in self._staged.items()}
        ingest = kernel_or_twin(ingest_rows, slots)
        ingest(self._sources, list(staged.values()), self._copied, slots, rows)
        first = staged["flags"][:, FIRST] != 0
        seen = staged
        if self._history is not None:
            seen = {name: leaf[:size] for name, leaf in self._stacks.items()}
            self._history.push(slots, first, [staged[name] for name in seen], list(seen.values()))
        obs = {
            name: seen[f"obs/{name}"].view(_dtype_of(leaf)).unsqueeze(0)
            for name, leaf in self._slab.obs.items()
        }
        mask = staged["mask"].unsqueeze(0) if "mask" in staged else None
        state, entering = self.states.gather_on_device(slots, first)
        inputs, value, new, extras = self._forward(obs, state, first.unsqueeze(0), entering)
        self.states.scatter_on_device(slots, leaves(new))
        actions, log_prob = self._draw(inputs, mask, slots, best)
        if self._keeps_values:
            extras = {**extras, **added_values(inputs, mask, actions)}
        if self._storage is not None:
            made = {f"action/{name}": action for name, action in actions.items()}
            made |= {f"extra/{name}": leaf for name, leaf in extras.items()}
            made |= {"log_prob": log_prob, "value": value}
            columns = [version if name == "version" else made[name].squeeze(0) for name in self._made]  # fmt: skip
            run(scatter_rows, list(self._made.values()), rows, columns)
            if entering:
                run(scatter_rows, self._storage.states, places, entering)
        wanted = self.heads.to_env(actions)
        return {name: action.squeeze(0) for name, action in wanted.items()}

    def _draw(self, inputs: Tensor, mask: Tensor | None, slots: Tensor, best: Tensor) -> tuple[Actions, Tensor]:  # fmt: skip
        """Actions as stored, [1, B, ...], and their log-probabilities [1, B]; the likeliest where `best`, bool [B]."""
        if self._branches:
            legal = None if mask is None else mask[0]
            drawn = run(sample_discrete, inputs[0].float(), legal, self._branches, self._seed, slots, self._step, greedy=best)  # fmt: skip
            self._step += 1
            return self.heads.of_branches(drawn.actions.unsqueeze(0)), drawn.log_prob.unsqueeze(0)
        of_slots = slots.clamp_min(0) if self._explores else None
        actions, log_prob = self.heads.sample(inputs, mask, self._generator, of_slots)
        likeliest = self.heads.mode(inputs, mask)
        for name, action in actions.items():
            where = best.view(1, -1, *(1,) * (action.dim() - 2))
            actions[name] = torch.where(where, likeliest[name], action)
        return actions, log_prob


def _dtype_of(leaf: np.ndarray) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, leaf.dtype.name)
    return dtype


def _pinned(memory: Tensor, device: torch.device) -> Tensor:
    return memory.pin_memory() if device.type == "cuda" else memory
