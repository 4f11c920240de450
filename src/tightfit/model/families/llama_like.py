"""Llama and the many that kept its shape: attention, then an MLP, each behind a norm, on a residual stream.

They differ in defaults, in which linear layers have a bias, in the norm and where it stands, in windows,
in whether projections are fused, and in experts that stand in the MLP's place. A `LlamaVariant` says those differences
for one `model_type`; the values are the defaults of transformers' own config class, so an absent key means here what it
means there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tightfit.messages import Message
from tightfit.model.families import windows
from tightfit.model.families.parts import assemble, linear, norm, read_layers, rotary_width
from tightfit.model.families.reader import MAX_HEADS, ConfigReader
from tightfit.types import Arrangement, Attention, Block, Mlp, ModelShape, Moe, NormKind, Tensor

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A router with experts."""

    experts_key: str = "num_experts"
    experts: int
    top_k: int
    inner_key: str = "moe_intermediate_size"
    inner: int
    shared_inner: int = 0  # default width of the shared expert; 0: the family has none
    gate_first: bool = True  # the router is registered before the experts
    scores_fp32: bool = False  # the router's weights are not cast back
    lora_on_experts: bool = False
    """PEFT has a mapping from this family's old expert modules to today's parameters, and `all-linear` uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaVariant:
    """One model type's departures from Llama."""

    required: tuple[str, ...] = SIZES
    heads: int = 32
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / heads
    head_dim_readable: bool = True
    heads_must_divide: bool = False
    """transformers refuses a hidden size that the heads do not divide even where head_dim is given."""
    vocab: int = 32000
    positions: int = 2048
    tied: bool = False
    biases: tuple[bool | str, bool | str, bool | str] = ("attention_bias", "attention_bias", False)
    """Of q, k and v, of the output and of the MLP: always, never, or by this flag, whose default is `bias_default`."""
    bias_default: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    norm: NormKind = "rms"
    arrangement: Arrangement = "pre"
    qk_norm: str | None = None
    """'head': one vector of head_dim; 'whole': one over the projection; 'each': a LayerNorm a head, if qk_layernorm."""
    fused: bool = False
    gated: bool = True
    partial_rotary: float | None = None  # default of partial_rotary_factor; None: the family does not read it
    window: windows.Rule = windows.never
    skips_rotary: bool = False
    rotary_fp32: bool = False
    residual_scaled: bool = False
    embedding_scale: bool = False
    softcaps: bool | None = None  # whether logits are capped where the config does not say; None: it is not asked
    mixture: Mixture | None = None


_NORMS: Mapping[Arrangement, tuple[str, ...]] = {
    "pre": ("input", "post_attention"),
    "post": ("post_attention", "post_feedforward"),
    "sandwich": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "parallel": ("input",),  # read by the mixer and the MLP
}
_FLAGS = ("attention_bias", "attention_bias", "mlp_bias")
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
    window=windows.by_place(lambda i: i % 2 == 0),
    softcaps=True,
)
_MISTRAL = LlamaVariant(kv_heads=8, positions=131_072, biases=(False, False, False), window=windows.every_layer(4096))
_QWEN2 = LlamaVariant(kv_heads=32, positions=32_768, biases=(True, False, False), window=windows.upper_layers)
_OLMO2 = LlamaVariant(
    norm="olmo",
    arrangement="post",
    qk_norm="whole",
    rotary_fp32=True,
)

VARIANTS: Mapping[str, LlamaVariant] = {
    "llama": LlamaVariant(heads_must_divide=True, biases=_FLAGS),
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, window=windows.by_place(lambda i: True)),
    "ministral3": replace(_MISTRAL, head_dim=128, positions=262_144, window=windows.every_layer(None)),
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, head_dim=128, biases=LlamaVariant().biases, qk_norm="head"),
    "phi3": LlamaVariant(
        positions=4096,
        biases=(False, False, False),
        partial_rotary=1.0,
        fused=True,
        window=windows.every_layer(None),
    ),
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
        softcaps=False,
    ),
    "granite": LlamaVariant(biases=_FLAGS, embedding_scale=True, residual_scaled=True),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, window=windows.by_place(lambda i: (i + 1) % 4 != 0)),
    "smollm3": LlamaVariant(
        kv_heads=4,
        positions=32_768,
        tied=True,
        biases=_FLAGS,
        window=windows.without_rope,
        skips_rotary=True,
    ),
    "starcoder2": LlamaVariant(
        kv_heads=2,
        positions=4096,
        tied=True,
        biases=("use_bias", "use_bias", "use_bias"),
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
        biases=("use_qkv_bias", False, False),
        norm="layer",
        qk_norm="each",
        partial_rotary=0.25,
    ),
    "mixtral": replace(
        _MISTRAL,
        window=windows.every_layer(None),
        mixture=Mixture(
            experts_key="num_local_experts",
            experts=8,
            top_k=2,
            inner_key="intermediate_size",
            inner=14_336,
            scores_fp32=True,
            lora_on_experts=True,
        ),
    ),
    "qwen2_moe": LlamaVariant(
        heads=16,
        kv_heads=16,
        positions=32_768,
        biases=("qkv_bias", False, False),
        bias_default=True,
        window=windows.even_lower_layers,
        mixture=Mixture(experts=60, top_k=4, inner=1408, shared_inner=5632),
    ),
    "qwen3_moe": LlamaVariant(
        kv_heads=4,
        positions=32_768,
        qk_norm="head",
        window=windows.every_layer_if_asked,
        mixture=Mixture(experts=128, top_k=8, inner=768, gate_first=False, lora_on_experts=True),
    ),
}


