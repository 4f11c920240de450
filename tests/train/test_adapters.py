"""Which layers get adapters when nobody names them, and what packed ones keep."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.train.build import add_adapters, quantise
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_matrix_that_zero3_releases_is_gone_until_the_backward_pass(dtype: torch.dtype) -> None:
    """The layer computes in fp32; `dtype` is that of what enters it."""
    pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **SMALL, intermediate_size=32, num_attention_heads=2)
    )
    quantise(model, lambda name, shape: torch.randn(shape), torch.device("cpu"), torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    given = torch.randn(3, 16, dtype=dtype, requires_grad=True)
    layer(given).sum().backward()
    assert given.grad is not None
    wanted, given.grad = given.grad, None

    layer.weight.ds_id = 0  # as ZeRO-3 marks its parameters
    output = layer(given)
    packed, whole = layer.weight.data.clone(), StorageWeakRef(layer.weight.data.untyped_storage())
    layer.weight.data = torch.empty(0, dtype=torch.uint8)
    assert whole.expired()
    layer.weight.data = packed
    output.sum().backward()
    torch.testing.assert_close(given.grad, wanted)
