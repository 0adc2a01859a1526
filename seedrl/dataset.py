"""Kept rows out of a `ReplayStore`, and rows of elsewhere into one: one `.npz` file, or a Minari dataset (`seedrl[minari]`).

    save_npz(store, "rows.npz")            load_npz(store, "rows.npz")
    to_minari(store, "mine/rows-v0")       from_minari(store, minari.load_dataset("D4RL/door/human-v2"))

A file holds *runs*: rows of one slot, one after the other, with no gap between them. Recurrent states stay behind: what is read has the initial
one at every row, which a burn-in warms.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seedrl.errors import ConfigError, SpecError
from seedrl.replay import ReplayStore
from seedrl.spec import EnvSpec, flatteners, unflatten
from seedrl.store.ring import RingReader

if TYPE_CHECKING:
    import minari

_CHOICES = ("discrete", "multi_discrete")
_PLAIN = ("reward", "flags", "log_prob", "value", "version")
_FORMAT = 1

Run = dict[
    str, np.ndarray
]  # columns [n, ...]: obs/NAME, action/NAME, ... in the dtypes of the spaces


def kept_runs(store: ReplayStore) -> Iterator[Run]:
    """What is kept on the device, run by run, in the order of the slots: rows of unrolls that are whole, each once, bootstrap rows included.

    Raises: ConfigError with queue, which keeps nothing.
    """
    reader = store._reader
    if not isinstance(reader, RingReader):
        raise ConfigError(what="queue keeps no rows", where="mode", do="use uniform, prioritized or recent")  # fmt: skip
    rule = store.plan.blocks.rule
    entries = reader._entries(np.arange(*reader.bounds()))
    whole = reader._on_device(entries)
    rows, slots = entries.rows[whole][:, rule.lead :], entries.slots[whole]
    for slot in range(store.num_slots):
        mine = rows[slots == slot]
        # where an unroll does not begin where the one before it has its stride's end, something is missing between them
        gaps = np.flatnonzero(mine[1:, 0] != mine[:-1, rule.stride]) + 1
        for part in np.split(mine, gaps) if len(mine) else ():
            yield _columns(store, np.concatenate([part[:-1, : rule.stride].reshape(-1), part[-1]]))


def _columns(store: ReplayStore, rows: np.ndarray) -> Run:
    dtypes = {f"obs/{leaf.name}": leaf.dtype for leaf in store.spec.observation}
    found = {}
    for name, leaf in store._storage.rows.items():
        column = leaf[rows].cpu().numpy()
        found[name] = column.view(dtypes[name]) if name in dtypes else column
    return found


def add_runs(store: ReplayStore, runs: Iterable[Run]) -> int:
    """Appends runs, as many at a time as there are slots; returns their rows.

    A run that begins an episode follows the one before in its slot, as episodes follow each other there. After the last one come rows
    that are marked `first`, of which nothing is learnt, until its last transition is in an unroll.

    Raises: ConfigError when the store holds them back: with queue, or a ratio.
    """
    waiting, added = iter(runs), 0
    open_runs: dict[int, tuple[Run, int]] = {}
    idle, over = list(range(store.num_slots)), False
    latest: dict[int, Run] = {}  # each slot's last one that has ended
    while True:
        while idle and not over:
            run = next(waiting, None)
            if run is None:
                over = True
            elif run["reward"].size:
                slot = idle.pop()
                if slot in latest and not run["flags"][0, 2]:
                    _fill_up(store, slot, latest.pop(slot))
                open_runs[slot] = (run, 0)
        if not open_runs:
            for slot, run in latest.items():
                _fill_up(store, slot, run)
            return added
        slots = sorted(open_runs)
        _append(store, np.array(slots), [open_runs[slot] for slot in slots])
        added += len(slots)
        ended = [slot for slot in slots if open_runs[slot][1] + 1 == open_runs[slot][0]["reward"].size]  # fmt: skip
        latest |= {slot: open_runs[slot][0] for slot in ended}
        open_runs = {slot: (run, at + 1) for slot, (run, at) in open_runs.items() if slot not in ended}  # fmt: skip
        idle += ended


def _fill_up(store: ReplayStore, slot: int, run: Run) -> None:
    """Rows without transitions, until the run's last one is in an unroll; then the run is at its end."""
    filler = {name: column[-1:].copy() for name, column in run.items()}
    filler["flags"][:] = (0, 0, 1, 0)
    filler["reward"][:] = 0
    for _ in range(store.plan.blocks.rule.unroll_length):
        _append(store, np.array([slot]), [(filler, 0)])
    store.end(np.array([slot]))


