"""Stacks of frames: against plain queues, against Gymnasium's own wrapper, and what the policy saw against what is learnt from."""

from __future__ import annotations

from collections import deque

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.config import Config
from seedrl.engine.frames import FrameHistory
from seedrl.engine.step import PolicyStep
from seedrl.policy.agent import make_agent
from seedrl.policy.base import Heads, Policy, make_policy
from seedrl.policy.nets import Picture, is_image
from seedrl.replay import ReplayStore
from seedrl.spec import spec_from_spaces
from tests.engine.test_step import a_slab

SLOTS = 12
CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(stack=st.integers(1, 6), seed=st.integers(0, 1 << 30), chance=st.sampled_from([0.0, 0.2, 0.7]))  # fmt: skip
def test_stacks_are_those_of_a_queue_for_each_slot(stack: int, seed: int, chance: float) -> None:
    """Rows of padding, slot -1, in between; they are nobody's and change nothing."""
    rng = np.random.default_rng(seed)
    history = FrameHistory([torch.zeros(2), torch.zeros((), dtype=torch.uint8)], 5, stack, CPU)
    queues: dict[int, deque[int]] = {}
    for _ in range(40):
        slots = rng.permutation(5)[: rng.integers(0, 6)]
        first = np.array([slot not in queues or rng.random() < chance for slot in slots], bool)
        numbers = rng.integers(0, 200, slots.size)
        for slot, begins, number in zip(slots.tolist(), first.tolist(), numbers.tolist(), strict=True):  # fmt: skip
            if begins:
                queues[slot] = deque([number] * stack, maxlen=stack)
            else:
                queues[slot].append(number)
        padding = int(rng.integers(0, 4))
        padded = np.r_[slots, np.full(padding, -1)]
        shown = torch.from_numpy(np.r_[numbers, np.full(padding, 7)])
        into = [torch.zeros(padded.size, stack, 2), torch.zeros(padded.size, stack, dtype=torch.uint8)]  # fmt: skip
        frames = [torch.stack([shown, -shown], 1).float(), shown.to(torch.uint8)]
        history.push(torch.from_numpy(padded), torch.from_numpy(np.r_[first, rng.random(padding) < 0.5]), frames, into)  # fmt: skip
        expected = [list(queues[slot]) for slot in slots.tolist()]
        assert into[1][: slots.size].tolist() == expected
        assert into[0][: slots.size, :, 0].tolist() == expected
        assert (into[0][..., 0] == -into[0][..., 1]).all()


class Corridor(gym.Env):
    """Episodes of the lengths in turn; the observation is (episode, step), as two boxes and a choice."""

    observation_space = spaces.Dict({"count": spaces.Box(-1, 99, (2,), np.float32), "small": spaces.Box(0, 99, (), np.uint16), "turn": spaces.Discrete(3, start=4)})  # fmt: skip
    action_space = spaces.Discrete(2)
    lengths = (1, 5, 2, 9, 1, 1, 3, 30)

    def __init__(self, episode: int) -> None:
        self.episode = episode - 1

    def _observe(self) -> dict[str, np.ndarray]:
        count = np.array([self.episode, self.step_], np.float32)
        return {
            "count": count,
            "small": np.array(self.step_, np.uint16),
            "turn": np.int64(4 + self.step_ % 3),
        }  # type: ignore[dict-item]

    def reset(self, *, seed=None, options=None):
        self.episode, self.step_ = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action):
        self.step_ += 1
        return self._observe(), 1.0, self.step_ >= self.lengths[self.episode % 8], False, {}


