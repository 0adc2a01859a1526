"""Workers over the network: the same truths, through a network that loses, doubles, delays and cuts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness import Harness
from ledger import Ledger, config_of
from proxy import Proxy
from seedrl.listen import Listen

SECONDS = float(os.environ.get("SEEDRL_PROXY_SECONDS", "12"))  # `make truths` runs two minutes
ROWS = int(os.environ.get("SEEDRL_TRUTH_ROWS", "60000")) // 3


def _echo(tmp_path: Path, **sections):
    (tmp_path / "ids").mkdir()
    env = {
        "id": "system_envs:Echo",
        "kwargs": {"folder": str(tmp_path / "ids"), "lengths": [1, 3, 7, 20, 33]},
    }
    return config_of(env, "answer", {"num": 2, "envs_per_worker": 16, "groups": 2}, batching={"min_batch": 8, "max_wait_us": 300}, **sections)  # fmt: skip


def _balances(acted: dict[str, int]) -> bool:
    return (
        acted["acted"]
        == acted["stored"] + acted["worker_died"] + acted["detached"] + acted["shutdown"]
    )


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_case_1_over_the_network_no_mixing(tmp_path: Path, scheme: str) -> None:
    listen = Listen(f"ipc://{tmp_path}/gate" if scheme == "ipc" else "tcp://127.0.0.1:0")
    with Harness(_echo(tmp_path), tmp_path, num_slots=64, listen=listen) as run:
        run.start()
        run.begin_remote(run.listener.address, 2)
        ledger = Ledger(20)
        while ledger.rows < ROWS:
            ledger.check(run.sample(8))
        acted, _ = run.finish()
    assert _balances(acted) and acted["worker_died"] == acted["detached"] == 0


def test_a_bad_network_costs_time_and_no_row(tmp_path: Path) -> None:
    config = _echo(tmp_path, gateway={"heartbeat_s": 0.1, "lease_s": 20})
    with Harness(config, tmp_path, num_slots=64, listen=Listen("tcp://127.0.0.1:0")) as run:
        run.start()
        with Proxy(
            run.listener.address, hush_every_s=SECONDS / 3, hush_s=1.0, cut_every_s=SECONDS / 20
        ) as proxy:
            run.begin_remote(proxy.address, 2)
            ledger, end = Ledger(20), time.monotonic() + SECONDS
            while time.monotonic() < end:
                ledger.check(run.sample(8))
            acted, _ = run.finish()
            while (batch := run.reader.sample(1, timeout_s=0)) is not None:
                ledger.check(batch)
    assert all(proxy.counts[what] > 3 for what in ("dropped", "doubled", "delayed", "cut")), (
        proxy.counts
    )
    assert proxy.counts["hushed"] > 0 and ledger.rows > 5000
    # every lease outlived all of it: no episode was broken off, and no row lost
    assert _balances(acted) and acted["worker_died"] == acted["detached"] == 0
    assert acted["stored"] == ledger.rows
    assert run.board.get("interrupted_episodes") == 0
