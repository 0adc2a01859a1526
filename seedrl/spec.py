"""Spaces as named leaves in a fixed order, and the difference of two specs.

Order and names, part of the protocol: the leaf of a plain space is "observation" or "action"; a Dict adds ".key", its keys sorted
as text; a Tuple adds ".0", ".1", ...; nesting goes on in the same way. Dtypes are the space's own.
Gymnasium is imported inside the functions that need it, so that the engine can read a spec without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from seedrl.errors import SpecError

Kind = Literal["box", "discrete", "multi_discrete", "multi_binary"]
KINDS = ("box", "discrete", "multi_discrete", "multi_binary")
DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
MAX_BOUNDS = (
    1024  # bounds that differ by entry are kept one by one up to here; a spec must fit one message
)

NO_MASK = "none"  # the config's word for "there is a mask, and it is not to be used"
INFO_MASK = "info"  # the mask is info["action_mask"]
# torch dtype and shape of a row, by name
RowSpecs = dict[str, tuple[Any, tuple[int, ...]]]
# extras of a row that the engine adds where first priorities are made of them
BEST_VALUE, TAKEN_VALUE = "acting.best_value", "acting.taken_value"


@dataclass(frozen=True)
class Leaf:
    """One array of a nested space.

    Attributes:
        name: its path, "observation.camera"; unique in a spec.
        dtype: numpy's name, "float32".
        shape: of one environment's value; () for a number.
        kind: "box", "discrete", "multi_discrete" or "multi_binary".
        low, high: of a box: its bounds, flattened, or a single number when all are equal (or when there are more than `MAX_BOUNDS`
            of them: the smallest low, the largest high); infinite where an entry has none; None when no entry has, and for the other kinds.
        n: number of values: (n,) of discrete, one an entry (flattened) of multi_discrete, (size,) of multi_binary; () of a box.
        start: smallest value of discrete (one) and multi_discrete (one an entry); () otherwise.
        stack: of what a policy sees, how many frames lie along the first dimension; 1: it is no stack. No message has it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    n: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    stack: int = 1

    @property
    def size(self) -> int:
        """Number of entries of one value; 1 for a number."""
        return math.prod(self.shape)

    @property
    def num_logits(self) -> int:
        """As an action: logits of the discrete kinds, which are those that a mask speaks of; 0 for the others."""
        return sum(self.n) if self.kind in ("discrete", "multi_discrete") else 0

    def text(self) -> str:
        """What it holds, for a message: "uint8 [84, 84]"."""
        return f"{self.dtype} {list(self.shape)}"

    def text_in_full(self) -> str:
        """Dtype, shape and range, for the message where the dtype and shape alone say too little."""
        if self.kind == "box":
            low, high = _bounds_text(self.low, "-inf"), _bounds_text(self.high, "inf")
            return f"{self.text()} in [{low}, {high}]"
        start = f" from {_few(self.start)}" if any(self.start) else ""
        return f"{self.text()} {self.kind} of {_few(self.n)}{start}"

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["stack"]
        return fields

    def stacked(self, frames: int) -> Leaf:
        """The last `frames` of it along a new first dimension, the newest last: choices become one choice a frame."""

        def of_all(bounds: tuple[float, ...] | None) -> tuple[float, ...] | None:
            return bounds if bounds is None or len(bounds) == 1 else bounds * frames

        low, high = of_all(self.low), of_all(self.high)
        if max(len(low or ()), len(high or ())) > MAX_BOUNDS:
            low, high = (low and (min(low),), high and (max(high),))
        return replace(
            self, shape=(frames, *self.shape), kind="multi_discrete" if self.kind == "discrete" else self.kind, low=low, high=high,
            n=(frames * self.n[0],) if self.kind == "multi_binary" else self.n * frames, start=self.start * frames, stack=frames,
        )  # fmt: skip

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Leaf:
        """The inverse of `to_dict`. Raises: KeyError, TypeError or ValueError when it is no leaf."""
        kind, dtype = str(fields["kind"]), str(fields["dtype"])
        if kind not in KINDS or dtype not in DTYPES:
            raise ValueError(f"no leaf: kind {kind}, dtype {dtype}")
        return Leaf(
            name=str(fields["name"]),
            dtype=dtype,
            shape=tuple(int(x) for x in fields["shape"]),
            kind=cast(Kind, kind),
            low=None if fields["low"] is None else tuple(float(x) for x in fields["low"]),
            high=None if fields["high"] is None else tuple(float(x) for x in fields["high"]),
            n=tuple(int(x) for x in fields["n"]),
            start=tuple(int(x) for x in fields["start"]),
        )


