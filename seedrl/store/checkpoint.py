"""Checkpoints on disk: written so that a crash at any instant leaves the one before whole.

    checkpoints/step-000000123/     named by the learner's updates; -1, -2 follow on a repeated one
        weights.safetensors         the policy's state_dict: a file of its own, for other programs
        training.safetensors        optimizer/PARAMETER.KEY, random/GENERATOR (uint8) and algorithm/TENSOR
        checkpoint.json             format | counters | optimizer (groups, class) | config | spec
                                    | files {name: {bytes, sha256}} | checksum of all the rest

All of it is written under a name that begins with a dot, synced, and then renamed: a directory of
the right name is whole unless the disk itself lost something, which the checksums tell. Nothing is
ever unpickled: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from seedrl.errors import CheckpointError
from seedrl.store.weights import differences, entries_of

if TYPE_CHECKING:
    from seedrl.config import Config
    from seedrl.spec import EnvSpec

FORMAT = 1
_WEIGHTS, _TRAINING, _ABOUT = "weights.safetensors", "training.safetensors", "checkpoint.json"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_UNFINISHED = ".unfinished-"
_MAX_SHOWN = 8


@dataclass
class Checkpoint:
    """All that a run needs to go on as if it had not stopped.

    weights: the policy's state_dict. optimizer, optimizer_about: of `optimizer_state_to_tensors`.
    counters: whole numbers; `updates`, also the schedule's position, names the directory.
    random: states of torch's generators, uint8. algorithm: tensors of its own, a target network, say. config, spec: plain values.
    path, skipped: set by `load_checkpoint`: where it lay; which newer ones were torn, and how.
    """

    weights: dict[str, Tensor]
    counters: dict[str, Any]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    optimizer_about: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Tensor] = field(default_factory=dict)
    algorithm: dict[str, Tensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    skipped: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        spec: EnvSpec,
        *,
        counters: dict[str, Any],
        algorithm: dict[str, Tensor] | None = None,
    ) -> Checkpoint:
        """A learner's state now, with torch's random state; it shares the live tensors' memory."""
        tensors, about = optimizer_state_to_tensors(optimizer)
        return Checkpoint(
            weights=policy.state_dict(),
            counters=counters,
            optimizer=tensors,
            optimizer_about=about,
            random={name: generator.get_state() for name, generator in _generators().items()},
            algorithm=algorithm or {},
            config=config.model_dump(mode="json"),
            spec=spec.to_dict(),
        )

    @property
    def updates(self) -> int:
        return int(self.counters["updates"])

    @property
    def policy_version(self) -> int:
        return int(self.counters["policy_version"])

    def load_into(self, policy: nn.Module, spec: EnvSpec) -> None:
        """Copies the weights into a policy of the same architecture, for the same environment.

        Raises: CheckpointError with the leaves, or the names and shapes, that differ (`here` is
        what was given, `there` the checkpoint); the policy is then untouched.
        """
        lines = spec.difference(type(spec).from_dict(self.spec))
        if lines:
            raise CheckpointError(
                what=_listed("checkpoint of another environment", lines),
                where=str(self.path or "checkpoint"),
                do="use the environment that it was trained with (env.id, env.kwargs)",
            )
        state = policy.state_dict()
        lines = differences(entries_of(state), entries_of(self.weights))
        if lines:
            raise CheckpointError(
                what=_listed("checkpoint of another architecture", lines),
                where=str(self.path or "checkpoint"),
                do="use the policy section of the run that wrote it (config.yaml in its directory)",
            )
        for name, tensor in state.items():
            tensor.copy_(self.weights[name])

    def load_algorithm(self, tensors: dict[str, Tensor]) -> None:
        """Copies what the algorithm kept into its tensors. Raises: CheckpointError with those that differ."""
        lines = differences(entries_of(tensors), entries_of(self.algorithm))
        if lines:
            raise CheckpointError(
                what=_listed("checkpoint of another algorithm", lines),
                where=str(self.path or "checkpoint"),
                do="use the algorithm section of the run that wrote it (config.yaml in its directory)",
            )
        for name, tensor in tensors.items():
            tensor.copy_(self.algorithm[name])

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Brings the optimiser and torch's random generators to where the run stopped.

        Raises: CheckpointError when the optimiser is of another class or has other parameters.
        """
        optimizer_state_from_tensors(optimizer, self.optimizer, self.optimizer_about)
        for name, generator in _generators().items():
            if name in self.random:  # not for a device that the first part of the run had not
                generator.set_state(self.random[name])


def save_checkpoint(directory: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes a checkpoint into `directory` (a run's checkpoints/); keeps the last `keep` there.

    Returns: where it lies. Once this returns it survives a crash of the machine.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"{_UNFINISHED}*"):  # of a process that was killed in the middle
        shutil.rmtree(left, ignore_errors=True)
    target = _free_name(directory, checkpoint.updates)
    unfinished = directory / f"{_UNFINISHED}{target.name}"
    unfinished.mkdir()
    training = {f"optimizer/{name}": tensor for name, tensor in checkpoint.optimizer.items()}
    training |= {f"random/{name}": tensor for name, tensor in checkpoint.random.items()}
    training |= {f"algorithm/{name}": tensor for name, tensor in checkpoint.algorithm.items()}
    files = {}
    for name, tensors in ((_WEIGHTS, checkpoint.weights), (_TRAINING, training)):
        content = safetensors.torch.save({key: _on_host(value) for key, value in tensors.items()})
        _write_synced(unfinished / name, content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    about = {
        "format": FORMAT,
        "counters": checkpoint.counters,
        "optimizer": checkpoint.optimizer_about,
        "config": checkpoint.config,
        "spec": checkpoint.spec,
        "files": files,
    }
    about = json.loads(json.dumps(about))  # as it will be read: the checksum is of plain values
    about["checksum"] = _checksum(about)
    _write_synced(unfinished / _ABOUT, json.dumps(about, indent=1).encode())
    _sync_directory(unfinished)
    os.rename(unfinished, target)
    _sync_directory(directory)
    for old in _by_age(directory)[: -max(1, keep)]:
        if old != target:
            gone = (
                directory / f"{_UNFINISHED}{old.name}"
            )  # half removed, it must not look like torn
            os.rename(old, gone)
            shutil.rmtree(gone, ignore_errors=True)
    return target


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Reads one checkpoint, or the newest whole one of a run directory or its checkpoints/.

    Raises: CheckpointError when there is none, when all are torn, or when `path` is something else.
    """
    path = Path(path)
    if path.is_file():
        _refuse_file(path)
    if (path / _ABOUT).exists() or _NAME.fullmatch(path.name):
        try:
            return _read(path)
        except _Torn as torn:
            raise CheckpointError(
                what=f"torn checkpoint: {torn}",
                where=str(path),
                do="name the run directory instead, to take the newest whole one",
            ) from None
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    skipped: list[str] = []
    for candidate in reversed(_by_age(directory)):
        try:
            checkpoint = _read(candidate)
        except _Torn as torn:
            skipped.append(f"{candidate.name}: {torn}")
        else:
            checkpoint.skipped = skipped
            return checkpoint
    if skipped:
        raise CheckpointError(
            what="every checkpoint is torn: " + "; ".join(skipped[:_MAX_SHOWN]),
            where=str(directory),
            do="start without --resume, or from a copy of the directory",
        )
    raise CheckpointError(
        what="no checkpoint here",
        where=str(path),
        do="name a run directory, its checkpoints/, or one checkpoint in it",
    )


