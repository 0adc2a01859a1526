"""CUDA kernels compiled at run time: which function a tensor gets, the compiler, the cache of binaries, the launch.

Every kernel is a pair: `x.cu`, and in `x.py` a launcher and its twin in plain PyTorch, of the same signature. The twin is the definition of
correct and the CPU path; `kernel_or_twin` chooses by the tensor's device. CuPy brings NVRTC and the driver's calls, and is imported only when
a tensor on a GPU asks for a kernel. A launch takes torch's pointers, on torch's current stream of the tensor's device: no copies, and
nothing that a CUDA graph could not capture.

A binary in the cache is `_MAGIC`, the SHA-256 of what it was made from, the SHA-256 of the binary, the binary. It is written beside and
renamed into place; a file that does not say all of that (torn, of another version, not ours) is as good as none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from seedrl.errors import ConfigError, RunError, ShapeError

THREADS = 256  # of a block, where a kernel does not say otherwise
MODES = ("auto", "off", "required")
_HERE = Path(__file__).parent
_MAGIC = b"seedrl cubin 1\n\0"
_DIGEST = hashlib.sha256().digest_size
# as the twins compute: a product is rounded before it is added to
_OPTIONS = ("--std=c++17", "--fmad=false")

Twin = TypeVar("Twin", bound=Callable[..., Any])
Argument = Any  # an instance of a ctypes type: a pointer, a number, a structure


class KernelError(RunError):
    """A kernel that cannot be compiled or loaded."""


class ArgumentError(ShapeError, ValueError):
    """A tensor that a kernel cannot take: of another device or dtype, or not contiguous."""


@dataclass(frozen=True)
class Source:
    """`name`.cu, with constants that its module defines and headers (`<header>.cuh`) that are put before it."""

    name: str
    defines: tuple[tuple[str, str], ...] = ()
    headers: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What is compiled: the prelude and the headers, then the file; lines are those of the files."""
        names = [*(f"{header}.cuh" for header in ("prelude", *self.headers)), f"{self.name}.cu"]
        return "".join(f'#line 1 "{name}"\n{(_HERE / name).read_text()}' for name in names)

    def options(self, arch: str) -> tuple[str, ...]:
        given = tuple(f"-D{name}={value}" for name, value in self.defines)
        return (*_OPTIONS, *given, f"--gpu-architecture={arch}")


# which function


_LAUNCHERS: dict[Callable[..., Any], Callable[..., Any]] = {}


def launcher_of(twin: Twin) -> Callable[[Twin], Twin]:
    """Registers the decorated launcher as that of `twin`, which has the same signature."""

    def register(launcher: Twin) -> Twin:
        _LAUNCHERS[twin] = launcher
        return launcher

    return register


def kernel_or_twin(twin: Twin, tensor: Tensor) -> Twin:
    """The launcher of `twin` where `tensor` is on a GPU and kernels can be had, else `twin` itself.

    SEEDRL_KERNELS: "off" is always the twin; with "required" it is an error that kernels cannot be had; else ("auto") a warning, once.
    Raises: ConfigError, saying what to install, or that SEEDRL_KERNELS is none of these.
    """
    launcher: Any = _LAUNCHERS[twin]
    return launcher if kernels_on(tensor.device) else twin


def kernels_on(device: torch.device) -> bool:
    """Whether tensors on `device` get kernels. Raises: ConfigError, as `kernel_or_twin`."""
    return device.type == "cuda" and mode() != "off" and backend() is not None


