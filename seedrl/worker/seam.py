"""Where an environment's arrays enter their slots: checked against the spec, then copied, row by row.

Nothing is cast in silence: a value of another dtype or shape is refused by name before a byte of it is written. What cannot be seen
by type, numbers that are not finite or outside a discrete leaf's range, is looked for in the whole group's columns at once, after
the rows were written and before they are published.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from seedrl.errors import EnvError
from seedrl.spec import EnvSpec, Leaf, flatteners
from seedrl.transport.rows import RowChecks

ARRAYS = (np.ndarray, np.generic)
PLAIN = frozenset(
    [float, int, bool, np.bool_, np.float64, np.float32]
)  # rewards that need no second look


class Seam(RowChecks):
    """The columns of one group and the checks at their door.

    Args:
        spec: the server's. observation_space: of one environment, for the way to each leaf.
        view: the group's rows (obs[leaf] [E, ...], mask uint8 [E, M] or None).
        where: "worker 3, group 1", for messages.
    """

    def __init__(self, spec: EnvSpec, observation_space: Any, view: Any, where: str) -> None:
        super().__init__(spec, view, where)
        self._getters = flatteners(observation_space)
        self._leaves = [
            (
                get,
                column,
                np.dtype(leaf.dtype),
                leaf.shape,
                leaf.kind == "discrete" and leaf.dtype == "int64",
                leaf,
            )
            for get, column, leaf in zip(
                self._getters, self._columns, spec.observation, strict=True
            )
        ]
        # A plain array observation, the common case: the group's loop compares these itself.
        first = spec.observation[0]
        single = len(spec.observation) == 1 and first.name == "observation" and first.kind == "box"
        self.single_column = self._columns[0] if single else None
        self.single_dtype = np.dtype(first.dtype) if single else None
        self.single_shape = first.shape if single else None

    # ------------------------------------------------------------------------------------------------ one row

    def write(self, seat: int, obs: Any) -> None:
        """Copies one observation into the row of `seat`. Raises: EnvError naming leaf, dtype, shape and seat."""
        for get, column, dtype, shape, takes_int, leaf in self._leaves:
            try:
                value = get(obs)
            except (KeyError, IndexError, TypeError):
                raise self._missing(seat, leaf, obs) from None
            if (
                (value.dtype is dtype and value.shape == shape)
                if isinstance(value, ARRAYS)
                else (takes_int and value.__class__ is int)
            ):
                column[seat] = value
            else:
                column[seat] = self._look_again(seat, value, leaf, dtype)

    def _look_again(self, seat: int, value: Any, leaf: Leaf, dtype: np.dtype[Any]) -> Any:
        """A value whose type is not the usual one: allowed when it says the same without loss, else EnvError."""
        kind = getattr(value, "dtype", None)
        if kind is not None and value.shape == leaf.shape:
            if kind == dtype:
                return value
            if leaf.kind == "discrete" and kind.kind in "iu" and int(value) == dtype.type(value):
                return value
        elif kind is None and leaf.shape == ():
            whole = isinstance(value, int) and dtype.kind in "iu" and not isinstance(value, bool)
            if whole and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                return value
            if isinstance(value, float) and dtype.kind == "f":
                return value
            if isinstance(value, bool) and dtype.kind == "b":
                return value
        got = (
            f"{kind} {list(value.shape)}"
            if kind is not None
            else f"a Python {type(value).__name__}"
        )
        raise EnvError(
            what=f"leaf '{leaf.name}' is declared {leaf.text()}; the environment returned {got}",
            where=f"{self.where}, seat {seat}",
            do="return what the observation space declares, or declare what is returned",
        )

    def _missing(self, seat: int, leaf: Leaf, obs: Any) -> EnvError:
        return EnvError(
            what=f"leaf '{leaf.name}' is missing in the observation, which is a {type(obs).__name__}",
            where=f"{self.where}, seat {seat}",
            do="return every leaf of the observation space",
        )

    def write_info_mask(self, seat: int, info: Any) -> None:
        """Copies info["action_mask"] into the mask of `seat`; arrays of a tuple one after the other. Raises: EnvError."""
        assert self._mask is not None
        found = info.get("action_mask") if isinstance(info, dict) else None
        self._mask[seat] = self._flat_mask(seat, found)

    def _flat_mask(self, seat: int, found: Any) -> np.ndarray:
        if isinstance(found, list | tuple) and found and np.ndim(found[0]):
            found = np.concatenate([np.ravel(part) for part in found])
        mask = None if found is None else np.asarray(found)
        if mask is None or mask.size != self.spec.mask_size or mask.dtype.kind not in "biu":
            got = (
                "no 'action_mask'"
                if mask is None
                else f"an 'action_mask' of {mask.dtype} {list(mask.shape)}"
            )
            raise EnvError(
                what=f"the info has {got}; the action space has {self.spec.mask_size} choices",
                where=f"{self.where}, seat {seat}",
                do="return one integer or bool a choice at every reset and step",
            )
        return np.not_equal(mask.ravel(), 0)

    # ------------------------------------------------------------------------------------------------ a native batch

    def write_batch(self, obs: Any) -> None:
        """Copies the observation of a vector environment, each leaf [E, ...], into all rows. Raises: EnvError."""
        for get, column, dtype, _, _, leaf in self._leaves:
            try:
                value = get(obs)
            except (KeyError, IndexError, TypeError):
                raise self._missing(0, leaf, obs) from None
            kind, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
            if kind != dtype or shape != column.shape:
                raise EnvError(
                    what=f"leaf '{leaf.name}' of the batch is declared {leaf.dtype} {list(column.shape)}; "
                    f"the environment returned {kind} {list(shape) if shape is not None else type(value).__name__}",
                    where=self.where,
                    do="return what the observation space declares, or declare what is returned",
                )
            column[...] = value

    def write_batch_info_mask(self, infos: Any) -> None:
        """Copies infos["action_mask"], [E, M], into all masks. Raises: EnvError."""
        found = infos.get("action_mask") if isinstance(infos, dict) else None
        for seat in range(self.size):
            self._mask[seat] = self._flat_mask(seat, None if found is None else found[seat])  # type: ignore[index]


def as_reward(reward: Any, where: Callable[[], str]) -> float:
    """A reward of any numeric type with one entry as a float. Raises: EnvError naming its type or shape and `where()`."""
    kind = getattr(reward, "dtype", None)
    if kind is not None and reward.size == 1 and kind.kind in "biuf":
        return float(reward.item())
    if isinstance(reward, float | int):
        return float(reward)
    got = f"{kind} array of shape {reward.shape}" if kind is not None else type(reward).__name__
    raise EnvError(
        what=f"the reward is a {got}, not one number",
        where=where(),
        do="return one number from step()",
    )


def stat_of(info: Any, name: str) -> float:
    """The numeric info called `name` ("a.b" is info["a.b"], or else info["a"]["b"]); NaN when it is absent or no number."""
    found = info
    if isinstance(info, dict) and name not in info:
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
    else:
        found = info.get(name) if isinstance(info, dict) else None
    try:
        return float(found.item() if hasattr(found, "item") else found)
    except (TypeError, ValueError):
        return math.nan


def vector_stat_of(infos: Any, name: str, seat: int) -> float:
    """`stat_of` for one seat of a vector environment's infos, whose entries "_name" tell which seats have a value."""
    found, present = infos, True
    for part in [name] if isinstance(infos, dict) and name in infos else name.split("."):
        if not isinstance(found, dict) or part not in found:
            return math.nan
        marks = found.get(f"_{part}")
        present = present and (marks is None or bool(marks[seat]))
        found = found[part]
    try:
        return float(found[seat]) if present else math.nan
    except (TypeError, ValueError, IndexError, KeyError):
        return math.nan
