"""Layers that several ranks share: the footprint against the worker's own model, cut and sharded.

A process of its own (this file, run as a script) trains tiny models on the CPU as one rank of several under torch's
fake process group. What is there at the worst moment of each pass, shards and gradients at rest left out, is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tightfit.inputs.flags import levers_from_flags
from tightfit.memory import estimate
from tightfit.model.load import shape_from_config
from tightfit.types import Levers, ModelShape

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
BROAD = {**LLAMA, "vocab_size": 4096}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "vocab_size": 2048}
LONG, SHORT = {"seq": 256, "micro_batch": 2}, {"seq": 16, "micro_batch": 1}
SCENARIOS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "2 of 4": (LLAMA, 4, {**LONG, "tensor_parallel": 2, "checkpointing": "none"}),
    "4 of 4": (LLAMA, 4, {**LONG, "tensor_parallel": 4, "checkpointing": "none"}),
    "one row": (LLAMA, 8, {**LONG, "tensor_parallel": 2, "checkpointing": "none", "micro_batch": 1}),
    "recomputed": (LLAMA, 8, {**LONG, "tensor_parallel": 4, "checkpointing": "full"}),
    "some recomputed": (LLAMA, 8, {**LONG, "tensor_parallel": 2, "checkpointing": "layers:2"}),
    "head": (BROAD, 8, {**SHORT, "tensor_parallel": 2, "checkpointing": "full"}),
    "tied, with norms of heads": (QWEN3, 4, {**LONG, "tensor_parallel": 2, "checkpointing": "none"}),
    "adapters": (LLAMA, 4, {**LONG, "tensor_parallel": 2, "checkpointing": "none", "method": "lora"}),
    "adapters, recomputed": (LLAMA, 4, {**LONG, "tensor_parallel": 4, "checkpointing": "full", "method": "lora"}),
    "parts recomputed": (LLAMA, 4, {**LONG, "tensor_parallel": 2, "checkpointing": "select:mlp"}),
    "adapters, parts recomputed": (
        LLAMA,
        4,
        {**LONG, "tensor_parallel": 2, "checkpointing": "select:mlp", "method": "lora"},
    ),
    "in groups": (LLAMA, 8, {**LONG, "tensor_parallel": 2, "shard_within": 4, "checkpointing": "none"}),
}
TOLERANCE = 0.025
"""Autograd does not add gradients in place under a dispatch mode. And what comes of the next layer is counted from the
beginning of a layer's backward pass, though it is fetched in the middle of it."""


def question(name: str) -> tuple[ModelShape, Levers, int]:
    config, world, flags = SCENARIOS[name]
    shape = shape_from_config(config, name)
    return shape, levers_from_flags({"engine": "fsdp2", "optimizer": "sgd", **flags}, shape), world


# --- the process that trains ----------------------------------------------------------------------


def record(name: str) -> dict[str, int]:
    """The most that each pass of a second step held beside what rests between steps."""
    import torch
    import torch.distributed as dist
    from live import live_mode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig

    from tightfit.train import build
    from tightfit.train.assemble import materialise
    from tightfit.train.config import AdapterSettings
    from tightfit.train.engines.fsdp2 import shard
    from tightfit.train.mesh import make_mesh
    from tightfit.train.place import Place
    from tightfit.train.recompute import recompute
    from tightfit.train.row_parts import RowParts

    torch.set_num_threads(1)
    _, way, world = question(name)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    place = Place(rank=0, local_rank=0, world=world, device=torch.device("cpu"), launcher="", rehearsal=True)
    config = AutoConfig.for_model(**SCENARIOS[name][0])
    model = build.skeleton(config, torch.bfloat16, "sdpa")
    build.freeze(model, way)
    if way.lora is not None:
        model = build.add_adapters(model, way.lora, AdapterSettings(alpha=16, dropout=0.0), build.adapter_dtype(way))
    build.cast_meta(model, lambda _, param: build.rests_in(way, trains=param.requires_grad))
    recompute(model, way.checkpointing)
    shard(model, way, make_mesh(way, place), place)
    materialise(model, place.device)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02)
    model.train()
    parts = RowParts(way, place)
    peaks: dict[str, int] = {}
    for _ in range(2):
        ids = torch.randint(0, 90, (way.micro_batch, way.sequence))
        given = parts.cut({"input_ids": ids, "labels": ids})
        with parts, live_mode([*given.values(), *model.parameters(), *model.buffers()]) as live:
            loss = model(**given, use_cache=False).loss
            peaks["forward"], live.peak = live.peak, 0
            loss.backward()
            peaks["backward"] = live.peak
        del loss
        for param in model.parameters():
            param.grad = None
    dist.destroy_process_group()
    return peaks


# --- the comparison -----------------------------------------------------------------------------


def predicted(name: str) -> dict[str, int]:
    shape, way, world = question(name)
    phases = estimate(shape, way, world).gpu.phases
    at_rest = ("weights", "optimizer_states", "temporaries")
    return {
        name: sum(size for part, size in phases[name].components.items() if part not in at_rest)
        for name in ("forward", "loss", "backward")
    }


@pytest.fixture(scope="module")
def real() -> dict[str, dict[str, int]]:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(lines[0].removeprefix("FOUND "))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_step_holds_what_a_rank_that_shares_layers_holds(real: dict[str, dict[str, int]], name: str) -> None:
    """The loss belongs to both passes: its worst moment is in one of them."""
    wanted = predicted(name)
    assert max(real[name].values()) == pytest.approx(max(wanted.values()), rel=TOLERANCE)
    assert real[name]["forward"] <= max(wanted["forward"], wanted["loss"]) * (1 + TOLERANCE)
    assert real[name]["backward"] <= max(wanted["backward"], wanted["loss"]) * (1 + TOLERANCE)


if __name__ == "__main__":
    os.environ.update({"LOCAL_RANK": "0", "RANK": "0"})
    print("FOUND " + json.dumps({name: record(name) for name in SCENARIOS}))  # noqa: T201
