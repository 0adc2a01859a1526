"""Which block makes room for new rows: the one that was filled longest ago, that the oldest policy began, or whose unrolls matter least.

Blocks are *retired* once no unroll will be made of their rows any more, and taken when the writer needs one. All unrolls that read a block
that is taken are gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from seedrl.store.selectors import Selector

if TYPE_CHECKING:
    from seedrl.store.replay import Control, ReplayLayout


_SHARE = 256  # of a large store's blocks, one is chosen along with those needed: to look at all of them takes milliseconds


class Remover(Protocol):
    """Of the writer."""

    def retire(self, blocks: np.ndarray) -> None:
        """Lets blocks int64 [n], each at most once and none retired, be taken from now on."""
        ...

    def take(self, count: int) -> np.ndarray:
        """`count` retired blocks, int64; the plan has as many for all open unrolls."""
        ...


class Oldest:
    """A ring, as the order of retirement is the order of taking: nothing is looked for."""

    def __init__(self, num_blocks: int) -> None:
        self._ring = np.zeros(num_blocks, np.int64)
        self._retired = self._taken = 0

    def retire(self, blocks: np.ndarray) -> None:
        head = self._retired
        self._ring[np.arange(head, head + blocks.size) % self._ring.size] = blocks
        self._retired = head + blocks.size

    def take(self, count: int) -> np.ndarray:
        tail = self._taken
        assert count <= self._retired - tail, "the plan has blocks for all open unrolls"
        blocks: np.ndarray = self._ring[np.arange(tail, tail + count) % self._ring.size]
        self._taken = tail + count
        return blocks


class _Lowest:
    """By a key, the oldest first where keys are equal."""

    def __init__(self, num_blocks: int) -> None:
        # in the order in which they retired; -1: in use
        self._age = np.full(num_blocks, -1, np.int64)
        self._retired = 0
        self._chosen = np.zeros(0, np.int64)  # those that go next
        self._at_a_time = 1 + num_blocks // _SHARE

    def retire(self, blocks: np.ndarray) -> None:
        self._age[blocks] = np.arange(self._retired, self._retired + blocks.size)
        self._retired += blocks.size

    def take(self, count: int) -> np.ndarray:
        lacking = count - self._chosen.size
        if lacking > 0:
            there = np.flatnonzero(self._age >= 0)
            assert lacking <= there.size, "the plan has blocks for all open unrolls"
            more = max(lacking, min(self._at_a_time, there.size))
            found = there[lowest(self._keys(there), self._age[there], more)]
            self._age[found] = -1
            self._chosen = np.concatenate([self._chosen, found])
        taken, self._chosen = self._chosen[:count], self._chosen[count:]
        return taken

    def _keys(self, blocks: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class OldestVersion(_Lowest):
    """By the version that acted the block's first row.

    Args: versions: the store's column, an array or tensor int64 [K * L]. block_length: L.
    """

    def __init__(self, num_blocks: int, versions: np.ndarray | Tensor, block_length: int) -> None:
        super().__init__(num_blocks)
        self._versions, self._length = versions, block_length

    def _keys(self, blocks: np.ndarray) -> np.ndarray:
        firsts = blocks * self._length
        if isinstance(self._versions, np.ndarray):
            return self._versions[firsts]
        at = torch.from_numpy(firsts).to(self._versions.device)
        found: np.ndarray = self._versions.index_select(0, at).cpu().numpy()
        return found


class LowestPriority(_Lowest):
    """By the largest priority among the unrolls that read the block, as the reader last said; what it has not seen yet stays."""

    def __init__(self, num_blocks: int, control: Control) -> None:
        super().__init__(num_blocks)
        self._control = control

    def _keys(self, blocks: np.ndarray) -> np.ndarray:
        control = self._control
        said = control.key_generations[blocks] == control.blocks[blocks]
        keys: np.ndarray = np.where(said, control.keys[blocks], np.inf)
        return keys


def lowest(keys: np.ndarray, ages: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` lowest keys [n]; of equal ones those of the lowest ages [n]."""
    if count >= keys.size:
        return np.arange(keys.size)
    bar = np.partition(keys, count - 1)[count - 1]
    below, equal = np.flatnonzero(keys < bar), np.flatnonzero(keys == bar)
    more = equal[np.argsort(ages[equal], kind="stable")[: count - below.size]]
    return np.concatenate([below, more])


