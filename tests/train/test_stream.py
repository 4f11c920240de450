"""Layers that come from the host, in one process: losses, norms and what an evaluation says, against `ddp` with the
same weights, batches and steps. Nothing differs but the order of sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tightfit.train import build
from tightfit.train.assemble import fill, materialise
from tightfit.train.config import AdapterSettings, OptimizerConfig
from tightfit.train.engines import Engine
from tightfit.train.engines.ddp import Ddp
from tightfit.train.engines.stream import StreamAdapters, StreamWeights
from tightfit.train.optimizers import name_decays
from tightfit.train.place import Place
from tightfit.train.recompute import recompute
from tightfit.train.scratch import Scratch
from tightfit.train.streaming import place_model
from tightfit.types import AttentionKernel, Checkpointing, Levers, Lora

WINDOW, STEPS, RATE = 3, 3, 1e-2
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SMALL},
    "tied": {"model_type": "llama", "tie_word_embeddings": True, **SMALL},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, **SMALL},
    "bloom": {"model_type": "bloom", "vocab_size": 384, "hidden_size": 64, "n_layer": 5, "n_head": 4},
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 320, "state_size": 8},
}
ATTENTION: dict[str, AttentionKernel] = {"bloom": "eager"}
WHOLE = Levers(
    engine="stream", precision="fp32", accumulation=WINDOW, checkpointing=Checkpointing(layers=None), micro_batch=2
)
LORA = replace(WHOLE, method="lora", lora=Lora(rank=4))
WAYS: dict[str, tuple[str, Levers]] = {
    **{family: (family, WHOLE) for family in MODELS},
    "two stay": ("llama", replace(WHOLE, resident=2)),
    "all stay": ("tied", replace(WHOLE, resident=5)),
    "nothing recomputes": ("llama", replace(WHOLE, checkpointing=Checkpointing(layers=0))),
    "some recompute": ("tied", replace(WHOLE, checkpointing=Checkpointing(layers=2))),
    "parts recompute": (
        "llama",
        replace(WHOLE, checkpointing=Checkpointing(layers=None, select=("elementwise", "mlp"))),
    ),
    "inputs wait on the host": ("tied", replace(WHOLE, checkpointing=Checkpointing(layers=None, offload=True))),
    "fused loss": ("tied", replace(WHOLE, loss="fused")),
    "frozen layers": ("llama", replace(WHOLE, frozen_layers=2)),
    "the embeddings alone": ("llama", replace(WHOLE, trains="embeddings")),
    "all but the embeddings": ("llama", replace(WHOLE, trains="layers")),
    "adapters": ("llama", LORA),
    "adapters, two stay": ("tied", replace(LORA, resident=2)),
    "adapters, nothing recomputes": ("tied", replace(LORA, checkpointing=Checkpointing(layers=0))),
}
HERE = Place(rank=0, local_rank=0, world=1, device=torch.device("cpu"), launcher="python")


def make(model: str, levers: Levers, *, clip: float = 1.0, dropout: float = 0.0) -> Engine:
    config, working = AutoConfig.for_model(**MODELS[model]), build.DTYPES[levers.precision]

    def adapt(skeleton: Any) -> Any:
        if levers.lora is None:
            return skeleton
        settings = AdapterSettings(alpha=16, dropout=dropout)
        return build.add_adapters(skeleton, levers.lora, settings, build.adapter_dtype(levers))

    draws = Scratch(adapt(build.skeleton(config, working, ATTENTION.get(model, "sdpa"))), 1)
    made = build.skeleton(config, working, ATTENTION.get(model, "sdpa"))
    build.audit(made, working)
    build.freeze(made, levers)
    made = adapt(made)
    build.cast_meta(made, lambda name, param: param.dtype if ".lora_" in name else working)
    training = OptimizerConfig(
        learning_rate=RATE, schedule="constant", warmup=0, epochs=None, max_steps=STEPS, weight_decay=0.1, clip=clip,
        first_scale_power=None, seed=1,
    )  # fmt: skip
    if levers.engine == "ddp" or levers.checkpointing.select:
        recompute(made, replace(levers.checkpointing, offload=False))
    if levers.engine == "ddp":
        materialise(made, HERE.device)
    else:
        stream = place_model(made, levers, HERE, {} if levers.lora else name_decays(made, 0.1))
    fill(made, draws.read, working, 0, lambda *_: None)
    if levers.engine == "ddp":
        engine: Engine = Ddp(made, levers, HERE, training)
    else:
        engine = (StreamAdapters if levers.lora else StreamWeights)(made, levers, HERE, training, stream)
    engine.train(True)
    return engine


def batches(step: int) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(step)
    for _ in range(WINDOW):
        ids = torch.randint(0, 320, (2, 12), generator=random)
        yield {"input_ids": ids, "labels": ids}


def run(engine: Engine, first: int = 0, steps: int = STEPS) -> list[float]:
    """Loss and norm of each step, and the loss of an evaluation."""
    said = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        engine.expect_rate(RATE)
        added = engine.accumulate(batches(step), WINDOW, 2.0 * 11 * WINDOW, lambda *_: None)
        loss, stepped = engine.step(RATE).read(added)
        said += [loss, stepped.grad_norm or 0.0]
    engine.train(False)
    with torch.no_grad():
        said.append(float(engine.evaluate(batches(0), WINDOW)))
    engine.train(True)
    return said


def plain(levers: Levers) -> Levers:
    return replace(levers, engine="ddp", resident=0)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_follows_ddp(way: str) -> None:
    model, levers = WAYS[way]
    expected = run(make(model, plain(levers)))
    assert expected[-1] != pytest.approx(run(make(model, plain(levers)), steps=0)[-1], rel=1e-3), "nothing was learnt"
    assert run(make(model, levers)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("model", ["llama", "tied"])
def test_without_clipping_a_unit_is_updated_as_its_gradients_arrive(model: str) -> None:
    assert run(make(model, WHOLE, clip=0.0)) == pytest.approx(run(make(model, plain(WHOLE), clip=0.0)), rel=2e-5)


def test_what_is_dropped_out_is_dropped_again() -> None:
    """The same step twice, and with nothing recomputed: the generator stands where it should."""
    levers = replace(LORA, checkpointing=Checkpointing(layers=0))
    expected = run(make("llama", levers, dropout=0.3))
    assert run(make("llama", LORA, dropout=0.3)) == pytest.approx(expected, rel=2e-5)


def test_bf16_follows_ddp() -> None:
    levers = replace(WHOLE, precision="bf16")
    assert run(make("llama", levers)) == pytest.approx(run(make("llama", plain(levers))), rel=1e-2)
