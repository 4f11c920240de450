"""An MLP in tiles holds what its tape says, on real tensors."""

from __future__ import annotations

import pytest
import torch
from live import live_mode
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.inputs.flags import levers_from_flags
from tightfit.memory.activations import setting_of
from tightfit.memory.feedforward import mlp
from tightfit.memory.operations import Operations
from tightfit.memory.tape import Slot, measure
from tightfit.model.load import load_model
from tightfit.train.tiles import mlps_of, tile_mlps
from tightfit.types import Mlp

TILES = 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [True, False])
def test_it_holds_what_its_tape_says(dtype: torch.dtype, trains: bool) -> None:
    shape = load_model("tiny_llama")
    hidden, tokens, block = shape.hidden_size, TILES * shape.hidden_size, shape.blocks[0]
    assert isinstance(block.mlp, Mlp)
    fields = {"hidden_size": hidden, "intermediate_size": block.mlp.intermediate, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **fields), dtype=dtype)
    model.requires_grad_(trains)
    tile_mlps(model)
    (own,) = mlps_of(model)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    flags = {"seq": tokens, "precision": precision, "mlp": "tiled"}
    if not trains:
        flags |= {"method": "full", "trains": "embeddings"}
    ops = Operations(setting_of(levers_from_flags(flags, shape)), {tensor.name: tensor for tensor in block.tensors})
    read = Slot(ops.size(hidden), True)
    cost = measure(ops.tape, read, mlp(ops, read, block.mlp, hidden))

    x, grad = (torch.randn(1, tokens, hidden, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    with live_mode([*model.parameters(), x, grad]) as forward:
        out = own(x)
    assert forward.peak == pytest.approx(cost.forward - read.size, rel=0.01)
    with live_mode([*model.parameters(), x, grad, out]) as backward:
        out.backward(grad)
    # Under a dispatch mode autograd adds gradients into a third tensor: here those of a tile's input.
    assert 0 <= backward.peak - (cost.backward - 2 * read.size) <= read.size // TILES
    assert cost.saved == read.size
