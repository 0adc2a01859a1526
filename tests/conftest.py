"""Child processes of tests find the environments and tools of tests; one thread each, so that tests share a machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

_HERE = Path(__file__).resolve().parent
_FOLDERS = [str(_HERE.parent), str(_HERE / "tools"), str(_HERE / "cases")]
_GIVEN = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, *([_GIVEN] if _GIVEN else [])])
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)

# how fast examples come is the machine's affair, not the code's
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
