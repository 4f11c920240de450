"""Llama and the many that kept its shape: attention, then an MLP, each behind a norm, on a residual stream.

They differ in defaults, in which linear layers have a bias, in the norm and where it stands, in windows
and in whether projections are fused. A `LlamaVariant` says those differences for one `model_type`; the values
are the defaults of transformers' own config class, so an absent key means here what it means there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tightfit.messages import Message
from tightfit.model.families import windows
from tightfit.model.families.parts import Skeleton, layer_kinds, linear, norm, read_layers, rotary_width
from tightfit.model.families.reader import MAX_HEADS, ConfigReader
from tightfit.types import Arrangement, Attention, Block, Mlp, ModelShape, NormKind, Tensor

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaVariant:
    """One model type's departures from Llama."""

    required: tuple[str, ...] = SIZES
    heads: int = 32
    kv_heads: int | None = None
    """None: as many as heads."""
    head_dim: int | None = None
    """None: hidden_size / heads."""
    head_dim_readable: bool = True
    heads_must_divide: bool = False
    """transformers refuses a hidden size that the heads do not divide even where head_dim is given."""
    vocab: int = 32000
    positions: int = 2048
    tied: bool = False
    qkv_bias: bool | str = "attention_bias"
    """Always, never, or the name of the flag; `bias_default` is the flag's default."""
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    bias_default: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    norm: NormKind = "rms"
    arrangement: Arrangement = "pre"
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: str | None = None
    """'head': one vector of head_dim; 'whole': one over the projection; 'each': a LayerNorm a head, if qk_layernorm."""
    fused: bool = False
    gated: bool = True
    partial_rotary: float = 1.0
    """Default of partial_rotary_factor, in the families that read it."""
    window: windows.Rule = windows.never
    skips_rotary: bool = False
    rotary_fp32: bool = False
    residual_scaled: bool = False
    embedding_scale: bool = False
    attention_softcap: float | None = None
    """Default of attn_logit_softcapping."""
    final_softcap: float | None = None
    reads_softcaps: bool = False


_GEMMA = LlamaVariant(
    heads=16,
    kv_heads=16,
    head_dim=256,
    vocab=256000,
    positions=8192,
    tied=True,
    activation="gelu_pytorch_tanh",
    norm="gemma",
    embedding_scale=True,
)
_GEMMA2 = replace(
    _GEMMA,
    heads=8,
    kv_heads=4,
    heads_must_divide=True,
    activation_key="hidden_activation",
    arrangement="sandwich",
    layer_norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    window=windows.alternating,
    attention_softcap=50.0,
    final_softcap=30.0,
    reads_softcaps=True,
)
_MISTRAL = LlamaVariant(kv_heads=8, positions=131_072, qkv_bias=False, out_bias=False, window=windows.every_layer(4096))
_QWEN2 = LlamaVariant(kv_heads=32, positions=32_768, qkv_bias=True, out_bias=False, window=windows.upper_layers)
_OLMO2 = LlamaVariant(
    norm="olmo",
    arrangement="post",
    layer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    qk_norm="whole",
    rotary_fp32=True,
)

