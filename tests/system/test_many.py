"""Many workers, and many comings and goings: nothing is lost, nothing leaks."""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import psutil
import zmq

from crowd import Crowd, Member
from runs import Command, overrides, records, seedrl
from seedrl.transport import link
from seedrl.worker.envs import probe_spec

CONNECTIONS, ENVS, SECONDS = (
    int(part) for part in os.environ.get("SEEDRL_CROWD", "40x10x8").split("x")
)  # `make crowd`: 200x10x120
CYCLES = int(os.environ.get("SEEDRL_CYCLES", "60"))  # `make crowd`: 500


def _serve(tmp_path: Path, *more: object, prefix: list[str] | None = None) -> Command:
    arguments = (
        "serve",
        "cartpole",
        "run.max_seconds=6000",
        "evaluation.episodes=0",
        "run.stop_at_return=null",  # a slow machine gives it time to learn
        "run.log_every_s=0.2",
        "--listen",
        "tcp://127.0.0.1:0",
        "--run-dir",
        "run",
        *more,
    )
    return Command(*arguments, cwd=tmp_path, prefix=prefix)


def _address(server: Command) -> str:
    server.until("workers may attach: seedrl attach tcp")
    return re.search(r"attach (tcp://\S+)", server.text())[1]


def _resident(server: Command) -> dict[str, float]:
    names = ("seedrl.engine.loop", "seedrl.transport.gateway", "seedrl serve")
    return {name: psutil.Process(server.named(name)[0]).memory_info().rss / 2**20 for name in names}


def test_many_connections_at_ten_hertz_lose_no_step(tmp_path: Path, capsys) -> None:
    code, text = seedrl(
        "train",
        "cartpole",
        *overrides("CartPole-v1", {}, "evaluation.episodes=0", "run.max_seconds=1"),
        "--run-dir",
        "trained",
        cwd=tmp_path,
    )
    assert code == 0, text
    with _serve(
        tmp_path, "--checkpoint", "trained", f"batching.max_slots={CONNECTIONS * ENVS}"
    ) as server:
        crowd = Crowd(_address(server), CONNECTIONS, ENVS, 0.1)
        crowd.run(SECONDS * 0.3)
        before, counted = _resident(server), len(crowd.rtt_s)
        crowd.run(SECONDS * 0.7)
        after = _resident(server)
        rtt_ms = 1e3 * np.array(crowd.rtt_s[counted:])
        late, refused, steps = crowd.late, crowd.refused, crowd.steps
        crowd.close()
    with capsys.disabled():
        p50, p99, worst = np.percentile(rtt_ms, [50, 99, 100])
        print(f"\n{CONNECTIONS} connections x {ENVS} at 10 Hz, {SECONDS} s: {steps} group steps, round trip p50 {p50:.2f} p99 {p99:.2f} worst {worst:.2f} ms, resident MiB {before} -> {after}")  # fmt: skip
    assert not refused and not late
    assert steps >= 0.8 * CONNECTIONS * 10 * SECONDS * 0.9
    assert all(after[name] - before[name] < 6 for name in after)


def test_comings_and_goings_leak_no_seat_descriptor_or_memory(tmp_path: Path) -> None:
    spec = probe_spec("CartPole-v1", {}).to_dict()
    hello = {
        "groups": [2, 2],
        "spec": spec,
        "pid": os.getpid(),
        "host": "",
        "env": "CartPole-v1",
        "evaluation": False,
        "attempt": 0,
    }
    with _serve(tmp_path, "batching.max_slots=16") as server:
        address = _address(server)
        with (
            Command(
                "attach", address, "--env", "CartPole-v1", "--envs-per-worker", "4", cwd=tmp_path
            ),
            zmq.Context() as context,
        ):
            server.until("attached: 4 slots")
            counts, memory = [], []
            for number in range(CYCLES):
                local = link.connect(f"unix://{tmp_path}/run/door.sock", hello)
                for group in local.groups:
                    group.view.flags[...] = 0
                    group.view.first[...] = 1
                    group.publish()
                assert all(group.wait() for group in local.groups), server.text()
                member = Member(context, address, 3, number)
                while not member.seated:
                    kind, header, _ = member.hear()
                    assert kind == "welcome", header
                    member.seat(header)
                member.step()
                assert member.hear()[0] == "answer"
                member.leave()
                local.close()
                if number == CYCLES // 3 or number == CYCLES - 1:
                    time.sleep(0.5)
                    pids = [
                        server.named(name)[0]
                        for name in (
                            "seedrl.engine.loop",
                            "seedrl.transport.gateway",
                            "seedrl serve",
                        )
                    ]
                    counts.append([psutil.Process(pid).num_fds() for pid in pids])
                    memory.append([psutil.Process(pid).memory_info().rss / 2**20 for pid in pids])
            assert counts[0] == counts[1], counts
            assert all(end - begin < 8 for begin, end in zip(*memory, strict=True)), memory
            code, text = seedrl("ctl", "run", "status", "--json", cwd=tmp_path)
            assert code == 0 and '"free_slots": 12' in text, text
            steps = records(tmp_path / "run")[-1]["env_steps"]
            time.sleep(1.0)
            assert records(tmp_path / "run")[-1]["env_steps"] > steps, "the one that stayed goes on"


def test_few_descriptors_the_limit_is_raised_or_the_lack_named(tmp_path: Path) -> None:
    soft = f'ulimit -Sn 64; exec {os.sys.executable} -m seedrl "$@"'
    with _serve(
        tmp_path,
        "run.max_seconds=3",
        "batching.max_slots=128",
        prefix=["bash", "-c", soft, "seedrl"],
    ) as server:
        assert server.wait(60) == 0, server.text()
    shutil.rmtree(tmp_path / "run")
    hard = f'ulimit -n 64; exec {os.sys.executable} -m seedrl "$@"'
    with _serve(
        tmp_path, "batching.max_slots=128", prefix=["bash", "-c", hard, "seedrl"]
    ) as server:
        assert server.wait(60) == 2, server.text()
        assert (
            "ulimit -n" in server.text()
            and "64" in server.text()
            and len(server.text().strip().splitlines()) <= 3
        )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
