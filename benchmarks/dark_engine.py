"""The engine, in turn with and without its clocks and its ledger of batches, for `sweeps.py telemetry`: what does measuring cost?

A quarter of a second this way, a quarter the other, within one run, as runs differ by more than what is looked for. With no line in the
ledger the supervisor has nothing to count either. Its log gets a line at every turn: {"rows": [with, without], "ns": [with, without]}.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from seedrl.engine.loop import Engine, main

WINDOW_BITS = 28  # of nanoseconds: 0.27 s


@torch.inference_mode()
def dark(self: Engine) -> bool:
    """`Engine.step` less its clocks and `log_batch`."""
    ready = self.wait()
    if ready is None:
        return False
    self._new_weights()
    self.policy_step.ingest(ready.rows)
    self._log_episodes(ready)
    self.policy_step.forward(ready.rows, ready.evaluation)
    self.answer(ready)
    self._count(ready)
    self.append(ready)
    return True


class Turns:
    """`Engine.step` in turns."""

    def __init__(self) -> None:
        self._lit = Engine.step
        self.rows, self.ns = [0, 0], [0, 0]
        self._last_ns, self._kind = time.monotonic_ns(), 0

    def step(self, engine: Engine) -> bool:
        before = engine.board.get("rows_acted")
        going = dark(engine) if self._kind else self._lit(engine)
        now = time.monotonic_ns()
        self.rows[self._kind] += engine.board.get("rows_acted") - before
        self.ns[self._kind] += now - self._last_ns
        self._last_ns, kind = now, now >> WINDOW_BITS & 1
        if kind != self._kind:
            self._kind = kind
            print(json.dumps({"rows": self.rows, "ns": self.ns}), flush=True)
        return going


if __name__ == "__main__":
    turns = Turns()
    Engine.step = lambda self: turns.step(self)  # type: ignore[method-assign]
    sys.exit(main())
