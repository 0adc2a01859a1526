"""The worker's process: what it imports, and how it behaves at a door that the test holds."""

from __future__ import annotations

import subprocess
import sys


def test_a_worker_imports_no_torch_pydantic_or_cupy() -> None:
    code = (
        "import sys, seedrl.worker.loop, seedrl.worker.video, seedrl.join\n"
        "heavy = {'torch', 'pydantic', 'cupy', 'tensorboard', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_seedrl_is_light() -> None:
    code = "import sys, seedrl; assert not {'torch', 'numpy', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
