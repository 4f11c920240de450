"""Public models by the names that people write, each as the config that Hugging Face's classes are built from.

A published measurement names its model in words: `Llama-2-70B`, `qwen-1_8b-chat`, `MPT-7b (6,658,859,008 params)`.
`find_model` knows the sizes of the common ones, so that nothing is downloaded. A model that no family of ours builds
exactly stands here as the nearest one, and the remark says what differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from tightfit.model.load import load_model, shape_from_config
from tightfit.model.presets import PRESETS
from tightfit.types import Attention, Block, ModelShape, Tensor

Config = Mapping[str, object]

_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()


@dataclass(frozen=True, slots=True)
class Known:
    """A model by its name, and what is different about the one that was measured."""

    shape: ModelShape
    remark: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    pattern: str
    config: Config
    remark: str = ""
    fused: bool = False
    """One projection makes q, k and v, where the family has three."""
    one_norm: bool = False
    """Attention and MLP read the same norm, where the family has one for each."""


def _made(model_type: str, sizes: tuple[int, ...], *, tied: bool = False, **more: object) -> Config:
    return {
        "model_type": model_type,
        **dict(zip(_SIZES, sizes, strict=True)),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131_072,
        **more,
    }


def _llama(*sizes: int, tied: bool = False) -> Config:
    return _made("llama", sizes, tied=tied)


def _qwen2(*sizes: int, tied: bool = False) -> Config:
    return _made("qwen2", sizes, tied=tied, use_sliding_window=False)


def _qwen3(*sizes: int, tied: bool = False) -> Config:
    return _made("qwen3", sizes, tied=tied, use_sliding_window=False, head_dim=128)


def _mistral(*sizes: int, window: int | None = None) -> Config:
    return _made("mistral", sizes, sliding_window=window)


def _neox(vocab: int, hidden: int, layers: int, heads: int, **more: object) -> Config:
    return {
        "model_type": "gpt_neox",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **more,
    }


def _gpt2(vocab: int, hidden: int, layers: int, heads: int, positions: int, **more: object) -> Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return {"model_type": "gpt2", "vocab_size": vocab, **sizes, "tie_word_embeddings": True, **more}


_ENTRIES = (
    # Llama
    _Entry("(code-?)?llama-?2?-7b|llama-?1-7b|vicuna-7b|alpaca-7b", _llama(32_000, 4096, 11_008, 32, 32, 32)),
    _Entry("(code-?)?llama-?2?-13b|vicuna-13b", _llama(32_000, 5120, 13_824, 40, 40, 40)),
    _Entry("llama-?1?-(30|33)b", _llama(32_000, 6656, 17_920, 60, 52, 52)),
    _Entry("llama-?1?-65b", _llama(32_000, 8192, 22_016, 80, 64, 64)),
    _Entry("code-?llama-34b", _llama(32_000, 8192, 22_016, 48, 64, 8)),
    _Entry("llama-?2-70b", _llama(32_000, 8192, 28_672, 80, 64, 8)),
    _Entry("tiny-?llama-?1\\.1b.*", _llama(32_000, 2048, 5632, 22, 32, 4)),
    # torchao's benchmarks/quantized_training/pretrain_llama2.py
    _Entry("llama-?2-1b", _llama(32_000, 1536, 6144, 24, 24, 24)),
    _Entry("(meta-)?llama-?3(\\.1)?-8b|deepseek-r1-distill-llama-8b", _llama(128_256, 4096, 14_336, 32, 32, 8)),
    _Entry("(meta-)?llama-?3(\\.[13])?-70b|deepseek-r1-distill-llama-70b", _llama(128_256, 8192, 28_672, 80, 64, 8)),
    _Entry("(meta-)?llama-?3(\\.1)?-405b", _llama(128_256, 16_384, 53_248, 126, 128, 8)),
    _Entry("llama-?3\\.2-1b", _llama(128_256, 2048, 8192, 16, 32, 8, tied=True)),
    _Entry("llama-?3\\.2-3b", _llama(128_256, 3072, 8192, 28, 24, 8, tied=True)),
    # Qwen
    *(
        _Entry(f"{name}{size}", config, fused=fused)
        for name, fused in (("qwen-?1\\.5-", False), ("qwen-(1-)?", True))
        for size, config in (
            ("0\\.5b", _qwen2(151_936, 1024, 2816, 24, 16, 16, tied=True)),
            ("1\\.8b", _qwen2(151_936, 2048, 5504, 24, 16, 16)),
            ("4b", _qwen2(151_936, 2560, 6912, 40, 20, 20)),
            ("7b", _qwen2(151_936, 4096, 11_008, 32, 32, 32)),
            ("14b", _qwen2(152_064, 5120, 13_696, 40, 40, 40)),
            ("72b", _qwen2(152_064, 8192, 24_576, 80, 64, 64)),
        )
    ),
    _Entry("qwen-?1\\.5-32b", _qwen2(152_064, 5120, 27_392, 64, 40, 8)),
    _Entry("qwen-?2(\\.5)?-0\\.5b", _qwen2(151_936, 896, 4864, 24, 14, 2, tied=True)),
    _Entry(
        "(qwen-?2(\\.5)?(-coder|-math)?|deepseek-r1-distill-qwen)-1\\.5b",
        _qwen2(151_936, 1536, 8960, 28, 12, 2, tied=True),
    ),
    _Entry("qwen-?2\\.5-3b", _qwen2(151_936, 2048, 11_008, 36, 16, 2, tied=True)),
    _Entry("(qwen-?2(\\.5)?(-coder|-math)?|deepseek-r1-distill-qwen)-7b", _qwen2(152_064, 3584, 18_944, 28, 28, 4)),
    _Entry("(qwen-?2\\.5(-coder|-math)?|deepseek-r1-distill-qwen)-14b", _qwen2(152_064, 5120, 13_824, 48, 40, 8)),
    _Entry("(qwen-?2\\.5(-coder|-math)?|deepseek-r1-distill-qwen|qwq)-32b", _qwen2(152_064, 5120, 27_648, 64, 40, 8)),
    _Entry("qwen-?2(\\.5)?-72b", _qwen2(152_064, 8192, 29_568, 80, 64, 8)),
    _Entry("qwen-?3-0\\.6b", _qwen3(151_936, 1024, 3072, 28, 16, 8, tied=True)),
    _Entry("qwen-?3-1\\.7b", _qwen3(151_936, 2048, 6144, 28, 16, 8, tied=True)),
    _Entry("qwen-?3-4b", _qwen3(151_936, 2560, 9728, 36, 32, 8, tied=True)),
    _Entry("(deepseek-r1-0528-)?qwen-?3-8b", _qwen3(151_936, 4096, 12_288, 36, 32, 8)),
    _Entry("qwen-?3-14b", _qwen3(151_936, 5120, 17_408, 40, 40, 8)),
    _Entry("qwen-?3-32b", _qwen3(151_936, 5120, 25_600, 64, 64, 8)),
    _Entry(
        "qwen-?3-30b-a3b",
        _made("qwen3_moe", (151_936, 2048, 6144, 48, 32, 4), head_dim=128, num_experts=128, num_experts_per_tok=8),
    ),
    # others of Llama's kind
    _Entry("mistral-7b(-v0\\.1)?|zephyr-7b(-.*)?", _mistral(32_000, 4096, 14_336, 32, 32, 8, window=4096)),
    _Entry("mistral-7b-v0\\.[23]", _mistral(32_768, 4096, 14_336, 32, 32, 8)),
    _Entry(
        "openbuddy-zephyr-7b",
        _mistral(36_608, 4096, 14_336, 32, 32, 8, window=4096),
        "OpenBuddy's larger vocabulary is taken as 36,608",
    ),
    _Entry("mistral-nemo(-12b)?(-2407)?", _made("mistral", (131_072, 5120, 14_336, 40, 32, 8), head_dim=128)),
    _Entry("mistral-small(-24b)?(-2501)?", _made("mistral", (131_072, 5120, 32_768, 40, 32, 8), head_dim=128)),
    _Entry("mixtral-8x7b(-v0\\.1)?", _made("mixtral", (32_000, 4096, 14_336, 32, 32, 8))),
    _Entry("yi(-1\\.5)?-6b", _llama(64_000, 4096, 11_008, 32, 32, 4)),
    _Entry("yi(-1\\.5)?-9b", _llama(64_000, 4096, 11_008, 48, 32, 4)),
    _Entry("yi(-1\\.5)?-34b", _llama(64_000, 7168, 20_480, 60, 56, 8)),
    _Entry("internlm-?2(\\.5)?-7b", _llama(92_544, 4096, 14_336, 32, 32, 8), fused=True),
    _Entry("internlm-?2(\\.5)?-20b", _llama(92_544, 6144, 16_384, 48, 48, 8), fused=True),
    _Entry("smollm2?-135m", _llama(49_152, 576, 1536, 30, 9, 3, tied=True)),
    _Entry("smollm2?-360m", _llama(49_152, 960, 2560, 32, 15, 5, tied=True)),
    _Entry("smollm2?-1\\.7b", _llama(49_152, 2048, 8192, 24, 32, 32, tied=True)),
    _Entry("deepseek-(llm-)?7b", _llama(102_400, 4096, 11_008, 30, 32, 32)),
    _Entry("baichuan-?2-7b", _llama(125_696, 4096, 11_008, 32, 32, 32), fused=True),
    _Entry(
        "chatglm-?[23]-6b",
        _qwen2(65_024, 4096, 13_696, 28, 32, 2),
        "ChatGLM as a model of Qwen 2's kind with its sizes: gate and up are one product there",
        fused=True,
    ),
    _Entry("gemma-2b", _made("gemma", (256_000, 2048, 16_384, 18, 8, 1), tied=True, head_dim=256)),
    _Entry("gemma-7b", _made("gemma", (256_000, 3072, 24_576, 28, 16, 16), tied=True, head_dim=256)),
    _Entry("gemma-2-2b", _made("gemma2", (256_000, 2304, 9216, 26, 8, 4), tied=True, head_dim=256)),
    _Entry("gemma-2-9b", _made("gemma2", (256_000, 3584, 14_336, 42, 16, 8), tied=True, head_dim=256)),
    _Entry("gemma-2-27b", _made("gemma2", (256_000, 4608, 36_864, 46, 32, 16), tied=True, head_dim=128)),
    _Entry("phi-?3(\\.5)?-mini(-4k)?", _made("phi3", (32_064, 3072, 8192, 32, 32, 32), sliding_window=2047)),
    _Entry("phi-?4(-14b)?", _made("phi3", (100_352, 5120, 17_920, 40, 40, 10))),
    _Entry("gemma-3-1b", _made("gemma3_text", (262_144, 1152, 6912, 26, 4, 1), tied=True, head_dim=256)),
    _Entry("gemma-3-4b", _made("gemma3_text", (262_208, 2560, 10_240, 34, 8, 4), tied=True, head_dim=256)),
    _Entry("gemma-3-12b", _made("gemma3_text", (262_208, 3840, 15_360, 48, 16, 8), tied=True, head_dim=256)),
    _Entry("gemma-3-27b", _made("gemma3_text", (262_208, 5376, 21_504, 62, 32, 16), tied=True, head_dim=128)),
    _Entry("olmo-?2-(1124-)?7b", _made("olmo2", (100_352, 4096, 11_008, 32, 32, 32))),
    _Entry("olmo-?2-(1124-)?13b", _made("olmo2", (100_352, 5120, 13_824, 40, 40, 40))),
    # GPT-NeoX and GPT-2
    _Entry("stablelm-(base-|tuned-)?alpha-3b", _neox(50_688, 4096, 16, 32)),
    _Entry("stablelm-(base-|tuned-)?alpha-7b", _neox(50_432, 6144, 16, 48)),
    _Entry("(gpt-?)?neox-20b", _neox(50_432, 6144, 44, 64)),
    _Entry("pythia-410m", _neox(50_304, 1024, 24, 16)),
    _Entry("pythia-1b", _neox(50_304, 2048, 16, 8)),
    _Entry("pythia-1\\.4b", _neox(50_304, 2048, 24, 16)),
    _Entry("pythia-2\\.8b", _neox(50_688, 2560, 32, 32)),
    _Entry("pythia-6\\.9b", _neox(50_688, 4096, 32, 32)),
    _Entry("pythia-12b", _neox(50_688, 5120, 36, 40)),
    _Entry(
        "phi-1(\\.5)?(-1\\.3b)?",
        _neox(51_200, 2048, 24, 32, rotary_pct=0.5, hidden_act="gelu_pytorch_tanh"),
        "Phi as a GPT-NeoX of its sizes: it has a bias on its head",
        one_norm=True,
    ),
    _Entry("gpt-?2(-small|-124m)?", _gpt2(50_257, 768, 12, 12, 1024)),
    _Entry("gpt-?2-medium|gpt-?2-350m", _gpt2(50_257, 1024, 24, 16, 1024)),
    _Entry("gpt-?2-large|gpt-?2-774m", _gpt2(50_257, 1280, 36, 20, 1024)),
    _Entry("gpt-?2-xl|gpt-?2-1\\.5b", _gpt2(50_257, 1600, 48, 25, 1024)),
)

_MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Width, layers and heads, from llm-foundry's scripts/train/yamls/pretrain."""
_MPT_VOCABULARY = 50_368
_MPT_NAME = re.compile(r"mpt-([0-9]+[mb])")
_SIZES_SAID = {
    "hidden": r"hidden\w*[ =]+(\d+)",
    "layers": r"layers[ =]+(\d+)|(\d+) layers",
    "heads": r"heads[ =]+(\d+)",
}
"""How a model without a name is described."""


