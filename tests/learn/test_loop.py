"""A request to stop, at any moment: what is half done is finished, what may take long is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from seedrl.learn.loop import Learner, _Stop
from seedrl.transport import doorbell


class Reader:
    """A replay reader to which SIGTERM comes at a given moment of `sample`."""

    def __init__(self, moment: str) -> None:
        self.moment, self.half_taken, self.bell = moment, False, doorbell.make()
        self.wait = doorbell.wait

    def sample(self, batch_size: int, timeout_s: float) -> None:
        if self.moment == "waiting":
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        elif self.moment == "before the wait":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.moment != "taking":
            self.wait(self.bell, 5e6)
            raise AssertionError("the wait went on")
        self.half_taken = True
        os.kill(os.getpid(), signal.SIGTERM)
        self.half_taken = False


@pytest.fixture
def _handlers() -> Iterator[None]:
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("moment", ["taking", "waiting", "before the wait"])
def test_a_stop_never_leaves_rows_half_taken_and_never_waits_for_data(
    _handlers: None, moment: str
) -> None:
    learner = object.__new__(Learner)
    learner.config = SimpleNamespace(learner=SimpleNamespace(batch_size=8))
    learner._critical = learner._stop_wanted = False
    learner.reader = reader = Reader(moment)
    reader.wait = learner._wait_for_data
    signal.signal(signal.SIGTERM, learner._on_sigterm)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(_Stop):
        learner.update()
    assert not reader.half_taken
    os.close(reader.bell)
