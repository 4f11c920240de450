"""An MLP in tiles computes what it computes whole.

In float64: what remains is the order of sums. Most families compute their norms in fp32.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import config_of
from transformers import AutoModelForCausalLM

from tightfit.inputs.flags import levers_from_flags
from tightfit.memory.feedforward import tile_tokens
from tightfit.model.load import load_model
from tightfit.train.tiles import mlps_of, tile_mlps
from tightfit.types import ConfigError

ROWS, TOKENS, WORDS = 2, 101, 64
TOLERANCE, IN_FP32 = 1e-12, 1e-5


def pair(family: str, **fields: Any) -> tuple[Any, Any]:
    """The same model twice, once in tiles."""
    torch.manual_seed(0)
    config = config_of(family, vocab_size=WORDS, max_position_embeddings=TOKENS, **fields)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    tiled = deepcopy(whole)
    tile_mlps(tiled)
    return whole, tiled


def gradients(model: Any, *, again: bool = False) -> list[torch.Tensor]:
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    ids = torch.randint(0, WORDS, (ROWS, TOKENS))
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    found = [param.grad for param in model.parameters()]
    assert all(grad is not None and grad.abs().max() > 0 for grad in found)
    return [loss.detach(), *found]


def distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max() / one.abs().max()) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "gpt_neox", "olmo2"])
def test_losses_and_gradients_are_those_of_the_whole(family: str, again: bool) -> None:
    whole, tiled = pair(family)
    tokens = ROWS * TOKENS
    assert tile_tokens(tokens, whole.config.hidden_size) < tokens / 2
    assert distance(gradients(whole), gradients(tiled, again=again)) < (TOLERANCE if family == "gpt_neox" else IN_FP32)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_dropped_is_dropped_in_both_passes(again: bool) -> None:
    """Tile by tile with autograd's own backward pass, from the same random numbers."""
    whole, tiled = pair("gpt2", resid_pdrop=0.5, attn_pdrop=0.0, embd_pdrop=0.0)
    for each in mlps_of(whole):

        def in_parts(x: Any, plain: Any = each.forward) -> Any:
            rows = x.reshape(-1, x.shape[-1])
            return torch.cat([plain(part) for part in rows.split(tile_tokens(*rows.shape))]).view(x.shape)

        each.forward = in_parts
    assert distance(gradients(whole), gradients(tiled, again=again)) < TOLERANCE


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("tiny_llama", {"compile": "layers"}, "does not go with --compile layers"),
        ("tiny_llama", {"checkpointing": "select:mlp"}, "does not go with --checkpointing select:mlp"),
        ("tiny_llama", {"engine": "fsdp2", "tensor_parallel": 2}, "does not go with --tensor-parallel 2"),
        ("tiny_mamba", {}, "needs an MLP in every layer"),
        ("mixtral", {}, "needs an MLP in every layer"),
    ],
)
def test_what_cannot_be_tiled_is_said(tmp_path: Path, model: str, flags: dict[str, Any], said: str) -> None:
    if model == "mixtral":
        config_of(model).save_pretrained(tmp_path)
        model = str(tmp_path)
    with pytest.raises(ConfigError, match=said):
        levers_from_flags({"mlp": "tiled", **flags}, load_model(model))
