"""Which attention kernel `sdpa` takes: PyTorch's own conditions, card by card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.memory.activations import setting_of
from tightfit.memory.attention import KERNELS, computed_keys, kernel_of
from tightfit.memory.operations import Operations
from tightfit.memory.tape import Slot, measure
from tightfit.types import Attention, Gpu, Levers, Precision

MEASURED = Path(__file__).parents[2] / "benchmarks" / "data" / "h200-attention.jsonl"

GROUPED = {"heads": 32, "kv_heads": 8, "head_dim": 128}
WHOLE = {"heads": 32, "kv_heads": 32, "head_dim": 96}
WINDOWED = {**WHOLE, "sliding_window": 2047}
WIDE = {"heads": 8, "kv_heads": 4, "head_dim": 256}
"""Gemma's heads."""


def picked(arch: str | None, precision: Precision, heads: dict[str, Any], **levers: Any) -> str:
    vendor = "amd" if arch and arch.startswith("gfx") else "nvidia"
    card = Gpu(name="card", vendor=vendor, memory_bytes=2**36, arch=arch)
    setting = setting_of(Levers(precision=precision, sequence=4096, **levers), card)
    return kernel_of(Attention(**heads), setting)


@pytest.mark.parametrize(
    ("arch", "precision", "heads", "kernel"),
    [
        ("sm_90", "bf16", GROUPED, "cudnn"),
        ("sm_90", "bf16", WINDOWED, "cudnn"),
        ("sm_90", "bf16", {**WIDE, "sliding_window": 1024}, "cudnn"),
        ("sm_90", "bf16", {**WHOLE, "head_dim": 512}, "efficient"),
        ("sm_90", "bf16", {**WHOLE, "dropout": True}, "flash"),
        ("sm_90", "bf16", {**WIDE, "softcap": True}, "eager"),
        ("sm_90", "fp32", GROUPED, "math"),
        ("sm_90", "fp32", WHOLE, "efficient"),
        ("sm_80", "bf16", GROUPED, "flash"),
        ("sm_80", "bf16", WIDE, "flash"),
        ("sm_80", "bf16", {**WIDE, "sliding_window": 1024}, "efficient"),
        ("sm_89", "bf16", WINDOWED, "efficient"),
        ("sm_120", "bf16", WINDOWED, "efficient"),
        ("sm_75", "fp16", GROUPED, "math"),
        ("sm_75", "fp16", WHOLE, "efficient"),
        ("sm_75", "fp16", {**GROUPED, "sliding_window": 1024}, "efficient"),
        ("sm_75", "bf16", WHOLE, "math"),
        ("sm_75", "bf16", WINDOWED, "math"),
        ("gfx942", "bf16", GROUPED, "flash"),
        ("gfx90a", "bf16", WINDOWED, "efficient"),
        ("gfx908", "bf16", WHOLE, "math"),
        (None, "bf16", WINDOWED, "cudnn"),
    ],
)
def test_the_kernel(arch: str | None, precision: Precision, heads: dict[str, Any], kernel: str) -> None:
    assert picked(arch, precision, heads) == kernel


def test_a_mask_takes_the_kernel_that_reads_one() -> None:
    assert picked("sm_80", "bf16", WHOLE) == "flash"
    assert picked("sm_80", "bf16", WHOLE, packed=True) == "efficient"
    assert picked("sm_80", "bf16", WHOLE, packed=True, attention="flash") == "flash"


def test_what_a_mask_hides_is_computed() -> None:
    """A kernel that is told of causality computes half of the scores, one that is told of the window fewer still."""
    windowed = Attention(**WINDOWED)
    by_mask, told = [
        setting_of(Levers(precision="bf16", sequence=4096, attention=attention)) for attention in ("sdpa", "flash")
    ]
    assert computed_keys(Attention(**WHOLE), by_mask) == 2048
    assert computed_keys(windowed, by_mask) == 4096
    assert computed_keys(windowed, told) == pytest.approx(2047 - 2047**2 / 8192)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "math"])
def test_a_kernel_holds_what_it_held_on_a_gpu(kernel: str) -> None:
    """Kept after the forward pass, and the most in the backward pass beside it: rows of `measure_attention.py`."""
    rows = [row for row in map(json.loads, MEASURED.read_text().splitlines()) if row["kernel"] == kernel]
    assert rows
    for row in rows:
        window = None if row["mask"] == "causal" else row["sequence"] // 2
        heads = {name: row[name] for name in ("heads", "kv_heads", "head_dim")}
        shape = Attention(**heads, sliding_window=window)
        setting = setting_of(Levers(precision=row["dtype"], sequence=row["sequence"], micro_batch=row["batch"]))
        ops = Operations(setting, {})
        each = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        q, k, v = [Slot(ops.size(features), True) for features in each]
        out = KERNELS[kernel](ops, q, k, v, shape)
        cost = measure(ops.tape, q, out)
        given = {id(slot): slot.size for op in ops.tape.ops for slot in op.saves if slot in (q, k, v)}
        kept, back = cost.saved - sum(given.values()), cost.backward - cost.saved - out.size
        if kernel == "math":  # its output is kept by nobody, yet it was there
            kept += out.size
        near = 0.03 if kernel == "math" else 0.01
        assert kept == pytest.approx(row["kept"], rel=near, abs=2**19), row
        assert back == pytest.approx(row["backward_peak"], rel=near), row


def test_the_h200_takes_the_kernel_that_it_took() -> None:
    for row in map(json.loads, MEASURED.read_text().splitlines()):
        grouped_under_a_mask = row["mask"] != "causal" and row["kv_heads"] != row["heads"]  # transformers repeats them
        if row["asked"] is None and not grouped_under_a_mask:
            heads = {name: row[name] for name in ("heads", "kv_heads", "head_dim")}
            heads["sliding_window"] = None if row["mask"] == "causal" else 2048
            assert picked("sm_90", row["dtype"], heads) == row["kernel"], row
