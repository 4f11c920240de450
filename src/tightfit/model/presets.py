"""Models that people ask for by name, each as the config that Hugging Face's classes are built from.

The Mamba names come from users' notes and promise round numbers; `called` keeps the promise beside the
count, so that the screen can say both. Vocabularies and tied embeddings are those of the public models.

Public checkpoints that have a preset's shape are in `CHECKPOINTS`: their ids need no network, also where the licence
is gated. Only those are there whose published config gives the same tensors; what may differ beside is the number of
positions, which is said. `PUBLISHED` has other models that people ask for by id, each with its config, so that a family
is there in all its sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tightfit.messages import Message, Said


class Preset(NamedTuple):
    """A config with where it comes from."""

    config: Mapping[str, object]
    source: Said
    called: str | None = None  # the size in the name, where the true count ought to be said beside it


class Checkpoint(NamedTuple):
    """A public model that has the shape of a preset, and what its own config says otherwise."""

    preset: str
    differs: Mapping[str, object] = MappingProxyType({})


DRAWN_STD = 0.02
"""Of a new Mamba's weights, unless its config says another, and of weights that stand for real ones. With transformers'
own 0.1 a Mamba that is 4864 wide gives 2.6 million after its first layer, beyond what fp16 can hold; with this, 1.3."""


def _mamba(vocab: int, hidden: int, layers: int, **more: int | float) -> Mapping[str, object]:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers}
    common = {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "tie_word_embeddings": True}
    return {**common, "initializer_range": DRAWN_STD, **sizes, **more}


_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings".split()
)


def _transformer(model_type: str, *sizes: int, tied: bool, **more: object) -> Mapping[str, object]:
    """`sizes`: those of `_SIZES`, in that order."""
    return {"model_type": model_type, **more, **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": tied}


def _qwen2(*sizes: int, tied: bool = False) -> Mapping[str, object]:
    more = {"hidden_act": "silu", "use_sliding_window": False, "rope_theta": 1_000_000.0}
    return _transformer("qwen2", *sizes, tied=tied, **more)


def _qwen3(*sizes: int, tied: bool = False) -> Mapping[str, object]:
    more = {"hidden_act": "silu", "use_sliding_window": False, "head_dim": 128, "rope_theta": 1_000_000.0}
    return _transformer("qwen3", 151_936, *sizes, 40_960, tied=tied, **more)


def _llama3(*sizes: int, factor: float = 8.0, tied: bool = False) -> Mapping[str, object]:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    more = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    scaling = {**rope, "original_max_position_embeddings": 8192}
    return {**_transformer("llama", 128_256, *sizes, 131_072, tied=tied, **more), "rope_scaling": scaling}


_TINY_VOCAB = 512  # room for a byte-level tokenizer and its special tokens

PRESETS: Mapping[str, Preset] = {
    "7b_mamba": Preset(_mamba(50257, 4864, 45, expand=2), Message("model.mamba-wide"), "7B"),
    "3b_mamba": Preset(
        _mamba(50280, 2560, 64, expand=2), Message("model.shape-of", name="state-spaces/mamba-2.8b-hf"), "3B"
    ),
    # transformers takes no fractional `expand`, but lets intermediate_size overrule it.
    "3b_mamba_lite": Preset(
        _mamba(50257, 2560, 24, state_size=8, intermediate_size=3840), Message("model.mamba-small-state"), "3B"
    ),
    "1b_mamba": Preset(
        _mamba(50280, 2048, 48, expand=2), Message("model.shape-of", name="state-spaces/mamba-1.4b-hf"), "1B"
    ),
    "tiny_mamba": Preset(_mamba(_TINY_VOCAB, 128, 4, expand=2, initializer_range=0.1), Message("model.for-a-cpu")),
    "tiny_llama": Preset(
        _transformer("llama", _TINY_VOCAB, 128, 384, 4, 4, 2, 2048, tied=True), Message("model.for-a-cpu")
    ),
    "qwen1.5-0.5b": Preset(_qwen2(151_936, 1024, 2816, 24, 16, 16, 32_768, tied=True), "Qwen/Qwen1.5-0.5B", "0.5B"),
    "qwen1.5-1.8b": Preset(_qwen2(151_936, 2048, 5504, 24, 16, 16, 32_768), "Qwen/Qwen1.5-1.8B", "1.8B"),
    "qwen2.5-7b": Preset(_qwen2(152_064, 3584, 18_944, 28, 28, 4, 131_072), "Qwen/Qwen2.5-7B", "7B"),
    "qwen2.5-32b": Preset(_qwen2(152_064, 5120, 27_648, 64, 40, 8, 131_072), Message("model.qwen-32b"), "32B"),
    "llama-3.1-8b": Preset(_llama3(4096, 14_336, 32, 32, 8), "meta-llama/Llama-3.1-8B", "8B"),
    "gemma-3-27b": Preset(
        _transformer(
            *("gemma3_text", 262_208, 5376, 21_504, 62, 32, 16, 131_072),
            tied=True,
            head_dim=128,
            query_pre_attn_scalar=168,
            sliding_window=1024,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        Message("model.gemma-27b"),
        "27B",
    ),
}

_SHORT: Mapping[str, object] = {"max_position_embeddings": 32_768}
"""Qwen2.5's chat models promise fewer positions than the base models that they were made from."""

