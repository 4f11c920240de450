"""GPT-2, GPT-NeoX and Pythia: LayerNorms and one fused projection.

GPT-2 has learned positions, and linear layers that are stored transposed; in the others attention and MLP stand side by
side by default.
"""

from __future__ import annotations

from dataclasses import replace

from tightfit.messages import Message
from tightfit.model.families.parts import assemble, linear, norm, read_layers, rotary_width
from tightfit.model.families.reader import MAX_HEADS, MAX_LAYERS, ConfigReader, NotByName
from tightfit.types import Attention, Block, Mlp, ModelShape, Tensor


def gpt2(config: ConfigReader) -> ModelShape:
    config.require("n_embd", "n_layer", "n_head", "vocab_size")
    hidden = config.count("n_embd", 768)
    heads = config.count("n_head", 12, most=MAX_HEADS)
    inner = config.optional_count("n_inner", None) or 4 * hidden
    config.check_multiple("n_embd", hidden, "n_head", heads)
    if config.flag("add_cross_attention", False):
        raise NotByName(config.model, Message("model.cross-attention"))

    def conv1d(name: str, in_features: int, out_features: int) -> list[Tensor]:
        """transformers' Conv1D: the weight is (in, out), the bias is always there."""
        return [Tensor(f"{name}.weight", (in_features, out_features)), Tensor(f"{name}.bias", (out_features,))]

    block = Block(
        mixer=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            rotary=False,
            fused_qkv=True,
            dropout=config.share("attn_pdrop", 0.1) > 0,
        ),
        mlp=Mlp(intermediate=inner, activation=config.activation("activation_function", "gelu_new"), gated=False),
        norm="layer",
        arrangement="pre",
        tensors=(
            *norm("ln_1", hidden, "layer"),
            *conv1d("attn.c_attn", hidden, 3 * hidden),
            *conv1d("attn.c_proj", hidden, hidden),
            *norm("ln_2", hidden, "layer"),
            *conv1d("mlp.c_fc", hidden, inner),
            *conv1d("mlp.c_proj", inner, hidden),
        ),
        dropout=config.share("resid_pdrop", 0.1) > 0,
    )
    layers, positions = [block] * config.count("n_layer", 12, most=MAX_LAYERS), config.count("n_positions", 1024)
    names = ("transformer.wte.weight", "transformer.h.{i}.", "transformer.ln_f")
    shape = assemble(config, layers, hidden=hidden, vocab=50257, tied=True, positions=positions, names=names)
    return replace(shape, before=(*shape.before, Tensor("transformer.wpe.weight", (positions, hidden))))


def gpt_neox(config: ConfigReader) -> ModelShape:
    config.require("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    hidden = config.count("hidden_size", 6144)
    inner = config.count("intermediate_size", 24576)
    heads = config.count("num_attention_heads", 64, most=MAX_HEADS)
    config.check_multiple("hidden_size", hidden, "num_attention_heads", heads)
    bias, rotary_dim = config.flag("attention_bias", True), rotary_width(config, hidden // heads, "rotary_pct", 0.25)
    block = Block(
        mixer=Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads, rotary_dim=rotary_dim, fused_qkv=True),
        mlp=Mlp(intermediate=inner, activation=config.activation("hidden_act", "gelu"), gated=False),
        norm="layer",
        arrangement="parallel" if config.flag("use_parallel_residual", True) else "pre",
        tensors=(
            *norm("input_layernorm", hidden, "layer"),
            *norm("post_attention_layernorm", hidden, "layer"),
            *linear("attention.query_key_value", 3 * hidden, hidden, bias=bias),
            *linear("attention.dense", hidden, hidden, bias=bias),
            *linear("mlp.dense_h_to_4h", inner, hidden, bias=True),
            *linear("mlp.dense_4h_to_h", hidden, inner, bias=True),
        ),
    )
    layers, positions = [block] * read_layers(config, 44), config.count("max_position_embeddings", 2048)
    names = ("gpt_neox.embed_in.weight", "gpt_neox.layers.{i}.", "gpt_neox.final_layer_norm")
    return assemble(config, layers, hidden=hidden, vocab=50432, tied=False, positions=positions, names=names)
