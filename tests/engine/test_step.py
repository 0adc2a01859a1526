"""A device with memory of its own: the CPU, used as if it had. What is acted and stored must not differ."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from seedrl import host
from seedrl.config import Config, PolicySection
from seedrl.engine.make_step import make_step
from seedrl.engine.step import PolicyStep, state_leaves
from seedrl.errors import ConfigError
from seedrl.policy.agent import make_agent, stored_extras
from seedrl.policy.base import Heads, Policy, make_policy
from seedrl.spec import BEST_VALUE, TAKEN_VALUE, EnvSpec, spec_from_spaces
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


class _Critic(Policy):
    """A policy with a second value, and the sum of the observation, stored beside each row."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.layer, self.changes, self.calls = torch.nn.Linear(2, 5), changes, 0

    def extra_leaves(self):
        return {"second": (torch.float32, ()), "twice": (torch.float64, (2,))}

    def forward(self, obs, state, first):
        self.calls += 1
        out = self.layer(obs.float())
        twice = obs.double() * 2
        if self.changes and self.calls > 1:
            twice = twice[..., :1]
        return out[..., :3], out[..., 3], state, {"second": out[..., 4], "twice": twice}


@pytest.mark.parametrize("apart", [False, True])
def test_what_the_policy_adds_is_stored_beside_its_row(apart: bool) -> None:
    spec = spec_from_spaces(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), action_mask=None, stats=(), env_id="x")  # fmt: skip
    policy, heads, slab = _Critic(), Heads(spec.action, "squashed"), a_slab(spec)
    step = PolicyStep(policy, heads, slab, SLOTS, 5, False, CPU, CPU, apart, extras=policy.extra_leaves())  # fmt: skip
    rule = UnrollRule(4, 0, 4, 4)
    layout = BlockLayout.of(spec, heads.stored_specs(), [], 40, rule, policy.extra_leaves())
    storage = BlockStorage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    if apart:
        storage.arrays = None
    appender = Appender(storage, SLOTS, rule)
    rng, seen = np.random.default_rng(0), []
    for _ in range(3):
        slab.obs["observation"][:] = rng.normal(size=(SLOTS, 2))
        seen.append(slab.obs["observation"].copy())
        with torch.inference_mode():
            step.ingest(np.arange(SLOTS))
            step.forward(np.arange(SLOTS), None)
            appender.append(np.arange(SLOTS), *step.columns(0, None))
    for slot in range(SLOTS):
        at = torch.from_numpy(appender._chain[slot, 0] * 4 + np.arange(3))
        obs = torch.from_numpy(np.stack(seen)[:, slot])
        assert torch.equal(storage.rows["extra/twice"][at], obs.double() * 2)
        assert torch.allclose(storage.rows["extra/second"][at], policy.layer(obs)[:, 4])


def test_an_extra_whose_shape_changes_is_refused_by_name() -> None:
    spec = spec_from_spaces(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), action_mask=None, stats=(), env_id="x")  # fmt: skip
    policy = _Critic(changes=True)
    step = PolicyStep(policy, Heads(spec.action), a_slab(spec), SLOTS, 5, False, extras=policy.extra_leaves())  # fmt: skip
    with torch.inference_mode():
        step.ingest(np.arange(3))
        step.forward(np.arange(3), None)
        with pytest.raises(ConfigError, match=r"'twice' is torch.float64 \[1, 3, 1\]; extra_leaves declares torch.float64 \[1, 3, 2\]"):  # fmt: skip
            step.forward(np.arange(3), None)


