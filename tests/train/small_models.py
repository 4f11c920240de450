"""Small models of each family, for tests that need real ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ATTENTION = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
SSM = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": SSM | {"rescale_prenorm_residual": True},
    "falcon_mamba": SSM,
    "mamba2": SSM | {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "gpt2": {
        "vocab_size": 384,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    },
    "gpt_neox": ATTENTION,
    "llama": ATTENTION,
    "qwen2": ATTENTION | {"tie_word_embeddings": True},
    "qwen3": ATTENTION | {"head_dim": 16},
    "gemma3_text": ATTENTION | {"head_dim": 16},
    "phi3": ATTENTION,
    "olmo2": ATTENTION,
    "mixtral": ATTENTION | {"num_local_experts": 11},
    "qwen2_moe": ATTENTION | EXPERTS | {"num_experts": 11, "shared_expert_intermediate_size": 80},
    "qwen3_moe": ATTENTION | EXPERTS | {"num_experts": 11, "head_dim": 16},
}

OF_EXPERTS = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
MIXTRAL = {**OF_EXPERTS, "model_type": "mixtral"}
QWEN2_MOE = {**OF_EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 80}
QWEN3_MOE = {**OF_EXPERTS, "model_type": "qwen3_moe", "head_dim": 16, "num_experts_per_tok": 3, "mlp_only_layers": [1]}
"""As flags of a job."""


def config_of(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **(FAMILIES[family] | changes))


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def real(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()
