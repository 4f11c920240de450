"""What the card reaches: matrix products, attention, its memory; and what the host takes to launch an operation."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from math import prod
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tightfit.measure.bench import SLOW_FLOPS, Bench, Found, Run
from tightfit.messages import text

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# --- matrix products ------------------------------------------------------------------------------

Product = tuple[int, int, int]
"""Tokens, and the out and in features of a linear layer."""
LARGE: tuple[Product, ...] = (
    (8192, 4096, 4096),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (2048, 18944, 3584),
    (2048, 3584, 18944),
    (8192, 2048, 2048),
    (2048, 3584, 3584),
    (4096, 32768, 2048),
)
SMALL: tuple[Product, ...] = ((512, 896, 896), (256, 1024, 1024), (1024, 896, 896), (512, 2048, 2048))
LARGE_SLOW: tuple[Product, ...] = (
    (512, 1024, 1024),
    (256, 1024, 1024),
    (256, 512, 512),
    (128, 256, 256),
    (64, 128, 256),
)
SMALL_SLOW: tuple[Product, ...] = ((8, 64, 64), (16, 64, 64))
"""Of the widths and lengths that are trained. A CPU, and a GPU as slow as one, gets smaller ones."""
FIRST: Product = (16, 128, 128)
WARM_S = 1.0


def find_grid(bench: Bench) -> None:
    """Whether the device gets the small shapes, by a first product."""
    tokens, out, inner = 512, 1024, 1024
    x, w = (bench.randn(rows, inner, dtype=torch.float32) for rows in (tokens, out))
    bench.slow = 2 * tokens * out * inner / bench.seconds(lambda: F.linear(x, w), 0.01) < SLOW_FLOPS


def products(bench: Bench) -> Found:
    """FLOP/s of a linear layer's three products: the output, and the gradients of its input and of its weight."""
    large, small = (LARGE_SLOW, SMALL_SLOW) if bench.slow else (LARGE, SMALL)
    many = (2 if bench.slow else 4) if bench.quick else len(large)
    each_s = (0.02 if bench.quick else 0.1) if bench.slow else (0.06 if bench.quick else 0.15)
    rates: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    starts: list[float] = []
    x, w = (bench.randn(1024, 1024, dtype=torch.float32) for _ in range(2))
    bench.keep_busy(lambda: x @ w, 0.05 if bench.slow else WARM_S / 3 if bench.quick else WARM_S)
    for name, dtype in PRECISIONS.items():
        # A CPU may compute one format in matrix units and another number by number, a thousand times slower.
        first = _product(bench, FIRST, dtype, each_s / 10)
        if first is None:
            continue
        least = first["flops"] / sum(first["seconds"])
        chosen = [shape for shape in large if prod(shape) * 6 / least < 20 * each_s] if bench.slow else list(large)
        reached: list[float] = []
        for shape in chosen[:many] or [FIRST]:
            if bench.out_of_time and reached:
                break
            if (row := _product(bench, shape, dtype, each_s)) is not None:
                rows.append({"precision": name, **row})
                reached.append(row["flops"] / sum(row["seconds"]))
        if not reached:
            continue
        rates[f"products.{name}"] = median(reached)
        if name == "fp16":
            continue
        for shape in small[: 2 if bench.quick else None]:
            if (row := _product(bench, shape, dtype, each_s / 5)) is not None:
                rows.append({"precision": name, **row})
                starts += [max(seconds - row["flops"] / 3 / median(reached), 0.0) for seconds in row["seconds"]]
    if starts:
        rates["product_start_s"] = median(starts)
    return Found(rates=rates, raw=rows)


def _product(bench: Bench, shape: Product, dtype: torch.dtype, budget_s: float) -> dict[str, Any] | None:
    """Seconds of the three products; None: this device has no memory or no kernel for them."""
    tokens, out, inner = shape
    try:
        x, w, y = (bench.randn(*size, dtype=dtype) for size in ((tokens, inner), (out, inner), (tokens, out)))
        runs: tuple[Run, ...] = (lambda: F.linear(x, w), lambda: y @ w, lambda: y.t() @ x)
        seconds = [bench.seconds(run, budget_s / 3) for run in runs]
    except RuntimeError:
        return None
    return {"shape": list(shape), "flops": 6 * tokens * out * inner, "seconds": seconds}


# --- attention --------------------------------------------------------------------------------------

