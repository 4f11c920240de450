"""Which layers get adapters when nobody names them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.train.adapters import add_adapters
from tightfit.train.config import AdapterSettings
from tightfit.types import Lora

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
KINDS = {
    "mamba": {"in_proj", "x_proj", "dt_proj"},
    "falcon_mamba": {"in_proj", "x_proj", "dt_proj"},
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_that_can_have_one(kind: str) -> None:
    more = {"intermediate_size": 32, "num_attention_heads": 2} if kind == "llama" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **more))
    adapted = add_adapters(model, Lora(rank=2), AdapterSettings(alpha=4, dropout=0.0), torch.float32)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == KINDS[kind]