CHECKPOINTS: Mapping[str, Checkpoint] = {
    "state-spaces/mamba-2.8b-hf": Checkpoint("3b_mamba"),
    "state-spaces/mamba-1.4b-hf": Checkpoint("1b_mamba"),
    "Qwen/Qwen1.5-0.5B": Checkpoint("qwen1.5-0.5b"),
    "Qwen/Qwen1.5-0.5B-Chat": Checkpoint("qwen1.5-0.5b"),
    "Qwen/Qwen1.5-1.8B": Checkpoint("qwen1.5-1.8b"),
    "Qwen/Qwen1.5-1.8B-Chat": Checkpoint("qwen1.5-1.8b"),
    "Qwen/Qwen2.5-7B": Checkpoint("qwen2.5-7b"),
    "Qwen/Qwen2.5-7B-Instruct": Checkpoint("qwen2.5-7b", _SHORT),
    "Qwen/Qwen2.5-32B": Checkpoint("qwen2.5-32b"),
    "Qwen/Qwen2.5-32B-Instruct": Checkpoint("qwen2.5-32b", _SHORT),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": Checkpoint("qwen2.5-32b"),
    "meta-llama/Llama-3.1-8B": Checkpoint("llama-3.1-8b"),
    "meta-llama/Llama-3.1-8B-Instruct": Checkpoint("llama-3.1-8b"),
    "meta-llama/Meta-Llama-3.1-8B": Checkpoint("llama-3.1-8b"),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": Checkpoint("llama-3.1-8b"),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Checkpoint("llama-3.1-8b"),
    "google/gemma-3-27b-pt": Checkpoint("gemma-3-27b"),
    "google/gemma-3-27b-it": Checkpoint("gemma-3-27b"),
}
"""By Hugging Face id. The first of a preset is the checkpoint that the preset describes."""

_QWEN25 = {
    "0.5B": (151_936, 896, 4864, 24, 14, 2, 32_768),
    "1.5B": (151_936, 1536, 8960, 28, 12, 2, 131_072),
    "3B": (151_936, 2048, 11_008, 36, 16, 2, 32_768),
    "14B": (152_064, 5120, 13_824, 48, 40, 8, 131_072),
    "72B": (152_064, 8192, 29_568, 80, 64, 8, 131_072),
}
_QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8),
    "1.7B": (2048, 6144, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
    "8B": (4096, 12_288, 36, 32, 8),
    "14B": (5120, 17_408, 40, 40, 8),
    "32B": (5120, 25_600, 64, 64, 8),
}
_LLAMA = {
    "3.2-1B": _llama3(2048, 8192, 16, 32, 8, factor=32.0, tied=True),
    "3.2-3B": _llama3(3072, 8192, 28, 24, 8, factor=32.0, tied=True),
    "3.1-70B": _llama3(8192, 28_672, 80, 64, 8),
}

PUBLISHED: Mapping[str, Mapping[str, object]] = {
    **{f"Qwen/Qwen2.5-{size}": _qwen2(*sizes, tied=sizes[1] < 3000) for size, sizes in _QWEN25.items()},
    **{
        f"Qwen/Qwen2.5-{size}-Instruct": {**_qwen2(*sizes, tied=sizes[1] < 3000), **_SHORT}
        for size, sizes in _QWEN25.items()
    },
    **{f"Qwen/Qwen3-{size}": _qwen3(*sizes, tied=sizes[0] < 3000) for size, sizes in _QWEN3.items()},
    **{f"meta-llama/Llama-{size}": config for size, config in _LLAMA.items()},
    **{f"meta-llama/Llama-{size}-Instruct": config for size, config in _LLAMA.items()},
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA["3.1-70B"],
}
"""By Hugging Face id, other models than those of `CHECKPOINTS`."""

_SPELT = {name.lower(): name for name in (*CHECKPOINTS, *PUBLISHED)}


def find_checkpoint(word: str) -> str | None:
    """The id that is known, as Hugging Face spells it; None: not known here."""
    return _SPELT.get(word.strip().lower())


def checkpoint_of(preset: str) -> str | None:
    """Where a preset's weights lie; None: no public model has its shape."""
    return next((name for name, checkpoint in CHECKPOINTS.items() if checkpoint.preset == preset), None)
