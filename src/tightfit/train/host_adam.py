"""AdamW on the host's cores in one pass, without Python's lock: `host_adam.c`, compiled at the start of each run.

torch's own kernel comes to a third of that on 16 cores, and what has to follow it (rounding to bf16) needs Python, and
with it the lock that the thread which feeds the GPU holds. DeepSpeed's is as fast, but keeps the lock. A second of
compiling is all that it costs, and leaves nothing behind that the next start would have to trust.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.train.optimizers import BETAS, EPS

FLAGS = "-O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math -shared -fPIC".split()
COMPILE_S = 60


class Step(NamedTuple):
    rate: float
    number: int  # from 1
    factor: float  # of gradients


class _Step(ctypes.Structure):
    names = ("factor", "take1", "beta2", "take2", "shrink", "size", "root", "eps")
    _fields_ = [(name, ctypes.c_float) for name in names]


class HostAdam:
    def __init__(self, library: Any, threads: int) -> None:
        self._run, self._threads = library.adamw, threads
        self._run.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int, _Step]
        self._run.restype = None

    def update(
        self,
        master: Tensor,
        gradients: Tensor,
        moments: tuple[Tensor, Tensor],
        weights: Tensor | None,
        step: Step,
        decay: float,
    ) -> None:
        """All of these, in place. `weights`: what becomes of `master` in bf16; None: nothing."""
        (beta1, beta2), tensors = BETAS, (master, gradients, *moments)
        assert all(each.is_contiguous() and each.dtype == torch.float32 for each in tensors)
        size, root = step.rate / (1 - beta1**step.number), (1 - beta2**step.number) ** 0.5
        taken = _Step(step.factor, 1 - beta1, beta2, 1 - beta2, 1 - step.rate * decay, size, root, EPS)
        pointers = [each.data_ptr() for each in tensors]
        self._run(*pointers, None if weights is None else weights.data_ptr(), master.numel(), self._threads, taken)


@cache
def find_host_adam(threads: int) -> HostAdam | None:
    """None: there is no compiler, or none that can do it."""
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        made = Path(folder) / "host_adam.so"
        try:
            with as_file(files("tightfit.train") / "host_adam.c") as source:
                command = [*compiler.split(), *FLAGS, str(source), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            return HostAdam(ctypes.CDLL(str(made)), threads)
        except (OSError, subprocess.SubprocessError):
            return None