VARIANTS: Mapping[str, LlamaVariant] = {
    "llama": LlamaVariant(heads_must_divide=True, mlp_bias="mlp_bias"),
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, window=windows.ministral),
    "ministral3": replace(_MISTRAL, head_dim=128, positions=262_144, window=windows.every_layer(None)),
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, head_dim=128, qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head"),
    "phi3": LlamaVariant(positions=4096, qkv_bias=False, out_bias=False, fused=True, window=windows.every_layer(None)),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        # Hub configs of Gemma 3 leave out whatever equals the class's default.
        required=("hidden_size", "num_hidden_layers", "intermediate_size"),
        vocab=262_208,
        positions=131_072,
        qk_norm="head",
        window=windows.gemma3,
        attention_softcap=None,
        final_softcap=None,
    ),
    "granite": LlamaVariant(mlp_bias="mlp_bias", embedding_scale=True, residual_scaled=True),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, window=windows.three_of_four),
    "smollm3": LlamaVariant(
        kv_heads=4,
        positions=32_768,
        tied=True,
        mlp_bias="mlp_bias",
        window=windows.without_rope,
        skips_rotary=True,
    ),
    "starcoder2": LlamaVariant(
        kv_heads=2,
        positions=4096,
        tied=True,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        bias_default=True,
        activation="gelu_pytorch_tanh",
        norm="layer",
        gated=False,
        window=windows.every_layer(None),
    ),
    "stablelm": LlamaVariant(
        kv_heads=32,
        head_dim_readable=False,
        positions=4096,
        qkv_bias="use_qkv_bias",
        out_bias=False,
        norm="layer",
        qk_norm="each",
        partial_rotary=0.25,
    ),
}


def shape(config: ConfigReader) -> ModelShape:
    """The model of any type in VARIANTS."""
    variant = VARIANTS[config.model_type]
    config.require(*variant.required)
    hidden = config.count("hidden_size", 1)
    vocab = config.count("vocab_size", variant.vocab)
    layers = read_layers(config, 1)
    heads = read_heads(config, variant, hidden)
    inner = config.count("intermediate_size", 1)
    bias = _bias(config, variant, variant.mlp_bias)
    activation = config.activation(variant.activation_key, variant.activation)
    if config.model_type == "gemma" and activation == "gelu":
        # The first Gemma configs say gelu and mean its tanh form; transformers corrects them.
        activation = "gelu_pytorch_tanh"
    mlp = Mlp(intermediate=inner, activation=activation, gated=variant.gated, fused_gate_up=variant.fused)
    if not variant.gated:
        mlp_tensors = [*linear("mlp.c_fc", inner, hidden, bias=bias), *linear("mlp.c_proj", hidden, inner, bias=bias)]
    elif variant.fused:
        gate_up = linear("mlp.gate_up_proj", 2 * inner, hidden, bias=bias)
        mlp_tensors = [*gate_up, *linear("mlp.down_proj", hidden, inner, bias=bias)]
    else:
        mlp_tensors = gated_mlp("mlp", hidden, inner, bias=bias)
    window = variant.window(config, layers)
    rotary = windows.rotary_layers(config, layers) if variant.skips_rotary else [True] * layers
    arrangement, layer_norms = variant.arrangement, variant.layer_norms
    if config.model_type == "stablelm" and config.flag("use_parallel_residual", False):
        # Mixer and MLP run side by side, and one norm is read with both.
        arrangement, layer_norms = "parallel", ("input_layernorm",)

    def block(kind: tuple[int | None, bool]) -> Block:
        mixer, mixer_tensors = attention_of(config, variant, hidden, heads)
        norms = [tensor for name in layer_norms for tensor in norm(name, hidden, variant.norm)]
        return Block(
            mixer=replace(mixer, sliding_window=kind[0], rotary=kind[1]),
            mlp=mlp,
            norm=variant.norm,
            arrangement=arrangement,
            tensors=(*mixer_tensors, *mlp_tensors, *norms),
            residual_scaled=variant.residual_scaled,
        )

    assembled = Skeleton().assemble(
        config,
        hidden=hidden,
        vocab=vocab,
        kinds=layer_kinds(list(zip(window, rotary, strict=True)), block),
        tied=config.flag("tie_word_embeddings", variant.tied),
        positions=config.count("max_position_embeddings", variant.positions),
        final=variant.norm,
    )
    final_softcap = _softcap(config, variant, "final_logit_softcapping", variant.final_softcap)
    return replace(assembled, embedding_scale=variant.embedding_scale, final_softcap=final_softcap)