def optimizer_state_to_tensors(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as named tensors ("PARAMETER.KEY") and plain values, without pickle."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            (tensors if isinstance(value, Tensor) else values)[f"{index}.{key}"] = value
    groups = [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}
        for group in state["param_groups"]
    ]
    return tensors, {"class": type(optimizer).__name__, "values": values, "groups": groups}


def optimizer_state_from_tensors(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> None:
    """Brings a new optimiser over the same parameters to the saved state.

    Raises: CheckpointError when it is of another class, or its parameters are not those saved.
    """
    now = optimizer.state_dict()
    name = type(optimizer).__name__
    if about.get("class") != name:
        raise CheckpointError(
            what=f"the checkpoint's optimiser is {about.get('class')}, not {name}",
            where="learner.optimizer",
            do="resume with the optimiser that the run began with",
        )
    saved_groups = [list(group["params"]) for group in about["groups"]]
    if saved_groups != [list(group["params"]) for group in now["param_groups"]]:
        raise CheckpointError(
            what="the checkpoint's optimiser has other parameters",
            do="use the policy section of the run that wrote it",
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, value in (*tensors.items(), *about["values"].items()):
        index, _, key = name.partition(".")
        shape = parameters[int(index)].shape
        if isinstance(value, Tensor) and value.ndim and value.shape != shape:
            raise CheckpointError(
                what=f"optimiser state {name} is {list(value.shape)}, its parameter {list(shape)}",
                do="use the policy section of the run that wrote it",
            )
        state.setdefault(int(index), {})[key] = value
    groups = []
    for saved, group in zip(about["groups"], now["param_groups"], strict=True):
        restored = {}
        for key, value in saved.items():
            model = group.get(
                key
            )  # JSON knows no tuple and no tensor; the optimiser's own value does
            if isinstance(model, tuple):
                value = tuple(value)
            elif isinstance(model, Tensor):
                value = torch.as_tensor(value, dtype=model.dtype, device=model.device)
            restored[key] = value
        groups.append(restored)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


class _Torn(Exception):
    """A checkpoint that is not whole; the message says in what."""


def _read(path: Path) -> Checkpoint:
    try:
        about = json.loads((path / _ABOUT).read_bytes())
    except FileNotFoundError:
        raise _Torn(f"{_ABOUT} is missing") from None
    except ValueError:
        raise _Torn(f"{_ABOUT} is no JSON") from None
    if not isinstance(about, dict) or about.pop("checksum", None) != _checksum(about):
        raise _Torn(f"{_ABOUT} does not match its checksum")
    if about["format"] != FORMAT:
        raise CheckpointError(
            what=f"checkpoint of format {about['format']}; this version reads {FORMAT}",
            where=str(path),
            do="load it with the version of seedrl that wrote it",
        )
    weights, training = (
        _read_tensors(path / name, about["files"][name]) for name in (_WEIGHTS, _TRAINING)
    )
    optimizer, random, algorithm = (
        {name.removeprefix(prefix): t for name, t in training.items() if name.startswith(prefix)}
        for prefix in ("optimizer/", "random/", "algorithm/")
    )
    return Checkpoint(
        weights=weights,
        counters=about["counters"],
        optimizer=optimizer,
        optimizer_about=about["optimizer"],
        random=random,
        algorithm=algorithm,
        config=about["config"],
        spec=about["spec"],
        path=path,
    )


def _read_tensors(path: Path, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _Torn(f"{path.name} is missing") from None
    if len(content) != expected["bytes"]:
        raise _Torn(f"{path.name} has {len(content)} of {expected['bytes']} bytes")
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise _Torn(f"{path.name} does not match its checksum")
    try:
        return safetensors.torch.load(content)
    except SafetensorError as error:
        raise _Torn(f"{path.name} is no safetensors file ({error})") from None


def _refuse_file(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(2)
    if start in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise CheckpointError(
            what="this is a pickle, which may run any code when loaded; seedrl never loads one",
            where=str(path),
            do="name a checkpoint directory, or save the tensors as safetensors",
        )
    raise CheckpointError(
        what="this is a file; a checkpoint is a directory",
        where=str(path),
        do="name a run directory, its checkpoints/, or one checkpoint in it",
    )


def _by_age(directory: Path) -> list[Path]:
    """The checkpoints of a directory, whole or not, oldest first."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found)]


def _free_name(directory: Path, updates: int) -> Path:
    path, repeated = directory / f"step-{updates:09d}", 0
    while path.exists():
        repeated += 1
        path = directory / f"step-{updates:09d}-{repeated}"
    return path


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(about: Mapping[str, Any]) -> str:
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _on_host(tensor: Tensor) -> Tensor:
    # A copy, as safetensors refuses tensors that share memory (tied weights).
    return tensor.detach().to("cpu", copy=True).contiguous()


def _generators() -> dict[str, torch.Generator]:
    generators = {"cpu": torch.default_generator}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators |= {f"cuda:{i}": g for i, g in enumerate(torch.cuda.default_generators)}
    return generators


def _listed(what: str, lines: list[str]) -> str:
    shown = "; ".join(lines[:_MAX_SHOWN])
    more = f"; and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
    return f"{what}: {shown}{more}"
