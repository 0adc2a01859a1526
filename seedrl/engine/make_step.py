"""Which step acts, by the configuration and the device; and what is said when there is no room for it, or it does not compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from csrc_free_kernels.build import kernels_on
from seedrl.config import Config
from seedrl.engine.device_step import DeviceStep
from seedrl.engine.step import PolicyStep, state_leaves
from seedrl.errors import ConfigError, RunError
from seedrl.spec import RowSpecs
from seedrl.store.blocks import BlockStorage
from seedrl.transport.slab import Slab

if TYPE_CHECKING:
    from seedrl.policy.base import Heads, Policy

_CPU = torch.device("cpu")
_PORTABLE, _MAPPED = 1, 2  # of cudaHostRegister


def make_step(
    config: Config, policy: Policy, heads: Heads, slab: Slab, device: torch.device, storage: BlockStorage | None,
    greedy: bool, extras: RowSpecs,
) -> PolicyStep | DeviceStep:  # fmt: skip
    """A GPU's own where kernels can be had and rows are stored there; else the one that copies leaf by leaf.

    Args: policy: on the device. storage: of the rows, None: nothing is stored. extras: what is stored beside them.
    Raises: ConfigError when it does not compile, is no graph, or finds no room; RunError when the slab cannot be mapped.
    """
    try:
        step = _make_step(config, policy, heads, slab, device, storage, greedy, extras)
        if config.engine.compile and isinstance(step, PolicyStep):
            _warm_up(step, slab.layout.num_slots)
    except torch.OutOfMemoryError as error:
        raise _no_room(device, policy, slab.layout.num_slots, storage) from error
    except RuntimeError as error:
        if not config.engine.compile:
            raise
        raise ConfigError(
            what=f"the policy does not run when torch.compile compiles it: {error}", where="engine.compile, policy.name", do="set engine.compile=false",
        ) from error  # fmt: skip
    return step


def _make_step(
    config: Config, policy: Policy, heads: Heads, slab: Slab, device: torch.device, storage: BlockStorage | None,
    greedy: bool, extras: RowSpecs,
) -> PolicyStep | DeviceStep:  # fmt: skip
    section, seed, slots = config.engine, config.run.seed, slab.layout.num_slots
    if section.compile:  # for any size of batch: torch's limit on compiled ones is low
        policy.compile(dynamic=True)
    near = storage is None or storage.device == device
    if device.type == "cuda" and near and kernels_on(device):
        _map_slab(slab)
        return DeviceStep(
            policy, heads, slab, slots, seed, greedy, device, storage, extras=extras, precision=section.precision,
            buckets=config.batching.buckets, graphs=section.graphs, frame_stack=config.env.frame_stack,
        )  # fmt: skip
    return PolicyStep(
        policy, heads, slab, slots, seed, greedy, device, _CPU if storage is None else storage.device, extras=extras,
        precision=section.precision, compiled=section.compile, frame_stack=config.env.frame_stack,
    )  # fmt: skip


def _warm_up(step: PolicyStep, max_rows: int) -> None:
    """Compiles now, not while environments wait."""
    with torch.inference_mode():
        for size in {
            max_rows,
            max(1, max_rows - 1),
            1,
        }:  # all, some and one are what torch tells apart
            step.ingest(np.arange(size))
            step.forward(np.arange(size), None)


def _no_room(
    device: torch.device, policy: Policy, num_slots: int, storage: BlockStorage | None
) -> ConfigError:
    """What was wanted, and how much of replay would leave room for it."""
    mib = 1 << 20
    state = num_slots * sum(leaf.nbytes for leaf in state_leaves(policy)) // mib
    blocks = {} if storage is None else storage.layout.bytes_by_leaf()
    rows = 0 if storage is None else storage.layout.num_rows
    by_leaf = ", ".join(f"{name} {nbytes // mib}" for name, nbytes in blocks.items())
    return ConfigError(
        what=f"{device} has no room left for the policy's step: states of {num_slots} slots take {state} MiB, replay {sum(blocks.values()) // mib} "
        f"MiB for {rows} rows ({by_leaf})",
        where="replay.capacity, batching.max_slots",
        do=f"set replay.capacity to {int(0.8 * rows)} rows or fewer, batching.buckets to fewer sizes, or replay.device=cpu",
    )  # fmt: skip


def _map_slab(slab: Slab) -> None:
    """Lets the device read the slab where it lies. Raises: RunError when the driver will not."""
    code = int(torch.cuda.cudart().cudaHostRegister(slab.control.ctypes.data, slab.layout.nbytes, _PORTABLE | _MAPPED))  # type: ignore[no-untyped-call]  # fmt: skip
    if code:
        raise RunError(
            what=f"cudaHostRegister refused the {slab.layout.nbytes} bytes of observations: error {code}",
            where="engine.device", do="raise the limit of locked memory (ulimit -l), or set run.kernels=off",
        )  # fmt: skip
