"""The step of a GPU, on the CPU: with twins, with kernels of the host's compiler, and as recorded graphs of these. What is acted and
stored must be what `PolicyStep` acts and stores, which knows no padding, no kernels and no flights."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from recorded_graph import RecordedGraph, host_kernels, record_graphs
from seedrl import host
from seedrl.config import Config, PolicySection
from seedrl.engine.batcher import Rule
from seedrl.engine.device_step import DeviceStep, buckets_up_to
from seedrl.engine.loop import Engine
from seedrl.engine.step import PolicyStep, state_leaves
from seedrl.errors import ConfigError
from seedrl.policy.agent import make_agent, stored_extras
from seedrl.policy.base import Heads, Policy, make_policy
from seedrl.spec import BEST_VALUE, TAKEN_VALUE, EnvSpec, spec_from_spaces
from seedrl.store.batch import Gather
from seedrl.store.blocks import Appender, BlockLayout, BlockStorage, UnrollRule
from seedrl.store.board import Board
from seedrl.store.queue import QueueReader, QueueWriter, queue_blocks
from seedrl.store.replay import ReplayLayout
from seedrl.transport import doorbell
from seedrl.transport.slab import (
    BASE,
    DOOR_EPOCH,
    DOOR_LINE,
    EVALUATION,
    GENERATION,
    LEASED,
    PHASE,
    SEQUENCE,
    SIZE,
    START,
    SUPERVISOR_LINE,
    Phase,
    Slab,
    SlabLayout,
)
from system_policies import Count
from tests.kernels.compilers import HostBackend

SLOTS = 12
CPU = torch.device("cpu")
MADE_OF = ("twins", "kernels", "recorded twins", "recorded kernels")


@pytest.fixture(params=MADE_OF)
def graphs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, host_backend: HostBackend
) -> bool:
    """Whether steps are captured; what they are made of is in place."""
    backend = host_backend if "kernels" in request.param else None
    if request.param == "recorded twins":
        pytest.skip("twins look at numbers")
    if "recorded" in request.param:
        record_graphs(monkeypatch, backend)
    else:
        host_kernels(monkeypatch, backend)
    return "recorded" in request.param


def a_spec(action: spaces.Space[Any], mask: str | None = None) -> EnvSpec:
    observation = spaces.Dict({
        "bytes": spaces.Box(0, 255, (3, 2), np.uint8), "short": spaces.Box(0, 9, (2,), np.uint16),
        "bits": spaces.Box(0, 1, (4,), bool), "double": spaces.Box(-9, 9, (), np.float64),
        "choice": spaces.Discrete(2, start=5),
    })  # fmt: skip
    return spec_from_spaces(observation, action, action_mask=mask, stats=(), env_id="x")


ACTIONS = {
    "mixed": spaces.Dict({"which": spaces.Discrete(5, start=-1), "how": spaces.Box(-1, 3, (2,))}),
    "choices": spaces.Dict(
        {"a": spaces.Discrete(5, start=-1), "b": spaces.MultiDiscrete([[3, 2], [4, 3]])}
    ),  # fmt: skip
    "bits": spaces.MultiBinary(3),
}


def a_slab(spec: EnvSpec) -> Slab:
    layout = SlabLayout.of(spec, SLOTS, SLOTS)
    slab = Slab(host.map_shared(host.memfd("slab", layout.nbytes), layout.nbytes), layout)
    slab.fill(spec)
    return slab


def fill(slab: Slab, rng: np.random.Generator) -> None:
    for name, column in slab.obs.items():
        begin = 5 if name.endswith("choice") else 0
        column[:] = (begin + rng.integers(0, 2, column.shape)).astype(column.dtype)
    slab.reward[:] = rng.normal(size=SLOTS)
    slab.flags[:] = rng.integers(0, 2, slab.flags.shape)
    slab.mask[:] = rng.integers(0, 2, slab.mask.shape)
    slab.mask[:, ::2] = 1


class Pair:
    """The same policy in both steps, each with a slab, a storage and an appender of its own."""

    def __init__(self, spec: EnvSpec, core: str, graphs: bool, seed: int = 5, stack: int = 1) -> None:  # fmt: skip
        torch.manual_seed(3)
        policy = make_policy(PolicySection(core=core, core_size=8, hidden=[16]), spec.stacked(stack)).eval()  # fmt: skip
        self.policy, self.spec, self.heads = policy, spec, Heads(spec.action, "squashed")
        rule = UnrollRule(4, 2, 4, 4)
        layout = BlockLayout.of(spec, self.heads.stored_specs(), state_leaves(policy), 200, rule)
        self.storages = [BlockStorage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8)) for _ in range(2)]  # fmt: skip
        self.slabs = [a_slab(spec) for _ in range(2)]
        self.appenders = [Appender(storage, SLOTS, rule) for storage in self.storages]
        self.plain = PolicyStep(policy, Heads(spec.action, "squashed"), self.slabs[0], SLOTS, seed, True, CPU, CPU, True, frame_stack=stack)  # fmt: skip
        self.device = DeviceStep(
            policy, self.heads, self.slabs[1], SLOTS, seed, True, CPU, self.storages[1], graphs=graphs, buckets=[3, 8], frame_stack=stack,
        )  # fmt: skip
        if self.plain._store_apart:
            self.storages[0].arrays = None

    @torch.inference_mode()
    def step(self, rows: np.ndarray, evaluation: np.ndarray, training: np.ndarray, version: int) -> None:  # fmt: skip
        step, appender = self.plain, self.appenders[0]
        step.ingest(rows)
        step.forward(rows, evaluation)
        step.answer(rows)
        appender.append(rows[training], *step.columns(version, training))
        places = self.appenders[1].place(rows[training])
        self.device.ingest(rows)
        self.device.forward(rows, evaluation, places, training, version)
        self.device.answer(rows)


@pytest.mark.parametrize(
    ("kind", "core", "stack"),
    [*((kind, core, 1) for kind in ACTIONS for core in ("none", "lstm")), ("mixed", "none", 3)],
)
def test_greedy_rows_are_acted_and_stored_as_by_the_plain_step(
    graphs: bool, kind: str, core: str, stack: int
) -> None:
    spec = a_spec(ACTIONS[kind], None)
    captured = RecordedGraph.captured
    pair = Pair(spec, core, graphs, stack=stack)
    assert RecordedGraph.captured - captured == (3 if graphs else 0), "3, 8 and 12 rows"
    pair.plain.greedy_for_all = pair.device.greedy_for_all = True
    rng = np.random.default_rng(0)
    for number in range(12):
        rows = rng.permutation(SLOTS)[: rng.integers(2, SLOTS + 1)].astype(np.int64)
        evaluation, training = np.array([1]), np.array([0, *range(2, rows.size)])
        seed = int(rng.integers(1 << 30))
        for slab in pair.slabs:
            fill(slab, np.random.default_rng(seed))
        pair.step(rows, evaluation, training, number)
        for name, column in pair.slabs[0].action.items():
            np.testing.assert_allclose(column, pair.slabs[1].action[name], rtol=1e-5, atol=1e-6)
    for name, leaf in pair.storages[0].rows.items():
        if (
            name != "log_prob"
        ):  # of the action that the plain step drew before it took the likeliest
            torch.testing.assert_close(leaf, pair.storages[1].rows[name], msg=name)
    for one, other in zip(pair.storages[0].states, pair.storages[1].states, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mask", [None, "info"])
@pytest.mark.parametrize("kind", ["mixed", "choices"])
def test_what_is_drawn_has_the_log_probability_that_is_stored(
    graphs: bool, kind: str, mask: str | None
) -> None:
    spec = a_spec(ACTIONS[kind], mask)
    pair = Pair(spec, "none", graphs)
    rng, drawn, rows = np.random.default_rng(1), [], np.arange(SLOTS)
    fill(pair.slabs[1], rng)
    for _ in range(40):
        places = pair.appenders[1].place(rows)
        with torch.inference_mode():
            pair.device.ingest(rows)
            pair.device.forward(rows, None, places, None, 7)
            pair.device.answer(rows)
        stored = {name: leaf[places.rows] for name, leaf in pair.storages[1].rows.items()}
        slab = pair.slabs[1]
        obs = {name: torch.from_numpy(leaf)[None] for name, leaf in slab.obs.items()}
        with torch.no_grad():
            inputs, value, _ = pair.policy(obs, (), torch.from_numpy(slab.flags[None, :, 2] != 0))
        actions = {name[7:]: leaf for name, leaf in stored.items() if name.startswith("action/")}
        legal = torch.from_numpy(slab.mask) if mask else None
        expected = pair.heads.log_prob(inputs[0], actions, legal)
        torch.testing.assert_close(stored["log_prob"], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stored["value"], value[0])
        assert (stored["version"] == 7).all() and (expected > -50).all()
        drawn.append(torch.cat([leaf.double().flatten() for leaf in actions.values()]))
    assert len({tuple(row.tolist()) for row in drawn}) == 40, "each time other numbers"


def test_values_of_actions_and_exploration_by_slot(graphs: bool) -> None:
    spec = spec_from_spaces(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), action_mask=None, stats=(), env_id="x")  # fmt: skip
    replay = {"mode": "prioritized", "capacity": 1000, "initial_priority": "acting"}
    config = Config.model_validate({"algorithm": {"name": "dqn", "epsilon": 0.9}, "replay": replay})
    policy, heads = make_agent(config, spec, SLOTS)
    extras, rule = stored_extras(config, policy), UnrollRule(4, 0, 4, 4)
    layout = BlockLayout.of(spec, heads.stored_specs(), [], 60, rule, extras)
    storage = BlockStorage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    slab, rows = a_slab(spec), np.arange(5)
    step = DeviceStep(policy, heads, slab, SLOTS, 5, False, CPU, storage, graphs=graphs, extras=extras)  # fmt: skip
    appender, explored = Appender(storage, SLOTS, rule), 0
    slab.obs["observation"][:] = np.random.default_rng(1).normal(size=(SLOTS, 2))
    for _ in range(20):
        places = appender.place(rows)
        with torch.inference_mode():
            step.ingest(rows)
            step.forward(rows, None, places)
            step.answer(rows)
            q = policy(torch.from_numpy(slab.obs["observation"][:5])[None], (), torch.ones(1, 5, dtype=torch.bool))[0][0]  # fmt: skip
        best, taken = (storage.rows[f"extra/{name}"][places.rows] for name in (BEST_VALUE, TAKEN_VALUE))  # fmt: skip
        torch.testing.assert_close(best, q.amax(1))
        torch.testing.assert_close(taken, q.gather(1, storage.rows["action/action"][places.rows][:, None])[:, 0])  # fmt: skip
        explored += int((best != taken).sum())
    assert 5 < explored < 95


class _Peeks(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 4)

    def forward(self, obs, state, first):
        if first.any():
            state = ()
        out = self.layer(obs)
        return out[..., :3], out[..., 3], state


def test_a_policy_that_looks_at_its_numbers_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, host_backend: HostBackend
) -> None:
    record_graphs(monkeypatch, host_backend)
    spec = spec_from_spaces(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), action_mask=None, stats=(), env_id="x")  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be captured in a CUDA graph") as raised:
        DeviceStep(_Peeks(), Heads(spec.action), a_slab(spec), SLOTS, 5, False, CPU, None)
    assert raised.match("engine.graphs=false")
    DeviceStep(_Peeks(), Heads(spec.action), a_slab(spec), SLOTS, 5, False, CPU, None, graphs=False)


def test_buckets() -> None:
    assert buckets_up_to(100) == [7, 13, 25, 50, 100]
    assert buckets_up_to(4) == [4] and buckets_up_to(1) == [1]
    assert buckets_up_to(64, [8, 32, 128]) == [8, 32, 64]


class Seats:
    """Groups of two slots at an engine whose step is a device's: observations are (slot, run, number of the row in the run)."""

    def __init__(self, graphs: bool, unroll: int = 3, burn_in: int = 2) -> None:
        self.groups = 6
        spec = spec_from_spaces(spaces.Box(-1e9, 1e9, (3,), np.float64), spaces.Discrete(512), action_mask=None, stats=(), env_id="x")  # fmt: skip
        layout = SlabLayout.of(spec, 2 * self.groups, self.groups)
        self.slab = Slab(host.map_shared(host.memfd("slab", layout.nbytes), layout.nbytes), layout)
        board = Board(host.map_shared(host.memfd("board", Board.nbytes(0)), Board.nbytes(0)), 0)
        self.bell, doors = doorbell.make(), [doorbell.make() for _ in range(self.groups)]
        heads = Heads(spec.action)
        policy = Count(heads.num_inputs).eval()
        rule = UnrollRule(unroll, burn_in, 2, unroll)
        # room for a few batches: the queue holds back at times
        blocks = queue_blocks(rule, 2 * self.groups, 4) + 3
        rows = BlockLayout.of(spec, heads.stored_specs(), state_leaves(policy), blocks, rule)
        storage = BlockStorage(rows, torch.zeros(rows.nbytes, dtype=torch.uint8))
        control = ReplayLayout(rule, blocks, 2 * self.groups, False)
        memory = host.map_shared(host.memfd("control", control.nbytes), control.nbytes)
        self.writer = QueueWriter(storage, control, memory, self.bell)
        self.reader = QueueReader(storage, control, memory, self.bell, self.bell, Gather(storage, policy.initial_state(1)))  # fmt: skip
        step = DeviceStep(policy, heads, self.slab, 2 * self.groups, 0, True, CPU, storage, graphs=graphs, buckets=[4])  # fmt: skip
        self.board = board
        self.engine = Engine(self.slab, self.bell, doors, board, step, Rule(6, 1, 0.0, 1000.0), self.writer, None, None)  # fmt: skip
        self.generation, self.runs = 0, np.zeros(self.groups, int)
        self.number = np.full(self.groups, -1)  # of the row that was asked last
        self.asked = np.zeros(self.groups, np.int64)
        self.slab.control[SUPERVISOR_LINE, PHASE] = Phase.ACT
        self.most_in_flight = 0
        for group in range(self.groups):
            self.lease(group)

    def lease(self, group: int) -> None:
        self.generation += 1
        line = self.slab.lease[group]
        line[LEASED] = 0
        self._changed()
        line[[START, SIZE, BASE, EVALUATION]] = 2 * group, 2, self.generation << 32, group == 5
        line[GENERATION], line[LEASED] = self.generation, 1
        self.asked[group] = self.slab.asked[group, SEQUENCE] = self.generation << 32
        self.runs[group] += 1
        self.number[group] = -1
        self._changed()

    def _changed(self) -> None:
        self.slab.control[DOOR_LINE, DOOR_EPOCH] += 1
        os.eventfd_write(self.bell, 1)

    def waits(self, group: int) -> bool:
        return bool(self.slab.answered[group, SEQUENCE] != self.asked[group] and self.number[group] >= 0)  # fmt: skip

    def ask(self, group: int) -> None:
        if self.number[group] >= 0:  # the answer is the number of rows of the run before it
            assert self.slab.action["action"][2 * group : 2 * group + 2].tolist() == [self.number[group]] * 2  # fmt: skip
        self.number[group] += 1
        for slot in (2 * group, 2 * group + 1):
            self.slab.obs["observation"][slot] = slot, self.runs[group], self.number[group]
            self.slab.reward[slot] = self.number[group]
            self.slab.flags[slot] = 0, 0, self.number[group] == 0, 0
        self.asked[group] += 1
        self.slab.asked[group, SEQUENCE] = self.asked[group]
        os.eventfd_write(self.bell, 1)

    def step(self) -> None:
        assert self.engine.step()
        self.most_in_flight = max(self.most_in_flight, len(self.engine._in_flight))


