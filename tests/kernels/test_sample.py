"""Philox against its published values; actions of kernel and twin the same to the bit, and distributed as the logits say."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csrc_free_kernels import build, sample
from csrc_free_kernels.philox import launch_random_words, random_words
from csrc_free_kernels.sample import launch_sample_discrete, sample_discrete
from seedrl.errors import ShapeError
from seedrl.policy.heads import Heads
from seedrl.spec import Leaf
from tests.kernels.compilers import compile_on_host

pytestmark = pytest.mark.usefixtures("on_host")
SEED = st.integers(0, 2**64 - 1)
# philox4x32 with 10 rounds in Random123's tests/kat_vectors: counter, key, what it gives
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("words", [random_words, launch_random_words])
@pytest.mark.parametrize(("counter", "key", "right"), KNOWN)
def test_philox_gives_the_published_words(words: build.Twin, counter: str, key: str, right: str) -> None:  # fmt: skip
    low, high = _words(key)
    got = words(torch.tensor([_words(counter)]), low | high << 32)
    assert got.tolist() == [_words(right)]


@settings(max_examples=30)
@given(count=st.integers(0, 300), key=SEED, seed=st.integers(0, 2**32 - 1))
def test_the_kernel_of_philox_equals_its_twin(count: int, key: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    counters = torch.randint(-(2**62), 2**62, (count, 4), generator=draw)
    assert torch.equal(launch_random_words(counters, key), random_words(counters, key))


def test_the_plain_logarithm_is_one() -> None:
    x = torch.cat([torch.logspace(-30, 30, 100_001), torch.linspace(0.5, 1.5, 100_001), 1 - 2.0 ** torch.arange(-24.0, -1)])  # fmt: skip
    right = x.double().log()
    assert ((sample._log(x) - right).abs() <= 1.2e-7 * right.abs() + 1e-10).all()


def test_the_noise_of_kernel_and_twin_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """All of its 2^23 values."""
    main = """extern "C" void noise(const u32 *words, i64 count, float *into) {
        for (i64 i = 0; i < count; i++) into[i] = gumbel(words[i]);
    }"""
    library = tmp_path / "noise.so"
    compile_on_host(sample.SOURCE, sample.SOURCE.text, library, ("-O1", "-shared", "-fPIC"), main)
    words = torch.arange(0, 2**32, 2**9)
    ours, given = torch.zeros(words.numel()), words.to(torch.uint32)
    ctypes.CDLL(str(library)).noise(build.pointer(given), ctypes.c_int64(words.numel()), build.pointer(ours))  # fmt: skip
    assert torch.equal(ours, sample._gumbel(words))
    right = -(-((words >> 9).double() + 0.5).mul(2.0**-23).log()).log()
    assert ((ours - right).abs() <= 2e-7 * right.abs().clamp_min(1)).all()


def _given(
    rows: int, branches: list[int], masked: bool, greedy: bool, seed: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """logits, mask, slots, step, greedy."""
    draw = torch.Generator().manual_seed(seed)
    width = sum(branches)
    # some logits equal, so that greedy rows have ties
    logits = (4 * torch.randn(rows, width, generator=draw)).round(decimals=1)
    mask = (torch.rand(rows, width, generator=draw) < 0.6).to(torch.uint8) if masked else None
    slots = torch.randint(-1, 10_000, (rows,), generator=draw)
    step = torch.randint(0, 2**40, (1,), generator=draw)
    return logits, mask, slots, step, torch.rand(rows, generator=draw) < 0.3 if greedy else None


BRANCHES = st.lists(st.integers(1, 19), min_size=1, max_size=6)


@settings(max_examples=80)
@given(rows=st.integers(0, 150), branches=BRANCHES, masked=st.booleans(), greedy=st.booleans(), key=SEED, seed=st.integers(0, 2**32 - 1))  # fmt: skip
def test_kernel_and_twin_draw_the_same_actions(
    rows: int, branches: list[int], masked: bool, greedy: bool, key: int, seed: int
) -> None:
    logits, mask, slots, step, best = _given(rows, branches, masked, greedy, seed)
    ours = launch_sample_discrete(logits, mask, branches, key, slots, step, best)
    theirs = sample_discrete(logits, mask, branches, key, slots, step, best)
    assert torch.equal(ours.actions, theirs.actions)
    torch.testing.assert_close(ours.log_prob, theirs.log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(rows=st.integers(1, 20), branches=BRANCHES, masked=st.booleans(), seed=st.integers(0, 2**32 - 1))  # fmt: skip
def test_log_probabilities_and_entropies_are_those_of_the_heads(
    rows: int, branches: list[int], masked: bool, seed: int
) -> None:
    logits, mask, slots, step, _ = _given(rows, branches, masked, False, seed)
    got = sample_discrete(logits, mask, branches, 1, slots, step)
    leaf = Leaf("action", "int64", (len(branches),), "multi_discrete", n=tuple(branches))
    log_prob, entropy = Heads([leaf]).evaluate(logits, {"action": got.actions}, mask)
    torch.testing.assert_close(got.log_prob, log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy, entropy, rtol=1e-5, atol=1e-5)


def test_actions_are_drawn_as_the_logits_say() -> None:
    """Chi squared of 200000 draws, of two branches and a mask, below what 1 in 10^6 exceeds."""
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, 0.5, -1.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 1], dtype=torch.uint8)
    rows = 200_000
    got = launch_sample_discrete(
        logits.expand(rows, 7).contiguous(), mask.expand(rows, 7).contiguous(), (4, 3), 7, torch.arange(rows), torch.tensor([5]),
    )  # fmt: skip
    for part, actions in zip((logits[:4], logits[[4, 6]]), got.actions.unbind(1), strict=True):
        seen = torch.bincount(actions, minlength=4).double()
        seen = seen[seen > 0] if part.numel() == 2 else seen[:4]
        expected = rows * torch.softmax(part.double(), 0)
        assert ((seen - expected) ** 2 / expected).sum() < {4: 30.7, 2: 23.9}[part.numel()]
    joint = torch.bincount(got.actions[:, 0] * 3 + got.actions[:, 1], minlength=12).double() / rows
    apart = torch.outer(torch.softmax(logits[:4], 0), torch.tensor([1, 0, math.exp(-1.5)]) / (1 + math.exp(-1.5)))  # fmt: skip
    assert (joint.view(4, 3) - apart).abs().max() < 0.005, "branches are independent"


def test_an_action_depends_on_its_slot_and_step_alone() -> None:
    logits, _, slots, step, _ = _given(64, [5, 5], False, False, 3)
    whole = sample_discrete(logits, None, (5, 5), 1, slots, step).actions
    order = torch.from_numpy(np.random.default_rng(0).permutation(64))[:40]
    assert torch.equal(sample_discrete(logits[order], None, (5, 5), 1, slots[order], step).actions, whole[order])  # fmt: skip
    for other in (
        sample_discrete(logits, None, (5, 5), 2, slots, step),
        sample_discrete(logits, None, (5, 5), 1, slots + 1, step),
        sample_discrete(logits, None, (5, 5), 1, slots, step + 1),
        sample_discrete(logits, None, (5, 5), 1, slots, step + 2**32),
    ):
        assert not torch.equal(other.actions, whole)


def test_a_branch_without_a_legal_action_is_uniform_and_one_with_a_nan_stays_inside() -> None:
    rows = 4000
    nothing = torch.zeros(rows, 4, dtype=torch.uint8)
    logits = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    given = (logits, nothing, (4,), 3, torch.arange(rows), torch.tensor([0]))
    for got in (launch_sample_discrete(*given), sample_discrete(*given)):
        assert torch.bincount(got.actions[:, 0], minlength=4).min() > 900
        torch.testing.assert_close(got.entropy, torch.full((rows,), math.log(4)))
    bad = torch.tensor([[1.0, math.nan, 2.0, 0.0], [math.nan, 1.0, 0.0, 0.0]])
    given = (bad, None, (4,), 3, torch.arange(2), torch.tensor([0]))
    for got in (launch_sample_discrete(*given), sample_discrete(*given)):
        assert got.actions.flatten().tolist() == [0, 0] and got.log_prob.isnan().all()


def test_arguments_that_do_not_fit_are_named() -> None:
    logits, _, slots, step, _ = _given(3, [2, 2], False, False, 0)
    mask = torch.ones(3, 4, dtype=torch.uint8)
    for draw in (sample_discrete, launch_sample_discrete):
        with pytest.raises(ShapeError, match=r"logits has the shape \[3, 4\]; it must be \[B, 5\]"):
            draw(logits, None, (2, 3), 0, slots, step)
        with pytest.raises(ShapeError, match="mask"):
            draw(logits, mask[:, :3], (2, 2), 0, slots, step)
        with pytest.raises(ShapeError, match="slots"):
            draw(logits, None, (2, 2), 0, slots[1:], step)
        with pytest.raises(ShapeError, match=r"branches is \[4, 0\]"):
            draw(logits, None, (4, 0), 0, slots, step)
    with pytest.raises(build.ArgumentError, match="mask is bool; it must be uint8"):
        launch_sample_discrete(logits, mask.bool(), (2, 2), 0, slots, step)
    many = [1] * (sample.MAX_BRANCHES + 1)
    with pytest.raises(build.ArgumentError, match="branches has 257 sizes"):
        launch_sample_discrete(torch.zeros(3, len(many)), None, many, 0, slots, step)
