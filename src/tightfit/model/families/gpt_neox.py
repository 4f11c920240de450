"""GPT-NeoX and Pythia: LayerNorms, one fused projection, and by default attention and MLP side by side."""

from __future__ import annotations

from tightfit.model.families.parts import Skeleton, layer_kinds, linear, norm, read_layers, rotary_width
from tightfit.model.families.reader import MAX_HEADS, ConfigReader
from tightfit.types import Attention, Block, Mlp, ModelShape


def shape(config: ConfigReader) -> ModelShape:
    config.require("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    hidden = config.count("hidden_size", 6144)
    inner = config.count("intermediate_size", 24576)
    heads = config.count("num_attention_heads", 64, most=MAX_HEADS)
    config.check_multiple("hidden_size", hidden, "num_attention_heads", heads)
    head_dim = hidden // heads
    bias = config.flag("attention_bias", True)
    tensors = (
        *norm("input_layernorm", hidden, "layer"),
        *norm("post_attention_layernorm", hidden, "layer"),
        *linear("attention.query_key_value", 3 * hidden, hidden, bias=bias),
        *linear("attention.dense", hidden, hidden, bias=bias),
        *linear("mlp.dense_h_to_4h", inner, hidden, bias=True),
        *linear("mlp.dense_4h_to_h", hidden, inner, bias=True),
    )
    block = Block(
        mixer=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            rotary_dim=rotary_width(config, head_dim, "rotary_pct", 0.25),
            fused_qkv=True,
        ),
        mlp=Mlp(intermediate=inner, activation=config.activation("hidden_act", "gelu"), gated=False),
        norm="layer",
        arrangement="parallel" if config.flag("use_parallel_residual", True) else "pre",
        tensors=tensors,
    )
    names = Skeleton(
        embedding="gpt_neox.embed_in.weight", layers="gpt_neox.layers.{i}.", final_norm="gpt_neox.final_layer_norm"
    )
    return names.assemble(
        config,
        hidden=hidden,
        vocab=config.count("vocab_size", 50432),
        kinds=layer_kinds([None] * read_layers(config, 44), lambda _: block),
        tied=config.flag("tie_word_embeddings", False),
        positions=config.count("max_position_embeddings", 2048),
        final="layer",
    )
