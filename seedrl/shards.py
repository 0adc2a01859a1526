"""Rows of several policies in one memory: a shard for each, with a mode, a share, a rate and a version of its own.

    shards = Shards(env.observation_space, env.action_space, num_slots=10, capacity=100_000, unroll_length=16)
    main = shards.add("main", capacity=60_000, mode="prioritized", samples_per_insert=4)
    past = shards.add("past", capacity=20_000)
    shards.append(policies=[main, main, past, ...], obs=obs, ...)  # each row goes to its policy's shard
    batch = shards["main"].sample(32)

A slot is one seat. Whose policy sits there may change with every row; where it changes within an episode, what comes next in the shard does not follow
what was there before. A slot's run stays open in a shard that it leaves, and goes on when it comes back, so that no row is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from seedrl.errors import CheckpointError, ConfigError, ShapeError
from seedrl.replay import Pool, ReplayStore, one_each, seats
from seedrl.spec import RowSpecs
from seedrl.store.blocks import BlockStorage
from seedrl.store.state import State, leaves, rebuild

LEARN = "learn"  # extra of each row: 0 where its policy was frozen
_TABLE = "shards.json"
_LENGTHS = ("unroll_length", "burn_in", "stride", "block_length", "frame_stack")


class Shards(Mapping[str, ReplayStore]):
    """The shards by name, each a `ReplayStore` from which its learner samples.

    Args:
        observation_space, action_space, num_slots, state, device, extras: as in `ReplayStore`.
        capacity: rows in all, those that are being filled included.
        lengths: `unroll_length`, `burn_in`, `stride`, `block_length` and `frame_stack`, which all shards share.
    """

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], *, num_slots: int, capacity: int, state: State = (),
        device: str | torch.device = "cpu", extras: RowSpecs | None = None, **lengths: int,
    ) -> None:  # fmt: skip
        for name in lengths:
            if name not in _LENGTHS:
                raise ConfigError(
                    what=f"{name} is a shard's own", where=name, do="give it to add()"
                )
        self._common = {
            "observation_space": observation_space, "action_space": action_space, "num_slots": num_slots, "state": state, "device": device,
            "extras": {**(extras or {}), LEARN: (torch.uint8, ())}, **lengths,
        }  # fmt: skip
        # of a storage of that capacity, the blocks; nothing is appended to it
        like = ReplayStore(**self._common, mode="recent", capacity=capacity)
        layout = like.plan.blocks
        open_blocks = num_slots * layout.rule.blocks_held
        storage = BlockStorage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8, device=device))
        self._pool = Pool(storage)
        self._pool.take(open_blocks)  # the capacity counts them
        self.num_slots = num_slots
        self._stores: dict[str, ReplayStore] = {}
        self._names: list[str] = []  # by number, for good
        self._settings: dict[str, dict[str, Any]] = {}
        self._frozen: dict[str, bool] = {}  # and whether its rows are stored all the same
        self._last = np.full(
            num_slots, -1, np.int64
        )  # in whose shard a slot's last row is; -1: nowhere
        self._unstored = {"frozen_rows": 0, "retired_rows": 0}

    # ------------------------------------------------------------------------------------------------------- policies

    def add(self, name: str, **settings: Any) -> int:
        """A shard for a new policy. Returns: the number by which `append` knows it.

        Args: settings: of `ReplayStore` (`mode`, `capacity`, `samples_per_insert`, `max_lag`, `batch_size`, `seed`, ...).
        Raises: ConfigError when there is one of that name, or no room for it.
        """
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name) or name in (*self._unstored, "free_rows"):  # fmt: skip
            raise ConfigError(what=f"{name!r} is no name of a policy", where="add", do="use letters, digits, '_', '-' and '.'")  # fmt: skip
        if name in self._names:
            raise ConfigError(what=f"there is or was a policy '{name}' already", where="add", do="give it another name")  # fmt: skip
        for key in (*_LENGTHS, *self._common, "pool"):
            if key in settings:
                raise ConfigError(
                    what=f"{key} is of all shards", where=key, do="give it to Shards()"
                )
        self._stores[name] = ReplayStore(**self._common, **settings, pool=self._pool)
        self._names.append(name)
        self._settings[name] = settings
        return len(self._names) - 1

    def freeze(self, name: str, *, keep_rows: bool = False) -> None:
        """From now on nobody learns from this policy's new rows: they are not stored, or, with `keep_rows`, stored with `extras["learn"]` 0."""
        self[name]
        self._frozen[name] = keep_rows

    def unfreeze(self, name: str) -> None:
        """Its new rows are learnt from again."""
        self[name]
        self._frozen.pop(name, None)

    def retire(self, name: str) -> None:
        """Takes the shard away; its blocks are free for others. Rows that still come for this policy go nowhere, and are counted."""
        store = self[name]
        del self._stores[name], self._settings[name]
        self._frozen.pop(name, None)
        assert store.blocks is not None
        self._pool.give_back(store.blocks)
        store.retired = True

    def __getitem__(self, name: str) -> ReplayStore:
        if name not in self._stores:
            raise ConfigError(what=f"there is no policy '{name}'", where="shards", do=f"those that have a shard: {', '.join(self._stores) or 'none'}")  # fmt: skip
        return self._stores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def __len__(self) -> int:
        return len(self._stores)

    def __contains__(self, name: object) -> bool:
        return name in self._stores

    # ----------------------------------------------------------------------------------------------------------- rows

    def held_back(
        self, policies: Sequence[int] | np.ndarray, slots: np.ndarray | None = None
    ) -> dict[str, str]:
        """By policy, why its rows of such an `append` may not come now (`ReplayStore.held_back`); empty when all may."""
        return self._held_back(*self._seats(policies, slots))

    def _held_back(self, numbers: np.ndarray, at: np.ndarray) -> dict[str, str]:
        found = {}
        for name, rows in self._by_shard(numbers):
            reason = self._stores[name].held_back(at[rows])
            if reason is not None:
                found[name] = reason
        return found

    def append(
        self, *, policies: Sequence[int] | np.ndarray, first: Any, slots: np.ndarray | None = None, state: State | None = None,
        extras: Mapping[str, Any] | None = None, **columns: Any,
    ) -> dict[str, int]:  # fmt: skip
        """Appends one row to each slot, in the shard of the policy that acts there.

        Args: policies: int64 [B], numbers of `add`. The others, as columns [B, ...] or one value for all: see `ReplayStore.append`.
        Returns: by policy, rows that became drawable.
        Raises: ConfigError when a shard holds its rows back, and nothing is appended then; ShapeError, naming the argument.
        """
        numbers, at = self._seats(policies, slots)
        held = self._held_back(numbers, at)
        if held:
            name, reason = next(iter(held.items()))
            raise ConfigError(
                what=f"no row of '{name}' may be appended now: {reason}", where="append",
                do="sample from its shard first; held_back() says so beforehand",
            )  # fmt: skip
        begins = one_each("first", first, at.size).astype(bool)
        moved = (self._last[at] != numbers) & ~begins  # within an episode
        self._last[at] = -1
        stored = {}
        given = {**columns, "first": first, "extras": dict(extras or {})}
        for name, rows in self._by_shard(numbers, counts=True):
            store, mine = self._stores[name], at[rows]
            self._last[mine] = numbers[rows]
            if moved[rows].any():
                store.end(mine[moved[rows]])
            some = {key: _rows(part, rows, at.size) for key, part in given.items()}
            some["extras"][LEARN] = np.uint8(name not in self._frozen)
            entering = None if state is None else rebuild(state, [_rows(leaf, rows, at.size) for leaf in leaves(state)])  # fmt: skip
            stored[name] = store.append(**some, state=entering, slots=mine)
        return stored

    def _seats(
        self, policies: Sequence[int] | np.ndarray, slots: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.asarray(policies, np.int64)
        at = seats(slots, self.num_slots)
        if numbers.shape != at.shape:
            raise ShapeError(what=f"policies has the shape {list(numbers.shape)}; it must be {list(at.shape)}", do="give one number for each slot")  # fmt: skip
        wrong = (numbers < 0) | (numbers >= len(self._names))
        if wrong.any():
            raise ConfigError(
                what=f"there is no policy {int(numbers[wrong.argmax()])}", where="policies", do=f"give numbers that add() returned, below {len(self._names)}",
            )  # fmt: skip
        return numbers, at

    def _by_shard(
        self, numbers: np.ndarray, counts: bool = False
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Positions, int64, of the rows of each policy whose rows are stored; a loop over policies, not over slots."""
        for number in np.unique(numbers).tolist():
            name, rows = self._names[number], np.flatnonzero(numbers == number)
            if name in self._stores and self._frozen.get(name, True):
                yield name, rows
            elif counts:
                why = "frozen_rows" if name in self._stores else "retired_rows"
                self._unstored[why] += rows.size

    def end(self, slots: np.ndarray | None = None) -> None:
        """Ends the runs of `slots` (all) in every shard: what comes next there does not follow what was."""
        for store in self._stores.values():
            store.end(slots)

    def stats(self) -> dict[str, Any]:
        """By policy `ReplayStore.stats`; rows that went nowhere, and rows that no shard has taken."""
        length = self._pool.storage.layout.rule.block_length
        by_policy = {name: store.stats() for name, store in self._stores.items()}
        return by_policy | self._unstored | {"free_rows": len(self._pool.free) * length}

    # ----------------------------------------------------------------------------------------------------------- disk

    def save(self, folder: Path | str) -> None:
        """Writes what every shard keeps into `folder`. Raises: ConfigError when one keeps nothing (queue)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, store in self._stores.items():
            store.save(folder / name)
        table = {
            "names": self._names, "frozen": self._frozen,
            "shards": {name: {"settings": self._settings[name], "blocks": store.blocks} for name, store in self._stores.items()},
        }  # fmt: skip
        unfinished = folder / f".unfinished-{_TABLE}"
        unfinished.write_text(json.dumps(table))
        unfinished.rename(folder / _TABLE)

    def restore(self, folder: Path | str) -> dict[str, int]:
        """Brings back the shards that `save` wrote, into one of the same arguments that has none yet: the next draws are the same.

        Returns: by policy, unrolls that may be drawn again. Raises: CheckpointError when they are of other shards, or there are none.
        """
        folder = Path(folder)
        if self._names:
            raise ConfigError(what="there are shards already", where="restore", do="restore into new ones")  # fmt: skip
        try:
            table = json.loads((folder / _TABLE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(what=f"there are no shards: {error}", where=str(folder), do="name a folder that save() wrote") from None  # fmt: skip
        found = {}
        for name, about in table["shards"].items():
            others = [block for block in self._pool.free if block not in set(about["blocks"])]
            self._pool.free = about["blocks"] + others
            self.add(name, **about["settings"])
            found[name] = self._stores[name].restore(folder / name) or 0
        self._names, self._frozen = table["names"], table["frozen"]
        return found


def _rows(part: Any, rows: np.ndarray, count: int) -> Any:
    """The rows of a column [B, ...], of each leaf of a dict, or the one value for all."""
    if isinstance(part, Mapping):
        return {name: _rows(leaf, rows, count) for name, leaf in part.items()}
    if isinstance(part, Tensor):
        return part[torch.from_numpy(rows).to(part.device)] if part.dim() else part
    array = np.asarray(part)
    if array.ndim == 0:
        return array
    if len(array) != count:
        raise ShapeError(what=f"a column has {len(array)} rows; there must be {count}", do="give one for each slot")  # fmt: skip
    return array[rows]
