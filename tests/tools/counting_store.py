"""A writer and a reader over the same memory, in which each slot counts its rows, run by run: what comes out says where it came from."""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from seedrl import host
from seedrl.spec import spec_from_spaces
from seedrl.store.batch import Batch, Gather
from seedrl.store.blocks import BlockLayout, BlockStorage, UnrollRule
from seedrl.store.limiter import Limiter
from seedrl.store.queue import QueueReader, QueueWriter, queue_blocks
from seedrl.store.removers import LowestPriority, Oldest, OldestVersion
from seedrl.store.replay import Control, ReplayLayout
from seedrl.store.ring import RingReader, RingWriter
from seedrl.store.selectors import Prioritized, Recent, Schedule, Selector, Uniform
from seedrl.transport import doorbell

SPEC = spec_from_spaces(
    spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Discrete(4), action_mask=None, stats=(), env_id="test",
)  # fmt: skip
ACTIONS = {"action": (torch.int64, ())}
FREE = Limiter(None, 0.0, 1)


class CountingStore:
    """Observations are (slot, run, number of the row in the run), and everything else follows from the number.

    Args: unroll, burn_in, length, stride: of the rule; stride None: unroll. batch: of the queue's formula. extra: blocks beyond it.
        history: frames before each, which batches show. mode: "queue", "uniform", "recent", "prioritized". episode: rows of an episode, None: a run is one.
    """

    def __init__(
        self, slots: int, unroll: int, burn_in: int, length: int, batch: int = 1, extra: int = 0, max_lag: int | None = None,
        *, stride: int | None = None, mode: str = "queue", limiter: Limiter = FREE, max_uses: int | None = None,
        episode: int | None = None, cross_episodes: bool = True, seed: int = 0, alpha: float = 1.0, beta: float = 1.0,
        over_store: bool = False, remover: str = "oldest", history: int = 0,
    ) -> None:  # fmt: skip
        self.rule, self.batch = (
            UnrollRule(unroll, burn_in, length, stride or unroll, history),
            batch,
        )
        ring = mode != "queue"
        held = slots * self.rule.blocks_held
        blocks = (held if ring else queue_blocks(self.rule, slots, batch)) + extra
        state = [torch.zeros(1, 2)]
        layout = BlockLayout.of(SPEC, ACTIONS, state, blocks, self.rule)
        self.layout = ReplayLayout(self.rule, blocks, slots, ring, remover == "lowest_priority")
        memory = host.memfd("replay", layout.nbytes)
        control = host.memfd("control", self.layout.nbytes)
        bell, engine_bell = doorbell.make(), doorbell.make()

        def ends() -> tuple[Any, ...]:
            rows = torch.frombuffer(host.map_shared(memory, layout.nbytes), dtype=torch.uint8)
            return (
                BlockStorage(layout, rows), self.layout, host.map_shared(control, self.layout.nbytes), bell,
            )  # fmt: skip

        mine = ends()
        gather = Gather(mine[0], (state[0],), cross_episodes)
        if ring:
            selectors: dict[str, Selector] = {
                "uniform": Uniform(seed), "recent": Recent(self.layout.capacity),
                "prioritized": Prioritized(self.layout.capacity, seed, Schedule(alpha), Schedule(beta), over_store),
            }  # fmt: skip
            here = ends()
            removers = {
                "oldest": Oldest(blocks), "lowest_priority": LowestPriority(blocks, Control(self.layout, here[2])) if self.layout.keyed else None,
                "oldest_version": OldestVersion(blocks, here[0].arrays["version"], length),
            }  # fmt: skip
            self.writer: Any = RingWriter(*here, limiter=limiter, remover=removers[remover])
            self.reader: Any = RingReader(
                *mine, engine_bell, gather, max_lag, selector=selectors[mode], limiter=limiter, max_uses=max_uses
            )  # fmt: skip
        else:
            self.writer = QueueWriter(*ends())
            self.reader = QueueReader(*mine, engine_bell, gather, max_lag)
        fds = (memory, control, bell, engine_bell)
        weakref.finalize(self, lambda: [os.close(fd) for fd in fds])
        self.episode = episode
        self.count = np.zeros(slots, np.int64)
        self.run = np.zeros(slots, np.int64)
        self.version = 0

    def first(self, count: np.ndarray) -> np.ndarray:
        return count % self.episode == 0 if self.episode else count == 0

    def append(self, slots: np.ndarray) -> int:
        count = self.count[slots]
        row = torch.from_numpy(np.stack([slots, self.run[slots], count], axis=1).astype(np.float64))
        numbers = torch.from_numpy(count.copy())
        flags = torch.zeros(len(slots), 4, dtype=torch.uint8)
        flags[:, 2] = torch.from_numpy(self.first(count).astype(np.uint8))
        columns = {
            "obs/observation": row, "action/action": numbers, "reward": numbers.float(), "flags": flags,
            "log_prob": -numbers.float(), "value": numbers.float() / 2, "version": torch.full((len(slots),), self.version),
        }  # fmt: skip
        states = [torch.stack([numbers.float(), torch.from_numpy(slots).float()], dim=1)]
        stored = self.writer.append(
            slots, {name: column.numpy() for name, column in columns.items()}, states
        )
        self.count[slots] += 1
        return int(stored)

    def discard(self, slots: np.ndarray) -> int:
        dropped = self.writer.discard(slots)
        self.count[slots] = 0
        self.run[slots] += 1
        return int(dropped)

    def check(self, batch: Batch) -> list[tuple[int, int, int]]:
        """Every unroll: one slot, one run, consecutive, its own state; returns (slot, run, first loss row)."""
        found, burn_in = [], self.rule.burn_in
        for b, slot in enumerate(batch.slots.tolist()):
            rows = batch.obs["observation"][:, b]
            if self.rule.history:
                stacks, rows = rows, rows[:, -1]
                assert (stacks[..., :2] == rows[:, None, :2]).all()
                assert stacks[..., 2].tolist() == [self.stack(int(row)) for row in rows[:, 2]]
            assert (rows[:, 0] == slot).all() and (rows[:, 1] == rows[0, 1]).all()
            begin = int(rows[burn_in, 2])
            assert begin % self.rule.stride == 0
            expected = np.maximum(
                np.arange(begin - burn_in, begin + self.rule.unroll_length + 1), 0
            )
            assert rows[:, 2].tolist() == expected.tolist()
            for column in (batch.actions["action"], batch.reward, -batch.log_prob, 2 * batch.value):
                assert column[:, b].tolist() == expected.tolist()
            assert batch.first[:, b].tolist() == self.first(expected).tolist()
            assert batch.state[0][b].tolist() == [expected[0], slot]
            found.append((slot, int(rows[0, 1]), begin))
        return found

    def stack(self, number: int) -> list[int]:
        """Numbers of the rows whose frames stand with that of a row."""
        begin = number - number % self.episode if self.episode else 0
        return [max(number - back, begin) for back in range(self.rule.history, -1, -1)]
