"""A device with memory of its own: the CPU, used as if it had. What is acted and stored must not differ."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from seedrl import host
from seedrl.config import PolicySection
from seedrl.engine.step import PolicyStep, state_leaves
from seedrl.policy.base import Heads, make_policy
from seedrl.spec import EnvSpec, spec_from_spaces
from seedrl.store.blocks import Appender, BlockLayout, BlockStorage, UnrollRule
from seedrl.transport.slab import Slab, SlabLayout

SLOTS = 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec() -> EnvSpec:
    observation = spaces.Dict({
        "bytes": spaces.Box(0, 255, (3, 2), np.uint8), "short": spaces.Box(0, 9, (2,), np.uint16),
        "bits": spaces.Box(0, 1, (4,), bool), "double": spaces.Box(-9, 9, (), np.float64),
    })  # fmt: skip
    action = spaces.Dict({"which": spaces.Discrete(5, start=-1), "how": spaces.Box(-1, 3, (2,))})
    return spec_from_spaces(observation, action, action_mask=None, stats=(), env_id="x")


def a_slab(spec: EnvSpec) -> Slab:
    layout = SlabLayout.of(spec, SLOTS, SLOTS)
    return Slab(host.map_shared(host.memfd("slab", layout.nbytes), layout.nbytes), layout)


def fill(slab: Slab, spec: EnvSpec, rng: np.random.Generator) -> None:
    for leaf in spec.observation:
        column = slab.obs[leaf.name]
        column[:] = rng.integers(0, 2, column.shape).astype(column.dtype)
    slab.reward[:] = rng.normal(size=SLOTS)
    slab.flags[:] = rng.integers(0, 2, slab.flags.shape)


def build(spec: EnvSpec, core: str, apart: bool) -> tuple[PolicyStep, Slab, BlockStorage, Appender]:
    torch.manual_seed(3)
    config = PolicySection(core=core, core_size=8, hidden=[16])
    policy = make_policy(config, spec).eval()
    heads = Heads(spec.action, "squashed")
    slab = a_slab(spec)
    step = PolicyStep(policy, heads, slab, SLOTS, 5, True, CPU, CPU, apart)
    rule = UnrollRule(4, 0, 4, 4)
    layout = BlockLayout.of(spec, heads.stored_specs(), state_leaves(policy), 40, rule)
    storage = BlockStorage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    if apart:
        storage.arrays = None
    return step, slab, storage, Appender(storage, SLOTS, rule)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_device_with_its_own_memory_acts_and_stores_the_same(spec: EnvSpec, core: str) -> None:
    dtypes = {leaf.dtype for leaf in spec.observation}
    assert {"uint8", "uint16", "bool", "float64"} <= dtypes
    together, apart = build(spec, core, False), build(spec, core, True)
    rng = np.random.default_rng(0)
    for number in range(9):
        rows = rng.permutation(SLOTS)[: rng.integers(2, SLOTS + 1)].astype(np.int64)
        evaluation, training = np.array([1]), np.array([0, *range(2, rows.size)])
        seed = int(rng.integers(1 << 30))
        for step, slab, _, appender in (together, apart):
            fill(slab, spec, np.random.default_rng(seed))
            with torch.inference_mode():
                step.ingest(rows)
                step.forward(rows, evaluation)
                step.answer(rows)
                columns, states = step.columns(number, training)
            appender.append(rows[training], columns, states)
            kind = torch.Tensor if step._apart else np.ndarray
            assert all(isinstance(column, kind) for column in columns.values())
        for name, column in together[1].action.items():
            np.testing.assert_array_equal(column, apart[1].action[name])
    for name, leaf in together[2].rows.items():
        assert leaf.any() and torch.equal(leaf, apart[2].rows[name]), name
    for one, other in zip(together[2].states, apart[2].states, strict=True):
        assert one.any() and torch.equal(one, other)
