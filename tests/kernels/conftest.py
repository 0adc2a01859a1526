"""Kernels that tests launch run on the CPU: each source is compiled once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from csrc_free_kernels import build
from tests.kernels.compilers import HostBackend


@pytest.fixture(scope="session")
def host_backend(tmp_path_factory: pytest.TempPathFactory) -> HostBackend:
    return HostBackend(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def on_host(host_backend: HostBackend) -> Iterator[HostBackend]:
    """Launchers launch on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "backend", lambda: host_backend)
        yield host_backend