@dataclass(frozen=True, slots=True)
class Heads:
    """How the attention is cut."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def read_heads(config: ConfigReader, variant: LlamaVariant, hidden: int) -> Heads:
    heads = config.count("num_attention_heads", variant.heads, most=MAX_HEADS)
    # Absent is transformers' default of this family; null is 'as many as heads'.
    kv_heads = config.optional_count("num_key_value_heads", variant.kv_heads) or heads
    head_dim = config.optional_count("head_dim", variant.head_dim) if variant.head_dim_readable else None
    if head_dim is None or variant.heads_must_divide:
        config.check_multiple("hidden_size", hidden, "num_attention_heads", heads)
    given = "" if config.has("num_key_value_heads") else Message("model.default-kv", model_type=config.model_type)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads, given)
    return Heads(heads, kv_heads, head_dim or hidden // heads)


def attention_of(
    config: ConfigReader, variant: LlamaVariant, hidden: int, heads: Heads
) -> tuple[Attention, list[Tensor]]:
    """The mixer and its tensors, relative to the layer."""
    qkv_bias = _bias(config, variant, variant.qkv_bias)
    out = linear("self_attn.o_proj", hidden, heads.q_width, bias=_bias(config, variant, variant.out_bias))
    if variant.fused:
        # phi3 registers the output projection first.
        tensors = out + linear("self_attn.qkv_proj", heads.q_width + 2 * heads.kv_width, hidden, bias=qkv_bias)
    else:
        tensors = [
            *linear("self_attn.q_proj", heads.q_width, hidden, bias=qkv_bias),
            *linear("self_attn.k_proj", heads.kv_width, hidden, bias=qkv_bias),
            *linear("self_attn.v_proj", heads.kv_width, hidden, bias=qkv_bias),
            *out,
        ]
    norms: list[Tensor] = []
    if variant.qk_norm in ("head", "whole"):
        whole = variant.qk_norm == "whole"
        norms += norm("self_attn.q_norm", heads.q_width if whole else heads.head_dim, "rms")
        norms += norm("self_attn.k_norm", heads.kv_width if whole else heads.head_dim, "rms")
    elif variant.qk_norm == "each" and config.flag("qk_layernorm", False):
        for side, count in (("q", heads.heads), ("k", heads.kv_heads)):
            names = [f"self_attn.{side}_layernorm.norms.{i}.weight" for i in range(count)]
            norms += [Tensor(name, (heads.head_dim,)) for name in names]
    partial = config.model_type in ("phi3", "stablelm")
    mixer = Attention(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        rotary_dim=rotary_width(config, heads.head_dim, "partial_rotary_factor", variant.partial_rotary)
        if partial
        else None,
        rotary_fp32=variant.rotary_fp32,
        qk_norm=bool(norms),
        qk_norm_kind=variant.norm,
        qk_norm_whole=variant.qk_norm == "whole",
        fused_qkv=variant.fused,
        # gemma3's config has the field, but its attention never passes it on.
        softcap=config.model_type == "gemma2"
        and _softcap(config, variant, "attn_logit_softcapping", variant.attention_softcap),
    )
    return mixer, tensors + norms


def gated_mlp(prefix: str, hidden: int, inner: int, *, bias: bool = False) -> list[Tensor]:
    return [
        *linear(f"{prefix}.gate_proj", inner, hidden, bias=bias),
        *linear(f"{prefix}.up_proj", inner, hidden, bias=bias),
        *linear(f"{prefix}.down_proj", hidden, inner, bias=bias),
    ]


def _bias(config: ConfigReader, variant: LlamaVariant, rule: bool | str) -> bool:
    return rule if isinstance(rule, bool) else config.flag(rule, variant.bias_default)


def _softcap(config: ConfigReader, variant: LlamaVariant, key: str, default: float | None) -> bool:
    """Whether a cap is on: null switches it off, absent leaves the family's default."""
    if not variant.reads_softcaps or config.is_null(key):
        return False
    return default is not None if not config.has(key) else config.number(key, 1.0) > 0