def run(twin: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls what `kernel_or_twin` chooses by the first tensor; for the kernel, tensors are made contiguous, in lists too."""
    function = kernel_or_twin(twin, _first_tensor(arguments))
    if function is not twin:
        arguments = tuple(map(_contiguous, arguments))
        named = {name: _contiguous(value) for name, value in named.items()}
    return function(*arguments, **named)


def _first_tensor(arguments: Sequence[Any]) -> Tensor:
    for value in arguments:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, list) and value:
            return _first_tensor(value)
    raise TypeError("there is no tensor to choose by")


def _contiguous(value: Any) -> Any:
    if isinstance(value, list):
        return [_contiguous(part) for part in value]
    return value.contiguous() if isinstance(value, Tensor) else value


def prefer(wanted: str) -> None:
    """One of MODES, for this process and its children, where SEEDRL_KERNELS says nothing."""
    os.environ.setdefault("SEEDRL_KERNELS", wanted)


def mode() -> str:
    """What SEEDRL_KERNELS asks for."""
    asked = os.environ.get("SEEDRL_KERNELS", "auto")
    if asked not in MODES:
        raise ConfigError(
            what=f"SEEDRL_KERNELS is '{asked}'", where="environment", do=f"set one of {', '.join(MODES)}, or nothing",
        )  # fmt: skip
    return asked


class Backend(Protocol):
    """What runs a kernel: CuPy, or in tests the host's own compiler."""

    def launch(
        self, source: Source, kernel: str, device: torch.device, grid: tuple[int, int], threads: int,
        arguments: Sequence[Argument],
    ) -> None: ...  # fmt: skip

    def mapped(self, tensor: Tensor) -> int | None:
        """Where the device finds the host's pinned memory of `tensor`; None where it cannot."""
        ...


def backend() -> Backend | None:
    """CuPy's; None, after one warning, where it cannot be had and SEEDRL_KERNELS does not require it."""
    found, missing = _found()
    if found is not None:
        return found
    if mode() == "required":
        raise ConfigError(what=missing[0], where="SEEDRL_KERNELS=required", do=missing[1])
    _warn_once(". ".join(missing))
    return None


@cache
def _found() -> tuple[Backend | None, tuple[str, str]]:
    """The backend, or what is wrong and what to do."""
    cuda = torch.version.cuda
    if cuda is None:
        return None, ("this torch is built without CUDA", "install a torch for this machine's GPU")
    major = int(cuda.split(".")[0])
    install = f"pip install 'seedrl[cuda{major}]'"
    try:
        import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from cupy.cuda import driver, nvrtc, runtime  # type: ignore[import-not-found, import-untyped, unused-ignore]  # fmt: skip

        has = runtime.runtimeGetVersion() // 1000
    except Exception as error:  # a CuPy that finds no CUDA raises errors of its own
        reason = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        return None, (f"CUDA kernels need CuPy, which cannot be imported{reason}", install)
    if has != major:
        return None, (
            f"CuPy {cupy.__version__} is for CUDA {has}, torch {torch.__version__} for CUDA {major}",
            f"pip uninstall cupy-cuda{has}x, then {install}",
        )
    return CupyBackend(driver, nvrtc, runtime, cupy.__version__), ("", "")


@cache
def _warn_once(text: str) -> None:
    warnings.warn(f"kernels are off, PyTorch is used instead: {text}", RuntimeWarning, stacklevel=4)


# compiling


def cache_folder() -> Path:
    """Where compiled kernels are kept: SEEDRL_KERNEL_CACHE, or seedrl/kernels in the user's cache."""
    given = os.environ.get("SEEDRL_KERNEL_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seedrl" / "kernels"


class BinaryCache:
    """Binaries by the digest of what they were made from; see the module for the bytes. A folder that cannot be written is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.cubin"

    def load(self, digest: bytes) -> bytes | None:
        try:
            kept = self.path(digest).read_bytes()
        except OSError:
            return None
        head, binary = kept[: len(_MAGIC) + 2 * _DIGEST], kept[len(_MAGIC) + 2 * _DIGEST :]
        return binary if head == _MAGIC + digest + hashlib.sha256(binary).digest() else None

    def store(self, digest: bytes, binary: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, beside = tempfile.mkstemp(dir=self._folder, suffix=".part")
        except OSError:
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + digest + hashlib.sha256(binary).digest() + binary)
            os.replace(beside, self.path(digest))
        except OSError:
            Path(beside).unlink(missing_ok=True)


def digest_of(source: Source, arch: str, versions: Sequence[object]) -> bytes:
    """What a binary is known by: source, options, architecture and the compiler's versions."""
    parts = (source.text, *source.options(arch), *versions)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()


def compile_source(nvrtc: Any, source: Source, arch: str) -> bytes:
    """The binary of `source` for `arch` ("sm_90"), by the NVRTC of CuPy.

    Raises: KernelError with NVRTC's log.
    """
    program = nvrtc.createProgram(source.text, f"{source.name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, source.options(arch))
            binary: bytes = nvrtc.getCUBIN(program)
        except Exception as error:
            log = nvrtc.getProgramLog(program).strip() or str(error)
            version = ".".join(map(str, nvrtc.getVersion()))
            raise KernelError(
                what=f"the kernel {source.name}.cu does not compile for {arch}: {log}", where=f"NVRTC {version}",
                do="install a CuPy that knows this GPU, or set SEEDRL_KERNELS=off",
            ) from error  # fmt: skip
        return binary
    finally:
        nvrtc.destroyProgram(program)


# launching


class CupyBackend:
    """Compiles by CuPy's NVRTC, launches by CuPy's driver."""

    def __init__(self, driver: Any, nvrtc: Any, runtime: Any, cupy_version: str) -> None:
        self._driver, self._nvrtc, self._runtime = driver, nvrtc, runtime
        self._versions = (cupy_version, *nvrtc.getVersion())
        self._modules: dict[tuple[Source, torch.device], int] = {}
        self._functions: dict[tuple[Source, str, torch.device], int] = {}

    def launch(
        self, source: Source, kernel: str, device: torch.device, grid: tuple[int, int], threads: int,
        arguments: Sequence[Argument],
    ) -> None:  # fmt: skip
        pointers = packed(arguments)
        with torch.cuda.device(device):
            function = self._functions.get((source, kernel, device))
            if function is None:
                function = self._driver.moduleGetFunction(self._module(source, device), kernel)
                self._functions[source, kernel, device] = function
            stream = torch.cuda.current_stream(device).cuda_stream
            self._driver.launchKernel(
                function,
                grid[0],
                grid[1],
                1,
                threads,
                1,
                1,
                0,
                stream,
                ctypes.addressof(pointers),
                0,
            )

    def _module(self, source: Source, device: torch.device) -> int:
        module = self._modules.get((source, device))
        if module is None:
            major, minor = torch.cuda.get_device_capability(device)
            binary = self.binary(source, f"sm_{major}{minor}", BinaryCache(cache_folder()))
            torch.zeros(1, device=device)  # makes the device's context, into which modules load
            try:
                module = self._modules[source, device] = self._driver.moduleLoadData(binary)
            except Exception as error:
                raise KernelError(
                    what=f"the kernel {source.name}.cu, compiled for sm_{major}{minor}, cannot be loaded: {error}", where=str(device),
                    do="update the NVIDIA driver, or set SEEDRL_KERNELS=off",
                ) from error  # fmt: skip
        return module

    def binary(self, source: Source, arch: str, kept: BinaryCache) -> bytes:
        """The binary for `arch`, from the cache or compiled."""
        digest = digest_of(source, arch, self._versions)
        binary = kept.load(digest)
        if binary is None:
            binary = compile_source(self._nvrtc, source, arch)
            kept.store(digest, binary)
        return binary

    def mapped(self, tensor: Tensor) -> int | None:
        return self._runtime.pointerGetAttributes(tensor.data_ptr()).devicePointer or None


def packed(arguments: Sequence[Argument]) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of the arguments, as the driver takes them; valid as long as the arguments are held."""
    return (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))


def launch(
    source: Source, kernel: str, device: torch.device, grid: int | tuple[int, int], *arguments: Argument,
    threads: int = THREADS,
) -> None:  # fmt: skip
    """Launches on the device's current stream; an empty grid is no launch."""
    found = backend()
    assert found is not None, "a launcher is called only where kernel_or_twin chose it"
    size = (grid, 1) if isinstance(grid, int) else grid
    if size[0] and size[1]:
        found.launch(source, kernel, device, size, threads, arguments)


def blocks_for(count: int, threads: int = THREADS) -> int:
    """Blocks with at least `count` threads."""
    return -(-count // threads)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Of the tensor's memory; a null pointer for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def check_arguments(**arguments: tuple[Tensor, torch.dtype | None]) -> torch.device:
    """Checks that tensors are contiguous, of their dtype (None: any) and all on the first one's device, which is returned.

    Raises: ArgumentError, naming the argument.
    """
    device = next(iter(arguments.values()))[0].device
    for name, (tensor, dtype) in arguments.items():
        wrong = ""
        if tensor.device != device:
            wrong = f"is on {tensor.device}, {next(iter(arguments))} on {device}"
        elif dtype is not None and tensor.dtype != dtype:
            wrong = f"is {_plain(tensor.dtype)}; it must be {_plain(dtype)}"
        elif not tensor.is_contiguous():
            wrong = f"has the strides {list(tensor.stride())} for the shape {list(tensor.shape)}"
        if wrong:
            raise ArgumentError(
                what=f"{name} {wrong}", where="a CUDA kernel's argument", do=f"pass {name} contiguous, of that dtype, on one device",
            )  # fmt: skip
    return device


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
