"""The GPU's kernels without a GPU: Triton interprets them, slowly. Prints the error of every result of the scan
as JSON; those of the convolution are looked at by `test_conv.py`.

TRITON_INTERPRET=1 python interpreted.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import test_conv
from scans import NAMES, Shape, error, make, results

from tightfit.mamba.arguments import Scan
from tightfit.mamba.gpu_scan import FORWARD, Config, run_backward, run_forward

SMALL = Config(cells=16, border=8, segment=16)
CASES = {
    "one step": (Shape(2, 3, 1, 1), SMALL, torch.float32, False),
    "two steps": (Shape(1, 4, 2, 3), SMALL, torch.float32, False),
    "several segments, tiles that are not full": (Shape(1, 3, 33, 3), SMALL, torch.float32, True),
    "one segment": (Shape(1, 4, 20, 4), Config(cells=16, border=8, segment=24), torch.float32, False),
    "a segment of several borders": (
        Shape(1, 2, 19, 2),
        Config(cells=4, border=4, segment=12),
        torch.float32,
        True,
    ),
    "the default cut": (Shape(1, 3, 19, 16), FORWARD, torch.float32, False),
    "bf16": (Shape(1, 5, 9, 3), SMALL, torch.bfloat16, False),
    "fp16": (Shape(1, 5, 9, 3), SMALL, torch.float16, False),
}
TWICE = ("two steps", "one segment")


def main() -> None:
    torch.set_num_threads(1)  # such small tensors would only wait for one another
    found = {}
    for name, (shape, config, dtype, with_starts) in CASES.items():
        inputs = make(shape, dtype)
        starts = torch.rand(shape.batch, shape.length) < 0.15 if with_starts else None
        if starts is not None:  # channel-last, as a model has them
            inputs |= {key: inputs[key].transpose(1, 2).contiguous().transpose(1, 2) for key in ("u", "delta", "z")}
        expected = results(inputs, "reference", wide=True, starts=starts)
        ours = gradients(inputs, starts, config)
        found[name] = {key: error(ours[key], expected[key]) for key in expected}
        if name in TWICE:
            again = gradients(inputs, starts, config)
            found[name]["same bits"] = float(all(torch.equal(ours[key], again[key]) for key in ours))
    test_conv.interpreted()
    print(json.dumps(found))  # noqa: T201


def gradients(inputs: dict[str, torch.Tensor], starts: torch.Tensor | None, config: Config) -> dict[str, torch.Tensor]:
    scan = Scan(**inputs, delta_softplus=True, starts=starts)
    out, last, borders = run_forward(scan, config)
    weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
    grads = run_backward(scan, borders, weights, 2 * last, config)  # of Σ out · weights + Σ last²
    return {"out": out, "last": last, **{f"d{name}": getattr(grads, name).to(inputs[name].dtype) for name in NAMES}}


if __name__ == "__main__":
    main()