@dataclass(frozen=True)
class EnvSpec:
    """What one environment shows and takes, and what it sends up besides.

    Attributes:
        observation, action: leaves in their fixed order.
        action_mask: "info", an observation leaf's name, or None.
        mask_size: entries of the mask: the logits of all discrete and multi_discrete action leaves, in order; 0 without a mask.
        stats: names of numeric infos to send up at the end of an episode; "a.b" looks into info["a"]["b"].
        env_id: as given by the user, for messages.
    """

    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    action_mask: str | None = None
    mask_size: int = 0
    stats: tuple[str, ...] = ()
    env_id: str = ""

    @cached_property
    def mask_segments(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) in the mask of each choice: one a discrete leaf, one an entry of a multi_discrete leaf."""
        if not self.mask_size:
            return ()
        counts = [n for leaf in self.action if leaf.num_logits for n in leaf.n]
        stops = np.cumsum(counts).tolist()
        return tuple((stop - n, stop) for n, stop in zip(counts, stops, strict=True))

    def stacked(self, frames: int) -> EnvSpec:
        """What a policy sees of an environment whose last `frames` observations are stacked; itself for 1."""
        if frames == 1:
            return self
        return replace(self, observation=tuple(leaf.stacked(frames) for leaf in self.observation))

    def to_dict(self) -> dict[str, Any]:
        """The spec in plain lists, texts and numbers, as msgpack and JSON take them."""
        return {
            "observation": [leaf.to_dict() for leaf in self.observation],
            "action": [leaf.to_dict() for leaf in self.action],
            "action_mask": self.action_mask,
            "mask_size": self.mask_size,
            "stats": list(self.stats),
            "env_id": self.env_id,
        }

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> EnvSpec:
        """The inverse of `to_dict`. Raises: KeyError, TypeError or ValueError when it is no spec."""
        mask = fields["action_mask"]
        return EnvSpec(
            observation=tuple(Leaf.from_dict(leaf) for leaf in fields["observation"]),
            action=tuple(Leaf.from_dict(leaf) for leaf in fields["action"]),
            action_mask=None if mask is None else str(mask),
            mask_size=int(fields["mask_size"]),
            stats=tuple(str(name) for name in fields["stats"]),
            env_id=str(fields["env_id"]),
        )

    def difference(self, other: EnvSpec) -> list[str]:
        """Leaf by leaf, what differs between this spec ("here") and another ("there"); empty when they agree.

        The environment's name and the stats take no part: the same spaces may be reached by another name, and a worker sends up
        the stats that its server asks for. Nor does a mask in the info, which no worker can know of before its first reset.
        """
        lines: list[str] = []
        for mine, theirs in ((self.observation, other.observation), (self.action, other.action)):
            here, there = ({leaf.name: leaf for leaf in leaves} for leaves in (mine, theirs))
            for name in [*here, *(name for name in there if name not in here)]:
                a, b = here.get(name), there.get(name)
                if a is None or b is None:
                    shown = [leaf.text() if leaf else "missing" for leaf in (a, b)]
                    lines.append(f"{name}: {shown[0]} here, {shown[1]} there")
                elif a != b:
                    full = a.text() == b.text()
                    shown = [leaf.text_in_full() if full else leaf.text() for leaf in (a, b)]
                    lines.append(f"{name}: {shown[0]} here, {shown[1]} there")
        masks = [
            None if spec.action_mask == INFO_MASK else spec.action_mask for spec in (self, other)
        ]
        if masks[0] != masks[1]:
            lines.append(
                f"action mask: {self.action_mask or 'none'} here, {other.action_mask or 'none'} there"
            )
        return lines


def _few(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:8])
    return shown if len(values) == 1 else f"[{shown}{', ...' if len(values) > 8 else ''}]"


def _bounds_text(bounds: tuple[float, ...] | None, unbounded: str) -> str:
    return unbounded if bounds is None else _few(bounds)


# ---------------------------------------------------------------------------------------------- from Gymnasium's spaces

Path = tuple[Any, ...]


def leaf_spaces(space: Any, root: str) -> Iterator[tuple[str, Path, Any]]:
    """(name, keys that lead to it, space) of each leaf, in the fixed order, whatever its type.

    Args:
        space: a gymnasium.Space. root: "observation" or "action".
    """
    from gymnasium import spaces

    def walk(inner: Any, name: str, path: Path) -> Iterator[tuple[str, Path, Any]]:
        if isinstance(inner, spaces.Dict):
            for key in sorted(inner.spaces, key=str):
                yield from walk(inner.spaces[key], f"{name}.{key}", (*path, key))
        elif isinstance(inner, spaces.Tuple):
            for index, element in enumerate(inner.spaces):
                yield from walk(element, f"{name}.{index}", (*path, index))
        else:
            yield name, path, inner

    yield from walk(space, root, ())


def _bound(bound: np.ndarray, smallest: bool) -> tuple[float, ...] | None:
    if not np.any(np.isfinite(bound)):
        return None
    flat = bound.astype(np.float64).ravel()
    if flat.size == 0:
        return ()
    if flat.size > MAX_BOUNDS or np.all(flat == flat[0]):
        return (float(flat.min() if smallest else flat.max()),)
    return tuple(flat.tolist())


def _leaf(name: str, space: Any) -> Leaf:
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        dtype, shape = np.dtype(space.dtype).name, tuple(int(x) for x in space.shape)
        if dtype in DTYPES:
            return Leaf(
                name, dtype, shape, "box", _bound(space.low, True), _bound(space.high, False)
            )
        kind = f"Box of {dtype}"
    elif isinstance(space, spaces.Discrete):
        return Leaf(
            name,
            np.dtype(space.dtype).name,
            (),
            "discrete",
            n=(int(space.n),),
            start=(int(space.start),),
        )
    elif isinstance(space, spaces.MultiDiscrete):
        return Leaf(
            name,
            np.dtype(space.dtype).name,
            tuple(int(x) for x in space.nvec.shape),
            "multi_discrete",
            n=tuple(int(x) for x in space.nvec.ravel()),
            start=tuple(int(x) for x in np.ravel(space.start)),
        )
    elif isinstance(space, spaces.MultiBinary):
        shape = tuple(int(x) for x in space.shape)
        return Leaf(name, np.dtype(space.dtype).name, shape, "multi_binary", n=(math.prod(shape),))
    else:
        kind = type(space).__name__
    verb = "acts on" if name.partition(".")[0] == "action" else "shows"
    raise SpecError(
        what=f"leaf '{name}' is a {kind}, which has no fixed shape and number type",
        where=f"the environment {verb} {name}",
        do=f"wrap the environment so that '{name}' maps to a Box",
    )


def _leaves(space: Any, root: str) -> tuple[Leaf, ...]:
    leaves = tuple(_leaf(name, inner) for name, _, inner in leaf_spaces(space, root))
    names = [leaf.name for leaf in leaves]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not leaves or twice:
        raise SpecError(
            what=f"two leaves are called '{twice[0]}'"
            if twice
            else f"the {root} space has no leaf",
            where=f"{root} space",
            do="rename a key" if twice else "wrap the environment so that it has one",
        )
    return leaves


def spec_from_spaces(
    observation_space: Any,
    action_space: Any,
    *,
    action_mask: str | None = None,
    stats: Sequence[str] = (),
    env_id: str = "",
) -> EnvSpec:
    """The spec of an environment with these spaces.

    Args:
        observation_space, action_space: gymnasium spaces of one environment.
        action_mask: "info", an observation leaf ("mask" or "observation.mask"), "none", or None: an observation leaf called
            "action_mask" that fits the action space, if there is one.
        stats: names of infos to send up. env_id: as the user gave it.
    Raises: SpecError for a space without fixed shape, naming leaf and type, and for a mask that does not fit.
    """
    observation, action = _leaves(observation_space, "observation"), _leaves(action_space, "action")
    wanted = sum(leaf.num_logits for leaf in action)
    by_name = {leaf.name: leaf for leaf in observation}
    if action_mask is None:
        found = by_name.get("observation.action_mask")
        fits = found is not None and found.size == wanted and found.kind == "multi_binary"
        action_mask = "observation.action_mask" if fits else None
    elif action_mask == NO_MASK:
        action_mask = None
    if action_mask is not None:
        if action_mask != INFO_MASK:
            action_mask = _mask_leaf(action_mask, by_name, wanted)
        if wanted == 0:
            raise SpecError(
                what="an action mask needs a Discrete or MultiDiscrete action; this environment has none",
                where="env.action_mask",
                do="leave env.action_mask out",
            )
    return EnvSpec(
        observation=observation,
        action=action,
        action_mask=action_mask,
        mask_size=wanted if action_mask is not None else 0,
        stats=tuple(stats),
        env_id=env_id,
    )


def _mask_leaf(asked: str, by_name: dict[str, Leaf], wanted: int) -> str:
    """The full name of the observation leaf that holds the mask, once it is known to fit."""
    name = asked if asked in by_name else f"observation.{asked}"
    leaf = by_name.get(name)
    if leaf is None:
        raise SpecError(
            what=f"there is no observation leaf '{asked}' to take the action mask from",
            where="env.action_mask",
            do=f"use 'info', or one of: {', '.join(by_name)}",
        )
    if leaf.size != wanted or leaf.dtype.startswith("float"):
        raise SpecError(
            what=f"leaf '{name}' is {leaf.text()}; a mask of this action space holds {wanted} integers or bools",
            where="env.action_mask",
            do="name the leaf that holds the mask, one entry a choice",
        )
    return name


# ----------------------------------------------------------------------------------------- between nests and their leaves


def _getter(path: Path) -> Callable[[Any], Any]:
    if not path:
        return lambda nest: nest
    if len(path) == 1:
        (key,) = path
        return lambda nest: nest[key]

    def get(nest: Any) -> Any:
        for key in path:
            nest = nest[key]
        return nest

    return get


def flatteners(space: Any) -> list[Callable[[Any], Any]]:
    """One function a leaf, in leaf order: nested value of `space` (or of a batch of it) -> that leaf's value."""
    return [_getter(path) for _, path, _ in leaf_spaces(space, "observation")]


