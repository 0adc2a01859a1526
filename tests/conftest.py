"""Child processes of tests find the environments and tools of tests; one thread each, so that tests share a machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_FOLDERS = [str(_HERE.parent), str(_HERE / "tools"), str(_HERE / "cases")]
_GIVEN = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, *([_GIVEN] if _GIVEN else [])])
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)
