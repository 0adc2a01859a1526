from __future__ import annotations

import subprocess
import sys
import timeit

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seedrl.errors import CheckpointError, RunError
from seedrl.host import map_shared, memfd
from seedrl.store.weights import Publisher, Subscriber, WeightsLayout


class Mixed(nn.Module):
    """Tensors of every kind that a policy may hold."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)  # buffers, one of them 0-d int64
        self.gain = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 4))

    def randomise(self) -> None:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.copy_(torch.randint(0, 2, tensor.shape))


def shared(nbytes: int) -> memoryview:
    return memoryview(map_shared(memfd("test", nbytes), nbytes))


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_every_tensor_arrives_in_place_with_its_version() -> None:
    source, target = Mixed(), Mixed()
    layout = WeightsLayout.of(source)
    memory = shared(layout.nbytes)
    publisher, subscriber = Publisher(memory, layout), Subscriber(memory, WeightsLayout.of(target))
    addresses = [tensor.data_ptr() for tensor in target.state_dict().values()]
    for version in (0, 1, 7):
        source.randomise()
        publisher.publish(source, version)
        assert subscriber.poll(target) == version == subscriber.version == publisher.version
        assert same(source, target)
        assert subscriber.poll(target) is None
    assert [tensor.data_ptr() for tensor in target.state_dict().values()] == addresses
    assert all(parameter.requires_grad for parameter in target.parameters())


def test_nothing_is_news_before_the_first_publication() -> None:
    module = Mixed()
    layout = WeightsLayout.of(module)
    memory = shared(layout.nbytes)
    subscriber = Subscriber(memory, layout)
    assert subscriber.poll(module) is None and subscriber.newest_version == -1
    publisher = Publisher(memory, layout)
    assert subscriber.poll(module) is None
    publisher.publish(module, 3)
    assert subscriber.newest_version == 3 and subscriber.poll(module) == 3


def test_only_the_newest_of_several_versions_is_taken() -> None:
    source, target = Mixed(), Mixed()
    layout = WeightsLayout.of(source)
    memory = shared(layout.nbytes)
    publisher, subscriber = Publisher(memory, layout), Subscriber(memory, layout)
    for version in range(5):
        source.randomise()
        publisher.publish(source, version)
    assert subscriber.poll(target) == 4 and same(source, target)


def test_a_module_that_was_moved_to_other_storage_still_gets_the_weights() -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    layout = WeightsLayout.of(source)
    memory = shared(layout.nbytes)
    publisher, subscriber = Publisher(memory, layout), Subscriber(memory, layout)
    publisher.publish(source, 1)
    subscriber.poll(target)
    target.weight.data = torch.zeros(2, 2)
    publisher.publish(source, 2)
    assert subscriber.poll(target) == 2 and same(source, target)


def test_a_version_that_does_not_grow_is_refused() -> None:
    module = nn.Linear(2, 2)
    layout = WeightsLayout.of(module)
    memory = shared(layout.nbytes)
    publisher = Publisher(memory, layout)
    publisher.publish(module, 4)
    with pytest.raises(RunError, match="version 4 published after 4"):
        publisher.publish(module, 4)


def test_a_restarted_publisher_goes_on_after_one_that_died_in_the_middle() -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    layout = WeightsLayout.of(source)
    memory = shared(layout.nbytes)
    first = Publisher(memory, layout)
    first.publish(source, 4)
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}

    class Killed(Exception):
        pass

    class Unwritable:
        def copy_(self, source: Tensor) -> None:
            raise Killed

    first._buffers[0][-1] = Unwritable()  # type: ignore[call-overload]
    with torch.no_grad():
        source.weight.fill_(9.0)
        source.bias.fill_(9.0)
    with pytest.raises(Killed):
        first.publish(source, 5)
    subscriber = Subscriber(memory, layout)
    assert subscriber.poll(target) == 4
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    second = Publisher(memory, layout)
    assert second.version == 4
    second.publish(source, 6)
    assert subscriber.poll(target) == 6 and same(source, target)


def test_another_architecture_is_refused_by_name_and_shape() -> None:
    source, target = Mixed(5), Mixed(6)
    layout = WeightsLayout.of(source)
    memory = shared(max(layout.nbytes, WeightsLayout.of(target).nbytes))
    early = Subscriber(memory, WeightsLayout.of(target))
    Publisher(memory, layout).publish(source, 0)
    right = r"layer.bias: float32 \[6\] here, float32 \[5\] there, and 5 more"
    with pytest.raises(CheckpointError, match=right):
        Subscriber(memory, WeightsLayout.of(target))
    with pytest.raises(CheckpointError, match=right):
        early.poll(target)
    with pytest.raises(CheckpointError, match=right):
        Publisher(memory, WeightsLayout.of(target))


def test_a_name_that_only_one_side_has_is_named() -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    layout = WeightsLayout.of(source)
    memory = shared(layout.nbytes)
    Publisher(memory, layout).publish(source, 0)
    with pytest.raises(CheckpointError, match=r"bias: absent here, float32 \[2\] there"):
        Subscriber(memory, WeightsLayout.of(target))


def test_memory_that_is_too_small_is_refused() -> None:
    layout = WeightsLayout.of(nn.Linear(9, 9))
    with pytest.raises(RunError, match="bytes for weights that take"):
        Publisher(bytearray(layout.nbytes - 1), layout)


def test_every_tensor_lies_on_a_cache_line_and_the_control_words_on_their_own() -> None:
    layout = WeightsLayout.of(Mixed())
    assert all(offset % 64 == 0 for offset in layout.offsets)
    assert layout.buffer_bytes % 64 == 0
    assert list(layout.entries) == sorted(layout.entries)


def test_the_fingerprint_follows_names_dtypes_and_shapes_but_not_values() -> None:
    fingerprints = {
        WeightsLayout.of(module).fingerprint
        for module in (nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3).double())
    }
    assert len(fingerprints) == 3


_HAMMER = """
import sys, torch
from torch import nn
from seedrl.host import map_shared
from seedrl.store.weights import Publisher, WeightsLayout
torch.set_num_threads(1)
module = nn.Linear(64, 64)
layout = WeightsLayout.of(module)
publisher = Publisher(map_shared(int(sys.argv[1]), layout.nbytes), layout)
version = 0
while True:
    version += 1
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(version % 65536)
    publisher.publish(module, version)