Heads = tuple[int, int, int, int]
"""Sequences, heads, tokens, and the width of a head."""
LONG: tuple[Heads, ...] = ((2, 32, 4096, 128), (4, 32, 2048, 128), (1, 32, 8192, 128), (8, 16, 2048, 64))
LONG_MATH: tuple[Heads, ...] = ((1, 32, 2048, 128), (1, 16, 4096, 128))
SHORT: Heads = (1, 32, 512, 128)
LONG_SLOW: tuple[Heads, ...] = ((1, 8, 1024, 64), (1, 8, 512, 64), (1, 4, 256, 32), (1, 4, 128, 32))
SHORT_SLOW: Heads = (1, 2, 64, 32)
KERNELS = {
    "flash": ("FLASH_ATTENTION", False),
    "cudnn": ("CUDNN_ATTENTION", False),
    "efficient": ("EFFICIENT_ATTENTION", False),
    "masked_efficient": ("EFFICIENT_ATTENTION", True),
    "masked_cudnn": ("CUDNN_ATTENTION", True),
    "math": ("MATH", True),
}
"""The name of its rate → torch's name of the kernel, and whether it is handed a mask."""


def attention(bench: Bench) -> Found:
    """FLOP/s of each kernel that torch may take, forward and backward."""
    from torch.nn.attention import SDPBackend

    # A CPU is hardly ever asked to train in 16 bits, which most compute number by number.
    dtype = _find_half() if bench.on_gpu else torch.float32
    rates: dict[str, float] = {}
    raw: dict[str, Any] = {}
    for name, (kernel, masked) in KERNELS.items():
        if not hasattr(SDPBackend, kernel):
            raw[name] = text("measure.no-kernel", torch=torch.__version__)
            continue
        shapes = list(LONG_SLOW if bench.slow else LONG_MATH if name == "math" else LONG)
        if bench.slow:
            first = _attention(bench, SHORT_SLOW, dtype, getattr(SDPBackend, kernel), masked)
            if isinstance(first, str):
                raw[name] = first
                continue
            least = first["flops"] / (first["seconds"] + first["seconds_back"])
            shapes = [shape for shape in shapes if 4 * prod(shape) * shape[2] / least < 1.0] or [SHORT_SLOW]
        if bench.quick:
            shapes = shapes[: 1 if bench.slow else 2]
        rows: list[dict[str, Any]] = []
        for shape in shapes:
            if bench.out_of_time and rows:
                break
            row = _attention(bench, shape, dtype, getattr(SDPBackend, kernel), masked)
            if isinstance(row, str):
                raw[name] = row  # why torch has it not for these
            else:
                rows.append(row)
        if rows:
            raw[name] = rows
            rates[f"attention.{name}"] = median(row["flops"] / row["seconds"] for row in rows)
            rates[f"attention.{name}.back"] = median(row["flops"] / row["seconds_back"] for row in rows)
    usual = next((name for name in ("flash", "efficient", "math") if f"attention.{name}" in rates), None)
    if usual is not None:
        shape = SHORT_SLOW if bench.slow else SHORT
        row = _attention(bench, shape, dtype, getattr(SDPBackend, KERNELS[usual][0]), KERNELS[usual][1])
        if not isinstance(row, str):
            raw["short"] = {"kernel": usual, **row}
            rates["attention_start_s"] = max(row["seconds"] - row["flops"] / rates[f"attention.{usual}"], 0.0)
    return Found(rates=rates, raw=raw)


def _attention(bench: Bench, shape: Heads, dtype: torch.dtype, kernel: Any, masked: bool) -> dict[str, Any] | str:
    """Seconds forward and backward; or why this kernel does not take it."""
    from torch.nn.attention import sdpa_kernel

    batch, heads, tokens, width = shape
    budget_s = (0.03 if bench.quick else 0.1) if bench.slow else (0.08 if bench.quick else 0.2)
    try:
        q, k, v = (bench.randn(batch, heads, tokens, width, dtype=dtype, grad=True) for _ in range(3))
        # as Hugging Face hands it over: true where a token may look
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=bench.device).tril() if masked else None
        mask = mask if mask is None else mask.expand(batch, 1, tokens, tokens)

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)

        with sdpa_kernel(kernel), _quiet():
            # Dropout's numbers, which these kernels take even where nothing is dropped, cannot be captured.
            seconds = bench.seconds(forward, budget_s, graphs=False)
            out = forward()
            grad = bench.randn(*out.shape, dtype=dtype)

            def back_again() -> object:
                return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

            back = bench.seconds(back_again, budget_s, graphs=False)
    except RuntimeError as error:  # no such kernel for this device, this mask, or this much memory
        return " ".join(str(error).split())[:200] or type(error).__name__
    flops = (4 if masked else 2) * batch * heads * tokens * tokens * width
    return {"shape": list(shape), "flops": flops, "seconds": seconds, "seconds_back": back}


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of each reason for which it does not take a kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _find_half() -> torch.dtype:
    """The 16-bit format that the card computes itself: bf16, or fp16 before Ampere."""
    has_bf16 = torch.version.hip or torch.cuda.get_device_capability()[0] >= 8
    return torch.bfloat16 if has_bf16 else torch.float16


