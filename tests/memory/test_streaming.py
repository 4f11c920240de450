"""What the streaming engine holds: the footprint against the engine itself, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from live import live_mode

from tightfit.inputs.flags import checkpointing_from_word
from tightfit.memory import stream
from tightfit.memory.job import make_job
from tightfit.model.load import shape_from_config
from tightfit.types import Gpu, Levers, Lora, ModelShape

CPU = Gpu(name="CPU", vendor="cpu", memory_bytes=2**34)
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96,
         "tie_word_embeddings": False}  # fmt: skip
GEMMA = {"model_type": "gemma2", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}  # fmt: skip
WORDS = 4096
SCENARIOS: dict[str, dict[str, Any]] = {
    "layers": {},
    "no accumulation": {"accumulation": 1},
    "nothing recomputes": {"checkpointing": "none"},
    "some layers recompute": {"checkpointing": "layers:2"},
    "parts recompute": {"checkpointing": "select:mlp"},
    "inputs on the host": {"checkpointing": "full+offload", "accumulation": 4},
    "a broad head": {"vocab_size": WORDS, "sequence": 32},
    "a tied head": {"vocab_size": WORDS, "sequence": 32, "tie_word_embeddings": True},
    "a broad embedding": {"vocab_size": WORDS, "sequence": 2},
    "some layers stay": {"resident": 2},
    "all layers stay": {"resident": 4, "checkpointing": "none"},
    "frozen layers": {"frozen_layers": 2, "checkpointing": "none"},
    "adapters": {"method": "lora", "lora": Lora(rank=4)},
    "adapters, nothing recomputes": {"method": "lora", "lora": Lora(rank=4), "checkpointing": "none"},
    "Gemma": {"model": GEMMA, "attention": "eager"},
}
QUICK = ("layers", "adapters")
TOLERANCE = 0.03
"""Autograd does not add gradients in place under a dispatch mode."""


def ask(name: str) -> tuple[dict[str, Any], Levers]:
    words = dict(SCENARIOS[name])
    config = {**words.pop("model", LLAMA)}
    config |= {key: words.pop(key) for key in ("vocab_size", "tie_word_embeddings") if key in words}
    words["checkpointing"] = checkpointing_from_word(words.get("checkpointing", "full"))
    return config, Levers(engine="stream", **{"sequence": 256, "micro_batch": 2, "accumulation": 3, **words})


def record(config: dict[str, Any], levers: Levers) -> int:
    """The most that a window held beside what is always there."""
    import torch
    from transformers import AutoConfig

    from tightfit.train import build
    from tightfit.train.config import AdapterSettings, OptimizerConfig
    from tightfit.train.engines.stream import StreamAdapters, StreamWeights
    from tightfit.train.optimizers import name_decays
    from tightfit.train.place import Place
    from tightfit.train.recompute import recompute
    from tightfit.train.streaming import place_model

    torch.set_num_threads(1)
    place = Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="none")
    training = OptimizerConfig(
        learning_rate=1e-4, schedule="constant", warmup=0.0, epochs=None, max_steps=2, weight_decay=0.0, clip=1.0,
        first_scale_power=None, seed=42,
    )  # fmt: skip
    hf = AutoConfig.for_model(**config)
    build.install_scan(hf.model_type, levers)
    model = build.skeleton(hf, torch.bfloat16, levers.attention, trust_remote_code=False)
    build.freeze(model, levers)
    if levers.lora is not None:
        model = build.add_adapters(model, levers.lora, AdapterSettings(alpha=8, dropout=0.0), torch.bfloat16)
    build.cast_meta(model, lambda *_: torch.bfloat16)
    if levers.checkpointing.select:
        recompute(model, levers.checkpointing)
    decays = name_decays(model, 0.0) if levers.lora is None else {}
    placed = place_model(model, levers, place, decays)
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            module._buffers[leaf] = None if buffer is None else buffer.to("cpu")
    for unit in placed.units:
        unit.home.zero_()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    kind = StreamWeights if levers.lora is None else StreamAdapters
    engine = kind(model, levers, place, training, placed)
    engine.train(True)
    rows = (levers.micro_batch, levers.sequence)
    peak = 0
    for _ in range(2):
        batches = [torch.randint(0, 90, rows) for _ in range(levers.accumulation)]
        resting = [*batches, *model.parameters(), *model.buffers()]
        resting += [memory for unit in placed.units for memory in (unit.home, unit.slot.memory)]
        resting += engine._kept._buffers.values()
        if levers.lora is None:
            resting += [*engine._updates._arrived.values(), *engine._updates._places.values()]
        else:
            resting += engine._copies
        with live_mode(resting) as live:
            live.known.clear()
            inputs = ({"input_ids": ids, "labels": ids} for ids in batches)
            engine.accumulate(inputs, len(batches), 1.0, lambda *_: None)
            peak = live.peak
        engine.step(1e-4)
    return int(peak)


def predict(shape: ModelShape, levers: Levers) -> dict[str, int]:
    job = make_job(shape, levers, 1, CPU)
    always = sum(stream.hold_always(job).values())
    waiting = (levers.accumulation - 1) * stream.INPUT_BYTES * levers.micro_batch * levers.sequence  # at rest here
    return {name: sum(parts.values()) - always - waiting for name, parts in stream.passes(job).items()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCENARIOS],
)
@pytest.mark.thorough
def test_a_window_holds_what_the_engine_holds(name: str) -> None:
    pytest.importorskip("torch")
    config, levers = ask(name)
    found = predict(shape_from_config(config, name), levers)
    assert record(config, levers) == pytest.approx(max(found.values()), rel=TOLERANCE), found
