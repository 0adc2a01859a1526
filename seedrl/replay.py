"""The store without an engine: for a training loop of one's own, in one process.

    store = ReplayStore(env.observation_space, env.action_space, num_slots=8, capacity=100_000, mode="prioritized", unroll_length=16)
    store.append(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, first=first)
    batch = store.sample(32)

Rows are in the order in which Gymnasium's vector environments give them (next-step autoreset): a row is an observation, the action that was
chosen at it, and the reward and flags of the step that *led* to it. The first row of an episode is `first`, and its reward is of no step.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from pydantic import ValidationError
from torch import Tensor

from seedrl.config import Learner, Replay
from seedrl.config_checks import replay_contradictions
from seedrl.errors import ConfigError, ShapeError
from seedrl.policy.heads import Heads
from seedrl.spec import RowSpecs, spec_from_spaces
from seedrl.store.batch import Batch
from seedrl.store.blocks import BlockStorage, torch_dtype
from seedrl.store.kept import KeptRows
from seedrl.store.memory import require_device, require_room
from seedrl.store.plan import StorePlan
from seedrl.store.replay import ReplayReader
from seedrl.store.ring import RingReader
from seedrl.store.state import State, leaves
from seedrl.transport import doorbell

_LENGTHS = ("unroll_length", "burn_in", "stride")


class Pool:
    """Blocks of one storage, which several stores take and give back."""

    def __init__(self, storage: BlockStorage) -> None:
        self.storage = storage
        self.free = list(range(storage.layout.num_blocks))

    def take(self, count: int) -> list[int]:
        """Raises: ConfigError when there are not as many: how many rows are left."""
        if count > len(self.free):
            length = self.storage.layout.rule.block_length
            raise ConfigError(
                what=f"the store asks for {count * length} rows, those that are being filled included; {len(self.free) * length} are left",
                where="capacity", do="lower it, retire another policy, or make the whole larger",
            )  # fmt: skip
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        self.free += blocks


class ReplayStore:
    """Rows of `num_slots` environments, drawn as unrolls. See the module for the order of rows.

    Args:
        observation_space, action_space: of one environment. num_slots: environments that are appended.
        state: the policy's recurrent state for one slot, each leaf [1, ...]; () for none.
        device: where rows lie. batch_size: largest batch that will be asked for.
        frame_stack: observations of which a batch shows the newest and those before it, each stored once; `append` takes single ones.
        extras: what else is stored beside each row: dtype and shape by name, `{"teacher_logits": (torch.float32, (18,))}`.
        pool: memory that is shared with other stores (`seedrl.shards`); None: the store has its own.
        settings: fields of the configuration's `replay` section, and `unroll_length`, `burn_in`, `stride` of `learner`.
    Raises: ConfigError for a setting that cannot be: which one, and what to do.
    """

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], *, num_slots: int, state: State = (),
        device: str | torch.device = "cpu", batch_size: int = 32, seed: int = 0, extras: RowSpecs | None = None,
        pool: Pool | None = None, frame_stack: int = 1, **settings: Any,
    ) -> None:  # fmt: skip
        learner = {name: settings.pop(name) for name in _LENGTHS if name in settings}
        settings.setdefault("mode", "uniform")
        sections = (
            _section(Replay, settings),
            _section(Learner, learner | {"batch_size": batch_size}),
        )
        for keys, what, do in replay_contradictions(*sections):
            raise ConfigError(what=what, where=", ".join(keys), do=do)
        if sections[0].initial_priority == "acting":
            raise ConfigError(what="there is no policy here whose values first priorities could be made of", where="initial_priority", do="give priorities with update_priorities")  # fmt: skip
        for name, number, least in (("num_slots", num_slots, 1), ("seed", seed, 0), ("frame_stack", frame_stack, 1)):  # fmt: skip
            if not isinstance(number, int | np.integer) or number < least:
                raise ConfigError(what=f"{name} is {number!r}", where=name, do=f"give a whole number from {least} on")  # fmt: skip
        _check_extras(extras or {})
        self.spec = spec_from_spaces(
            observation_space, action_space, action_mask="none", env_id="own"
        )
        self.observation_space, self.action_space = observation_space, action_space
        self.num_slots, self.device = num_slots, _device(device)
        self.retired = False  # by `Shards`: its blocks are others'
        self.batch_size = batch_size
        self._blocked_by: str | None = None
        self._kept: KeptRows | None = None
        stored = Heads(self.spec.action).stored_specs()
        self.plan = StorePlan.of_sections(*sections, self.spec, stored, leaves(state), num_slots, seed, extras, frame_stack)  # fmt: skip
        self._initial = [leaf.to(self.device) for leaf in leaves(state)]
        self.blocks: list[int] | None = None  # of the pool
        if pool is not None:
            self.plan = self.plan.within(pool.storage.layout)
            self.blocks = pool.take(self.plan.blocks.num_blocks)
        self._storage = _memory(self.plan, self.device) if pool is None else pool.storage
        control = mmap.mmap(-1, self.plan.control.nbytes)
        bell, engine_bell = doorbell.make(), doorbell.make()
        self._writer = self.plan.writer(self._storage, control, bell, self.blocks)
        self._reader = self.plan.reader(self._storage, control, bell, engine_bell, state)
        self._reader.blocks = self.blocks
        weakref.finalize(self, _close, self._reader, bell, engine_bell)
        self._every = np.arange(num_slots)
        self._obs = [leaf.name for leaf in self.spec.observation]
        self._actions = [leaf.name for leaf in self.spec.action]
        self.extra_names = list(extras or {})
        self._rows, self._restored = 0, False
        self._behind = any(self.plan.replay.bytes_behind)
        self._views = {
            leaf.name: getattr(torch, leaf.dtype) for leaf in self.spec.observation if torch_dtype(leaf.dtype) != getattr(torch, leaf.dtype)
        }  # fmt: skip

    def held_back(self, slots: np.ndarray | None = None) -> str | None:
        """Why no row for each of `slots` may come now: "ratio" (sample first), "room" (queue: sample first); None when it may."""
        return self._writer.held_back(self._seats(slots))

    def append(
        self, *, obs: Any, action: Any, reward: Any, terminated: Any, truncated: Any, first: Any, log_prob: Any = 0.0, value: Any = 0.0,
        version: Any = 0, state: State | None = None, slots: np.ndarray | None = None, extras: Mapping[str, Any] | None = None,
    ) -> int:  # fmt: skip
        """Appends one row to each slot, arrays or tensors [B, ...]; B is `num_slots` unless `slots`, int64 [B], says which.

        Args: state: entering the row, leaves [B, ...]; None: the initial one. obs, action: dicts by leaf where the space has several.
            action: as it is stored, choices counted from 0. extras: a column for each that was named at the start.
        Returns: rows that became drawable. Raises: ShapeError, naming the argument; ConfigError when `held_back`.
        """
        at = self._seats(slots)
        reason = self._writer.held_back(at)
        if reason is not None:
            raise ConfigError(
                what=f"no row may be appended now: {reason}", where="append",
                do="sample first; held_back() says so beforehand",
            )  # fmt: skip
        count = at.size
        given: dict[str, Any] = {"reward": reward, "log_prob": log_prob, "value": value}
        given |= {f"obs/{name}": leaf for name, leaf in _by_leaf("obs", obs, self._obs).items()}
        given |= {f"action/{name}": leaf for name, leaf in _by_leaf("action", action, self._actions).items()}  # fmt: skip
        given |= {f"extra/{name}": leaf for name, leaf in _by_leaf("extras", extras or {}, self.extra_names).items()}  # fmt: skip
        columns = {name: self._column(name, values, count) for name, values in given.items()}
        flags = np.zeros((count, 4), np.uint8)
        for column, (name, values) in enumerate({"terminated": terminated, "truncated": truncated, "first": first}.items()):  # fmt: skip
            flags[:, column] = one_each(name, values, count)
        columns["flags"] = self._on_device(flags)
        columns["version"] = self._on_device(one_each("version", version, count).astype(np.int64))
        states = self._states(state, count)
        self._rows += count
        stored = self._writer.append(at, columns, states)
        if stored and self._behind:
            self._reader._take_in()  # type: ignore[attr-defined]  # what is full is copied, drawn from or not
        return stored

    def end(self, slots: np.ndarray | None = None) -> int:
        """Ends the runs of `slots` (all): what comes next there does not follow what was. Returns: rows that no unroll was made of."""
        return self._writer.discard(self._seats(slots))

    def sample(self, batch_size: int | None = None) -> Batch | None:
        """A batch of unrolls, time first; None when there is none to draw: `stats()["blocked_by"]` says why."""
        self._require_open()
        count = self.batch_size if batch_size is None else batch_size
        replay = self.plan.replay
        sized = replay.mode == "queue" or replay.samples_per_insert is not None or any(replay.bytes_behind) or replay.max_uses_or_default is not None  # fmt: skip
        if (
            not isinstance(count, int | np.integer)
            or count < 1
            or (sized and count > self.batch_size)
        ):
            raise ConfigError(
                what=f"a batch of {count!r} unrolls was asked for; the store is made for 1 to {self.batch_size}", where="sample",
                do="give ReplayStore the largest batch_size that you will ask for",
            )  # fmt: skip
        batch, self._blocked_by = self._reader._attempt(int(count))
        return None if batch is None else self._as_spaces(batch)

    def update_priorities(self, items: np.ndarray, priorities: Any) -> None:
        """Gives drawn unrolls `batch.items` new priorities [B]; late ones, of unrolls overwritten since, are dropped and counted."""
        self._require_open()
        numbers, given = _host(items), _host(priorities)
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or given.shape != numbers.shape or given.dtype.kind not in "iuf":  # fmt: skip
            raise ShapeError(
                what=f"items are {numbers.dtype} {list(numbers.shape)}, priorities {given.dtype} {list(given.shape)}", where="update_priorities",
                do="give batch.items and one number for each",
            )  # fmt: skip
        self._reader.update_priorities(numbers.astype(np.int64), given)

    def set_progress(self, share: float) -> None:
        """How much of the training is over, from 0 to 1: what `importance_exponent_end` and `priority_exponent_end` go by."""
        self._reader.set_progress(share)

    def publish_version(self, version: int) -> None:
        """The version against which `max_lag` is measured."""
        self._reader.publish_version(version)

    def save(self, folder: Path | str) -> None:
        """Writes what is kept into `folder`; what was written there before and has not changed is not written again.

        Raises: ConfigError with queue, which keeps nothing; CheckpointError when it cannot be written.
        """
        kept = self._kept_in(Path(folder))
        kept.save()
        kept.finish()

    def restore(self, folder: Path | str) -> int | None:
        """Brings back what `save` wrote, into a store of the same settings that nothing was appended to: the next draws are the same.

        Returns: unrolls that may be drawn again; None when there is nothing. Raises: CheckpointError when they are of another store.
        """
        if self._rows or self._restored:
            raise ConfigError(what="rows were appended already, or restored", where="restore", do="restore into a new store")  # fmt: skip
        found = self._kept_in(Path(folder)).restore()
        self._writer.adopt()
        self._restored = found is not None
        return found

    def _kept_in(self, folder: Path) -> KeptRows:
        if not isinstance(self._reader, RingReader):
            raise ConfigError(what="queue keeps no rows", where="mode", do="use uniform, prioritized or recent")  # fmt: skip
        if self._kept is None or self._kept.folder != folder:
            self._kept = KeptRows(folder, self._reader)
        return self._kept

    def stats(self) -> dict[str, Any]:
        """Rows appended, kept and drawn, and what `docs/metrics.md` explains."""
        return {
            "appended_rows": self._rows, "nbytes": self.plan.blocks.nbytes + self.plan.control.nbytes,
            "blocked_by": self._blocked_by, **self._reader.accounts(), **self._reader.figures(),
        }  # fmt: skip

    def _column(self, name: str, values: Any, count: int) -> Any:
        leaf = next(leaf for leaf in self.plan.blocks.rows if leaf.name == name)
        array = _host(values)
        want = (count, *leaf.shape)
        if array.shape != want and array.size != 1:
            raise ShapeError(
                what=f"{name.replace('/', '.')} has the shape {list(array.shape)}; it must be {list(want)}",
                do="give one row for each slot",
            )
        if array.dtype.kind not in "biuf":
            raise ShapeError(what=f"{name.replace('/', '.')} is {array.dtype}; it must be numbers", do="give one row for each slot")  # fmt: skip
        array = np.broadcast_to(array, want)
        if name.startswith("obs/"):  # unsigned ones are kept under the signed type of their width
            kept = next(leaf for leaf in self.spec.observation if leaf.name == name[4:])
            array = np.ascontiguousarray(array, kept.dtype)
            if kept.name in self._views:
                array = array.view(str(leaf.dtype).removeprefix("torch."))
        return self._on_device(array.astype(str(leaf.dtype).removeprefix("torch."), copy=False))

    def _states(self, state: State | None, count: int) -> list[Tensor]:
        if state is None:
            return [leaf.expand(count, *leaf.shape[1:]) for leaf in self._initial]
        given = [leaf if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf)) for leaf in leaves(state)]  # fmt: skip
        if len(given) != len(self._initial):
            raise ShapeError(what=f"the state has {len(given)} leaves; it must have {len(self._initial)}", do="give a state of the nest that the store was made with")  # fmt: skip
        for number, (leaf, like) in enumerate(zip(given, self._initial, strict=True)):
            want = (count, *like.shape[1:])
            if leaf.shape != want or leaf.dtype is not like.dtype:
                raise ShapeError(
                    what=f"leaf {number} of the state is {leaf.dtype} {list(leaf.shape)}; it must be {like.dtype} {list(want)}",
                    do="give the state entering the row, of each slot",
                )  # fmt: skip
        return [leaf.to(self.device) for leaf in given]

    def _seats(self, slots: np.ndarray | None) -> np.ndarray:
        self._require_open()
        return self._every if slots is None else seats(slots, self.num_slots)

    def _require_open(self) -> None:
        if self.retired:
            raise ConfigError(what="this policy was retired, and its rows are gone", where="shards", do="use another shard")  # fmt: skip

    def _as_spaces(self, batch: Batch) -> Batch:
        """Observations in the dtypes of their spaces, where torch stores their bits under another name."""
        if not self._views:
            return batch
        obs = {name: leaf.view(self._views[name]) if name in self._views else leaf for name, leaf in batch.obs.items()}  # fmt: skip
        return batch._replace(obs=obs)

    def _on_device(self, array: np.ndarray) -> Any:
        if self._storage.arrays is not None:
            return array
        return torch.from_numpy(np.array(array)).to(self.device)


def _memory(plan: StorePlan, device: torch.device) -> BlockStorage:
    require_room(device, plan.blocks.nbytes + plan.control.nbytes, plan.blocks.num_rows)
    memory = torch.from_numpy(np.zeros(plan.blocks.nbytes, np.uint8)).to(device)
    return BlockStorage(plan.blocks, memory)


def seats(slots: Any, num_slots: int) -> np.ndarray:
    """`slots` as int64 [B]; None: all. Raises: ShapeError when they are no slots, or one stands there twice."""
    if slots is None:
        return np.arange(num_slots)
    at = _host(slots)
    wrong = at.ndim != 1 or (at.size and at.dtype.kind not in "iu")
    if wrong or (
        at.size and (at.min() < 0 or at.max() >= num_slots or np.unique(at).size < at.size)
    ):
        shown = at.tolist() if at.size <= 8 else f"{at.dtype} {list(at.shape)}"
        raise ShapeError(what=f"slots are {shown}", where="slots", do=f"give numbers below {num_slots} in one dimension, each once")  # fmt: skip
    return at.astype(np.int64)


def one_each(name: str, values: Any, count: int) -> np.ndarray:
    """A number for each of `count` slots, of as many or of one. Raises: ShapeError, naming it."""
    array = _host(values)
    if array.shape not in ((), (1,), (count,)) or array.dtype.kind not in "biuf":
        raise ShapeError(what=f"{name} is {array.dtype} {list(array.shape)}; it must be [{count}]", do="give one for each slot, or one for all")  # fmt: skip
    return np.broadcast_to(array, (count,))


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(what=f"there is no device '{name}'", where="device", do="use cpu, cuda or cuda:N") from None  # fmt: skip
    return require_device(str(device), "device")


def _check_extras(extras: RowSpecs) -> None:
    for name, about in extras.items():
        dtype, shape = about if isinstance(about, tuple) and len(about) == 2 else (None, None)
        plain = isinstance(dtype, torch.dtype) and isinstance(shape, tuple)
        if not plain or dtype in (torch.bfloat16, torch.uint16, torch.uint32, torch.uint64):
            raise ConfigError(
                what=f"the extra '{name}' is {about!r}", where="extras",
                do="give a torch dtype (float32, float16, int64, uint8, bool, ...) and a shape: (torch.float32, (18,))",
            )  # fmt: skip


def _close(reader: ReplayReader, *fds: int) -> None:
    reader.close()
    for fd in fds:
        os.close(fd)


def _section(kind: Any, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            what=f"{first['msg'].lower()}: {first['input']!r}", where=".".join(map(str, first["loc"])),
            do="see seedrl train --help-config, sections replay and learner",
        ) from None  # fmt: skip


def _by_leaf(what: str, values: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        values = {names[0]: values} if len(names) == 1 else {}
    short = {name.partition(".")[2] or name: name for name in names}  # the space's own keys
    values = {short.get(name, name): leaf for name, leaf in values.items()}
    if sorted(values) != sorted(names):
        raise ShapeError(
            what=f"{what} has the leaves {sorted(values)}; there must be {sorted(names)}", do="give a dict with each of them",
        )  # fmt: skip
    return values


def _host(values: Any) -> np.ndarray:
    try:
        array: np.ndarray = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)  # fmt: skip
    except (ValueError, TypeError) as error:
        raise ShapeError(what=f"no array can be made of it: {error}", do="give an array, or a tensor") from None  # fmt: skip
    return array
