import mmap

import numpy as np
from gymnasium import spaces

from seedrl import host
from seedrl.spec import spec_from_spaces
from seedrl.transport.slab import ALIGN_BYTES, Slab, SlabLayout

SPACE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (3, 5), np.uint8),
        "flag": spaces.MultiBinary(3),
        "number": spaces.Box(-1, 1, (), np.float64),
    }
)
SPEC = spec_from_spaces(
    SPACE, spaces.Discrete(4), action_mask=None, stats=("score",), env_id="test"
)


def test_arrays_begin_on_their_own_pair_of_cache_lines_and_do_not_overlap() -> None:
    layout = SlabLayout.of(SPEC, 7, 3)
    end = 0
    for _, dtype, shape, at in layout.arrays:
        assert at % ALIGN_BYTES == 0 and at >= end
        end = at + int(np.prod(shape)) * np.dtype(dtype).itemsize
    assert layout.nbytes >= end


def test_the_control_words_of_two_parties_never_share_a_line() -> None:
    layout = SlabLayout.of(SPEC, 7, 3)
    slab = Slab(host.map_shared(host.memfd("slab", layout.nbytes), layout.nbytes), layout)
    for array in (slab.asked, slab.answered, slab.lease, slab.drained, slab.control):
        assert array.strides[0] == ALIGN_BYTES
        assert array.__array_interface__["data"][0] % ALIGN_BYTES == 0


def test_a_group_sees_its_own_rows_and_no_others_in_the_dtypes_of_the_spaces() -> None:
    layout = SlabLayout.of(SPEC, 7, 3)
    slab = Slab(host.map_shared(host.memfd("slab", layout.nbytes), layout.nbytes), layout)
    view = slab.group_view(2, 3)
    view.obs["observation.camera"][:] = 9
    view.first[:] = 1
    view.reward[:] = 2.5
    assert (
        slab.obs["observation.camera"].dtype == np.uint8
        and slab.obs["observation.number"].dtype == np.float64
    )
    assert (slab.obs["observation.camera"][2:5] == 9).all()
    assert (
        not slab.obs["observation.camera"][:2].any()
        and not slab.obs["observation.camera"][5:].any()
    )
    assert slab.flags[2:5].tolist() == [[0, 0, 1, 0]] * 3
    assert slab.reward.tolist() == [0, 0, 2.5, 2.5, 2.5, 0, 0]
    assert view.mask is None and view.stats.shape == (3, 1)


def test_the_memory_cannot_be_shrunk_under_the_engine() -> None:
    import os

    import pytest

    layout = SlabLayout.of(SPEC, 7, 3)
    fd = host.memfd("slab", layout.nbytes)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert isinstance(host.map_shared(fd, layout.nbytes), mmap.mmap)
