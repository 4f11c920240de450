"""scan.cu without a GPU: emulated.cpp runs it, and is put in the place of the launches. Prints the error of every
result as JSON.

python emulated.py FOLDER      # for what is built
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from scans import NAMES, Shape, error, make, results

from tightfit.mamba import cuda, cuda_scan
from tightfit.mamba.arguments import Scan
from tightfit.mamba.cuda import LaunchSize

SOURCE = Path(__file__).with_name("emulated.cpp")
CASES = {
    "one segment": (Shape(1, 64, 13, 16), torch.bfloat16, False, 1),
    "time last": (Shape(1, 64, 18, 16), torch.bfloat16, False, 1),
    "several segments": (Shape(1, 64, 131, 16), torch.bfloat16, False, 100),
    "documents and a batch": (Shape(2, 128, 67, 16), torch.bfloat16, True, 100),
    "fp16": (Shape(1, 64, 70, 16), torch.float16, False, 1),
}


def main() -> None:
    torch.set_num_threads(1)

    @cache
    def build(options: tuple[str, ...]) -> Any:
        to = Path(sys.argv[1]) / f"scan{abs(hash(options))}.so"
        plain = ["g++", "-O1", "-std=c++17", "-w", "-fPIC", "-shared", f"-I{Path(cuda.__file__).parent}"]
        subprocess.run([*plain, *options, "-o", str(to), str(SOURCE)], check=True)
        return ctypes.CDLL(str(to))

    def launch(_: str, options: tuple[str, ...], kernel: str, size: LaunchSize, argument: Any, __: Any) -> None:
        failed = build(options).run(kernel.encode(), *size.grid, size.threads, size.shared, ctypes.byref(argument))
        assert not failed, kernel

    cuda.launch = launch  # type: ignore[assignment]
    print(json.dumps({name: errors(name, *case) for name, case in CASES.items()}))  # noqa: T201


def errors(name: str, shape: Shape, dtype: torch.dtype, with_starts: bool, programs: int) -> dict[str, float]:
    lay = torch.clone if name == "time last" else channels_last
    inputs = make(shape, dtype)
    inputs |= {key: lay(inputs[key]) for key in ("u", "delta", "z")}
    starts = torch.rand(shape.batch, shape.length) < 0.05 if with_starts else None
    expected = results(inputs, "reference", wide=True, starts=starts)
    # As a model has them: the logarithm of the rates, in the precision of the matrices where it is not fp32.
    inputs["A"] = torch.log(-inputs["A"])
    scan = Scan(**inputs, delta_softplus=True, starts=starts, log_rates=True)
    out = torch.empty_like(scan.u)
    last = torch.empty(shape.batch, shape.channels, shape.states)
    borders = torch.empty(shape.batch, -(-shape.length // cuda_scan.BORDER), shape.channels, shape.states)
    out, last, borders = cuda_scan.run_forward(scan, lambda: (out, last, borders), programs)
    weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
    again = torch.empty_like(out)
    grads = cuda_scan.run_backward(scan, borders, lay(weights), 2 * last, {}, again, programs)
    found = {"out": out, "last": last} | {f"d{name}": getattr(grads, name) for name in NAMES}
    expected["dA"] = expected["dA"] * -torch.exp(inputs["A"].double())
    compared = {name: error(found[name], wanted) for name, wanted in expected.items()}
    return compared | {"the output again": error(again, out)}


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


if __name__ == "__main__":
    main()