def find_model(name: str, sequence: int | None) -> Known | None:
    """The model of this name; None: not known. `sequence`: some learn a position for each token of it."""
    spelt = spell(name)
    if (found := _MPT_NAME.fullmatch(spelt)) and found[1] in _MPT and sequence:
        return _mpt(found[1], sequence)
    return _known(spelt) or _described(name, sequence)


def spell(name: str) -> str:
    """`Qwen/Qwen2.5-7B-Instruct` as qwen2.5-7b."""
    text = re.sub(r"\(.*?\)", "", name).strip().rpartition("/")[2].lower()
    text = re.sub(r"(?<=\d)_(?=\d)", ".", text)
    text = re.sub(r"[\s_]+", "-", text)
    return re.sub(r"(-(instruct|chat|base|hf|it|v1|2507|gptq|awq|int[48]))+$", "", text)


def _described(text: str, sequence: int | None) -> Known | None:
    """A plain transformer by its sizes: GPT-2's, with a head of its own if that comes nearer to the stated count."""
    found = {name: re.search(pattern, text.lower()) for name, pattern in _SIZES_SAID.items()}
    if not all(found.values()):
        return None
    hidden, layers, heads = (int(next(filter(None, match.groups()))) for match in found.values() if match)
    if not heads or hidden % heads or not layers:
        return None
    vocab = re.search(r"vocab\w*[ =]+(\d+)", text.lower())
    kind = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "activation_function": "gelu"}
    config = _gpt2(int(vocab[1]) if vocab else 50_257, hidden, layers, heads, sequence or 1024, **kind)
    shapes = [shape_from_config({**config, "tie_word_embeddings": tied}, "gpt") for tied in (True, False)]
    stated = re.search(r"(\d+(?:\.\d+)?) ?b(illion)?\b", text.lower())
    wanted = float(stated[1]) * 1e9 if stated else shapes[0].parameters
    return Known(
        min(shapes, key=lambda shape: abs(shape.parameters - wanted)), "a transformer by its sizes, as a GPT-2"
    )


