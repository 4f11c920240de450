"""Where the CPU stands in for GPUs, what is asked for and never written to takes no RAM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.memory import estimate
from tightfit.model.load import load_model
from tightfit.types import Engine, Gpu, Hardware, Levers, Vendor


def bucket_bytes(vendor: Vendor, levers: Levers) -> int:
    card = Gpu(name="card", vendor=vendor, memory_bytes=64 * 2**30)
    footprint = estimate(load_model("tiny_llama"), levers, 2, Hardware(gpu=card, gpus_per_node=2))
    return max(phase.components.get("buckets", 0) for phase in footprint.gpu.phases.values())


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_a_bucket_counts_as_what_gradients_fill_of_it(engine: Engine) -> None:
    """DeepSpeed asks for room for 500 million elements, and a tiny model has two million."""
    levers = Levers(engine=engine, sequence=64)
    trained = load_model("tiny_llama").parameters
    assert bucket_bytes("nvidia", levers) >= levers.buckets.reduce_bucket * 2
    assert trained * 2 <= bucket_bytes("cpu", levers) <= 2 * trained * 4
    small = replace(levers, buckets=replace(levers.buckets, reduce_bucket=1000))
    assert bucket_bytes("cpu", small) == bucket_bytes("nvidia", small)
