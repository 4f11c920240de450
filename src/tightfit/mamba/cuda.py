"""Kernels in CUDA's own language, compiled when they are first needed by NVRTC, the compiler that PyTorch brings along:
no build, and nothing to install. Where it is missing, other kernels have to do."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

MOST_SHARED = 8  # the driver's name for the attribute


class CompilerError(RuntimeError):
    """The kernels cannot be compiled here; nothing was launched."""


class LaunchSize(NamedTuple):
    """How many programs run, of how many threads, and the bytes that each has of a processor's own memory."""

    grid: tuple[int, int, int]
    threads: int
    shared: int = 0


def launch(
    source: str, options: tuple[str, ...], kernel: str, size: LaunchSize, argument: ctypes.Structure, device: int
) -> None:
    """A kernel of that file, on the current stream."""
    module = _load_module(source, options, device)
    if isinstance(module, str):
        raise CompilerError(module)
    function = _find_function(module, kernel, size.shared)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
    run = _driver().cuLaunchKernel
    _check(run(function, *size.grid, size.threads, 1, 1, size.shared, stream, arguments, None))


@cache
def _find_function(module: int, name: str, shared: int) -> Any:
    function = ctypes.c_void_p()
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), ctypes.c_void_p(module), name.encode()))
    if shared > 48 << 10:
        _check(_driver().cuFuncSetAttribute(function, MOST_SHARED, shared))
    return function


@cache
def _load_module(source: str, options: tuple[str, ...], device: int) -> int | str:
    """Compiled and loaded; its handle, or why there is none, so that it is tried once."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # so that the device's context is there
        major, minor = torch.cuda.get_device_capability(device)
        words = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17", *map(str.encode, options)]
        compiler, program, size = find_compiler(), ctypes.c_void_p(), ctypes.c_size_t()
        assert compiler is not None
        text = files("tightfit.mamba").joinpath(source).read_bytes()
        compiler.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None)
        try:
            if compiler.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words)):
                compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value)
                compiler.nvrtcGetProgramLog(program, log)
                return log.value.decode()
            compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
            code = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetCUBIN(program, code)
        finally:
            compiler.nvrtcDestroyProgram(ctypes.byref(program))
        module = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), code.raw))
    assert module.value is not None
    return module.value


@cache
def find_compiler() -> ctypes.CDLL | None:
    """NVRTC, as PyTorch has it beside itself or the system in its path; None if it is not there."""
    if torch.version.cuda is None:
        return None
    soname = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    beside = Path(torch.__file__).parent
    found = [str(path) for folder in (beside / "lib", beside.parent / "nvidia") for path in folder.rglob(soname)]
    for place in (soname, *found):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(result: int) -> None:
    if result:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError((words.value or b"").decode())
