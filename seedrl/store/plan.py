"""The store's sizes and rules, as engine and learner each derive them from the same configuration, and their two ends of it."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from seedrl.config import Config, Learner, Replay
from seedrl.errors import ConfigError
from seedrl.spec import EnvSpec, RowSpecs
from seedrl.store.batch import Gather
from seedrl.store.blocks import BlockLayout, BlockStorage, UnrollRule
from seedrl.store.initial import ActingPriorities
from seedrl.store.limiter import Limiter
from seedrl.store.queue import QueueReader, QueueWriter, queue_blocks
from seedrl.store.removers import LowestPriority, Oldest, OldestVersion, Remover
from seedrl.store.replay import Control, ReplayLayout, ReplayReader, ReplayWriter
from seedrl.store.ring import RingReader, RingWriter
from seedrl.store.selectors import Prioritized, Recent, Schedule, Selector, Uniform
from seedrl.store.state import State
from seedrl.store.tiered import TieredReader
from seedrl.store.tiers import Tiers, rows_behind

_QUEUED_BATCHES = 2  # by default: one that is learnt from, one that fills; more would only be older
_SHORT_BLOCK = 16  # rows; shorter blocks cost more than they save, unless unrolls are as short


@dataclass(frozen=True)
class StorePlan:
    """What is allocated: blocks and control memory; the bound on lag, if any; and whether all slots fill an unroll, then wait."""

    blocks: BlockLayout
    control: ReplayLayout
    limiter: Limiter
    replay: Replay
    seed: int
    max_lag: int | None
    iterations: bool
    batch_size: int
    acting: Config | None = None  # of whose values new unrolls get their priorities

    @staticmethod
    def of(
        config: Config, spec: EnvSpec, stored_actions: RowSpecs, state_leaves: list[Tensor], num_slots: int,
        extras: RowSpecs | None = None,
    ) -> StorePlan:  # fmt: skip
        """The run's. Raises: ConfigError, as `of_sections`."""
        acting = config if config.replay.initial_priority == "acting" else None
        plan = StorePlan.of_sections(
            config.replay, config.learner, spec, stored_actions, state_leaves, num_slots, config.run.seed, extras, config.env.frame_stack
        )  # fmt: skip
        max_lag = config.replay.max_lag
        if max_lag is None and config.run.deterministic and not plan.control.ring:
            max_lag = 1
        return replace(plan, max_lag=max_lag, iterations=config.algorithm.iterates, acting=acting)

    @staticmethod
    def of_sections(
        replay: Replay, learner: Learner, spec: EnvSpec, stored_actions: RowSpecs, state_leaves: list[Tensor],
        num_slots: int, seed: int, extras: RowSpecs | None = None, frame_stack: int = 1,
    ) -> StorePlan:  # fmt: skip
        """Of lengths and batch size in `learner`; `spec` is the environment's, of single frames.

        Raises: ConfigError when replay.capacity is so small that writer and reader would wait for each other, or holds no unroll; or
            replay.ratio_tolerance is.
        """
        rule, ring = unroll_rule(replay, learner, frame_stack), replay.mode != "queue"
        if ring:
            num_blocks = _ring_blocks(replay, rule, learner.batch_size, num_slots)
        else:
            num_blocks = _queue_blocks(replay, learner.batch_size, rule, num_slots)
        layout = BlockLayout.of(spec, stored_actions, state_leaves, num_blocks, rule, extras)
        behind = rows_behind(layout, sum(replay.bytes_behind), replay.compress)
        return StorePlan(
            layout, ReplayLayout(rule, num_blocks, num_slots, ring, replay.remover == "lowest_priority", behind),
            _limiter(replay, learner.batch_size, rule.stride, num_slots),
            replay, seed, replay.max_lag, False, learner.batch_size,
        )  # fmt: skip

    @property
    def admission(self) -> int | None:
        """The lag at which acting stops: rows of a ring are not made for one learner's step, and are dropped when they are drawn."""
        return None if self.control.ring else self.max_lag

    def within(self, layout: BlockLayout) -> StorePlan:
        """The same in a storage of more blocks, which others share. Raises: ConfigError when its rows are others."""
        if replace(layout, num_blocks=self.blocks.num_blocks) != self.blocks:
            raise ConfigError(
                what=f"{self.blocks.rule} does not fit the shared storage's {layout.rule}", where="unroll_length, burn_in, stride, block_length",
                do="leave these to the storage",
            )  # fmt: skip
        return replace(self, control=replace(self.control, pool_blocks=layout.num_blocks))

    def writer(
        self,
        storage: BlockStorage,
        memory: mmap.mmap,
        learner_bell: int,
        blocks: list[int] | None = None,
    ) -> ReplayWriter:
        """The engine's end. Args: memory: the control's. blocks: those of the storage that are its own; None: all."""
        if self.control.ring:
            ends = (storage, self.control, memory, learner_bell)
            return RingWriter(
                *ends, limiter=self.limiter, remover=self._remover(storage, memory), blocks=blocks
            )
        return QueueWriter(storage, self.control, memory, learner_bell, blocks)

    def reader(
        self,
        storage: BlockStorage,
        memory: mmap.mmap,
        bell: int,
        engine_bell: int,
        state_like: State,
        folder: Path | None = None,
    ) -> ReplayReader:
        """The learner's end. Args: folder: for the file of rows behind; None: that of temporary files."""
        gather = Gather(storage, state_like, self.replay.cross_episodes)
        ends = (storage, self.control, memory, bell, engine_bell, gather)
        if self.control.ring:
            initial = None if self.acting is None else ActingPriorities(storage, self.acting)
            kind: Any = RingReader
            more: dict[str, Any] = {}
            if any(self.replay.bytes_behind):
                kind, more["tiers"] = TieredReader, self._tiers(storage, memory, state_like, folder)
            return kind(  # type: ignore[no-any-return]
                *ends, self.max_lag, selector=self._selector(), limiter=self.limiter, max_uses=self.replay.max_uses_or_default,
                initial=initial, **more,
            )  # fmt: skip
        # an iteration's first rows are the bootstrap rows of the one before
        return QueueReader(*ends, 1 if self.iterations else self.max_lag)

    def _tiers(
        self, storage: BlockStorage, memory: mmap.mmap, state_like: State, folder: Path | None
    ) -> Tiers:
        return Tiers(
            storage, Control(self.control, memory), *self.replay.bytes_behind, compresses=self.replay.compress, folder=folder,
            num_slots=self.control.num_slots, batch_size=self.batch_size, state_like=state_like, cross_episodes=self.replay.cross_episodes,
        )  # fmt: skip

    def _remover(self, storage: BlockStorage, memory: mmap.mmap) -> Remover:
        blocks = self.control.storage_blocks
        if self.replay.remover == "lowest_priority":
            return LowestPriority(blocks, Control(self.control, memory))
        if self.replay.remover == "oldest_version":
            columns = storage.rows if storage.arrays is None else storage.arrays
            return OldestVersion(blocks, columns["version"], self.control.rule.block_length)
        return Oldest(blocks)

    def _selector(self) -> Selector:
        replay, capacity = self.replay, self.control.capacity
        if replay.mode == "recent":
            return Recent(capacity)
        if replay.mode == "prioritized":
            exponents = (
                Schedule(replay.priority_exponent, replay.priority_exponent_end),
                Schedule(replay.importance_exponent, replay.importance_exponent_end),
            )
            return Prioritized(capacity, self.seed, *exponents, replay.weights_over == "store")
        # where many are gone in between, each of them is tried once
        if replay.max_uses_or_default is not None or any(replay.bytes_behind):
            return Prioritized(capacity, self.seed, Schedule(0.0), Schedule(0.0), False)
        return Uniform(self.seed)


