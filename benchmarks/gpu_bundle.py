"""Wheels that `make gpu-check` needs beside the host's own torch, NumPy and CuPy, into a folder: python benchmarks/gpu_bundle.py FOLDER [--python 3.12].

They are those of this environment, at its versions, for Linux on x86-64; nothing of CUDA is among them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOTS = (
    "gymnasium", "typer", "msgpack", "pyzmq", "pydantic", "annotated-types", "rich", "ruamel.yaml", "safetensors", "tensorboard", "uvloop",
    "prometheus-client", "psutil", "pytest", "hypothesis",
)  # fmt: skip
OF_THE_HOST = {"torch", "numpy"}


def closure(roots: tuple[str, ...]) -> dict[str, str]:
    """name -> version of all that the roots need, themselves included, and the host does not have."""
    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop().lower()
        if name in found or name in OF_THE_HOST:
            continue
        try:
            about = distribution(name)
        except PackageNotFoundError:  # for another system or an older Python
            continue
        found[name] = about.version
        for text in about.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="of the host"
    )
    given = parser.parse_args()
    pins = [f"{name}=={version}" for name, version in sorted(closure(ROOTS).items())]
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", "_2_17", "_2_28")]
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"--python-version={given.python}", *platforms,
         "-d", str(given.folder), *pins], check=False,
    )  # fmt: skip
    if ran.returncode:
        return ran.returncode
    size = sum(wheel.stat().st_size for wheel in given.folder.glob("*.whl"))
    print(f"{len(pins)} wheels for Python {given.python}, {size / (1 << 20):.1f} MiB, in {given.folder}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
