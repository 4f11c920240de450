"""Layers that GPUs cannot share are refused in a sentence that names what would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.inputs.flags import levers_from_flags
from tightfit.inputs.layouts import check_layout, cut_dimension
from tightfit.model.load import shape_from_config
from tightfit.types import ConfigError, Lora

LLAMA = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
         "num_key_value_heads": 8, "vocab_size": 32_000, "num_hidden_layers": 4}  # fmt: skip
PHI3 = {**LLAMA, "model_type": "phi3"}
OLMO2 = {**LLAMA, "model_type": "olmo2"}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "flags", "world", "message", "words"),
    [
        (LLAMA, {"engine": "zero3"}, 8, "inputs.layout-needs-engine", "--engine fsdp2"),
        (LLAMA, {"method": "qlora"}, 8, "inputs.tensor-packed", "--method lora"),
        (LLAMA, {"method": "lora", "lora_dropout": 0.1}, 8, "inputs.tensor-dropout", "--lora-dropout 0"),
        (LLAMA, {"compile": "layers"}, 8, "inputs.compile-shared-layers", "--compile off"),
        (LLAMA, {"sequence_parallel": 2}, 8, "inputs.layouts-apart", "--sequence-parallel"),
        (LLAMA, {"tensor_parallel": 3}, None, "inputs.layout-sizes", "use 2, 4 or 8"),
        (LLAMA, {"tensor_parallel": 8}, 12, "inputs.layout-sizes", "12 GPUs; use 2 or 4"),
        (LLAMA, {"tensor_parallel": 4, "shard_within": 2}, 8, "inputs.layout-sizes", "use 2"),
        ({**LLAMA, "intermediate_size": 2818}, {"tensor_parallel": 4}, 8, "inputs.layout-sizes", "use 2"),
        ({**LLAMA, "attention_bias": True}, {}, 8, "inputs.tensor-whole", "self_attn.o_proj.bias"),
        (PHI3, {}, 8, "inputs.tensor-whole", "qkv_proj"),
        (OLMO2, {}, 8, "inputs.tensor-norms", "leave it out"),
        (MIXTRAL, {}, 8, "inputs.tensor-unknown", "leave it out"),
    ],
)
def test_layers_that_gpus_cannot_share(
    config: dict[str, Any], flags: dict[str, Any], world: int | None, message: str, words: str
) -> None:
    shape = shape_from_config(config, "a model")
    with pytest.raises(ConfigError) as raised:
        check_layout(levers_from_flags({"engine": "fsdp2", "tensor_parallel": 2, **flags}, shape), shape, world)
    assert raised.value.said.id == message
    assert words in str(raised.value.said)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite"])
def test_families_that_can_be_shared(model_type: str) -> None:
    shape = shape_from_config({**LLAMA, "model_type": model_type, "head_dim": 64}, model_type)
    levers = levers_from_flags({"engine": "fsdp2", "tensor_parallel": 8}, shape)
    check_layout(levers, shape, 16)
    check_layout(replace(levers, lora=Lora(), method="lora"), shape, 16)
    matrices = [tensor for block in shape.blocks for tensor in block.tensors if tensor.is_linear]
    assert {cut_dimension(tensor) for tensor in matrices} == {0, 1}