class BlockKeys:
    """The reader's side of `LowestPriority`: what each block is worth, kept as unrolls come, change and go.

    Args: selector: whose `priorities` [C], 0 where an unroll is gone, stand at the unrolls' numbers modulo C.
    """

    def __init__(self, layout: ReplayLayout, control: Control, selector: Selector) -> None:
        rule = layout.rule
        self._control, self._selector, self._capacity = control, selector, layout.capacity
        most = (rule.block_length + rule.num_rows) // rule.stride + 2  # unrolls that read a block
        self._readers = np.full((layout.storage_blocks, most), -1)  # their numbers, a ring
        self._count = np.zeros(layout.storage_blocks, np.int64)
        self._generation = control.blocks.copy()
        # whether an unroll of the block's rows has come
        self._known = np.zeros(layout.storage_blocks, bool)
        self._number = np.full(layout.capacity, -1, np.int64)  # at each place
        self._blocks = np.zeros((layout.capacity, rule.blocks_held), np.int64)

    def overwritten(self) -> np.ndarray:
        """Unrolls whose blocks were taken since the last call, int64: their other blocks are worth less without them.

        A block that is filled again is worth nothing known until an unroll of its new rows comes.
        """
        now = self._control.blocks
        taken = np.flatnonzero(now != self._generation)
        if not taken.size:
            return taken
        readers = np.unique(self._readers[taken])
        readers = readers[readers >= 0]
        gone: np.ndarray = readers[self._number[readers % self._capacity] == readers]
        self._number[gone % self._capacity] = -1
        self._readers[taken], self._count[taken] = -1, 0
        self._generation[taken] = now[taken]
        self._known[taken] = False
        self._say(np.unique(self._blocks[gone % self._capacity]))
        return gone

    def admit(self, numbers: np.ndarray, blocks: np.ndarray, generations: np.ndarray) -> None:
        """New unrolls, int64 [n], which read blocks of these generations, int64 [n, k]; they take the places of the oldest."""
        places = numbers % self._capacity
        before = self._blocks[places[self._number[places] >= 0]].reshape(-1)
        whole = (generations == self._generation[blocks]).all(1)
        self._number[places] = np.where(whole, numbers, -1)
        self._blocks[places] = blocks
        numbers, blocks = numbers[whole], blocks[whole]
        self._known[blocks] = True
        # each pair once, those of a block one after the other
        pairs = np.unique(np.stack([blocks.reshape(-1), np.repeat(numbers, blocks.shape[1])], 1), axis=0)  # fmt: skip
        block, number = pairs.T
        begins = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
        rank = np.arange(block.size) - np.repeat(begins, np.diff(np.r_[begins, block.size]))
        self._readers[block, (self._count[block] + rank) % self._readers.shape[1]] = number
        np.add.at(self._count, block, 1)
        self._say(np.unique(np.concatenate([before, block])))

    def changed(self, numbers: np.ndarray) -> None:
        """These unrolls, int64 [n], have other priorities, or are gone."""
        if numbers.size:
            self._say(np.unique(self._blocks[numbers % self._capacity]))

    def _say(self, blocks: np.ndarray) -> None:
        blocks = blocks[self._known[blocks]]
        readers = self._readers[blocks]
        places = readers % self._capacity
        there = (readers >= 0) & (self._number[places] == readers)
        priorities: np.ndarray = self._selector.priorities  # type: ignore[attr-defined]
        worth = np.where(there, priorities[places], 0.0).max(1, initial=0.0)
        control = self._control
        control.key_generations[blocks] = -1
        control.keys[blocks] = worth
        control.key_generations[blocks] = self._generation[blocks]