# --- the card's memory --------------------------------------------------------------------------------


def memory(bench: Bench) -> Found:
    """Bytes/s of a copy, a cast, an addition and a softmax, all with as many elements."""
    elements = 2**22 if bench.slow else 2**26 if bench.quick else 2**27
    vocabulary = 32_000
    x, z = (bench.randn(elements, dtype=torch.bfloat16) for _ in range(2))
    y, to = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    logits = bench.randn(elements // vocabulary, vocabulary, dtype=torch.float32)
    kinds: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (4 * elements, lambda: y.copy_(x)),
        "cast": (6 * elements, lambda: to.copy_(x)),
        "add": (6 * elements, lambda: torch.add(x, z, out=y)),
        "softmax": (8 * logits.numel(), lambda: F.softmax(logits, -1)),
    }
    budget_s = 0.03 if bench.slow and bench.quick else 0.1 if bench.quick else 0.3
    raw = {name: {"bytes": size, "seconds": bench.seconds(run, budget_s)} for name, (size, run) in kinds.items()}
    moved, seconds = (sum(each[name] for each in raw.values()) for name in ("bytes", "seconds"))
    rates = {f"memory_{name}": raw[name]["bytes"] / raw[name]["seconds"] for name in ("copy", "cast")}
    with suppress(Exception):  # whatever a bitsandbytes without kernels for this card raises
        if (unpacking := _unpack(bench)) is not None:
            rates["unpacking"] = unpacking
    return Found(rates={"memory": moved / seconds, **rates}, raw=raw)


def _unpack(bench: Bench) -> float | None:
    """Bytes/s of 16-bit weights that bitsandbytes writes from 4-bit ones; None: it is not installed, or has no GPU."""
    if not bench.on_gpu or find_spec("bitsandbytes") is None:
        return None
    from bitsandbytes import functional

    weight = bench.randn(4096, 4096, dtype=_find_half())
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return weight.numel() * 2 / bench.seconds(lambda: functional.dequantize_4bit(packed, state), 0.1)


# --- launches -----------------------------------------------------------------------------------------

LAYER_OPERATIONS = 30
"""Of a Llama's layer, as `memory/layers.py` writes it down and the pace counts it; each has a backward."""


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(kept)


class DecoderLayer(nn.Module):
    """A Llama's layer as Hugging Face writes it, and so small that the card never keeps the host waiting."""

    def __init__(self, width: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.each = heads, kv_heads, width // heads
        self.before, self.between = RmsNorm(width), RmsNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * self.each, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        read = self.before(x)
        q, k, v = (layer(read).view(batch, tokens, -1, self.each).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (each * cos + self._rotate(each) * sin for each in (q, k))
        k, v = (
            each[:, :, None]
            .expand(batch, self.kv_heads, self.heads // self.kv_heads, tokens, self.each)
            .reshape(batch, self.heads, tokens, self.each)
            for each in (k, v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(batch, tokens, width).contiguous())
        read = self.between(x)
        out: torch.Tensor = x + self.down(F.silu(self.gate(read)) * self.up(read))
        return out

    @staticmethod
    def _rotate(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def launch(bench: Bench) -> Found:
    """Host seconds of one operation, over a tiny layer forward and backward."""
    dtype = _find_half() if bench.on_gpu else torch.float32
    layer = DecoderLayer().to(bench.device, dtype)
    x = bench.randn(1, 16, 64, dtype=dtype, grad=True)
    cos, sin = (bench.randn(1, 1, 16, 16, dtype=dtype) for _ in range(2))
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for number in range(10 + (30 if bench.quick else 100)):
        began = time.perf_counter()
        out = layer(x, cos, sin)
        then = time.perf_counter()
        out.backward(out)
        done = time.perf_counter()
        bench.wait()  # or a queue that is full would make the host wait in the middle
        layer.zero_grad(set_to_none=True)
        if number >= 10:
            times["forward"].append(then - began)
            times["backward"].append(done - then)
    raw = {name: median(found) for name, found in times.items()} | {"operations": LAYER_OPERATIONS}
    rate = (raw["forward"] + raw["backward"]) / (2 * LAYER_OPERATIONS)
    return Found(rates={"launch_s": rate}, raw=raw)
