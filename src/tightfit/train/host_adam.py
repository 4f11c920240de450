"""AdamW on the host's cores in one pass, without Python's lock: `host_adam.c`, compiled at the start of each run.

torch's own kernel comes to a third of that on 16 cores, and what has to follow it (rounding to bf16) needs Python, and
with it the lock that the thread which feeds the GPU holds. DeepSpeed's is as fast, but keeps the lock. A second of
compiling is all that it costs, and leaves nothing behind that the next start would have to trust.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.inputs.surroundings import inherited
from tightfit.train.optimizers import BETAS, EPS

FLAGS = "-O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math -shared -fPIC".split()
COMPILE_S = 60


class Step(NamedTuple):
    rate: float
    number: int  # from 1
    factor: float  # of gradients, which clipping and the loss scale make


class Elements(NamedTuple):
    """Some of a unit's."""

    master: Tensor | None  # None: the weights themselves are updated, and rounded at random
    gradients: Tensor
    first: Tensor  # moments
    second: Tensor
    new_master: Tensor | None  # where they go: the same, or elsewhere
    new_first: Tensor
    new_second: Tensor
    weights: Tensor | None  # what the copies become in bf16; None: nothing

    def cut(self, low: int, high: int) -> Elements:
        return Elements(*(None if each is None else each[low:high] for each in self))  # type: ignore[arg-type]


class _Step(ctypes.Structure):
    names = ("factor", "take1", "beta2", "take2", "shrink", "size", "root", "eps")
    _fields_ = [(name, ctypes.c_float) for name in names]


class _Vectors(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in Elements._fields),
        *((name, ctypes.c_int64) for name in ("count", "begin")),
        ("key", ctypes.c_uint32),
    ]


class HostAdam:
    def __init__(self, library: Any, threads: int) -> None:
        self._run, self._threads = library.adamw, threads
        self._run.argtypes = [_Vectors, _Step, ctypes.c_int, ctypes.c_int]
        self._run.restype = None

    @staticmethod
    def takes(of: Elements) -> bool:
        """Whether there is code for these: fp32 copies, bf16 weights or both, and moments in fp32 or bf16."""
        kinds = (torch.float32, torch.bfloat16)
        return (
            (of.master is None or of.master.dtype == torch.float32)
            and (of.weights is None or of.weights.dtype == torch.bfloat16)
            and of.first.dtype in (kinds if of.weights is not None else kinds[:1])
        )

    def update(self, of: Elements, step: Step, *, begin: int, decay: float, seed: int) -> None:
        """`begin`: the number of the first in its unit. What is rounded at random is so by this, by the step's number
        and by `seed`."""
        assert all(each is None or each.is_contiguous() for each in of)
        (beta1, beta2), number = BETAS, step.number
        key = (seed * 0x85EBCA6B + number * 0x9E3779B1) & 0xFFFFFFFF
        pointers = [None if each is None else each.data_ptr() for each in of]
        size, root = step.rate / (1 - beta1**number), (1 - beta2**number) ** 0.5
        taken = _Step(step.factor, 1 - beta1, beta2, 1 - beta2, 1 - step.rate * decay, size, root, EPS)
        is_narrow = of.first.dtype == torch.bfloat16
        self._run(_Vectors(*pointers, of.gradients.numel(), begin, key), taken, self._threads, is_narrow)


@cache
def find_host_adam(threads: int) -> HostAdam | None:
    """None: there is no compiler, or none that can do it."""
    compiler = inherited({}).get("CC", "cc")
    with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        made = Path(folder) / "host_adam.so"
        try:
            with as_file(files("tightfit.train") / "host_adam.c") as source:
                command = [*compiler.split(), *FLAGS, str(source), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            return HostAdam(ctypes.CDLL(str(made)), threads)
        except (OSError, subprocess.SubprocessError):
            return None