def _append(store: ReplayStore, slots: np.ndarray, rows: list[tuple[Run, int]]) -> None:
    def column(name: str) -> np.ndarray:
        return np.stack([run[name][at] for run, at in rows])

    flags = column("flags").astype(bool)
    store.append(
        obs={leaf.name: column(f"obs/{leaf.name}") for leaf in store.spec.observation},
        action={leaf.name: column(f"action/{leaf.name}") for leaf in store.spec.action},
        reward=column("reward"), terminated=flags[:, 0], truncated=flags[:, 1], first=flags[:, 2],
        log_prob=column("log_prob"), value=column("value"), version=column("version"), slots=slots,
        extras={name: column(f"extra/{name}") for name in store.extra_names},
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- npz


def save_npz(store: ReplayStore, path: Path | str) -> int:
    """Writes what is kept into one compressed file, each column under its name, runs one behind the other; returns the rows.

    `run_rows` has the length of each run, `about` the leaves and the format as text.
    """
    runs = list(kept_runs(store))
    columns = {
        leaf.name: np.concatenate([run[leaf.name] for run in runs]) for leaf in store.plan.blocks.rows if runs
    }  # fmt: skip
    lengths = np.array([run["reward"].size for run in runs], np.int64)
    about = {"format": _FORMAT, "leaves": _leaves_of(store.spec)}
    with Path(path).open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, run_rows=lengths, about=np.array(json.dumps(about)), **columns)  # fmt: skip
    return int(lengths.sum())


def load_npz(store: ReplayStore, path: Path | str) -> int:
    """Appends the rows of a file of `save_npz`; returns them. Columns that it lacks beside observation, action, reward and flags are 0.

    Raises: SpecError when it is of other spaces, or no such file: what differs; ConfigError when the store holds rows back.
    """
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        about = json.loads(str(columns.pop("about")))
        lengths, there = columns.pop("run_rows"), dict(about["leaves"])
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
            raise ValueError(
                f"run_rows is {lengths.dtype} {list(lengths.shape)}, not lengths of runs"
            )
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:  # fmt: skip
        raise SpecError(
            what=f"no file of rows: {error}", where=str(path), do="give one that save_npz wrote"
        ) from None
    here = _leaves_of(store.spec)
    differ = [name for name in sorted(here | there) if here.get(name) != there.get(name)]
    if differ:
        name = differ[0]
        raise SpecError(
            what=f"leaf '{name}' is {_text(there.get(name))} there, {_text(here.get(name))} here", where=str(path),
            do="load it into a store of the same spaces",
        )  # fmt: skip
    total, needed = int(lengths.sum()), [leaf.name for leaf in store.plan.blocks.rows]
    dtypes = {f"obs/{leaf.name}": leaf.dtype for leaf in store.spec.observation}
    for leaf in store.plan.blocks.rows:
        name = leaf.name
        if name not in columns and (name in _PLAIN or name.startswith("extra/")):
            columns[name] = np.zeros((total, *leaf.shape), np.float32)
        column, wanted = columns.get(name, np.zeros(0)), (total, *leaf.shape)
        if column.shape != wanted or column.dtype.kind not in "biuf":
            kind = dtypes.get(name, str(leaf.dtype).removeprefix("torch."))
            raise SpecError(
                what=f"column '{name}' is {column.dtype} {list(column.shape)}; it must be {kind} {list(wanted)}", where=str(path), do="write the file anew",
            )  # fmt: skip
    ends = np.cumsum(lengths)
    return add_runs(store, ({name: columns[name][end - size : end] for name in needed} for end, size in zip(ends, lengths, strict=True)))  # fmt: skip


def _leaves_of(spec: EnvSpec) -> dict[str, list[Any]]:
    kinds = (("obs", spec.observation), ("action", spec.action))
    return {f"{kind}/{leaf.name}": [leaf.dtype, list(leaf.shape)] for kind, leaves in kinds for leaf in leaves}  # fmt: skip


def _text(about: list[Any] | None) -> str:
    return "missing" if about is None else f"{about[0]} {about[1]}"


# ------------------------------------------------------------------------------------------------------------- Minari


