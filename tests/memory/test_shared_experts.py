"""Experts that several ranks share: the footprint against the worker's own model, its experts shared out.

A process of its own (this file, run as a script) trains tiny models on the CPU as the busiest rank of several under
torch's fake process group. What is there at the worst moment of each pass, shards and gradients at rest left out, is
compared.
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

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
QWEN3 = {
    **MIXTRAL,
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
QWEN2 = {**QWEN3, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 96, "tie_word_embeddings": False}
LONG, SHORT = {"seq": 256, "micro_batch": 2}, {"seq": 32, "micro_batch": 1}
NONE, FULL = {"checkpointing": "none"}, {"checkpointing": "full"}
ADAPTERS = {"method": "lora", "lora_targets": "q_proj,v_proj"}
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2 of 8": (MIXTRAL, {**LONG, **NONE, "expert_parallel": 2}),
    "8 of 8": (MIXTRAL, {**LONG, **NONE, "expert_parallel": 8}),
    "recomputed": (MIXTRAL, {**LONG, **FULL, "expert_parallel": 2}),
    "some recomputed": (MIXTRAL, {**LONG, "checkpointing": "layers:2", "expert_parallel": 4}),
    "few tokens": (MIXTRAL, {**SHORT, **NONE, "expert_parallel": 2}),
    "few tokens, recomputed": (MIXTRAL, {**SHORT, **FULL, "expert_parallel": 4}),
    "many experts": (QWEN3, {**LONG, **NONE, "expert_parallel": 4}),
    "many experts, recomputed": (QWEN3, {**LONG, **FULL, "expert_parallel": 8}),
    "beside a common one": (QWEN2, {**LONG, **NONE, "expert_parallel": 2}),
    "adapters": (MIXTRAL, {**LONG, **NONE, **ADAPTERS, "expert_parallel": 4}),
    "adapters, recomputed": (QWEN3, {**LONG, **FULL, **ADAPTERS, "expert_parallel": 4}),
    "in groups": (MIXTRAL, {**LONG, **NONE, "expert_parallel": 2, "shard_within": 4}),
}
WORLD = 8
TOLERANCE = 0.035
"""Autograd does not add gradients in place under a dispatch mode. With many tokens, as trainings have them, predictions
are 0.4 to 1.5 % below that; only of a few is it more, and above."""


def question(name: str) -> tuple[ModelShape, Levers]:
    config, flags = SCENARIOS[name]
    shape = shape_from_config(config, name)
    return shape, levers_from_flags({"engine": "fsdp2", "optimizer": "sgd", **flags}, shape)


# --- the process that trains ----------------------------------------------------------------------


def record(name: str) -> dict[str, int]:
    """The most that each pass of a second step held beside what rests between steps."""
    import torch
    from live import live_mode
    from transformers import AutoConfig

    from tightfit.train import build
    from tightfit.train.assemble import materialise
    from tightfit.train.config import AdapterSettings
    from tightfit.train.engines.fsdp2 import shard
    from tightfit.train.experts import own_experts
    from tightfit.train.mesh import make_expert_mesh, make_mesh
    from tightfit.train.place import Place
    from tightfit.train.recompute import recompute

    torch.set_num_threads(1)
    _, way = question(name)
    place = Place(rank=0, local_rank=0, world=WORLD, device=torch.device("cpu"), launcher="", rehearsal=True)
    model = build.skeleton(AutoConfig.for_model(**SCENARIOS[name][0]), torch.bfloat16, "sdpa")
    build.freeze(model, way)
    if way.lora is not None:
        model = build.add_adapters(model, way.lora, AdapterSettings(alpha=16, dropout=0.0), build.adapter_dtype(way))
    build.cast_meta(model, lambda _, param: build.rests_in(way, trains=param.requires_grad))
    recompute(model, way.checkpointing)
    mesh = make_expert_mesh(way, place)
    own_experts(model, mesh, is_rehearsal=True)
    shard(model, way, make_mesh(way, place), place, mesh)
    materialise(model, place.device)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02)
    model.train()
    torch.manual_seed(0)
    peaks: dict[str, int] = {}
    for _ in range(2):
        ids = torch.randint(0, 90, (way.micro_batch, way.sequence))
        with live_mode([ids, *model.parameters(), *model.buffers()]) as live:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            peaks["forward"], live.peak = live.peak, 0
            loss.backward()
            peaks["backward"] = live.peak
        del loss
        for param in model.parameters():
            param.grad = None
    return peaks


# --- the comparison -----------------------------------------------------------------------------


def predicted(name: str) -> dict[str, int]:
    phases = estimate(*question(name), WORLD).gpu.phases
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
def test_a_step_holds_what_the_busiest_rank_holds(real: dict[str, dict[str, int]], name: str) -> None:
    """The loss belongs to both passes: its worst moment is in one of them."""
    wanted = predicted(name)
    assert max(real[name].values()) == pytest.approx(max(wanted.values()), rel=TOLERANCE)
    assert real[name]["forward"] <= max(wanted["forward"], wanted["loss"]) * (1 + TOLERANCE)
    assert real[name]["backward"] <= max(wanted["backward"], wanted["loss"]) * (1 + TOLERANCE)


if __name__ == "__main__":
    from tightfit.train.place import join_alone

    os.environ.update({"LOCAL_RANK": "0", "RANK": "0"})
    join_alone(0, WORLD)
    print("FOUND " + json.dumps({name: record(name) for name in SCENARIOS}))  # noqa: T201
