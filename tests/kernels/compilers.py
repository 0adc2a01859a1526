"""The kernels' sources under two compilers that need no GPU: NVRTC (its wheel), and g++ behind shim.h."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csrc_free_kernels import build

HERE = Path(__file__).parent
FOLDER = Path(build.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.cu"))
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def sources() -> list[build.Source]:
    """Of every .cu file, the `SOURCE` of the module beside it."""
    return [importlib.import_module(f"csrc_free_kernels.{name}").SOURCE for name in NAMES]


def kernels_in(source: build.Source) -> list[str]:
    return re.findall(r'extern "C" __global__ void (\w+)\(', source.text)


class Nvrtc:
    """The library of the wheel nvidia-cuda-nvrtc, by the names that CuPy gives its functions."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    @staticmethod
    @cache
    def found() -> Nvrtc | None:
        try:
            import nvidia  # type: ignore[import-not-found, unused-ignore]
        except ModuleNotFoundError:
            return None
        libraries = sorted(
            library
            for folder in nvidia.__path__
            for library in Path(folder).glob("**/libnvrtc.so.*")
        )
        return Nvrtc(libraries[-1]) if libraries else None

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def createProgram(self, text: str, name: str, headers: Any, names: Any) -> ctypes.c_void_p:
        program = ctypes.c_void_p()
        self._library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), 0, None, None
        )
        return program

    def compileProgram(self, program: ctypes.c_void_p, options: Sequence[str]) -> None:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = self._library.nvrtcCompileProgram(program, len(options), given)
        if code:
            raise RuntimeError(f"NVRTC error {code}")

    def _text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        into = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, into)
        return into.raw

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:
        return self._text("CUBIN", program)

    def getPTX(self, program: ctypes.c_void_p) -> bytes:
        return self._text("PTX", program)

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self._text("ProgramLog", program).rstrip(b"\0").decode()

    def destroyProgram(self, program: ctypes.c_void_p) -> None:
        self._library.nvrtcDestroyProgram(ctypes.byref(program))


def host_library(source: build.Source, folder: Path, flags: Sequence[str]) -> Path:
    """`source` as a shared library of the host."""
    library = folder / f"{source.name}.so"
    compile_on_host(source, source.text, library, ("-shared", "-fPIC", *flags))
    return library


def compile_on_host(
    source: build.Source, text: str, into: Path, flags: Sequence[str], main: str = ""
) -> None:
    """`text` by g++ behind shim.h, with a function `run_<kernel>(grid, threads, arguments)` for each kernel."""
    runs = "".join(f"SHIM_KERNEL({kernel})\n" for kernel in kernels_in(source))
    code = into.with_suffix(".cpp")
    threads = "#define SHIM_THREADS\n" if "__syncthreads" in source.text else ""
    code.write_text(f'{threads}#include "shim.h"\n{text}{runs}{main}')
    defines = [f"-D{name}={value}" for name, value in source.defines]
    subprocess.run(
        [
            "g++", "-std=c++17", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing", *WARNINGS, *flags, *defines, f"-I{HERE}",
            str(code), "-o", str(into),
        ],
        check=True, timeout=120, env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    )  # fmt: skip


class HostBackend:
    """Runs kernels on the CPU: the launcher's own arguments, as the driver would get them. Keeps what was launched."""

    def __init__(self, folder: Path, flags: Sequence[str] = ("-O1",)) -> None:
        self._folder, self._flags = folder, flags
        self._libraries: dict[build.Source, ctypes.CDLL] = {}
        self.launched: list[str] = []

    def library(self, source: build.Source) -> ctypes.CDLL:
        if source not in self._libraries:
            path = host_library(source, self._folder, self._flags)
            self._libraries[source] = ctypes.CDLL(str(path))
        return self._libraries[source]

    def launch(
        self, source: build.Source, kernel: str, device: torch.device, grid: tuple[int, int], threads: int,
        arguments: Sequence[Any],
    ) -> None:  # fmt: skip
        library = self.library(source)
        assert grid[0] < 2**31 and grid[1] < 2**16 and threads <= 1024, "more than a GPU takes"
        size = (ctypes.c_uint * 2)(*grid)
        getattr(library, f"run_{kernel}")(size, ctypes.c_uint(threads), build.packed(arguments))
        self.launched.append(kernel)

    def mapped(self, tensor: Tensor) -> int | None:
        return tensor.data_ptr()