def to_minari(store: ReplayStore, dataset_id: str, **about: Any) -> minari.MinariDataset:
    """Makes a Minari dataset of the whole episodes that are kept; those of which only a part is there are left out.

    Args: about: what `minari.create_dataset_from_buffers` takes beside: `env`, `author`, `description`, ...
    Raises: ConfigError when there is no whole episode, or Minari is not installed.
    """
    library = _minari()
    episodes = [episode for run in kept_runs(store) for episode in _episodes(run)]
    if not episodes:
        raise ConfigError(what="no episode is kept from its first row to its last", where="to_minari", do="append more rows, or raise capacity")  # fmt: skip
    buffers = []
    for number, episode in enumerate(episodes):
        observations, actions = _as_spaces(store, episode)
        flags = episode["flags"][1:].astype(bool)
        buffers.append(library.data_collector.EpisodeBuffer(
            id=number, observations=observations, actions=actions, rewards=episode["reward"][1:].tolist(), terminations=flags[:, 0].tolist(),
            truncations=flags[:, 1].tolist(),
        ))  # fmt: skip
    spaces = {"observation_space": store.observation_space, "action_space": store.action_space}
    return library.create_dataset_from_buffers(dataset_id, buffers, **spaces, **about)


def from_minari(store: ReplayStore, dataset: minari.MinariDataset) -> int:
    """Appends a Minari dataset's episodes; returns their rows.

    Raises: SpecError when its spaces are not the store's; ConfigError when the store holds rows back.
    """
    for what, there, here in (
        ("observation", dataset.observation_space, store.observation_space), ("action", dataset.action_space, store.action_space),
    ):  # fmt: skip
        if there != here:
            raise SpecError(what=f"the dataset's {what} space is {there}; the store's is {here}", where=str(dataset.id), do="make a store of the dataset's spaces")  # fmt: skip
    return add_runs(store, (_run_of(store, episode) for episode in dataset.iterate_episodes()))


def _episodes(run: Run) -> Iterator[Run]:
    """The whole ones: from a row that is `first` to the row that has ended."""
    flags = run["flags"].astype(bool)
    ends = np.flatnonzero(flags[:, 0] | flags[:, 1])
    firsts = np.flatnonzero(flags[:, 2])
    for end in ends.tolist():
        before = firsts[firsts <= end]
        if before.size and not np.isin(ends, np.arange(before[-1], end)).any():
            yield {name: column[before[-1] : end + 1] for name, column in run.items()}


def _as_spaces(store: ReplayStore, episode: Run) -> tuple[Any, Any]:
    """Observations [T + 1, ...] and actions [T, ...] in the nests and dtypes of the spaces."""
    obs = [episode[f"obs/{leaf.name}"] for leaf in store.spec.observation]
    actions = []
    for leaf in store.spec.action:
        action = episode[f"action/{leaf.name}"][:-1]
        if leaf.kind in _CHOICES and leaf.start:
            action = action + np.reshape(leaf.start, leaf.shape)
        actions.append(action.astype(leaf.dtype))
    return unflatten(store.observation_space, obs), unflatten(store.action_space, actions)


def _run_of(store: ReplayStore, episode: Any) -> Run:
    count = len(episode.rewards) + 1
    run: Run = {name: np.zeros(count, np.float32) for name in ("log_prob", "value")}
    run["version"] = np.zeros(count, np.int64)
    getters = flatteners(store.observation_space)
    for leaf, get in zip(store.spec.observation, getters, strict=True):
        run[f"obs/{leaf.name}"] = np.asarray(get(episode.observations))
    for leaf, get in zip(store.spec.action, flatteners(store.action_space), strict=True):
        action = np.asarray(get(episode.actions))
        if leaf.kind in _CHOICES and leaf.start:
            action = action - np.reshape(leaf.start, leaf.shape)
        run[f"action/{leaf.name}"] = np.concatenate([action, np.zeros_like(action[:1])])  # none is chosen at the last row  # fmt: skip
    run["reward"] = np.r_[0.0, np.asarray(episode.rewards)]
    flags = np.zeros((count, 4), np.uint8)
    flags[1:, 0], flags[1:, 1], flags[0, 2] = episode.terminations, episode.truncations, 1
    run["flags"] = flags
    for column in store.plan.blocks.rows:
        if column.name.startswith("extra/"):
            run[column.name] = np.zeros((count, *column.shape), np.float32)
    return run


def _minari() -> Any:
    try:
        import minari
        import minari.data_collector
    except ModuleNotFoundError as error:
        raise ConfigError(what=f"there is no module '{error.name}'", where="to_minari", do="pip install 'seedrl[minari]'") from None  # fmt: skip
    return minari
