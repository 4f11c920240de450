"""Models that people ask for by name, each as the config that Hugging Face's classes are built from.

The Mamba names come from users' notes and promise round numbers; `called` keeps the promise beside the
count, so that the screen can say both. Vocabularies and tied embeddings are those of the public models.

Public checkpoints that have a preset's shape are in `CHECKPOINTS`: their ids need no network, also where the licence
is gated. Only those are there whose published config gives the same tensors; what may differ beside is the number of
positions, which is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tightfit.messages import Message, Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A config with where it comes from."""

    config: Mapping[str, object]
    source: Said
    called: str | None = None
    """The size in the name, where the true count ought to be said beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A public model that has the shape of a preset."""

    preset: str
    differs: Mapping[str, object] = field(default_factory=dict)
    """What its own config says otherwise."""


DRAWN_STD = 0.02
"""Of a new Mamba's weights, unless its config says another, and of weights that stand for real ones. With transformers'
own 0.1 a Mamba that is 4864 wide gives 2.6 million after its first layer, beyond what fp16 can hold; with this, 1.3."""


def _mamba(**sizes: int | float | bool) -> Mapping[str, object]:
    common = {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "tie_word_embeddings": True}
    return {**common, "initializer_range": DRAWN_STD, **sizes}


def _qwen2(**sizes: int | bool) -> Mapping[str, object]:
    common = {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False, "rope_theta": 1_000_000.0}
    return {**common, **sizes}


_TINY_VOCAB = 512
"""Room for a byte-level tokenizer and its special tokens."""

PRESETS: Mapping[str, Preset] = {
    "7b_mamba": Preset(
        config=_mamba(vocab_size=50257, hidden_size=4864, num_hidden_layers=45, expand=2),
        source=Message("model.mamba-wide"),
        called="7B",
    ),
    "3b_mamba": Preset(
        config=_mamba(vocab_size=50280, hidden_size=2560, num_hidden_layers=64, expand=2),
        source=Message("model.shape-of", name="state-spaces/mamba-2.8b-hf"),
        called="3B",
    ),
    "3b_mamba_lite": Preset(
        # transformers takes no fractional `expand`, but lets intermediate_size overrule it.
        config=_mamba(vocab_size=50257, hidden_size=2560, num_hidden_layers=24, state_size=8, intermediate_size=3840),
        source=Message("model.mamba-small-state"),
        called="3B",
    ),
    "1b_mamba": Preset(
        config=_mamba(vocab_size=50280, hidden_size=2048, num_hidden_layers=48, expand=2),
        source=Message("model.shape-of", name="state-spaces/mamba-1.4b-hf"),
        called="1B",
    ),
    "tiny_mamba": Preset(
        config=_mamba(vocab_size=_TINY_VOCAB, hidden_size=128, num_hidden_layers=4, expand=2, initializer_range=0.1),
        source=Message("model.for-a-cpu"),
    ),
    "tiny_llama": Preset(
        config={
            "model_type": "llama",
            "vocab_size": _TINY_VOCAB,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        source=Message("model.for-a-cpu"),
    ),
    "qwen1.5-0.5b": Preset(
        config=_qwen2(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
        ),
        source="Qwen/Qwen1.5-0.5B",
        called="0.5B",
    ),
    "qwen1.5-1.8b": Preset(
        config=_qwen2(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=5504,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32_768,
            tie_word_embeddings=False,
        ),
        source="Qwen/Qwen1.5-1.8B",
        called="1.8B",
    ),
    "qwen2.5-7b": Preset(
        config=_qwen2(
            vocab_size=152_064,
            hidden_size=3584,
            intermediate_size=18_944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            max_position_embeddings=131_072,
            tie_word_embeddings=False,
        ),
        source="Qwen/Qwen2.5-7B",
        called="7B",
    ),
    "qwen2.5-32b": Preset(
        config=_qwen2(
            vocab_size=152_064,
            hidden_size=5120,
            intermediate_size=27_648,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
            max_position_embeddings=131_072,
            tie_word_embeddings=False,
        ),
        source=Message("model.qwen-32b"),
        called="32B",
    ),
    "llama-3.1-8b": Preset(
        config={
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
        },
        source="meta-llama/Llama-3.1-8B",
        called="8B",
    ),
    "gemma-3-27b": Preset(
        config={
            "model_type": "gemma3_text",
            "vocab_size": 262_208,
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
            "max_position_embeddings": 131_072,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": True,
        },
        source=Message("model.gemma-27b"),
        called="27B",
    ),
}

_SHORT: Mapping[str, object] = {"max_position_embeddings": 32_768}
"""Qwen2.5's chat models promise fewer positions than the base models that they were made from."""

CHECKPOINTS: Mapping[str, Checkpoint] = {
    "state-spaces/mamba-2.8b-hf": Checkpoint(preset="3b_mamba"),
    "state-spaces/mamba-1.4b-hf": Checkpoint(preset="1b_mamba"),
    "Qwen/Qwen1.5-0.5B": Checkpoint(preset="qwen1.5-0.5b"),
    "Qwen/Qwen1.5-0.5B-Chat": Checkpoint(preset="qwen1.5-0.5b"),
    "Qwen/Qwen1.5-1.8B": Checkpoint(preset="qwen1.5-1.8b"),
    "Qwen/Qwen1.5-1.8B-Chat": Checkpoint(preset="qwen1.5-1.8b"),
    "Qwen/Qwen2.5-7B": Checkpoint(preset="qwen2.5-7b"),
    "Qwen/Qwen2.5-7B-Instruct": Checkpoint(preset="qwen2.5-7b", differs=_SHORT),
    "Qwen/Qwen2.5-32B": Checkpoint(preset="qwen2.5-32b"),
    "Qwen/Qwen2.5-32B-Instruct": Checkpoint(preset="qwen2.5-32b", differs=_SHORT),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": Checkpoint(preset="qwen2.5-32b"),
    "meta-llama/Llama-3.1-8B": Checkpoint(preset="llama-3.1-8b"),
    "meta-llama/Llama-3.1-8B-Instruct": Checkpoint(preset="llama-3.1-8b"),
    "meta-llama/Meta-Llama-3.1-8B": Checkpoint(preset="llama-3.1-8b"),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": Checkpoint(preset="llama-3.1-8b"),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Checkpoint(preset="llama-3.1-8b"),
    "google/gemma-3-27b-pt": Checkpoint(preset="gemma-3-27b"),
    "google/gemma-3-27b-it": Checkpoint(preset="gemma-3-27b"),
}
"""By Hugging Face id. The first of a preset is the checkpoint that the preset describes."""

_SPELT = {name.lower(): name for name in CHECKPOINTS}


def find_checkpoint(word: str) -> str | None:
    """The id that is known, as Hugging Face spells it; None: not known here."""
    return _SPELT.get(word.strip().lower())


def checkpoint_of(preset: str) -> str | None:
    """Where a preset's weights lie; None: no public model has its shape."""
    return next((name for name, checkpoint in CHECKPOINTS.items() if checkpoint.preset == preset), None)
