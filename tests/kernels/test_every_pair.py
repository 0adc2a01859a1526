"""Every pair once, of sizes that training has: on the CPU by g++, and on the GPU where there is one with CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from csrc_free_kernels import build, priority, q_targets, returns
from csrc_free_kernels.ingest import ingest_rows
from csrc_free_kernels.philox import random_words
from csrc_free_kernels.sample import sample_discrete
from csrc_free_kernels.state import gather_state, scatter_rows
from csrc_free_kernels.unroll import gather_frames, gather_rows
from tests.kernels.compilers import HostBackend, sources

R, B, N, K, L = 21, 96, 128, 140, 20
GPU = torch.device("cuda", 0)
COPIES = (gather_state, scatter_rows, ingest_rows, gather_rows, gather_frames)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def _leaves(*lead: int) -> list[Tensor]:
    frame = torch.randint(0, 256, (*lead, 12, 12)).to(torch.uint8)
    return [torch.randn(*lead, 128), torch.randn(*lead), torch.randint(0, 9, (*lead, 3)), frame, frame[..., 0, :3].clone()]  # fmt: skip


def _rows() -> dict[str, Any]:
    log_probs, rewards, values = -torch.rand(R, B), torch.randn(R, B), torch.randn(R, B)
    return {
        "behaviour_log_probs": log_probs, "target_log_probs": 2 * log_probs, "rewards": rewards, "values": values,
        "terminated": torch.rand(R, B) < 0.05, "first": torch.rand(R, B) < 0.05, "gamma": 0.99,
    }  # fmt: skip


def _priorities() -> tuple[Tensor, Tensor]:
    tree = priority.empty(5000, torch.device("cpu"))
    priority.set_priorities(*tree, torch.arange(5000), torch.rand(5000))
    return tree


def cases() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Each twin with arguments."""
    rows = _rows()
    slots, places = torch.randperm(N)[:B], torch.randperm(K * L)[:B]
    slots[-3:] = places[-5:] = -1
    index, first = torch.randint(0, K * L, (R + 3, B)), torch.rand(R + 3, B) < 0.1
    states, step = _leaves(N)[:2], torch.tensor([2**33 + 5])
    values = {name: leaf for name, leaf in rows.items() if not name.endswith("log_probs")}
    yield returns.vtrace_rows, rows
    discounts, bootstrap = torch.full((R, B), 0.9), torch.randn(B)
    yield returns.vtrace, {name: rows[name] for name in ("behaviour_log_probs", "target_log_probs", "rewards", "values")} | {"discounts": discounts, "bootstrap_value": bootstrap}  # fmt: skip
    yield returns.gae_rows, {**values, "lambda_": 0.95}
    yield q_targets.n_step, {"rewards": rows["rewards"], "bootstrap_q": rows["values"], "terminated": rows["terminated"], "ended": rows["first"], "gamma": 0.99, "n": 5}  # fmt: skip
    yield gather_state, {"store": states, "initial": _leaves(1)[:2], "slots": slots, "first": first[0], "into": _leaves(B)[:2]}  # fmt: skip
    yield scatter_rows, {"store": _leaves(K * L), "places": places, "columns": _leaves(B)}
    yield ingest_rows, {"slab": _leaves(N), "into": _leaves(B), "storage": _leaves(K * L), "slots": slots, "rows": places}  # fmt: skip
    yield gather_rows, {"storage": _leaves(K * L), "rows": index, "into": _leaves(R + 3, B)}
    for dtype in (torch.uint8, torch.bfloat16, torch.float16, torch.float32):
        into = torch.zeros(R, B, 4, 12, 12, dtype=dtype)
        yield gather_frames, {"frames": _leaves(K * L)[3], "rows": index, "first": first, "into": into, "scale": 1 / 255}  # fmt: skip
    yield random_words, {"counters": torch.randint(0, 2**32, (1000, 4)), "key": 2**63 + 1}
    logits, mask = 3 * torch.randn(B, 27), (torch.rand(B, 27) < 0.8).to(torch.uint8)
    yield sample_discrete, {"logits": logits, "mask": mask, "branches": (18, 4, 5), "seed": 11, "slots": slots, "step": step, "greedy": first[0]}  # fmt: skip
    tree = dict(zip(("priorities", "sums"), _priorities(), strict=True))
    yield priority.set_priorities, {**tree, "places": torch.randint(-1, 5001, (64,)), "values": torch.rand(64)}  # fmt: skip
    yield priority.draw_places, {**tree, "count": 8, "seed": 3, "step": step, "items": 4000, "beta": 0.6}  # fmt: skip


def _moved(given: Any, device: torch.device | None) -> Any:
    """Copies, on that device."""
    if isinstance(given, Tensor):
        return given.clone() if device is None else given.to(device, copy=True)
    if isinstance(given, list):
        return [_moved(leaf, device) for leaf in given]
    return given


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [t for part in found for t in _tensors(part)] if isinstance(found, list | tuple) else []


def _equal_to_the_twins(device: torch.device | None) -> None:
    torch.manual_seed(0)
    seen = set()
    for twin, given in cases():
        launcher = build._LAUNCHERS[twin]
        ours, theirs = ({name: _moved(x, to) for name, x in given.items()} for to in (device, None))
        if device is not None and "slab" in given:
            ours["slab"] = [leaf.pin_memory() for leaf in given["slab"]]
        got, right = launcher(**ours), twin(**theirs)
        both = (_tensors([found, *given.values()]) for found, given in ((got, ours), (right, theirs)))  # fmt: skip
        for a, b in zip(*both, strict=True):
            close = 0.0 if twin in COPIES or not a.is_floating_point() else 2e-5
            torch.testing.assert_close(a.cpu(), b, rtol=close, atol=close, msg=lambda text, twin=twin: f"{twin.__name__}: {text}")  # fmt: skip
        seen.add(twin)
    sources()
    assert seen == set(build._LAUNCHERS)


def test_every_launcher_equals_its_twin_on_the_cpu(
    on_host: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priority, "THREADS", 4)
    _equal_to_the_twins(None)


@needs_gpu
def test_every_launcher_equals_its_twin_on_the_gpu() -> None:
    if build._found()[0] is None:
        pytest.skip(f"there is a GPU, but: {'. '.join(build._found()[1])}")
    _equal_to_the_twins(GPU)


@needs_gpu
def test_a_graph_draws_anew_at_each_replay() -> None:
    if build._found()[0] is None:
        pytest.skip(f"there is a GPU, but: {'. '.join(build._found()[1])}")
    logits, slots = torch.zeros(B, 6, device=GPU), torch.arange(B, device=GPU)
    step = torch.zeros(1, dtype=torch.int64, device=GPU)
    draw = build.kernel_or_twin(sample_discrete, logits)
    assert draw is not sample_discrete
    draw(logits, None, (6,), 1, slots, step)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actions = draw(logits, None, (6,), 1, slots, step).actions
        step += 1
    for number in range(3):
        graph.replay()
        right = sample_discrete(logits.cpu(), None, (6,), 1, slots.cpu(), torch.tensor([number]))
        assert torch.equal(actions.cpu(), right.actions)
