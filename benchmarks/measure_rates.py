"""Measure what a card and its host reach: the constants of `src/tightfit/pace/rates.py`.

    python benchmarks/measure_rates.py --out rates.json

Medians over repeated runs, on one idle GPU: matrix products of the shapes that training has, attention,
memory traffic, what a launch costs the host, both directions of the host link, the host's Adam, and the unpacking
of 4-bit weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

GEMMS = [
    (tokens, out, inner)
    for tokens in (512, 1024, 2048, 8192)
    for out, inner in ((896, 896), (4864, 896), (896, 4864), (2048, 2048), (3584, 3584), (18944, 3584), (3584, 18944))
] + [(2048, 27648, 5120), (2048, 5120, 27648), (2048, 152064, 3584), (8192, 151936, 896), (2048, 16, 4096)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, part in (
        ("gemm", gemms),
        ("attention", attention),
        ("traffic", traffic),
        ("launch", launches),
        ("host_link", host_link),
        ("cpu_adam", cpu_adam),
        ("nf4", nf4),
    ):
        try:
            found[name] = part()
        except Exception as error:  # one part that cannot run here must not cost the others
            found[name] = f"{type(error).__name__}: {error}"[:300]
        print(name, json.dumps(found[name])[:1500], flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def timed(run: Callable[[], object], repeats: int = 12) -> float:
    """Median seconds of one call, by device events."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def gemms() -> list[dict[str, Any]]:
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, out, inner in GEMMS if dtype is torch.bfloat16 else GEMMS[12:24:3]:
            x = torch.randn(tokens, inner, device="cuda", dtype=dtype)
            w = torch.randn(out, inner, device="cuda", dtype=dtype)
            y = torch.randn(tokens, out, device="cuda", dtype=dtype)
            flops = 2 * tokens * out * inner
            forward = timed(lambda x=x, w=w: F.linear(x, w))
            to_input = timed(lambda y=y, w=w: y @ w)
            to_weight = timed(lambda x=x, y=y: y.t() @ x)
            rows.append(
                {
                    "dtype": str(dtype),
                    "shape": [tokens, out, inner],
                    "us": [round(s * 1e6, 1) for s in (forward, to_input, to_weight)],
                    "tflops": [round(flops / s / 1e12) for s in (forward, to_input, to_weight)],
                }
            )
    return rows


def attention() -> list[dict[str, Any]]:
    rows = []
    for batch, heads, kv, length, dim in (
        (1, 28, 4, 2048, 128),
        (4, 14, 2, 2048, 64),
        (1, 32, 8, 8192, 128),
        (2, 32, 8, 4096, 128),
        (1, 40, 8, 512, 128),
    ):
        q = torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(batch, kv, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        forward = timed(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        grad = torch.randn_like(out)
        backward = timed(
            lambda q=q, k=k, v=v, out=out, grad=grad: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        )
        flops = 2 * batch * heads * length * length * dim  # causal: half of 4
        rows.append(
            {
                "shape": [batch, heads, kv, length, dim],
                "us": [round(forward * 1e6, 1), round(backward * 1e6, 1)],
                "tflops": [round(flops / forward / 1e12), round(2.5 * flops / backward / 1e12)],
            }
        )
    return rows


def traffic() -> dict[str, float]:
    """Bytes a second of a large copy, an addition, an upcast and a sum; of a small addition."""
    big = torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    small = torch.randn(2**22, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(2048, 152064, device="cuda", dtype=torch.float32)
    size = big.numel() * 2
    return {
        "copy": round(2 * size / timed(big.clone) / 1e9),
        "add": round(3 * size / timed(lambda: big + big) / 1e9),
        "upcast": round(3 * size / timed(big.float) / 1e9),
        "small_add": round(3 * small.numel() * 2 / timed(lambda: small + small) / 1e9),
        "log_softmax": round(2 * logits.numel() * 4 / timed(lambda: F.log_softmax(logits, -1)) / 1e9),
        "norm": round(size / timed(lambda: torch.linalg.vector_norm(big, dtype=torch.float32)) / 1e9),
    }


def launches() -> dict[str, float]:
    """Microseconds of host time: one bare operation, and one linear layer forward and backward through autograd."""
    x = torch.randn(64, device="cuda")
    layer = torch.nn.Linear(64, 64, device="cuda")
    rows = torch.randn(8, 64, device="cuda", requires_grad=True)

    def host_us(run: Callable[[], object], count: int = 2000) -> float:
        for _ in range(50):
            run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        seconds = time.perf_counter() - began
        torch.cuda.synchronize()
        return round(seconds / count * 1e6, 2)

    return {
        "add": host_us(lambda: x + x),
        "linear": host_us(lambda: layer(rows)),
        "linear_and_backward": host_us(lambda: layer(rows).sum().backward(), 500),
    }


def host_link() -> dict[str, float]:
    there = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    pageable = torch.empty(2**28, dtype=torch.uint8)
    return {
        "to_gpu_GBps": round(2**30 / timed(lambda: here.copy_(there, non_blocking=True)) / 1e9, 1),
        "to_host_GBps": round(2**30 / timed(lambda: there.copy_(here, non_blocking=True)) / 1e9, 1),
        "pageable_to_gpu_GBps": round(2**28 / timed(lambda: here[: 2**28].copy_(pageable)) / 1e9, 1),
    }


def cpu_adam() -> dict[str, float]:
    """Parameters a second of DeepSpeed's host optimizer, and of torch's fused one on the host."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    numel = 200_000_000
    found = {"threads": float(torch.get_num_threads())}
    for name in ("deepspeed", "torch"):
        weight = torch.nn.Parameter(torch.zeros(numel))
        weight.grad = torch.ones(numel)
        made: Any = DeepSpeedCPUAdam([weight]) if name == "deepspeed" else torch.optim.AdamW([weight], fused=True)
        made.step()
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            made.step()
            seconds.append(time.perf_counter() - began)
        found[f"{name}_params_per_s"] = round(numel / statistics.median(seconds) / 1e9, 3) * 1e9
    copied = torch.empty(2**28), torch.ones(2**28)
    began = time.perf_counter()
    for _ in range(3):
        copied[0].copy_(copied[1])
    found["host_copy_GBps"] = round(3 * 2 * 2**30 / (time.perf_counter() - began) / 1e9, 1)
    return found


def nf4() -> dict[str, float]:
    import bitsandbytes.functional as bnb

    weight = torch.randn(27648, 5120, device="cuda", dtype=torch.bfloat16)
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    seconds = timed(lambda: bnb.dequantize_4bit(packed, state))
    return {"written_GBps": round(weight.numel() * 2 / seconds / 1e9), "us": round(seconds * 1e6, 1)}


if __name__ == "__main__":
    main()