def test_the_truths_with_two_batches_in_flight(graphs: bool) -> None:
    seats, rng = Seats(graphs), np.random.default_rng(3)
    seen, runs, deaths = [], 0, 0
    for _ in range(1500):
        for group in range(seats.groups):
            if not seats.waits(group) and rng.random() < 0.6:
                seats.ask(group)
        if rng.random() < 0.02:
            seats.lease(int(rng.integers(seats.groups)))
            deaths += 1
        if any(seats.waits(group) for group in range(seats.groups)):
            # not while the queue is full: the engine would sleep
            while (batch := seats.reader.sample(4, timeout_s=0)) is not None:
                seen.append(batch)
            seats.step()
    assert seats.most_in_flight == 1 and deaths > 10  # the second lands the first
    unrolls = 0
    for batch in seen:
        obs, slots = batch.obs["observation"].numpy(), batch.slots.numpy()
        number, first = obs[:, :, 2].astype(int), batch.first.numpy()
        assert (obs[:, :, 0] == slots).all() and (slots < 10).all(), "evaluation is not stored"
        assert (obs[:, :, 1] == obs[0, :, 1]).all()
        assert ((np.diff(number, axis=0) == 1) | (number[:-1] == 0) & (number[1:] == 0)).all()
        np.testing.assert_array_equal(batch.reward.numpy(), number)
        np.testing.assert_array_equal(first, number == 0)
        np.testing.assert_array_equal(batch.actions["action"].numpy(), number)
        (state,) = batch.state
        np.testing.assert_array_equal(state[:, 0].numpy(), number[0])
        unrolls += slots.size
        runs = max(runs, int(obs[:, :, 1].max()))
    assert unrolls > 400 and runs > 3


def test_a_second_batch_is_queued_before_the_first_is_answered() -> None:
    seats = Seats(False)
    seats.ask(0)
    assert seats.engine.step() and len(seats.engine._in_flight) == 1 and seats.waits(0)
    seats.ask(1)
    seats.ask(2)
    assert seats.engine.step() and len(seats.engine._in_flight) == 1
    assert not seats.waits(0) and seats.waits(1) and seats.waits(2)
    seats.lease(3)  # taken in once nothing is in flight
    epoch = seats.engine.seating.epoch
    assert seats.engine.step() and seats.engine.seating.epoch == epoch and not seats.waits(1)
    seats.ask(3)
    begin = time.monotonic()
    assert seats.engine.step() and seats.engine.step() and not seats.waits(3)
    assert seats.engine.seating.epoch > epoch and time.monotonic() - begin < 5