def unroll_rule(replay: Replay, learner: Learner, frame_stack: int = 1) -> UnrollRule:
    stride = learner.stride_or_default
    common = math.gcd(learner.unroll_length, learner.burn_in, stride)
    default = common if replay.mode == "queue" else max(common, _SHORT_BLOCK)
    return UnrollRule(
        learner.unroll_length,
        learner.burn_in,
        replay.block_length or default,
        stride,
        frame_stack - 1,
    )


def _queue_blocks(replay: Replay, batch_size: int, rule: UnrollRule, num_slots: int) -> int:
    capacity = replay.capacity
    fewest = queue_blocks(rule, num_slots, batch_size)
    if capacity is None:
        return fewest + (_QUEUED_BATCHES - 1) * batch_size * rule.blocks_released
    if capacity // rule.block_length < fewest:
        raise ConfigError(
            what=f"replay.capacity {capacity} rows would stop actors and learner for ever",
            where="replay.capacity",
            do=f"set at least {fewest * rule.block_length} rows ({num_slots} slots, unrolls of {rule.unroll_length}, batches of "
            f"{batch_size}), or leave it out",
        )
    return capacity // rule.block_length


def _ring_blocks(replay: Replay, rule: UnrollRule, batch_size: int, num_slots: int) -> int:
    """Those of every slot's open unrolls come on top of the capacity."""
    capacity, open_blocks = replay.capacity, num_slots * rule.blocks_held
    assert capacity is not None, "replay_contradictions() asks for one"
    uses = replay.max_uses_or_default
    if uses is not None and capacity < (rows := (-(-batch_size // uses) - 1) * rule.stride + rule.num_rows):  # fmt: skip
        raise ConfigError(
            what=f"replay.capacity {capacity} rows hold fewer unrolls than a batch of {batch_size} takes, each at most {uses} times",
            where="replay.capacity, learner.batch_size", do=f"set at least {rows} rows, or lower learner.batch_size",
        )  # fmt: skip
    fewest = (replay.min_fill or 0) + rule.num_rows
    if capacity < fewest:
        raise ConfigError(
            what=f"replay.capacity {capacity} rows is less than {fewest}: an unroll of {rule.num_rows} rows, frames before it included, and "
            "replay.min_fill", where="replay.capacity", do=f"set at least {fewest}, or lower learner.unroll_length, learner.burn_in or replay.min_fill",
        )  # fmt: skip
    return open_blocks + -(-capacity // rule.block_length)


def _limiter(replay: Replay, batch_size: int, stride: int, num_slots: int) -> Limiter:
    ratio, tolerance = replay.samples_per_insert, replay.ratio_tolerance
    if ratio is not None:
        fewest = Limiter.fewest_tolerance(ratio, batch_size, num_slots)
        if tolerance is None:
            tolerance = 2 * fewest
        elif tolerance < fewest:
            raise ConfigError(
                what=f"replay.ratio_tolerance {tolerance:g} draws would stop actors and learner for ever: a batch is {batch_size} draws, and "
                f"{num_slots} environments may complete {num_slots} unrolls at once",
                where="replay.ratio_tolerance, replay.samples_per_insert", do=f"set at least {fewest:g}, or leave it out",
            )  # fmt: skip
    return Limiter(ratio, tolerance or 0.0, max(1, -(-(replay.min_fill or 0) // stride)))
