"""`deschedule_us` tells when the system runs something else on the engine's core, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seedrl.bench import Unlearnt, configuration
from seedrl.metrics import Histogram
from seedrl.supervise import probe

CORES = sorted(os.sched_getaffinity(0))
TRIES = 3  # what else runs on the machine counts too, and comes and goes


@pytest.mark.skipif(len(CORES) < 2, reason="needs a core for the engine and one for the others")
def test_a_busy_process_on_the_engines_core_is_seen(tmp_path: Path) -> None:
    config = configuration("S", "shm", "default", 1, 16, 0, [])

    def seen(run: Unlearnt) -> tuple[float, Histogram]:
        before, batches = run.board.histograms["deschedule_ns"].copy(), run.board.histograms["forward_ns"].copy()  # fmt: skip
        took_s = run.act(2.0)
        recent = run.board.histograms["deschedule_ns"].since(before)
        assert recent.count > 100 and batches.count
        return recent.total * 1e-9 / took_s, recent

    with Unlearnt(config, probe(config), tmp_path, num_slots=16) as run:
        run.begin()
        os.sched_setaffinity(run._engine.pid, {CORES[0]})
        for worker in run._workers:
            assert worker.child is not None
            os.sched_setaffinity(worker.child.pid, {CORES[1]})
        was = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {CORES[1]})  # this process counts
        try:
            run.act(0.5)
            spin = f"import os; os.sched_setaffinity(0, {{{CORES[0]}}})\nwhile True: pass"
            for _ in range(TRIES):
                alone, quiet = seen(run)
                busy = subprocess.Popen([sys.executable, "-c", spin])
                try:
                    crowded, loud = seen(run)
                finally:
                    busy.kill()
                    busy.wait()
                told = f"descheduled {alone:.1%} of the time alone, {crowded:.1%} beside a busy process; p50 {quiet.percentile(50):.0f} ns"
                print(told)
                if alone < 0.15 and crowded > 1.5 * alone and quiet.percentile(50) <= 5_000 and loud.max >= 1_000_000:  # fmt: skip
                    break
            else:
                pytest.fail(
                    f"in none of {TRIES} tries; at last {told}, longest {loud.max * 1e-6:.1f} ms"
                )
        finally:
            os.sched_setaffinity(0, was)