def shape(config: ConfigReader) -> ModelShape:
    """The model of any type in VARIANTS."""
    variant = VARIANTS[config.model_type]
    config.require(*variant.required)
    hidden = config.count("hidden_size", 1)
    layers = read_layers(config, 1)
    mixer, mixer_tensors = _read_attention(config, variant, hidden)
    mlp, mlp_tensors = _read_mlp(config, variant, hidden)
    moe, moe_tensors, has_experts = _read_experts(config, variant.mixture, hidden, layers)
    window = variant.window(config, layers)
    rotary = windows.rotary_layers(config, layers) if variant.skips_rotary else [True] * layers
    is_parallel = config.model_type == "stablelm" and config.flag("use_parallel_residual", False)
    arrangement = "parallel" if is_parallel else variant.arrangement
    norms = [each for name in _NORMS[arrangement] for each in norm(f"{name}_layernorm", hidden, variant.norm)]
    kinds = list(zip(window, rotary, has_experts, strict=True))
    blocks = {
        (window, rotary, is_sparse): Block(
            mixer=replace(mixer, sliding_window=window, rotary=rotary),
            mlp=moe if is_sparse else mlp,
            norm=variant.norm,
            arrangement=arrangement,
            tensors=(*mixer_tensors, *(moe_tensors if is_sparse else mlp_tensors), *norms),
            residual_scaled=variant.residual_scaled,
        )
        for window, rotary, is_sparse in dict.fromkeys(kinds)
    }
    positions = config.count("max_position_embeddings", variant.positions)
    every = [blocks[kind] for kind in kinds]
    assembled = assemble(config, every, hidden=hidden, vocab=variant.vocab, tied=variant.tied, positions=positions)
    final_softcap = _softcap(config, variant, "final_logit_softcapping")
    return replace(assembled, embedding_scale=variant.embedding_scale, final_softcap=final_softcap)


def _read_attention(config: ConfigReader, variant: LlamaVariant, hidden: int) -> tuple[Attention, list[Tensor]]:
    """The mixer and its tensors, relative to the layer."""
    heads = config.count("num_attention_heads", variant.heads, most=MAX_HEADS)
    # Absent is transformers' default of this family; null is 'as many as heads'.
    kv_heads = config.optional_count("num_key_value_heads", variant.kv_heads) or heads
    head_dim = config.optional_count("head_dim", variant.head_dim) if variant.head_dim_readable else None
    if head_dim is None or variant.heads_must_divide:
        config.check_multiple("hidden_size", hidden, "num_attention_heads", heads)
    given = "" if config.has("num_key_value_heads") else Message("model.default-kv", model_type=config.model_type)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads, given)
    head_dim = head_dim or hidden // heads
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    qkv_bias = _bias(config, variant, 0)
    out = linear("self_attn.o_proj", hidden, q_width, bias=_bias(config, variant, 1))
    if variant.fused:
        # phi3 registers the output projection first.
        tensors = out + linear("self_attn.qkv_proj", q_width + 2 * kv_width, hidden, bias=qkv_bias)
    else:
        tensors = [
            *linear("self_attn.q_proj", q_width, hidden, bias=qkv_bias),
            *linear("self_attn.k_proj", kv_width, hidden, bias=qkv_bias),
            *linear("self_attn.v_proj", kv_width, hidden, bias=qkv_bias),
            *out,
        ]
    norms: list[Tensor] = []
    if variant.qk_norm in ("head", "whole"):
        whole = variant.qk_norm == "whole"
        norms += norm("self_attn.q_norm", q_width if whole else head_dim, "rms")
        norms += norm("self_attn.k_norm", kv_width if whole else head_dim, "rms")
    elif variant.qk_norm == "each" and config.flag("qk_layernorm", False):
        for side, count in (("q", heads), ("k", kv_heads)):
            names = [f"self_attn.{side}_layernorm.norms.{i}.weight" for i in range(count)]
            norms += [Tensor(name, (head_dim,)) for name in names]
    rotary_dim = None
    if variant.partial_rotary is not None:
        rotary_dim = rotary_width(config, head_dim, "partial_rotary_factor", variant.partial_rotary)
    mixer = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rotary_fp32=variant.rotary_fp32,
        qk_norm=bool(norms),
        qk_norm_kind=variant.norm,
        qk_norm_whole=variant.qk_norm == "whole",
        fused_qkv=variant.fused,
        # gemma3's config has the field, but its attention never passes it on.
        softcap=config.model_type == "gemma2" and _softcap(config, variant, "attn_logit_softcapping"),
    )
    return mixer, tensors + norms


