"""GPT-2: learned positions, LayerNorms, one fused projection, and linear layers stored transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tightfit.messages import Message
from tightfit.model.families.parts import Skeleton, conv1d_linear, layer_kinds, norm
from tightfit.model.families.reader import MAX_HEADS, MAX_LAYERS, ConfigReader, NotByName
from tightfit.types import Attention, Block, Mlp, ModelShape, Tensor

ALIASES: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def shape(config: ConfigReader) -> ModelShape:
    config.require("n_embd", "n_layer", "n_head", "vocab_size")
    hidden = config.count("n_embd", 768)
    heads = config.count("n_head", 12, most=MAX_HEADS)
    inner = config.optional_count("n_inner", None) or 4 * hidden
    config.check_multiple("n_embd", hidden, "n_head", heads)
    if config.flag("add_cross_attention", False):
        raise NotByName(config.model, Message("model.cross-attention"))
    activation = config.activation("activation_function", "gelu_new")
    tensors = (
        *norm("ln_1", hidden, "layer"),
        *conv1d_linear("attn.c_attn", hidden, 3 * hidden),
        *conv1d_linear("attn.c_proj", hidden, hidden),
        *norm("ln_2", hidden, "layer"),
        *conv1d_linear("mlp.c_fc", hidden, inner),
        *conv1d_linear("mlp.c_proj", inner, hidden),
    )
    block = Block(
        mixer=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            rotary=False,
            fused_qkv=True,
            dropout=config.share("attn_pdrop", 0.1) > 0,
        ),
        mlp=Mlp(intermediate=inner, activation=activation, gated=False),
        norm="layer",
        arrangement="pre",
        tensors=tensors,
        dropout=config.share("resid_pdrop", 0.1) > 0,
    )
    positions = config.count("n_positions", 1024)
    names = Skeleton(embedding="transformer.wte.weight", layers="transformer.h.{i}.", final_norm="transformer.ln_f")
    assembled = names.assemble(
        config,
        hidden=hidden,
        vocab=config.count("vocab_size", 50257),
        kinds=layer_kinds([None] * config.count("n_layer", 12, most=MAX_LAYERS), lambda _: block),
        tied=config.flag("tie_word_embeddings", True),
        positions=positions,
        final="layer",
    )
    return replace(assembled, before=(*assembled.before, Tensor("transformer.wpe.weight", (positions, hidden))))