@pytest.mark.parametrize("mask", [None, "info"])
@pytest.mark.parametrize("numpy", [True, False])
def test_values_of_the_best_legal_and_of_the_taken_action_are_stored(
    numpy: bool, mask: str | None
) -> None:
    spec = spec_from_spaces(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), action_mask=mask, stats=(), env_id="x")  # fmt: skip
    replay = {"mode": "prioritized", "capacity": 1000, "initial_priority": "acting"}
    config = Config.model_validate({"algorithm": {"name": "dqn", "epsilon": 0.9}, "replay": replay})
    policy, heads = make_agent(config, spec, SLOTS)
    slab, rng = a_slab(spec), np.random.default_rng(1)
    step = PolicyStep(policy, heads, slab, SLOTS, 5, False, apart=not numpy, extras=stored_extras(config, policy))  # fmt: skip
    assert (step._fast is not None) == numpy
    slab.obs["observation"][:] = rng.normal(size=(SLOTS, 2))
    if mask:
        slab.mask[:] = rng.integers(0, 2, slab.mask.shape)
        slab.mask[:, 1] = 1
    rows, differ = np.arange(SLOTS), 0
    for _ in range(5):
        with torch.inference_mode():
            step.ingest(rows)
            step.forward(rows, None)
            columns, _ = step.columns(0, None)
            q = policy(torch.from_numpy(slab.obs["observation"])[None], (), torch.ones(1, SLOTS, dtype=torch.bool))[0][0].numpy()  # fmt: skip
        legal = np.where(slab.mask != 0, q, -np.inf) if mask else q
        best, taken = (np.asarray(columns[f"extra/{name}"]) for name in (BEST_VALUE, TAKEN_VALUE))
        np.testing.assert_allclose(best, legal.max(1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(taken, q[rows, np.asarray(columns["action/action"])], rtol=1e-5, atol=1e-6)  # fmt: skip
        differ += int((best != taken).sum())
    assert differ > 5


@pytest.mark.parametrize(
    ("core", "precision"), [("none", "bfloat16"), ("lstm", "bfloat16"), ("none", "float16")]
)
def test_in_half_the_bits_what_is_recorded_is_what_was_computed(core: str, precision: str) -> None:
    """Log-probabilities are those of the numbers that the actions were drawn from, to float32's rounding; states stay float32."""
    spec = spec_from_spaces(spaces.Box(-1, 1, (6,)), spaces.Discrete(5), action_mask=None, stats=(), env_id="x")  # fmt: skip
    torch.manual_seed(1)
    policy = make_policy(PolicySection(core=core, core_size=16, hidden=[64]), spec).eval()
    with torch.no_grad():
        policy.heads.weight.mul_(300)  # type: ignore[union-attr, operator]
    slab, rows, rng = a_slab(spec), np.arange(SLOTS), np.random.default_rng(0)
    step = PolicyStep(policy, Heads(spec.action), slab, SLOTS, 5, False, precision=precision)
    differ = 0
    for _ in range(5):
        slab.obs["observation"][:] = rng.normal(size=(SLOTS, 6))
        obs = torch.from_numpy(slab.obs["observation"].copy())[None]
        with torch.inference_mode():
            step.ingest(rows)
            step.forward(rows, None)
            columns, states = step.columns(0, None)
            entered = tuple(leaf.clone() for leaf in states)
            with torch.autocast("cpu", getattr(torch, precision)):
                rough = policy(obs, entered, torch.zeros(1, SLOTS, dtype=torch.bool))[0].float()
            exact = policy(obs, entered, torch.zeros(1, SLOTS, dtype=torch.bool))[0]
        assert all(leaf.dtype is torch.float32 for leaf in states)
        taken = torch.from_numpy(np.asarray(columns["action/action"]))
        for inputs, same in ((rough, True), (exact, False)):
            found = inputs[0].log_softmax(-1).gather(1, taken[:, None])[:, 0].numpy()
            close = np.allclose(columns["log_prob"], found, rtol=1e-4, atol=1e-4)
            assert close or not same
            differ += not same and not close
    assert differ == 5, "the weights are large enough to show the difference"


class _Uncompilable(Policy):
    def compile(self, **how: Any) -> None:
        pass

    def forward(self, obs, state, first):
        raise RuntimeError("no compiler")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_policy_acts_alike_whatever_the_size_of_batch(
    spec: EnvSpec, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_with(policy: torch.nn.Module, dynamic: bool) -> None:
        def counted(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            compiled.append(module)
            return module if backend == "eager" else torch._inductor.compile(module, inputs)

        policy._compiled_call_impl = torch.compile(
            policy._call_impl, dynamic=dynamic, backend=counted
        )

    monkeypatch.setattr(torch.nn.Module, "compile", compile_with)
    plain, slab, _, _ = build(spec, "lstm", apart=True)
    config = Config.model_validate({"engine": {"compile": True}, "run": {"seed": 5}})
    torch.manual_seed(3)
    policy = make_policy(PolicySection(core="lstm", core_size=8, hidden=[16]), spec).eval()
    step = make_step(config, policy, Heads(spec.action, "squashed"), slab, CPU, None, True, {})
    assert compiled, "before the first batch"
    found, rng = len(compiled), np.random.default_rng(0)
    for number, size in enumerate((12, 1, 5, 2, 7, 12)):
        fill(slab, spec, rng)
        slab.flags[:, 2] |= number == 0  # an episode begins in every slot
        rows, answers = np.arange(size), []
        for one in (plain, step):
            with torch.inference_mode():
                one.ingest(rows)
                one.forward(rows, rows)
                one.answer(rows)
            answers.append({name: leaf.copy() for name, leaf in slab.action.items()})
        for name, leaf in answers[0].items():
            np.testing.assert_allclose(leaf, answers[1][name], rtol=1e-5, atol=1e-6)
    assert len(compiled) == found, "nothing while environments wait"


def test_a_policy_that_does_not_compile_is_refused_by_name(spec: EnvSpec) -> None:
    config = Config.model_validate({"engine": {"compile": True}})
    with pytest.raises(ConfigError, match="torch.compile compiles it: no compiler"):
        make_step(config, _Uncompilable(), Heads(spec.action), a_slab(spec), CPU, None, False, {})
