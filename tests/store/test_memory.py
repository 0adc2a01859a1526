import ctypes

import pytest
import torch

from seedrl.errors import ConfigError, RunError
from seedrl.store import memory

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has it")


def test_two_mappings_of_the_cpus_memory_are_one() -> None:
    cpu = torch.device("cpu")
    ours, shared = memory.allocate(cpu, 256)
    theirs = memory.open_shared(cpu, 256, shared)
    assert ours.dtype == torch.uint8 and ours.shape == (256,) and not ours.any()
    ours[3] = 7
    assert int(theirs[3]) == 7 and shared.handle is None
    memory.finish(cpu)


@NO_GPU
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no device '{name}'.*none") as caught:
        memory.require_device(name, "run.yaml:3 engine.device")
    assert caught.value.where == "run.yaml:3 engine.device"


class FakeDriver:
    """The driver's answers, without one."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cuMemAlloc_v2(self, *_: object) -> int:
        return self.code

    def cuGetErrorString(self, code: int, text: object) -> int:
        text._obj.value = b"out of memory"
        return 0


def test_what_the_driver_refuses_is_said_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(2))
    with pytest.raises(RunError, match=r"cuMemAlloc_v2 failed: out of memory \(2\)"):
        memory._call("cuMemAlloc_v2", None, 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(0))
    memory._call("cuMemAlloc_v2", None, 1)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RunError, match=r"libcuda\.so\.1"):
        memory._call("cuMemAlloc_v2", None, 1)