class _Sees(Policy):
    def forward(self, obs, state, first):
        self.seen = {name: leaf[0].clone() for name, leaf in obs.items()}
        return torch.zeros(*first.shape, 2), torch.zeros(first.shape), state


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_acted_on_and_learnt_from_is_what_gymnasium_stacks(apart: bool) -> None:
    spec = spec_from_spaces(Corridor.observation_space, Corridor.action_space, action_mask=None, stats=(), env_id="x")  # fmt: skip
    slab, policy = a_slab(spec), _Sees()
    step = PolicyStep(policy, Heads(spec.action), slab, SLOTS, 0, False, CPU, CPU, apart, frame_stack=4)  # fmt: skip
    store = ReplayStore(
        Corridor.observation_space, Corridor.action_space, num_slots=SLOTS, capacity=400, unroll_length=5, stride=2, burn_in=1, frame_stack=4,
    )  # fmt: skip
    if apart:
        store._storage.arrays = None
    rng = np.random.default_rng(0)
    envs = [FrameStackObservation(Corridor(number), 4, padding_type="reset") for number in range(SLOTS)]  # fmt: skip
    right = [env.reset()[0] for env in envs]
    ends, ended = np.zeros(SLOTS, bool), np.zeros(SLOTS, bool)
    first = np.ones(SLOTS, bool)
    shown: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}
    for _ in range(120):
        for number, stacks in enumerate(right):
            for name, leaf in stacks.items():
                slab.obs[f"observation.{name}"][number] = leaf[-1]
        slab.flags[:] = np.stack([ends, 0 * ends, first, 0 * ends], 1)
        rows = rng.permutation(SLOTS)
        for some in np.split(rows, [5]):  # two batches
            with torch.inference_mode():
                step.ingest(some)
                step.forward(some, None)
            for place, slot in enumerate(some.tolist()):
                for name, leaf in right[slot].items():
                    np.testing.assert_array_equal(policy.seen[f"observation.{name}"][place].numpy(), leaf)  # fmt: skip
        singles = {name: np.stack([stacks[name][-1] for stacks in right]) for name in Corridor.observation_space}  # fmt: skip
        store.append(obs={f"observation.{name}": leaf for name, leaf in singles.items()}, action=np.zeros(SLOTS, int), reward=0.0, terminated=ends, truncated=False, first=first)  # fmt: skip
        for slot, stacks in enumerate(right):
            episode, number = stacks["count"][-1].astype(int).tolist()
            shown[slot, episode, number] = stacks
        for slot, env in enumerate(envs):
            first[slot] = ended[slot]
            if ended[slot]:
                right[slot], ends[slot], ended[slot] = env.reset()[0], False, False
            else:
                right[slot], _, ends[slot], _, _ = env.step(0)
                ended[slot] = ends[slot]
        batch = store.sample(16)
        for b in range(0 if batch is None else 16):
            for t in range(7):
                episode, number = batch.obs["observation.count"][t, b, -1].int().tolist()
                for name, leaf in shown[int(batch.slots[b]), episode, number].items():
                    np.testing.assert_array_equal(batch.obs[f"observation.{name}"][t, b].numpy(), leaf)  # fmt: skip


def test_a_small_network_acts_on_stacks_in_numpy_as_in_torch() -> None:
    spec = spec_from_spaces(spaces.Box(-3, 3, (5,), np.float32), spaces.Discrete(3), action_mask=None, stats=(), env_id="x")  # fmt: skip
    config = Config.model_validate({"env": {"frame_stack": 3}})
    policy, heads = make_agent(config, spec)
    slabs = [a_slab(spec) for _ in range(2)]
    steps = [PolicyStep(policy.eval(), heads, slab, SLOTS, 0, True, CPU, CPU, apart, frame_stack=3) for slab, apart in zip(slabs, (False, True), strict=True)]  # fmt: skip
    assert steps[0]._fast is not None and steps[1]._fast is None
    rng, rows = np.random.default_rng(0), np.arange(SLOTS)
    for number in range(6):
        for slab, step in zip(slabs, steps, strict=True):
            slab.obs["observation"][:] = np.random.default_rng(number).normal(size=(SLOTS, 5))
            slab.flags[:, 2] = number == 0 or rng.random() < 0
            step.greedy_for_all = True
            with torch.inference_mode():
                step.ingest(rows)
                step.forward(rows, None)
                step.answer(rows)
        assert (slabs[0].action["action"] == slabs[1].action["action"]).all()
        values = [step.columns(0, None)[0]["value"] for step in steps]
        np.testing.assert_allclose(values[0], np.asarray(values[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((84, 84), 4), ((84, 84, 3), 12), ((3, 84, 84), 12), ((10, 10, 6), 24), ((40, 50), 4)],
)
def test_frames_of_a_stack_are_channels(shape: tuple[int, ...], channels: int) -> None:
    spec = spec_from_spaces(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(3), action_mask=None, stats=(), env_id="x")  # fmt: skip
    (leaf,) = spec.stacked(4).observation
    assert is_image(leaf) and leaf.shape == (4, *shape)
    picture = Picture(leaf)
    obs = torch.randint(0, 255, (2, 4, *shape))
    (single,) = spec.observation
    each = [Picture(single)(obs[:, frame]) for frame in range(4)]
    assert picture.size[0] == channels and torch.equal(picture(obs), torch.cat(each, 1))
    policy = make_policy(Config().policy, spec.stacked(4))
    assert policy(obs[None], (), torch.ones(1, 2, dtype=torch.bool))[0].shape == (1, 2, 3)


def test_the_space_of_a_stack_is_gymnasiums() -> None:
    wrapped = FrameStackObservation(Corridor(0), 3).observation_space
    mine = spec_from_spaces(Corridor.observation_space, Corridor.action_space, action_mask=None, stats=(), env_id="x").stacked(3)  # fmt: skip
    theirs = spec_from_spaces(
        wrapped, Corridor.action_space, action_mask=None, stats=(), env_id="x"
    )
    for one, other in zip(mine.observation, theirs.observation, strict=True):
        assert (one.name, one.dtype, one.shape, one.kind, one.low, one.high, one.n, one.start) == (
            other.name, other.dtype, other.shape, other.kind, other.low, other.high, other.n, other.start,
        )  # fmt: skip