def unflatten(space: Any, leaves: Sequence[Any]) -> Any:
    """The nest of `space` (dicts and tuples) with these values for leaves, in leaf order."""
    from gymnasium import spaces

    values = iter(leaves)

    def build(inner: Any) -> Any:
        if isinstance(inner, spaces.Dict):
            built = {key: build(inner.spaces[key]) for key in sorted(inner.spaces, key=str)}
            return {key: built[key] for key in inner.spaces}  # in the environment's own order
        if isinstance(inner, spaces.Tuple):
            return tuple(build(element) for element in inner.spaces)
        return next(values)

    return build(space)


def unflatten_actions(space: Any) -> Callable[[Sequence[np.ndarray]], list[Any]]:
    """A function from the group's columns (one [E, ...] a leaf) to E actions as `env.step` wants them.

    Discrete becomes a Python int, everything else an array of the space's dtype and shape; what it gives is the environment's to
    keep and to change.
    """
    from gymnasium import spaces

    kinds = [inner for _, _, inner in leaf_spaces(space, "action")]
    splits = [
        _split(isinstance(inner, spaces.Discrete), tuple(inner.shape or ())) for inner in kinds
    ]
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        only = splits[0]
        return lambda columns: only(columns[0])

    def actions(columns: Sequence[np.ndarray]) -> list[Any]:
        lists = [split(column) for split, column in zip(splits, columns, strict=True)]
        return [unflatten(space, leaves) for leaves in zip(*lists, strict=True)]

    return actions


def _split(discrete: bool, shape: tuple[int, ...]) -> Callable[[np.ndarray], list[Any]]:
    if discrete:
        return lambda column: cast("list[Any]", column.tolist())
    if shape == ():
        return lambda column: [np.array(value, column.dtype) for value in column]
    return lambda column: list(column.copy())


def unflatten_action(space: Any) -> Callable[[Sequence[Any]], Any]:
    """A function from one environment's leaf values, in leaf order, to the action that `env.step` wants."""
    actions = unflatten_actions(space)
    return lambda leaves: actions([np.asarray(leaf)[None] for leaf in leaves])[0]
