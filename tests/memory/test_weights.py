"""What trains and in how many bytes, against PEFT and bitsandbytes' layout."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tightfit.memory.weights import NF4_BLOCK, weights
from tightfit.model.load import load_model, shape_from_config
from tightfit.types import Lora

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "gemma3_text": {**SMALL, "head_dim": 16},
    "gpt2": {"vocab_size": 97, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32},
    "mixtral": {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {**SMALL, **EXPERTS, "head_dim": 16},
    "qwen2_moe": {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 32},
}


@pytest.mark.thorough
@pytest.mark.parametrize("targets", [None, ("q_proj", "v_proj")])
@pytest.mark.parametrize("model_type", MODELS)
def test_adapters_are_those_of_peft(model_type: str, targets: tuple[str, ...] | None) -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if targets and model_type == "gpt2":
        targets = ("c_attn",)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MODELS[model_type]))
        chosen = list(targets) if targets else "all-linear"
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=chosen))
    real = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shape = shape_from_config({"model_type": model_type, **MODELS[model_type]}, model_type)
    assert weights(shape, "lora", Lora(rank=4, targets=targets), "bf16", 0).trainable_numel == real


def test_nf4_takes_half_a_byte_and_its_scales() -> None:
    shape = load_model("qwen2.5-7b")
    packed = weights(shape, "qlora", Lora(), "bf16", 0)
    assert packed.quantised_bytes - packed.scales_bytes == packed.quantised_numel // 2
    assert packed.scales_bytes == pytest.approx(packed.quantised_numel / NF4_BLOCK, rel=0.02)
    outside = sum(tensor.numel for tensor in (*shape.before, *shape.after))
    assert sum(packed.frozen) >= outside, "embedding and head stay as they are"


def test_frozen_layers_and_the_embedding_below_them_do_not_train() -> None:
    shape = load_model("tiny_llama")
    layer = sum(tensor.numel for tensor in shape.blocks[0].tensors)
    every, upper = (weights(shape, "full", None, "bf16", frozen) for frozen in (0, 2))
    assert every.trainable_numel - upper.trainable_numel == 2 * layer + shape.before[0].numel
    assert every.bytes == upper.bytes
