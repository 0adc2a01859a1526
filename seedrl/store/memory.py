"""The store's memory on a device, shared between engine and learner without a copy.

On the CPU it is a sealed memfd (a descriptor is handed over). On a GPU it is one allocation of the CUDA driver, handed over as the
64 bytes of its IPC handle; it lives as long as the process that allocated it, and nothing has a name in a file system.
(torch's own sharing of CUDA tensors counts references in named files of /dev/shm, which a killed process leaves there.)
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from seedrl import host
from seedrl.errors import ConfigError, RunError

_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True)
class Shared:
    """What another process needs to reach the memory: a descriptor (CPU), or an IPC handle (CUDA)."""

    fd: int | None
    handle: bytes | None


def require_device(name: str, where: str) -> torch.device:
    """The device of that name ("cpu", "cuda", "cuda:1"), with its index.

    Raises: ConfigError when this machine, or this torch, has none such.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        has = f"{count} of them" if count else "none"
        built = "" if torch.backends.cuda.is_built() else "; this torch is built without CUDA"
        raise ConfigError(
            what=f"there is no device '{name}': torch {torch.__version__} sees {has}{built}",
            where=where,
            do="use cpu, or install a torch for this machine's driver (nvidia-smi shows it)",
        )
    return torch.device("cuda", index)


def require_room(device: torch.device, nbytes: int, rows: int) -> None:
    """Raises: ConfigError when so many bytes, of a store of `rows` rows, are more than the device has: with how many would fit."""
    has = host.memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if nbytes > has:
        gib = 1 << 30
        raise ConfigError(
            what=f"replay takes {nbytes / gib:.1f} GiB for {rows} rows, and {device} has {has / gib:.1f} GiB",
            where="replay.capacity", do=f"set at most {int(0.9 * has / nbytes * rows)} rows, or lower learner.batch_size",
        )  # fmt: skip


def allocate(device: torch.device, nbytes: int) -> tuple[Tensor, Shared]:
    """`nbytes` zero bytes on the device, as uint8 [nbytes], and how another process reaches them.

    Raises: RunError when the device has not so many.
    """
    if device.type == "cpu":
        fd = host.memfd("replay", nbytes)
        return open_shared(device, nbytes, Shared(fd, None)), Shared(fd, None)
    torch.zeros(
        1, device=device
    )  # makes the device's primary context, which the driver's calls need
    with torch.cuda.device(device):
        pointer, handle = ctypes.c_uint64(), _IpcHandle()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        memory = _over(pointer.value, nbytes, device)
        memory.zero_()
        torch.cuda.synchronize(device)
    return memory, Shared(None, bytes(handle.reserved))


def open_shared(device: torch.device, nbytes: int, shared: Shared) -> Tensor:
    """The memory that another process allocated, as uint8 [nbytes]; `device` is where it lies."""
    if shared.fd is not None:
        return torch.frombuffer(host.map_shared(shared.fd, nbytes), dtype=torch.uint8)
    assert shared.handle is not None
    torch.zeros(1, device=device)
    with torch.cuda.device(device):
        pointer, handle = ctypes.c_uint64(), _IpcHandle()
        ctypes.memmove(ctypes.addressof(handle), shared.handle, len(shared.handle))
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, _LAZY_PEER_ACCESS)
        return _over(pointer.value, nbytes, device)


def finish(device: torch.device) -> None:
    """Returns once everything that this thread has asked of the device is done; at once on the CPU.

    Between processes there is no stream to keep the order: rows are there before the other side hears of them.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _Pointer:
    """Memory of the driver as torch takes it, without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (nbytes,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


def _over(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Pointer(pointer, nbytes), device=device)


def _call(name: str, *arguments: object) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise RunError(
            what="the CUDA driver's library libcuda.so.1 is not found",
            do="install the NVIDIA driver, or use engine.device=cpu",
        ) from None
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise RunError(
            what=f"{name} failed: {reason} ({code})",
            do="lower replay.capacity, or free the device (nvidia-smi shows who holds it)",
        )
