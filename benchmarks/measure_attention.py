"""Measure which attention kernel PyTorch takes on this GPU, what each of them holds and how long it takes.

    python benchmarks/measure_attention.py --out rows.jsonl

One row a case: under PyTorch's own choice (`asked` is null) and with each kernel forced. `kept` is what is there after
the forward pass and was not before, `forward_peak` and `backward_peak` the most above what was there when the pass
began, gradients included. TFLOP/s count half of the scores where nothing but causality hides them, all of them under a
mask, and the same in both passes. `benchmarks/data/h200-attention.jsonl` holds the rows of an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
NODES = {"Cudnn": "cudnn", "Flash": "flash", "Efficient": "efficient"}
"""A part of the name of each kernel's node in autograd's graph."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = {64: 64, 80: 48, 96: 40, 128: 32, 256: 16}
"""As many heads of each width as make a hidden size of about 4096."""


class Case(NamedTuple):
    mask: str  # causal, window (half of the sequence), packed (four documents)
    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    asked: str | None = None


def cases() -> Iterator[Case]:
    for asked in (None, *KERNELS):
        for mask in ("causal", "window", "packed"):
            if asked == "flash" and mask != "causal":
                continue  # it takes no mask
            for head_dim, heads in HEADS.items():
                yield Case(mask, 1, 4096, heads, heads, head_dim, asked=asked)
    for mask in ("causal", "window"):
        yield Case(mask, 1, 4096, 32, 32, 128, "fp16")
        for kv_heads in (32, 8):
            yield Case(mask, 1, 2048, 32, kv_heads, 128, "fp32")
        yield Case(mask, 1, 4039, 32, 32, 128)
        for asked in ("cudnn", "flash", "efficient"):
            for batch, sequence in ((4, 1024), (2, 2048), (1, 8192), (1, 16384)):
                if asked != "flash" or mask == "causal":
                    yield Case(mask, batch, sequence, 32, 32, 128, asked=asked)
    for asked in ("cudnn", "flash"):
        yield Case("causal", 1, 4096, 32, 8, 128, asked=asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warm()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with args.out.open("w") as out:
        for case in cases():
            try:
                row = case._asdict() | measure(case)
            except RuntimeError as error:  # no kernel of that name for such heads
                row = case._asdict() | {"error": str(error)[:300]}
            out.write(json.dumps(row | machine) + "\n")
            print(row, flush=True)


def warm() -> None:
    """A second of products: the card at the clock that it keeps."""
    a, began = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), time.monotonic()
    while time.monotonic() - began < 1.0:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def measure(case: Case) -> dict[str, Any]:
    dtype = DTYPES[case.dtype]

    def projected(heads: int) -> torch.Tensor:
        made = torch.randn(case.batch, case.sequence, heads, case.head_dim, device="cuda", dtype=dtype)
        return made.transpose(1, 2).requires_grad_()

    qkv = projected(case.heads), projected(case.kv_heads), projected(case.kv_heads)
    mask = mask_of(case)

    def forward() -> torch.Tensor:
        grouped = case.kv_heads != case.heads
        return F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)

    with sdpa_kernel(KERNELS[case.asked]) if case.asked else nullcontext():
        out = forward()
        node = out.grad_fn.name() if out.grad_fn else ""
        gradient = torch.randn_like(out)
        torch.autograd.grad(out, qkv, gradient)
        del out
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = forward()
        held, forward_peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(out, qkv, gradient)
        backward_peak = torch.cuda.max_memory_allocated()
        forward_ms = timed(forward)
        out = forward()
        backward_ms = timed(lambda: torch.autograd.grad(out, qkv, gradient, retain_graph=True))
    count = 4 * case.batch * case.heads * case.sequence**2 * case.head_dim / (2 if mask is None else 1)
    return {
        "kernel": next((name for word, name in NODES.items() if word in node), "math"),
        "kept": held - before,
        "forward_peak": forward_peak - before,
        "backward_peak": backward_peak - held,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "forward_tflops": round(count / forward_ms / 1e9, 1),
        "backward_tflops": round(count / backward_ms / 1e9, 1),
    }


def mask_of(case: Case) -> torch.Tensor | None:
    """As transformers makes it: boolean, for all heads together, the rows of a batch sharing one where they can."""
    if case.mask == "causal":
        return None
    place = torch.arange(case.sequence, device="cuda")
    seen = place[:, None] >= place[None, :]
    if case.mask == "window":
        seen &= place[None, :] > place[:, None] - case.sequence // 2
        return seen.expand(case.batch, 1, -1, -1)
    document = place * 4 // case.sequence
    return (seen & (document[:, None] == document[None, :])).repeat(case.batch, 1, 1, 1)


def timed(run: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds of one call, by device events."""
    run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median([start.elapsed_time(end) for start, end in marks]), 4)


if __name__ == "__main__":
    main()
