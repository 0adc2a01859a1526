"""Kernels of the host's compiler, for steps that are used on the CPU as if it were a device."""

from tests.kernels.conftest import host_backend

__all__ = ["host_backend"]
