"""What only a GPU can show: the whole system with engine, store and learner on it. `make gpu-check`; some 4 minutes.

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
from pathlib import Path

import torch

from seedrl.config import load_config
from seedrl.run import fit

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
    print("gpu-check: truths ...", file=sys.stderr, flush=True)
    found["truths"] = truths()
    print(json.dumps(found))
    parts = [part for part in found.values() if isinstance(part, dict)]
    return int(any(part["passed"] is False for part in parts))


if __name__ == "__main__":
    sys.exit(main())
