"""Rows that are kept, on disk: they survive a restart, and what is drawn next is what would have been drawn.

    RUN/replay/blocks.bin   K records: generation int64 | crc32 of the rest, int64 | the block's rows, leaf by leaf, and its states
    RUN/replay/index.npz    what was announced of the unrolls, the selector, counters and random state; layout, as text

A block is written in place when its generation, or how far unrolls read in it, is another than at the last time: full blocks do not change, so
copying needs no stop, and each is written once. The index is written after the blocks, beside the old one, and renamed. Whatever moment a
process dies at, a block that fits neither its checksum nor the index's generation counts as overwritten, which it was: with the run's
last moments, only open blocks are lost.
"""

from __future__ import annotations

import json
import os
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seedrl.errors import CheckpointError
from seedrl.store.replay import ITEMS_HEAD, LEARNED_ROWS, SAMPLED, STALE_ROWS
from seedrl.store.ring import RingReader

_BLOCKS, _INDEX = "blocks.bin", "index.npz"
_HEADER_BYTES = 16
_FORMAT = 2  # of the index
_EPOCH_BITS = 40  # generations of one process, at most
_COUNTERS = (SAMPLED, LEARNED_ROWS, STALE_ROWS)


class KeptRows:
    """The folder of a reader's rows. `save` copies in the background; `restore` is for a store that nobody has written to.

    Args: folder: of the run, made if need be.
    """

    def __init__(self, folder: Path, reader: RingReader) -> None:
        self.folder, self._storage, self._reader = folder, reader.storage, reader
        storage, layout = reader.storage, reader.storage.layout
        self._record_bytes = _HEADER_BYTES + sum(leaf[0].nbytes * count for leaf, count in storage.parts)  # fmt: skip
        # of each block, as it lies in the file: generation, and rows that unrolls read
        self._generation = np.full(layout.num_blocks, -1, np.int64)
        self._rows = np.zeros(layout.num_blocks, np.int64)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._mine = False  # whether what is in the folder is of this store

    # ---------------------------------------------------------------------------------------------------------- save

    def save(self) -> bool:
        """Begins to write what is kept now; False when the last time has not come to its end yet.

        Raises: CheckpointError when that one failed: the disk is full, say.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        self.finish()
        index, blocks, rows = self._snapshot()
        self._thread = threading.Thread(target=self._write, args=(index, blocks, rows), daemon=True)
        self._thread.start()
        return True

    def finish(self) -> None:
        """Returns once everything is written. Raises: CheckpointError when that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(
                what=f"the kept rows could not be written: {failure}", where=str(self.folder),
                do="make room there, or set replay.checkpoint to false",
            ) from failure  # fmt: skip

    def _snapshot(self) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """The index as it is now, and which blocks it reads, how far."""
        reader = self._reader
        tail, seen = reader.bounds()
        entries = reader._entries(np.arange(tail, seen))
        needed = self._reach(entries.rows[reader._on_device(entries)])
        control = reader._control
        index = {
            "bounds": np.array([tail, seen]), "counters": control.learner[list(_COUNTERS)].copy(),
            "items": control.items[np.arange(tail, seen) % len(control.items)], "generations": control.blocks.copy(),
            "about": np.array(json.dumps(self._about())), **reader.state(),
        }  # fmt: skip
        return index, np.flatnonzero(needed), needed

    def _reach(self, rows: np.ndarray) -> np.ndarray:
        """How many rows of each block are read, counted from its first, when `rows` are: int64 [K]."""
        block, offset = np.divmod(rows.reshape(-1), self._storage.layout.rule.block_length)
        reach = np.zeros(self._storage.layout.num_blocks, np.int64)
        np.maximum.at(reach, block, offset + 1)
        return reach

    def _about(self) -> dict[str, Any]:
        layout = self._storage.layout
        leaves = {leaf.name: [str(leaf.dtype), *leaf.shape] for leaf in (*layout.rows, *layout.states)}  # fmt: skip
        # as it was written before there were stacks
        rule = {
            name: value for name, value in vars(layout.rule).items() if value or name != "history"
        }
        mine = zlib.crc32(np.array(sorted(self._reader.blocks or ()), np.int64).tobytes())
        kind = type(self._reader.selector).__name__
        return {"format": _FORMAT, "share": mine, "selector": kind, "leaves": leaves, "rule": rule, "blocks": layout.num_blocks, "slots": self._reader._layout.num_slots, "announcements": self._reader._layout.capacity}  # fmt: skip

    def _write(self, index: dict[str, np.ndarray], blocks: np.ndarray, rows: np.ndarray) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._mine:  # its blocks are written over: an index of others' would mix them
                (self.folder / _INDEX).unlink(missing_ok=True)
                self._mine = True
            generations = index["generations"]
            flags = os.O_RDWR | os.O_CREAT
            fd = os.open(self.folder / _BLOCKS, flags, 0o644)
            try:
                for block in blocks.tolist():
                    old = self._generation[block] != generations[block]
                    if (old or self._rows[block] < rows[block]) and self._write_block(fd, block, int(generations[block])):  # fmt: skip
                        self._generation[block], self._rows[block] = generations[block], rows[block]
                os.fsync(fd)
            finally:
                os.close(fd)
            unfinished = self.folder / f".unfinished-{_INDEX}"
            with unfinished.open("wb") as file:
                np.savez(file, allow_pickle=False, **index)
                file.flush()
                os.fsync(file.fileno())
            os.rename(unfinished, self.folder / _INDEX)
        except Exception as error:  # told by `finish`, in the learner's own thread
            self._failure = error

    def _write_block(self, fd: int, block: int, generation: int) -> bool:
        """False, and nothing is written, where the block was overwritten meanwhile: the index has its generation from before."""
        data = b"".join(part.tobytes() for part in self._storage.block(block))
        header = np.array([generation, zlib.crc32(data)], np.int64).tobytes()
        if self._reader._control.blocks[block] != generation:
            return False
        os.pwrite(fd, header + data, block * self._record_bytes)
        return True

    # ------------------------------------------------------------------------------------------------------- restore

    def restore(self) -> int | None:
        """Brings back what is in the folder, before anything is appended; None when there is nothing.

        Returns: unrolls that may be drawn again. Raises: CheckpointError when they are of another store: in what.
        """
        path = self.folder / _INDEX
        if not path.exists():
            return None
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                index = {name: file[name] for name in file.files}
            about = json.loads(str(index.pop("about")))
            lacking = {*self._reader.state(), "bounds", "counters", "items", "generations"} - set(
                index
            )
            if about.get("format") == _FORMAT and lacking:
                raise ValueError(f"there is no {sorted(lacking)[0]}")
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OSError,
            EOFError,
            zlib.error,
            zipfile.BadZipFile,
        ) as error:
            raise CheckpointError(what=f"the index of the kept rows cannot be read: {error}", where=str(path), do=_APART) from None  # fmt: skip
        self._compare(about, path)
        self._mine = True
        control, reader = self._reader._control, self._reader
        tail, seen = index.pop("bounds").tolist()
        generations = index.pop("generations")
        items = index.pop("items")
        numbers = np.arange(tail, seen)
        control.items[numbers % len(control.items)] = items
        entries = reader._entries(numbers)
        stood = (generations[entries.blocks] == entries.generations).all(1)  # when it was written
        rows = self._reach(entries.rows[stood])
        whole, latest = self._read_blocks(np.flatnonzero(rows), generations)
        self._generation[whole], self._rows[whole] = generations[whole], rows[whole]
        # what is not there counts as overwritten, and begins anew with a generation that no process before gave to any block: a record
        # that one of them left must never be taken for one of this one's
        epoch = (int(max(generations.max(), latest)) >> _EPOCH_BITS) + 1
        control.blocks[:] = np.where(whole, generations, epoch << _EPOCH_BITS)
        control.learner[list(_COUNTERS)] = index.pop("counters")
        control.engine[ITEMS_HEAD] = (
            seen  # the engine has not begun: `RingWriter.adopt` goes on from here
        )
        reader.load_state(index, tail, seen)
        return int(np.count_nonzero(reader._on_device(reader._entries(numbers))))

    def _compare(self, there: dict[str, Any], path: Path) -> None:
        here = json.loads(json.dumps(self._about()))
        differ = [f"{name}: here {here[name]}, there {there.get(name)}" for name in here if here[name] != there.get(name)]  # fmt: skip
        if differ:
            raise CheckpointError(what="the kept rows are of another store; " + "; ".join(differ), where=str(path), do=_APART)  # fmt: skip

    def _read_blocks(self, blocks: np.ndarray, generations: np.ndarray) -> tuple[np.ndarray, int]:
        """Fills blocks from the file; which of all are there as the index has them, bool [K], and the largest generation in the file."""
        whole, latest = np.zeros(generations.size, bool), -1
        try:
            fd = os.open(self.folder / _BLOCKS, os.O_RDONLY)
        except FileNotFoundError:
            return whole, latest
        try:
            for block in range(generations.size):
                header = os.pread(fd, _HEADER_BYTES, block * self._record_bytes)
                if len(header) == _HEADER_BYTES:
                    latest = max(latest, int(np.frombuffer(header, np.int64, 1)[0]))
            for block in blocks.tolist():
                record = os.pread(fd, self._record_bytes, block * self._record_bytes)
                if len(record) < self._record_bytes:
                    continue
                generation, checksum = np.frombuffer(record, np.int64, 2).tolist()
                data = record[_HEADER_BYTES:]
                if generation != generations[block] or checksum != zlib.crc32(data):
                    continue
                whole[block], at = True, 0
                for leaf, count in self._storage.parts:
                    part = leaf[block * count : (block + 1) * count]
                    raw = np.frombuffer(data, np.uint8, part.nbytes, at).copy()
                    part.copy_(torch.from_numpy(raw).view(leaf.dtype).view(part.shape))
                    at += part.nbytes
        finally:
            os.close(fd)
        return whole, latest


_APART = "go on with the run's own configuration, or remove the folder to begin with an empty store"