@lru_cache(maxsize=256)
def _known(spelt: str) -> Known | None:
    if spelt in PRESETS:
        return Known(load_model(spelt))
    for entry in _ENTRIES:
        if re.fullmatch(entry.pattern, spelt):
            shape = shape_from_config(entry.config, spelt)
            shape = _fuse(shape) if entry.fused else shape
            return Known(_share_norm(shape) if entry.one_norm else shape, entry.remark)
    return None


def _fuse(shape: ModelShape) -> ModelShape:
    """The same model with one projection for q, k and v: as many parameters, in fewer products."""
    return replace(shape, blocks=tuple([_fused(block) for block in shape.blocks]))


def _fused(block: Block) -> Block:
    kept = [tensor for tensor in block.tensors if not re.search(r"[qkv]_proj\.", tensor.name)]
    joined = []
    for kind in ("weight", "bias"):
        parts = [tensor for tensor in block.tensors if re.search(rf"[qkv]_proj\.{kind}", tensor.name)]
        if parts:
            rows = sum(part.shape[0] for part in parts)
            joined.append(Tensor(f"self_attn.qkv_proj.{kind}", (rows, *parts[0].shape[1:])))
    assert isinstance(block.mixer, Attention)
    return replace(block, mixer=replace(block.mixer, fused_qkv=True), tensors=(*joined, *kept))


def _share_norm(shape: ModelShape) -> ModelShape:
    return replace(shape, blocks=tuple([_with_one_norm(block) for block in shape.blocks]))


def _with_one_norm(block: Block) -> Block:
    kept = [tensor for tensor in block.tensors if not tensor.name.startswith("post_attention_layernorm.")]
    return replace(block, tensors=tuple(kept))


@lru_cache(maxsize=64)
def _mpt(size: str, sequence: int) -> Known:
    """As llm-foundry's yamls build it: GPT-2's tensors, with learned positions and biases, and no dropout."""
    kind = {"activation_function": "gelu", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = _gpt2(_MPT_VOCABULARY, *_MPT[size], sequence, **kind)
    return Known(shape_from_config(config, f"mpt-{size}"))
