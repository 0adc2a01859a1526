"""Which function a tensor gets, compiling for every architecture, the cache of binaries, and what the driver is handed."""

from __future__ import annotations

import ctypes
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from csrc_free_kernels import build, priority, returns
from csrc_free_kernels.build import BinaryCache, Source
from seedrl.errors import ConfigError, RunError
from tests.kernels.compilers import HERE, NAMES, Nvrtc, compile_on_host, kernels_in, sources

ARCHITECTURES = ("compute_80", "compute_90", "compute_100")
ON_GPU: Any = SimpleNamespace(device=torch.device("cuda", 0))  # all that the choice looks at
needs_nvrtc = pytest.mark.skipif(
    Nvrtc.found() is None, reason="the wheel nvidia-cuda-nvrtc is not installed"
)


# which function


def _cupy(cuda: int) -> dict[str, ModuleType]:
    """A CuPy for the CUDA of that major version, without any device behind it."""
    cupy, cuda_module = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.__version__ = "14.0"  # type: ignore[attr-defined]
    cuda_module.driver = SimpleNamespace()  # type: ignore[attr-defined]
    cuda_module.nvrtc = SimpleNamespace(getVersion=lambda: (cuda, 2))  # type: ignore[attr-defined]
    cuda_module.runtime = SimpleNamespace(runtimeGetVersion=lambda: cuda * 1000 + 20)  # type: ignore[attr-defined]
    return {"cupy": cupy, "cupy.cuda": cuda_module}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`machine(torch's CUDA, CuPy's or None, SEEDRL_KERNELS)` sets what is installed."""

    def set_up(cuda: str | None, cupy: int | None, kernels: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        modules: dict[str, Any] = {"cupy": None} if cupy is None else _cupy(cupy)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        if kernels is not None:
            monkeypatch.setenv("SEEDRL_KERNELS", kernels)
        build._found.cache_clear()

    monkeypatch.delenv("SEEDRL_KERNELS", raising=False)
    build._warn_once.cache_clear()
    yield set_up
    build._found.cache_clear()
    build._warn_once.cache_clear()


def test_importing_the_kernels_imports_no_cupy() -> None:
    names = ", ".join(f"csrc_free_kernels.{name}" for name in NAMES)
    code = f"import sys, {names}; assert not any(m.split('.')[0] == 'cupy' for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_tensor_of_the_host_gets_the_twin(machine: Any) -> None:
    machine("13.0", 13, "required")
    assert build.kernel_or_twin(returns.vtrace, torch.zeros(1)) is returns.vtrace


def test_a_tensor_of_a_gpu_gets_the_kernel(machine: Any) -> None:
    machine("13.0", 13)
    assert build.kernel_or_twin(returns.vtrace, ON_GPU) is returns.launch_vtrace


def test_off_is_the_twin_everywhere(machine: Any) -> None:
    machine("13.0", 13, "off")
    assert build.kernel_or_twin(returns.vtrace, ON_GPU) is returns.vtrace


MISSING = pytest.mark.parametrize(
    ("cuda", "cupy", "what", "do"),
    [
        ("13.0", None, "CuPy, which cannot be imported", r"pip install 'seedrl\[cuda13\]'"),
        ("12.8", None, "CuPy, which cannot be imported", r"pip install 'seedrl\[cuda12\]'"),
        ("13.0", 12, "CuPy 14.0 is for CUDA 12, torch .* for CUDA 13", r"seedrl\[cuda13\]"),
        ("12.8", 13, "CuPy 14.0 is for CUDA 13, torch .* for CUDA 12", r"uninstall cupy-cuda13x"),
        (None, 13, "torch is built without CUDA", "install a torch"),
    ],
)


@MISSING
def test_required_says_what_to_install(
    machine: Any, cuda: str | None, cupy: int | None, what: str, do: str
) -> None:
    machine(cuda, cupy, "required")
    with pytest.raises(ConfigError, match=what) as raised:
        build.kernel_or_twin(returns.vtrace, ON_GPU)
    assert raised.match(do)


@MISSING
def test_otherwise_one_warning_says_so_and_the_twin_is_used(
    machine: Any, cuda: str | None, cupy: int | None, what: str, do: str
) -> None:
    machine(cuda, cupy)
    with pytest.warns(RuntimeWarning, match=what) as warned:
        assert build.kernel_or_twin(returns.vtrace, ON_GPU) is returns.vtrace
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build.kernel_or_twin(returns.vtrace_rows, ON_GPU) is returns.vtrace_rows


def test_another_word_for_seedrl_kernels_is_refused(machine: Any) -> None:
    machine("13.0", 13, "yes")
    with pytest.raises(ConfigError, match="SEEDRL_KERNELS is 'yes'") as raised:
        build.kernel_or_twin(returns.vtrace, ON_GPU)
    assert raised.match("auto, off, required")


def test_every_kernel_has_a_launcher_with_the_arguments_of_its_twin() -> None:
    pairs = build._LAUNCHERS
    sources()  # imports all
    assert len(pairs) == 13
    for twin, launcher in pairs.items():
        assert inspect.signature(launcher) == inspect.signature(twin), launcher.__name__
        assert launcher.__name__ == f"launch_{twin.__name__}"


# compiling


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_every_source_compiles_without_a_warning(name: str, arch: str) -> None:
    nvrtc, source = Nvrtc.found(), sources()[NAMES.index(name)]
    assert nvrtc is not None
    program = nvrtc.createProgram(source.text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*source.options(arch), "-Werror", "all-warnings"))
        ptx = nvrtc.getPTX(program).decode()
    except RuntimeError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
    assert kernels_in(source), "a source without a kernel"
    assert all(f".entry {kernel}(" in ptx for kernel in kernels_in(source))


@needs_nvrtc
def test_a_compile_failure_names_kernel_architecture_and_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prelude.cuh").write_text((build._HERE / "prelude.cuh").read_text())
    (tmp_path / "torn.cu").write_text("\nint x = ;\n")
    monkeypatch.setattr(build, "_HERE", tmp_path)
    with pytest.raises(build.KernelError, match="the kernel torn.cu does not compile for sm_90") as raised:  # fmt: skip
        build.compile_source(Nvrtc.found(), Source("torn"), "sm_90")
    assert raised.match(r"torn\.cu\(2\): error") and raised.match("SEEDRL_KERNELS=off")
    assert isinstance(raised.value, RunError)


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know_is_an_error() -> None:
    with pytest.raises(build.KernelError, match="sm_999"):
        build.compile_source(Nvrtc.found(), sources()[0], "sm_999")


# the cache


class _CountingNvrtc:
    """Compiles to its options, and counts."""

    def __init__(self, version: tuple[int, int] = (13, 2)) -> None:
        self.compiled, self._version = 0, version

    def getVersion(self) -> tuple[int, int]:
        return self._version

    def createProgram(self, text: str, name: str, headers: Any, names: Any) -> int:
        return 0

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.compiled += 1
        self._options = options

    def getCUBIN(self, program: int) -> bytes:
        return " ".join(self._options).encode()

    def destroyProgram(self, program: int) -> None:
        pass


def _backend(nvrtc: Any, cupy: str = "14.0") -> build.CupyBackend:
    return build.CupyBackend(None, nvrtc, None, cupy)


def test_a_binary_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    nvrtc, kept = _CountingNvrtc(), BinaryCache(tmp_path / "new" / "folder")
    made = _backend(nvrtc).binary(returns.SOURCE, "sm_90", kept)
    assert _backend(nvrtc).binary(returns.SOURCE, "sm_90", kept) == made
    assert nvrtc.compiled == 1 and b"sm_90" in made and b"MAX_LOG_RATIO=30.0f" in made
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".cubin"]


def test_another_architecture_version_option_or_source_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, nvrtc = BinaryCache(tmp_path), _CountingNvrtc()
    _backend(nvrtc).binary(returns.SOURCE, "sm_90", kept)
    _backend(nvrtc).binary(returns.SOURCE, "sm_100", kept)
    _backend(nvrtc, "14.1").binary(returns.SOURCE, "sm_90", kept)
    _backend(nvrtc).binary(Source("returns", (("MAX_LOG_RATIO", "20.0f"),)), "sm_90", kept)
    monkeypatch.setattr(build, "_OPTIONS", ("--std=c++20",))
    _backend(nvrtc).binary(returns.SOURCE, "sm_90", kept)
    assert nvrtc.compiled == 5
    newer = _CountingNvrtc((13, 3))
    _backend(newer).binary(returns.SOURCE, "sm_90", kept)
    assert newer.compiled == 1 and len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("torn_at", [0, 7, 40, 90, -1])
def test_a_torn_or_foreign_file_is_compiled_anew(tmp_path: Path, torn_at: int) -> None:
    kept, nvrtc = BinaryCache(tmp_path), _CountingNvrtc()
    made = _backend(nvrtc).binary(returns.SOURCE, "sm_90", kept)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:torn_at])
    assert _backend(nvrtc).binary(returns.SOURCE, "sm_90", kept) == made
    assert path.read_bytes() == whole
    flipped = bytearray(whole)
    flipped[torn_at] ^= 1
    path.write_bytes(flipped)
    assert _backend(nvrtc).binary(returns.SOURCE, "sm_90", kept) == made
    assert nvrtc.compiled == 3 and path.read_bytes() == whole


def test_another_kernels_binary_under_this_name_is_not_taken(tmp_path: Path) -> None:
    kept = BinaryCache(tmp_path)
    kept.store(b"a" * 32, b"binary of a")
    kept.path(b"a" * 32).rename(kept.path(b"b" * 32))
    assert kept.load(b"b" * 32) is None


def test_without_a_writable_folder_a_binary_is_compiled_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    nvrtc, kept = _CountingNvrtc(), BinaryCache(tmp_path / "file" / "kernels")
    for _ in range(2):
        _backend(nvrtc).binary(returns.SOURCE, "sm_90", kept)
    assert nvrtc.compiled == 2


def test_the_folder_is_the_users_cache_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDRL_KERNEL_CACHE", "given")
    assert build.cache_folder() == Path("given")
    monkeypatch.delenv("SEEDRL_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "users")
    assert build.cache_folder() == Path("users", "seedrl", "kernels")


# launching


def test_the_driver_gets_addresses_stream_and_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The calls of CuPy's driver, in order, as a fake one sees them."""
    calls: list[Any] = []

    class Driver:
        def moduleLoadData(self, binary: bytes) -> int:
            calls.append(("load", binary))
            return 7

        def moduleGetFunction(self, module: int, name: str) -> int:
            calls.append(("get", module, name))
            return 8

        def launchKernel(self, function: int, *rest: Any) -> None:
            values = ctypes.cast(rest[8], ctypes.POINTER(ctypes.c_void_p))
            number = ctypes.cast(values[1], ctypes.POINTER(ctypes.c_int64))[0]
            where = ctypes.cast(values[0], ctypes.POINTER(ctypes.c_void_p))[0]
            calls.append(("launch", function, *rest[:8], where, number, rest[9]))

    devices: list[Any] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            devices.append(device)

        __enter__ = __exit__ = lambda self, *_: None

    monkeypatch.setenv("SEEDRL_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=99))  # fmt: skip
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    backend = build.CupyBackend(Driver(), _CountingNvrtc(), None, "14.0")
    monkeypatch.setattr(build, "backend", lambda: backend)
    tensor, device = torch.ones(3), torch.device("cuda", 1)
    for _ in range(2):
        build.launch(returns.SOURCE, "vtrace", device, (5, 6), build.pointer(tensor), ctypes.c_int64(42))  # fmt: skip
    build.launch(returns.SOURCE, "vtrace", device, 0, build.pointer(tensor))
    launched = ("launch", 8, 5, 6, 1, 256, 1, 1, 0, 99, tensor.data_ptr(), 42, 0)
    assert [call[0] for call in calls] == ["load", "get", "launch", "launch"]
    assert b"sm_90" in calls[0][1] and calls[1] == ("get", 7, "vtrace")
    assert calls[2] == calls[3] == launched
    assert devices == [device, device]


def test_a_binary_that_the_driver_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Driver:
        def moduleLoadData(self, binary: bytes) -> int:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setenv("SEEDRL_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    backend = build.CupyBackend(Driver(), _CountingNvrtc(), None, "14.0")
    with pytest.raises(build.KernelError, match=r"returns.cu, compiled for sm_90, cannot be loaded: CUDA_ERROR") as raised:  # fmt: skip
        backend._module(returns.SOURCE, torch.device("cuda", 0))
    assert raised.match("update the NVIDIA driver")


# memory


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """sanitized.py in a process of its own, as the address sanitizer has to be there from the start."""
    asked = ["g++", "-print-file-name=libasan.so"]
    library = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": str(Path(library).resolve()), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    given = [sys.executable, str(HERE / "sanitized.py"), str(tmp_path_factory.mktemp("sanitized"))]
    return subprocess.run(given, env=environment, capture_output=True, text=True, timeout=100)


def test_kernels_touch_no_memory_but_their_arguments(
    sanitized: subprocess.CompletedProcess[str],
) -> None:
    ran = set(sanitized.stdout.split())
    assert ran == {kernel for s in sources() for kernel in kernels_in(s)}, sanitized.stderr[-4000:]


def test_the_sanitizer_sees_one_column_too_many(
    sanitized: subprocess.CompletedProcess[str],
) -> None:
    assert sanitized.returncode != 0 and "heap-buffer-overflow" in sanitized.stderr
    assert "gae_rows" in sanitized.stderr


def _raced(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "races"
    main = (HERE / "races.cpp").read_text()
    compile_on_host(priority.SOURCE, text, program, ("-O1", "-g", "-fsanitize=thread"), main)
    # a fixed layout of memory, without which the sanitizer of older compilers does not start
    return subprocess.run(
        ["setarch", "-R", str(program)], capture_output=True, text=True, timeout=100
    )


def test_threads_that_talk_do_not_race(tmp_path: Path) -> None:
    done = _raced(priority.SOURCE.text, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "2053 1\n"


def test_without_any_one_of_the_barriers_they_do(tmp_path: Path) -> None:
    barrier = "__syncthreads();"
    parts = priority.SOURCE.text.split(barrier)
    assert len(parts) == 4
    for i in range(1, len(parts)):
        done = _raced(barrier.join(parts[:i]) + barrier.join(parts[i:]), tmp_path)
        assert "data race" in done.stderr, f"barrier {i}"