"""


def test_no_copy_is_ever_torn_while_another_process_publishes_without_pause() -> None:
    target = nn.Linear(64, 64)
    layout = WeightsLayout.of(target)
    fd = memfd("test", layout.nbytes)
    memory = map_shared(fd, layout.nbytes)
    command = [sys.executable, "-c", _HAMMER, str(fd)]
    with subprocess.Popen(command, pass_fds=[fd]) as process:
        try:
            subscriber = Subscriber(memory, layout)
            taken, last = 0, 0
            while taken < 2000:
                assert process.poll() is None
                version = subscriber.poll(target)
                if version is None:
                    continue
                taken += 1
                assert version > last
                last = version
                for parameter in target.parameters():
                    values = parameter.detach().numpy()
                    assert (values == version % 65536).all(), np.unique(values)
        finally:
            process.kill()


def test_polling_without_news_costs_less_than_a_microsecond() -> None:
    module = nn.Linear(2, 2)
    layout = WeightsLayout.of(module)
    memory = shared(layout.nbytes)
    Publisher(memory, layout).publish(module, 0)
    subscriber = Subscriber(memory, layout)
    subscriber.poll(module)
    runs = timeit.repeat(lambda: subscriber.poll(module), number=2000, repeat=20)
    assert min(runs) / 2000 < 1e-6  # the fastest of many: a busy machine cannot make it faster
