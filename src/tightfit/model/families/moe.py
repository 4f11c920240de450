"""Mixtures of experts: Llama's attention, and a router with experts in the MLP's place.

transformers 5 keeps all experts of a layer in two three-dimensional parameters, gate and up side by side;
the router is a bare matrix. Which of the two is registered first differs from family to family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tightfit.model.families import windows
from tightfit.model.families.llama_like import LlamaVariant, attention_of, gated_mlp, read_heads
from tightfit.model.families.parts import Skeleton, layer_kinds, linear, norm, read_layers
from tightfit.model.families.reader import MAX_HEADS, ConfigReader
from tightfit.types import Block, Mlp, ModelShape, Moe, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """One model type's attention and experts."""

    attention: LlamaVariant
    experts_key: str = "num_experts"
    experts: int
    top_k: int
    inner_key: str = "moe_intermediate_size"
    inner: int
    shared_inner: int = 0
    """Default width of the shared expert; 0: the family has none."""
    gate_first: bool = True
    """The router is registered before the experts."""
    scores_fp32: bool = False
    """The router's weights are not cast back."""
    lora_on_experts: bool = False
    """PEFT has a mapping from this family's old expert modules to today's parameters, and `all-linear` uses it."""


MIXTURES: Mapping[str, Mixture] = {
    "mixtral": Mixture(
        attention=LlamaVariant(
            kv_heads=8, positions=131_072, qkv_bias=False, out_bias=False, window=windows.every_layer(None)
        ),
        experts_key="num_local_experts",
        experts=8,
        top_k=2,
        inner_key="intermediate_size",
        inner=14_336,
        scores_fp32=True,
        lora_on_experts=True,
    ),
    "qwen2_moe": Mixture(
        attention=LlamaVariant(
            heads=16,
            kv_heads=16,
            positions=32_768,
            qkv_bias="qkv_bias",
            bias_default=True,
            out_bias=False,
            window=windows.even_lower_layers,
        ),
        experts=60,
        top_k=4,
        inner=1408,
        shared_inner=5632,
    ),
    "qwen3_moe": Mixture(
        attention=LlamaVariant(kv_heads=4, positions=32_768, qk_norm="head", window=windows.every_layer_if_asked),
        experts=128,
        top_k=8,
        inner=768,
        gate_first=False,
        lora_on_experts=True,
    ),
}

ALIASES: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}


def shape(config: ConfigReader) -> ModelShape:
    """The model of any type in MIXTURES."""
    mixture = MIXTURES[config.model_type]
    variant = mixture.attention
    config.require(*variant.required)
    hidden = config.count("hidden_size", 1)
    layers = read_layers(config, 1)
    heads = read_heads(config, variant, hidden)
    mixer, mixer_tensors = attention_of(config, variant, hidden, heads)
    experts = config.count(mixture.experts_key, mixture.experts, most=MAX_HEADS)
    top_k = config.count("num_experts_per_tok", mixture.top_k)
    inner = config.count(mixture.inner_key, mixture.inner)
    if top_k > experts:
        raise config.fail(
            "model.more-active-than-experts", top_k=top_k, experts_key=mixture.experts_key, experts=experts
        )
    gate = [Tensor("mlp.gate.weight", (experts, hidden))]
    stacked = [
        Tensor("mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)),
        Tensor("mlp.experts.down_proj", (experts, hidden, inner)),
    ]
    moe_tensors = gate + stacked if mixture.gate_first else stacked + gate
    shared = config.count("shared_expert_intermediate_size", mixture.shared_inner) if mixture.shared_inner else 0
    if shared:
        moe_tensors += gated_mlp("mlp.shared_expert", hidden, shared)
        moe_tensors += linear("mlp.shared_expert_gate", 1, hidden)
    moe = Moe(
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        activation=config.activation("hidden_act", "silu"),
        shared_intermediate=shared,
        scores_fp32=mixture.scores_fp32,
        lora_on_experts=mixture.lora_on_experts,
    )
    dense = Mlp(intermediate=config.count("intermediate_size", 1), activation=moe.activation)
    norms = [*norm("input_layernorm", hidden, "rms"), *norm("post_attention_layernorm", hidden, "rms")]

    def block(kind: tuple[int | None, bool]) -> Block:
        window, has_experts = kind
        mlp_tensors = moe_tensors if has_experts else gated_mlp("mlp", hidden, dense.intermediate)
        return Block(
            mixer=replace(mixer, sliding_window=window),
            mlp=moe if has_experts else dense,
            norm="rms",
            arrangement="pre",
            tensors=(*mixer_tensors, *mlp_tensors, *norms),
        )

    sparse = [True] * layers
    if config.model_type != "mixtral":
        step = config.count("decoder_sparse_step", 1)
        only_dense = set(config.whole_numbers("mlp_only_layers") or ())
        sparse = [i not in only_dense and (i + 1) % step == 0 for i in range(layers)]
    kinds = list(zip(variant.window(config, layers), sparse, strict=True))
    return Skeleton().assemble(
        config,
        hidden=hidden,
        vocab=config.count("vocab_size", variant.vocab),
        kinds=layer_kinds(kinds, block),
        tied=config.flag("tie_word_embeddings", variant.tied),
        positions=config.count("max_position_embeddings", variant.positions),
        final="rms",
    )