def _read_mlp(config: ConfigReader, variant: LlamaVariant, hidden: int) -> tuple[Mlp, list[Tensor]]:
    inner, bias = config.count("intermediate_size", 1), _bias(config, variant, 2)
    activation = config.activation(variant.activation_key, variant.activation)
    if config.model_type == "gemma" and activation == "gelu":
        # The first Gemma configs say gelu and mean its tanh form; transformers corrects them.
        activation = "gelu_pytorch_tanh"
    if not variant.gated:
        tensors = [*linear("mlp.c_fc", inner, hidden, bias=bias), *linear("mlp.c_proj", hidden, inner, bias=bias)]
    elif variant.fused:
        gate_up = linear("mlp.gate_up_proj", 2 * inner, hidden, bias=bias)
        tensors = [*gate_up, *linear("mlp.down_proj", hidden, inner, bias=bias)]
    else:
        tensors = _gated_mlp("mlp", hidden, inner, bias=bias)
    return Mlp(intermediate=inner, activation=activation, gated=variant.gated, fused_gate_up=variant.fused), tensors


def _read_experts(
    config: ConfigReader, mixture: Mixture | None, hidden: int, layers: int
) -> tuple[Moe | None, list[Tensor], list[bool]]:
    """The router and its experts, their tensors, and which layers have them.

    transformers 5 keeps all experts of a layer in two three-dimensional parameters, gate and up side by side; the
    router is a bare matrix. Which of the two is registered first differs from family to family.
    """
    if mixture is None:
        return None, [], [False] * layers
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
    tensors = gate + stacked if mixture.gate_first else stacked + gate
    shared = config.count("shared_expert_intermediate_size", mixture.shared_inner) if mixture.shared_inner else 0
    if shared:
        tensors += [*_gated_mlp("mlp.shared_expert", hidden, shared), *linear("mlp.shared_expert_gate", 1, hidden)]
    moe = Moe(
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        activation=config.activation("hidden_act", "silu"),
        shared_intermediate=shared,
        scores_fp32=mixture.scores_fp32,
        lora_on_experts=mixture.lora_on_experts,
    )
    if config.model_type == "mixtral":
        return moe, tensors, [True] * layers
    step = config.count("decoder_sparse_step", 1)
    only_dense = set(config.whole_numbers("mlp_only_layers") or ())
    return moe, tensors, [i not in only_dense and (i + 1) % step == 0 for i in range(layers)]


def _gated_mlp(prefix: str, hidden: int, inner: int, *, bias: bool = False) -> list[Tensor]:
    return [
        *linear(f"{prefix}.gate_proj", inner, hidden, bias=bias),
        *linear(f"{prefix}.up_proj", inner, hidden, bias=bias),
        *linear(f"{prefix}.down_proj", hidden, inner, bias=bias),
    ]


def _bias(config: ConfigReader, variant: LlamaVariant, place: int) -> bool:
    rule = variant.biases[place]
    return rule if isinstance(rule, bool) else config.flag(rule, variant.bias_default)


def _softcap(config: ConfigReader, variant: LlamaVariant, key: str) -> bool:
    """Whether a cap is on: null switches it off, absent leaves the family's default."""
    if variant.softcaps is None or config.is_null(key):
        return False
    return config.number(key, 1.0) > 0 if config.has(key) else variant.softcaps
