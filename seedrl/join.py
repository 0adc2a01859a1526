"""`seedrl attach`: worker processes for a server that runs already. No torch, no pydantic: an environment's host needs neither."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from seedrl.children import Child, Children
from seedrl.errors import ConfigError
from seedrl.transport.wire import is_remote, load_key, make_keys
from seedrl.worker.envs import probe_spec

_GRACE_S = 2.0


def keys(folder: Path, worker: str, admin: str | None = None) -> int:
    """The `keys` command; returns its exit code."""
    name = worker if admin is None else admin
    for path in make_keys(folder, name, admin=admin is not None):
        print(path)
    use = "attach" if admin is None else "use seedrl ctl tcp://HOST:PORT"
    print(
        f"serve with --keys {folder}; copy {folder / name}.key to the {'workers' if admin is None else 'admin'}' host and {use} with --key {name}.key"
    )
    return 0


def attach(
    address: str, env: str, kwargs: dict[str, Any], workers: int, envs_per_worker: int, groups: int, check: str,
    on_nan: str, reconnect_s: float, key: Path | None = None, on_reconnect: str = "reset",
) -> int:  # fmt: skip
    """Starts the workers and waits for them. Returns the exit code: 0, that of the first that failed, or 130."""
    remote = is_remote(address)
    for flag, value, known in (("--check", check, ("strict", "warn", "off")), ("--on-nan", on_nan, ("error", "drop_episode")), ("--on-reconnect", on_reconnect, ("reset", "keep"))):  # fmt: skip
        if value not in known:
            raise ConfigError(
                what=f"'{value}' is none of {', '.join(known)}", where=flag, do=f"use {known[0]}"
            )
    if key is not None and not remote:
        raise ConfigError(what="a Unix socket needs no key", where="--key", do="leave it out")
    if key is not None:
        load_key(key)
    if envs_per_worker % groups:
        raise ConfigError(
            what=f"{envs_per_worker} environments do not divide into {groups} groups", where="--envs-per-worker, --groups",
            do="choose a multiple of --groups",
        )  # fmt: skip
    mask = probe_spec(
        env, kwargs
    ).action_mask  # and says at once what is wrong with the environment
    interrupted = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    children, selector, code = Children(), selectors.DefaultSelector(), 0
    selector.register(read, selectors.EVENT_READ)
    try:
        for _ in range(workers):
            child = children.start("worker", "seedrl.worker.loop", [
                "--address", address, "--env", env, "--env-kwargs", json.dumps(kwargs), "--envs", str(envs_per_worker),
                "--groups", str(groups), "--check", check, "--on-nan", on_nan, "--reconnect-s", str(reconnect_s), "--on-reconnect", on_reconnect,
                "--say", "--supervised", "--parent", str(os.getpid()), *(["--action-mask", mask] if mask else []),
                *(["--key", str(key)] if key else []),
            ])  # fmt: skip
            selector.register(child.pidfd, selectors.EVENT_READ, child)
        while children.living() and not interrupted:
            for ready, _ in selector.select():
                if isinstance(ready.data, Child):
                    selector.unregister(ready.fd)
                    code = code or abs(ready.data.process.wait())
                    children.bury(ready.data)
    finally:
        signal.set_wakeup_fd(-1)
        children.close(_GRACE_S)
    sys.stdout.flush()
    return 130 if interrupted else code
