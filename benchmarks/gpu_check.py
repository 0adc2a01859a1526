"""What only a GPU can show: the whole system with engine, store and learner on it. `make gpu-check`; some 6 minutes.

Needs torch with CUDA and the run-time dependencies (numpy, gymnasium, pydantic, ruamel.yaml, msgpack, safetensors, tensorboard, typer,
rich, psutil); pytest too for the truths. Without a GPU it says so and exits with 0. Ends with one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

from csrc_free_kernels.build import run
from csrc_free_kernels.unroll import gather_rows
from seedrl.config import load_config
from seedrl.replay import ReplayStore
from seedrl.run import fit
from seedrl.store.memory import finish

RUNS = {
    "cartpole": ["run.max_seconds=60", "engine.device=cuda", "learner.device=cuda"],
    "rows on the cpu": ["run.max_seconds=60", "engine.device=cuda", "learner.device=cuda", "replay.device=cpu"],
    "learner on the cpu": ["run.max_seconds=60", "engine.device=cuda"],
    "lstm": ["run.max_seconds=60", "engine.device=cuda", "learner.device=cuda", "policy.core=lstm"],
}  # fmt: skip
ENOUGH = {"cartpole": 475.0, "rows on the cpu": 475.0, "learner on the cpu": 475.0, "lstm": 200.0}


def train(name: str, folder: Path) -> dict[str, object]:
    begin = time.monotonic()
    result = fit(load_config("cartpole", RUNS[name]), run_dir=folder / name.replace(" ", "-"))
    assert result.evaluation is not None
    mean = float(result.evaluation.returns.mean())
    return {
        "mean_return": mean, "passed": mean >= ENOUGH[name], "seconds": round(time.monotonic() - begin, 1),
        "accounts": result.accounts,
    }  # fmt: skip


def speeds(device: torch.device, small: bool = False) -> dict[str, object]:
    """Figures of the parts: GB/s of copying, of gathering unrolls and of a whole draw, and the engine's time for one batch by stage.

    Args: small: sizes for a trial on the CPU.
    """
    from engine import measure

    rows, columns = (2_000, 8) if small else (200_000, 256)
    frames = torch.randint(0, 255, (rows, 84, 84), dtype=torch.uint8, device=device)
    index = torch.randint(0, rows, (41, columns), device=device)
    into = torch.empty(41, columns, 84, 84, dtype=torch.uint8, device=device)
    moved = into.numel()
    found: dict[str, object] = {
        "copy_gb_per_s": round(moved / _seconds(lambda: into.copy_(frames[: 41 * columns].view_as(into)), device) * 1e-9, 1),
        "gather_gb_per_s": round(moved / _seconds(lambda: run(gather_rows, [frames], index, [into]), device) * 1e-9, 1),
    }  # fmt: skip
    store = ReplayStore(
        spaces.Box(0, 255, (84, 84), np.uint8), spaces.Discrete(6), num_slots=32, capacity=rows, unroll_length=40, batch_size=columns, device=device,
    )  # fmt: skip
    frame = torch.zeros(32, 84, 84, dtype=torch.uint8)
    for _ in range(rows // 32):
        store.append(obs=frame, action=0, reward=0.0, terminated=False, truncated=False, first=False)  # fmt: skip
    found["draw_gb_per_s"] = round(moved / _seconds(store.sample, device) * 1e-9, 1)
    for policy, groups, envs in (("mlp", 4, 32), ("mlp", 4, 128), ("lstm", 4, 32), ("cnn", 4, 32)):
        took = measure(policy, groups, 2 if small else envs, 20 if small else 500, str(device))
        found[f"engine_{policy}_{took['rows']}"] = took
    return {"passed": None, **found}


def _seconds(call: Callable[[], object], device: torch.device, times: int = 20) -> float:
    for _ in range(3):
        call()
    finish(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    finish(device)
    return (time.perf_counter() - begin) / times


def truths() -> dict[str, object]:
    """Off-by-one truths of tests/system, with every row on the device."""
    if importlib.util.find_spec("pytest") is None:
        return {"passed": None, "skipped": "no pytest here"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/system/test_truths.py",
        "tests/engine/test_step.py",
        "tests/kernels/test_every_pair.py",
    ]
    ran = subprocess.run(
        command, env={**os.environ, "SEEDRL_DEVICE": "cuda"}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    return {"passed": ran.returncode == 0, "last_lines": ran.stdout.splitlines()[-15:]}


def main() -> int:
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": f"torch {torch.__version__} sees no CUDA device"}))
        return 0
    found: dict[str, object] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            print(f"gpu-check: {name} ...", file=sys.stderr, flush=True)
            try:
                found[name] = train(name, Path(folder))
            except Exception as error:  # one part's failure must not hide the others'
                found[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
    print("gpu-check: speeds ...", file=sys.stderr, flush=True)
    try:
        found["speeds"] = speeds(torch.device("cuda", 0))
    except Exception as error:
        found["speeds"] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
    print("gpu-check: truths ...", file=sys.stderr, flush=True)
    found["truths"] = truths()
    print(json.dumps(found))
    parts = [part for part in found.values() if isinstance(part, dict)]
    return int(any(part["passed"] is False for part in parts))


if __name__ == "__main__":
    sys.exit(main())
