"""The store's sizes, as engine and learner each derive them from the same configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from seedrl.config import Config
from seedrl.errors import ConfigError
from seedrl.spec import EnvSpec
from seedrl.store.blocks import BlockLayout, UnrollRule
from seedrl.store.replay import QueueLayout, queue_blocks

_QUEUED_BATCHES = 2  # by default: one that is learnt from, one that fills; more would only be older


@dataclass(frozen=True)
class StorePlan:
    """What is allocated: blocks, the queue's control memory; the bound on lag, if any; and whether all slots fill an unroll, then wait."""

    blocks: BlockLayout
    queue: QueueLayout
    max_lag: int | None
    iterations: bool

    @staticmethod
    def of(
        config: Config, spec: EnvSpec, stored_actions: dict[str, tuple[torch.dtype, tuple[int, ...]]],
        state_leaves: list[Tensor], num_slots: int,
    ) -> StorePlan:  # fmt: skip
        """Raises ConfigError when replay.capacity is so small that engine and learner would wait for each other."""
        unroll, burn_in = config.learner.unroll_length, config.learner.burn_in
        length = config.replay.block_length or math.gcd(unroll, burn_in)
        rule = UnrollRule(unroll, burn_in, length)
        fewest = queue_blocks(rule, num_slots, config.learner.batch_size)
        num_blocks = (
            fewest + (_QUEUED_BATCHES - 1) * config.learner.batch_size * rule.blocks_per_unroll
        )
        if config.replay.capacity is not None:
            num_blocks = config.replay.capacity // length
            if num_blocks < fewest:
                raise ConfigError(
                    what=f"replay.capacity {config.replay.capacity} rows would stop actors and learner for ever",
                    where="replay.capacity",
                    do=f"set at least {fewest * length} rows ({num_slots} slots, unrolls of {unroll}, batches of "
                    f"{config.learner.batch_size}), or leave it out",
                )
        max_lag = config.replay.max_lag
        if max_lag is None and config.run.deterministic:
            max_lag = 1
        blocks = BlockLayout.of(spec, stored_actions, state_leaves, num_blocks, length)
        return StorePlan(
            blocks, QueueLayout(rule, num_blocks, num_slots), max_lag, config.algorithm.iterates
        )
