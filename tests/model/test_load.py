"""Shapes against the models that transformers really builds, on the meta device; then every way to get it wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.model import load as models
from tightfit.model.families import FAMILIES
from tightfit.model.families.reader import ACTIVATIONS
from tightfit.model.load import find_config, load_model, shape_from_config, shape_from_fields
from tightfit.model.presets import PRESETS
from tightfit.types import Attention, Mamba1, Mamba2, Mlp, ModelError, ModelShape, Moe

SRC = Path(models.__file__).parents[2]

Config = dict[str, Any]

# Small, and no two sizes alike, so that a swapped dimension shows.
DENSE: Config = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
SSM: Config = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
MOE: Config = {**DENSE, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


def cases() -> Iterator[tuple[str, Config]]:
    """Several configs of every family: biases, tying, grouped heads, head widths, norms, expert layouts."""
    flip = {"tie_word_embeddings": True}
    untie = {"tie_word_embeddings": False}
    for family in ("llama", "granite"):
        yield family, {**DENSE, "attention_bias": True, "mlp_bias": True}
        yield family, {**DENSE, **flip, "num_key_value_heads": None}
        yield family, {**DENSE, "attention_bias": True, "head_dim": 16}
        yield family, {k: v for k, v in DENSE.items() if k != "num_key_value_heads"}
    for family in ("mistral", "ministral3"):
        yield family, DENSE
        yield family, {**DENSE, **flip, "head_dim": 10, "sliding_window": None}
        yield family, {**DENSE, "sliding_window": 16}
    yield "mistral", {**DENSE, "head_dim": None}
    yield "ministral", {**DENSE, "head_dim": 8}
    yield (
        "ministral",
        {**DENSE, "head_dim": 12, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    )
    for family in ("qwen2", "qwen3"):
        yield family, DENSE
        yield family, {**DENSE, **flip, "head_dim": 12, "num_key_value_heads": None}
        yield family, {**DENSE, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    yield (
        "qwen2",
        {
            **{k: v for k, v in DENSE.items() if k != "num_key_value_heads"},
            "num_attention_heads": 32,
            "hidden_size": 64,
        },
    )
    yield "qwen3", {**DENSE, "attention_bias": True}
    yield "phi3", DENSE
    yield "phi3", {**DENSE, **flip, "num_key_value_heads": None, "partial_rotary_factor": 0.5}
    for family in ("gemma", "gemma2", "gemma3_text"):
        yield family, DENSE
        yield family, {**DENSE, **untie, "head_dim": 12, "attention_bias": True, "num_key_value_heads": 6}
    yield "gemma3_text", {"hidden_size": 48, "num_hidden_layers": 7, "intermediate_size": 80}
    yield "gemma3_text", {**DENSE, "num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 16}
    for family in ("olmo2", "olmo3"):
        yield family, DENSE
        yield family, {**DENSE, **flip, "attention_bias": True, "num_key_value_heads": None}
    yield "smollm3", DENSE
    yield "smollm3", {**DENSE, **untie, "attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2}
    yield "smollm3", {**DENSE, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8}
    yield "starcoder2", DENSE
    yield "starcoder2", {**DENSE, **untie, "use_bias": False, "head_dim": 12}
    yield "stablelm", DENSE
    yield "stablelm", {**DENSE, **flip, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}
    yield "stablelm", {**DENSE, "qk_layernorm": True, "partial_rotary_factor": 0.5}
    gpt2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 6}
    yield "gpt2", gpt2
    yield "gpt2", {**gpt2, **untie, "n_inner": 100, "n_positions": 40}
    yield "gpt2", {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    yield "gpt_neox", DENSE
    yield "gpt_neox", {**DENSE, **flip, "attention_bias": False, "use_parallel_residual": False, "rotary_pct": 1.0}
    yield "mixtral", DENSE
    yield "mixtral", {**DENSE, **flip, "num_local_experts": 3, "head_dim": 12, "sliding_window": 16}
    yield "mixtral", {**DENSE, "num_experts": 3}
    for family in ("qwen2_moe", "qwen3_moe"):
        yield family, MOE
        yield family, {**MOE, **flip, "decoder_sparse_step": 2, "head_dim": 12}
        yield family, {**MOE, "mlp_only_layers": [0, 2]}
        yield family, {**MOE, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    yield "qwen2_moe", {**MOE, "qkv_bias": False, "shared_expert_intermediate_size": 28}
    yield "qwen3_moe", {**MOE, "attention_bias": True}
    for family in ("mamba", "falcon_mamba"):
        yield family, SSM
        yield family, {**SSM, **untie, "use_bias": True, "use_conv_bias": False, "state_size": 5, "conv_kernel": 3}
        yield family, {**SSM, "expand": 3, "time_step_rank": 7, "residual_in_fp32": False}
        yield family, {**SSM, "intermediate_size": 72, "time_step_rank": "auto"}
    mamba2 = {**SSM, "num_heads": 12, "head_dim": 8, "n_groups": 2, "state_size": 6}
    yield "mamba2", mamba2
    yield "mamba2", {**mamba2, **flip, "use_bias": True, "use_conv_bias": False, "chunk_size": 16, "n_groups": 3}


def build(config: Config) -> Any:
    """What transformers makes of it, without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    hf_config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config)


def built_tensors(model: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def our_tensors(shape: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    return [(tensor.name, tensor.shape) for tensor in shape.tensors]


CASES = list(cases())


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "config"), CASES, ids=[f"{family}-{i}" for i, (family, _) in enumerate(CASES)])
def test_tensors_are_those_of_transformers_in_its_order(family: str, config: Config) -> None:
    config = {"model_type": family, **config}
    shape = shape_from_config(config, "some/model")
    model = build(config)
    assert our_tensors(shape) == built_tensors(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.name == "some/model"
    assert shape.model_type == family
    assert shape.tied == model.config.tie_word_embeddings
    assert shape.vocab_size == model.get_input_embeddings().weight.shape[0]
    assert shape.hidden_size == model.config.hidden_size
    assert shape.n_layers == model.config.num_hidden_layers
    if not family.endswith(("mamba", "mamba2")):
        assert shape.max_positions == model.config.max_position_embeddings


BARE: Config = {"hidden_size": 128, "num_hidden_layers": 9, "num_attention_heads": 32}
BARE |= {"intermediate_size": 80, "vocab_size": 200_000}
BARE_OF: dict[str, Config] = {
    "gpt2": {"n_embd": 120, "n_layer": 2, "n_head": 12, "vocab_size": 200_000},
    "gemma3_text": {"hidden_size": 128, "num_hidden_layers": 9, "intermediate_size": 80},
    "ministral": {**BARE, "head_dim": 4},  # without it, transformers 5.22 cannot build its own default
    "mamba2": {"hidden_size": 4096, "num_hidden_layers": 2, "vocab_size": 200_000},
}


@pytest.mark.thorough
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_absent_keys_mean_what_transformers_means_by_them(family: str) -> None:
    config = {"model_type": family, **BARE_OF.get(family, BARE)}
    if family.endswith("mamba"):
        del config["num_attention_heads"], config["intermediate_size"]
    shape, model = shape_from_config(config, "m"), build(config)
    assert our_tensors(shape) == built_tensors(model)
    assert shape.tied == model.config.tie_word_embeddings
    mlp = shape.blocks[0].mlp
    if mlp is not None:
        names = ("hidden_activation", "hidden_act", "activation_function")
        assert mlp.activation == next(getattr(model.config, name) for name in names if hasattr(model.config, name))
        assert shape.max_positions == model.config.max_position_embeddings


SWITCHES = (
    "attention_bias mlp_bias tie_word_embeddings use_bias use_conv_bias qkv_bias use_qkv_bias qk_layernorm "
    "use_parallel_residual use_sliding_window residual_in_fp32"
).split()


def random_config(family: str, draw: random.Random) -> Config:
    """Any sizes that go together, any switches that the family's own config class has."""
    from transformers import CONFIG_MAPPING

    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
    kv_heads, groups, width = draw.randint(1, 4), draw.randint(1, 3), 2 * draw.randint(2, 8)
    heads = kv_heads * groups
    config: Config = {
        "vocab_size": draw.randint(64, 200),
        "hidden_size": heads * width,
        "num_hidden_layers": draw.randint(1, 8),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": draw.randint(8, 99),
        "head_dim": draw.choice([width, 2 * draw.randint(2, 20)]),
        "pad_token_id": 0,
    }
    for switch in SWITCHES:
        if switch in known and draw.random() < 0.5:
            config[switch] = draw.random() < 0.5
    own: Config = {
        "n_inner": draw.choice([None, 70]),
        "num_experts": draw.randint(2, 6),
        "num_local_experts": draw.randint(2, 6),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": draw.randint(8, 40),
        "shared_expert_intermediate_size": draw.randint(8, 40),
        "decoder_sparse_step": draw.randint(1, 3),
        "mlp_only_layers": draw.sample(range(8), 2),
        "sliding_window": draw.randint(4, 40),
        "max_window_layers": draw.randint(0, 8),
        "state_size": draw.randint(2, 20),
        "conv_kernel": draw.randint(2, 5),
        "time_step_rank": draw.choice(["auto", draw.randint(1, 9)]),
    }
    config |= {key: value for key, value in own.items() if key in known}
    if family == "mamba2":
        config |= {"num_heads": 2 * heads, "head_dim": width, "n_groups": draw.choice([1, 2, heads])}
    if "mamba" in family:
        config = {key: value for key, value in config.items() if key in known}
    return config


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] if place % 2 else []) for place, name in enumerate(sorted(FAMILIES))],
)
def test_random_configs_have_the_tensors_of_transformers(family: str) -> None:
    draw = random.Random(family)  # noqa: S311 the same ones every time
    for _ in range(8):
        config = {"model_type": family, **random_config(family, draw)}
        shape, model = shape_from_config(config, "m"), build(config)
        assert our_tensors(shape) == built_tensors(model), config


def test_every_family_is_tried() -> None:
    assert {family for family, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_config_that_transformers_saved_is_read_back(family: str, tmp_path: Path) -> None:
    config = {"model_type": family, **next(config for name, config in CASES if name == family)}
    model = build(config)
    model.config.save_pretrained(tmp_path)
    assert our_tensors(load_model(str(tmp_path))) == built_tensors(model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    sorted(set(FAMILIES) - {"gpt2", "gpt_neox", "mamba", "falcon_mamba", "mamba2", "stablelm"}),
)
def test_attention_details_agree_with_the_built_modules(family: str) -> None:
    for config in (config for name, config in CASES if name == family):
        shape = shape_from_config({"model_type": family, **config}, "m")
        model = build({"model_type": family, **config})
        for layer, kind in zip(model.model.layers, shape.pattern, strict=True):
            mixer = shape.blocks[kind].mixer
            assert isinstance(mixer, Attention)
            assert mixer.head_dim == layer.self_attn.head_dim
            assert mixer.heads // mixer.kv_heads == layer.self_attn.num_key_value_groups
            assert mixer.rotary == bool(getattr(layer.self_attn, "use_rope", True))
            assert mixer.sliding_window == window_of(model, layer)
            assert mixer.qk_norm == hasattr(layer.self_attn, "q_norm")


def window_of(model: Any, layer: Any) -> int | None:
    if hasattr(layer.self_attn, "sliding_window"):
        return layer.self_attn.sliding_window  # type: ignore[no-any-return]
    if model.config.model_type == "qwen2_moe":  # sets the attribute on sliding layers only
        return None
    return getattr(model.config, "sliding_window", None)


def test_what_the_kinds_of_layer_say() -> None:
    gemma2 = shape_from_config({"model_type": "gemma2", **DENSE}, "m")
    first, second = gemma2.blocks
    assert isinstance(first.mixer, Attention)
    assert isinstance(second.mixer, Attention)
    assert (first.mixer.sliding_window, second.mixer.sliding_window) == (4096, None)
    assert gemma2.pattern == (0, 1, 0)
    assert first.mixer.softcap
    assert gemma2.final_softcap
    assert gemma2.embedding_scale
    assert (first.norm, first.arrangement, gemma2.final_norm) == ("gemma", "sandwich", "gemma")
    capless = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    plain = shape_from_config({"model_type": "gemma2", **DENSE, **capless}, "m")
    assert isinstance(plain.blocks[0].mixer, Attention)
    assert not plain.blocks[0].mixer.softcap
    assert not plain.final_softcap

    phi3 = shape_from_config({"model_type": "phi3", **DENSE, "partial_rotary_factor": 0.5}, "m").blocks[0]
    assert isinstance(phi3.mixer, Attention)
    assert isinstance(phi3.mlp, Mlp)
    assert (phi3.mixer.fused_qkv, phi3.mixer.rotary_dim, phi3.mlp.fused_gate_up) == (True, 4, True)

    neox = shape_from_config({"model_type": "gpt_neox", **DENSE}, "m").blocks[0]
    assert isinstance(neox.mixer, Attention)
    assert (neox.mixer.rotary_dim, neox.arrangement, neox.norm) == (2, "parallel", "layer")

    mixed = shape_from_config({"model_type": "qwen2_moe", **MOE, "mlp_only_layers": [1]}, "m")
    assert [type(mixed.blocks[kind].mlp) for kind in mixed.pattern] == [Moe, Mlp, Moe]
    moe = mixed.blocks[0].mlp
    assert isinstance(moe, Moe)
    assert (moe.experts, moe.top_k, moe.intermediate, moe.shared_intermediate) == (5, 2, 20, 5632)

    falcon = shape_from_config({"model_type": "falcon_mamba", **SSM}, "m").blocks[0]
    assert falcon.mixer == Mamba1(inner=96, state=16, conv=4, dt_rank=3, normed_bcdt=True)
    assert falcon.residual_fp32
    mamba2 = shape_from_config({"model_type": "mamba2", **SSM, "num_heads": 12, "head_dim": 8, "n_groups": 2}, "m")
    assert mamba2.blocks[0].mixer == Mamba2(inner=96, state=128, conv=4, heads=12, head_dim=8, groups=2, chunk=256)


@pytest.mark.thorough
def test_the_measured_gemma_config_gets_the_defaults_of_its_class() -> None:
    sizes = {"vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "tie_word_embeddings": True}
    config = {"model_type": "gemma3_text", **sizes, **heads}
    shape = shape_from_config(config, "gemma27")
    assert our_tensors(shape) == built_tensors(build(config))
    assert shape.parameters == 27_009_346_304
    assert shape.pattern.count(1) == 10
    assert shape.max_positions == 131_072


def test_the_multimodal_wrapper_gives_its_language_model_and_says_so(tmp_path: Path) -> None:
    from transformers import AutoConfig

    text = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "sliding_window": 16}
    shape = shape_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "g")
    assert our_tensors(shape) == built_tensors(build({"model_type": "gemma3_text", **text}))
    assert any("vision tower" in note for note in map(str, shape.notes))
    AutoConfig.for_model("gemma3", text_config=text).save_pretrained(tmp_path)
    assert our_tensors(load_model(str(tmp_path))) == our_tensors(shape)
    with pytest.raises(ModelError, match="text_config"):
        shape_from_config({"model_type": "gemma3"}, "g")


def test_a_quantised_checkpoint_is_counted_plain_and_says_so() -> None:
    quantised = {"model_type": "llama", **DENSE, "quantization_config": {"quant_method": "gptq"}}
    shape = shape_from_config(quantised, "m")
    assert any("gptq" in note for note in map(str, shape.notes))


# --- blocks of shape fields ---------------------------------------------------------------------

NOTE_002 = {"vocab_size": 50257, "max_seq_length": 4096, "d_model": 4864, "n_layers": 45}
NOTE_002 |= {"d_state": 16, "d_conv": 4, "expand": 2}


def test_shape_fields_of_a_mamba() -> None:
    shape = shape_from_fields(NOTE_002, "mine")
    assert shape.parameters == load_model("7b_mamba").parameters
    assert (shape.name, shape.max_positions) == ("mine", 4096)
    same = shape_from_fields({"family": "mamba", **NOTE_002, "dt_rank": "auto", "tied": True}, "mine")
    assert asdict(same) == asdict(shape)


def test_a_fractional_expand_becomes_a_width_that_transformers_can_build() -> None:
    fields = {"family": "mamba", "d_model": 64, "n_layers": 2, "d_state": 8, "expand": 1.5, "vocab_size": 96}
    config = models.config_from_fields(fields, "lite")
    assert config["intermediate_size"] == 96
    assert our_tensors(shape_from_fields(fields, "lite")) == built_tensors(build({**config, "pad_token_id": 0}))
    whole, fraction = ({**fields, "expand": 2}, {**fields, "expand": 2.0})
    assert asdict(shape_from_fields(fraction, "x")) == asdict(shape_from_fields(whole, "x"))


def test_shape_fields_of_the_rest() -> None:
    sizes = {"d_model": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "d_ff": 80, "vocab_size": 96}
    llama = shape_from_fields({"family": "llama", **sizes, "tied": True, "max_seq_length": 512}, "m")
    direct = {k: v for k, v in DENSE.items() if k != "pad_token_id"}
    same = shape_from_fields(
        {"family": "llama", **direct, "tie_word_embeddings": True, "max_position_embeddings": 512}, "m"
    )
    assert asdict(llama) == asdict(same)
    gpt2 = {"family": "gpt2", "d_model": 48, "n_layers": 2, "n_heads": 6, "vocab_size": 96, "max_seq_length": 40}
    assert ("transformer.wpe.weight", (40, 48)) in our_tensors(shape_from_fields(gpt2, "m"))
    qwen = {"family": "qwen2", **direct, "sliding_window": 16, "use_sliding_window": False}
    assert shape_from_fields(qwen, "m").n_layers == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**NOTE_002, "d_modle": 3}, "d_modle.*did you mean 'd_model'"),
        ({**NOTE_002, "hidden_size": 4864}, "given twice"),
        ({"d_model": 48}, "name no family"),
        ({"family": "lama", "d_model": 48}, "did you mean 'llama'"),
        ({"family": "llama", **DENSE}, "pad_token_id.*no shape field"),
        ({**NOTE_002, "expand": 0}, "expand is 0"),
        ({**NOTE_002, "expand": float("nan")}, "expand"),
        ({**NOTE_002, "expand": 1.5, "d_model": 10**400}, "hidden_size.*plausible"),
        ({**NOTE_002, "n_layers": "45"}, "num_hidden_layers must be a whole number"),
        ({**NOTE_002, "max_seq_length": -1}, "max_seq_length is -1"),
    ],
)
def test_wrong_shape_fields_are_named(fields: Config, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape_from_fields(fields, "mine")


# --- wrong configs ------------------------------------------------------------------------------


def without(key: str) -> Config:
    return {name: value for name, value in DENSE.items() if name != key}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        ({"d_model": 2560, "ssm_cfg": {}}, "-hf"),
        ({"model_type": "lama", **DENSE}, "'lama'.*did you mean 'llama'.*estimate --trace.*train"),
        ({"model_type": "whisper"}, "'whisper'.*estimate --trace"),
        ({"model_type": 7}, "model type 7"),
        ({"model_type": "llama", **DENSE, "per_layer_config": {"0": {}}}, "per_layer_config.*--trace"),
        ({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9, "add_cross_attention": True},
         "add_cross_attention.*--trace"),
        ({"model_type": "llama"}, "no hidden_size"),
        ({"model_type": "llama", **without("vocab_size")}, "no vocab_size"),
        ({"model_type": "qwen2", **without("num_attention_heads")}, "no num_attention_heads"),
        ({"model_type": "llama", **DENSE, "hidden_size": 0}, "hidden_size is 0, but must be at least 1"),
        ({"model_type": "llama", **DENSE, "num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"model_type": "llama", **DENSE, "hidden_size": 2**30}, "hidden_size is 1073741824, but at most 1048576 is"),
        ({"model_type": "llama", **DENSE, "vocab_size": 10**9}, "vocab_size is 1000000000, but at most 16777216 is"),
        (
            {"model_type": "llama", **DENSE, "hidden_size": 6 * 2**17, "num_hidden_layers": 9999},
            "its sizes make .* parameters, but at most 1e.14 are plausible",
        ),
        ({"model_type": "llama", **DENSE, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000.*plausible"),
        ({"model_type": "llama", **DENSE, "hidden_size": 10**5000}, "hidden_size.*plausible"),
        ({"model_type": "llama", **DENSE, "hidden_size": True}, "hidden_size must be a whole number, not true"),
        ({"model_type": "llama", **DENSE, "vocab_size": 96.5}, "vocab_size must be a whole number"),
        ({"model_type": "llama", **DENSE, "num_attention_heads": 7, "num_key_value_heads": 7},
         "hidden_size 48 is not a multiple of num_attention_heads 7"),
        ({"model_type": "llama", **DENSE, "num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ({"model_type": "qwen2", **without("num_key_value_heads")}, "num_key_value_heads 32.*default for qwen2"),
        ({"model_type": "llama", **DENSE, "hidden_act": "sulu"}, "hidden_act is 'sulu'.*did you mean 'silu'"),
        ({"model_type": "llama", **DENSE, "tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"model_type": "qwen2", **DENSE, "layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"model_type": "qwen2", **DENSE, "layer_types": ["full_attention", 2, 3]}, "layer_types must hold words"),
        ({"model_type": "qwen2", **DENSE, "layer_types": ["full", "full", "full"]}, "layer_types holds 'full'"),
        ({"model_type": "smollm3", **DENSE, "no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ({"model_type": "stablelm", **DENSE, "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"model_type": "mixtral", **DENSE, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than"),
        ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": ["0"]}, "mlp_only_layers must hold whole numbers"),
        ({"model_type": "mamba", **SSM, "expand": -2}, "expand is -2"),
        ({"model_type": "mamba", **SSM, "time_step_rank": "automatic"}, "time_step_rank"),
        ({"model_type": "mamba2", **SSM}, "num_heads 128"),
        ({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 7, "vocab_size": 96}, "n_embd 48 is not a"),
    ],
)  # fmt: skip
def test_wrong_configs_are_named_in_a_sentence(config: Config, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        shape_from_config(config, "some/model")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["auto", "silu"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = sorted(
    {key for _, config in CASES for key in config}
    | {"model_type", "layer_types", "text_config", "rope_parameters", "rope_scaling", "quantization_config"}
)
SMALL = st.integers(min_value=-1, max_value=64)


@pytest.mark.thorough
@given(
    family=st.sampled_from([*sorted(FAMILIES), "gemma3"]) | JSON,
    sizes=st.dictionaries(st.sampled_from(KEYS), SMALL | JSON, max_size=14),
    rest=st.dictionaries(st.text(max_size=8), JSON, max_size=3),
)
def test_random_json_never_crashes(family: Any, sizes: Config, rest: Config) -> None:
    for read in (shape_from_config, shape_from_fields):
        with contextlib.suppress(ModelError):
            assert read({**rest, **sizes, "model_type": family}, "random").parameters > 0


@pytest.mark.thorough
@given(st.data())
def test_one_wrong_value_in_a_right_config_never_crashes(data: st.DataObject) -> None:
    family, config = data.draw(st.sampled_from(CASES))
    key = data.draw(st.sampled_from(KEYS))
    with contextlib.suppress(ModelError):
        shape = shape_from_config({"model_type": family, **config, key: data.draw(SMALL | JSON)}, "random")
        assert shape.parameters > 0


def test_activations_are_those_of_transformers() -> None:
    from transformers.activations import ACT2FN

    assert set(ACT2FN) - {"prelu", "xielu"} == ACTIVATIONS


# --- files and folders --------------------------------------------------------------------------


def test_folders_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **DENSE}))
    by_folder, by_file = load_model(str(folder)), load_model(str(folder / "config.json"))
    assert asdict(by_folder) == asdict(by_file)
    assert by_folder.name == "my-llama"
    other = tmp_path / "other.json"
    other.write_text((folder / "config.json").read_text())
    assert load_model(str(other)).name == "other"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{'model_type': 1}", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b"", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(str(file))


def test_paths_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no config"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="no file or folder"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="no file or folder 'missing"):
        load_model("missing.json")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter"):
        load_model(str(tmp_path))
    for nothing in ("", "  "):
        with pytest.raises(ModelError, match="no name"):
            load_model(nothing)


# --- Hugging Face -------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """A hub whose cache is empty and whose network answers with an error of huggingface_hub's own."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def not_cached(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("not cached")

    def answer(error: Exception) -> None:
        def raise_it(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", raise_it)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", not_cached)
    return answer


def http_error(kind: str) -> Exception:
    """Made without its constructor, which wants a real HTTP response."""
    import huggingface_hub.errors

    error_type: type[Exception] = getattr(huggingface_hub.errors, kind)
    return error_type.__new__(error_type)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "is gated: accept its licence.*did you mean 'llama-3.1-8b'"),
        ("RepositoryNotFoundError", "Hugging Face has no such model"),
        ("RemoteEntryNotFoundError", "has no config.json"),
        ("OfflineModeIsEnabled", "not in the Hugging Face cache.*HF_HUB_OFFLINE"),
    ],
)
def test_what_the_hub_refuses(hub: Callable[[Exception], None], error: str, message: str) -> None:
    hub(http_error(error))
    with pytest.raises(ModelError, match=message) as caught:
        load_model("meta-llama/Llama-3.1-8B-Base")
    assert "\n" not in str(caught.value)


def test_no_network(hub: Callable[[Exception], None]) -> None:
    hub(ConnectionError("Name or service not known\nand a second line"))
    with pytest.raises(ModelError, match=r"could not be asked \(Name or service not known\): without a network"):
        load_model("some/model")


def test_words_that_are_nothing() -> None:
    for word in ("a b", "x/y/z", "nul\0byte", "l" * 5000):
        with pytest.raises(ModelError, match="no preset, file, folder or Hugging Face id"):
            load_model(word)


def desk(code: str, **environment: str) -> str:
    """What a fresh desk process prints."""
    env = {**os.environ, "PYTHONPATH": str(SRC), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.thorough
def test_a_cached_model_is_read_offline_and_torch_stays_out(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", **DENSE}))
    code = (
        "import sys\nfrom tightfit.model.load import load_model\nfrom tightfit.types import ModelError\n"
        "print(load_model('some/model').parameters)\n"
        "try: load_model('some/other')\nexcept ModelError as error: print(error)\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path)}
    count, sentence, heavy = desk(code, **environment).splitlines()
    assert int(count) == shape_from_config({"model_type": "llama", **DENSE}, "m").parameters
    assert "HF_HUB_OFFLINE" in sentence
    assert heavy == "set()"


@pytest.mark.thorough
def test_presets_and_files_need_no_hub_library() -> None:
    code = (
        "import sys\nfrom tightfit.model.load import load_model\nload_model('qwen2.5-7b')\n"
        "load_model('Qwen/Qwen2.5-7B-Instruct')\n"
        "print({'huggingface_hub', 'torch', 'transformers', 'tightfit.model.trace'} & set(sys.modules))"
    )
    assert desk(code).strip() == "set()"


def test_a_preset_wins_over_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "7b_mamba").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_config("7b_mamba").called == "7B"
    with pytest.raises(ModelError, match="has no config"):
        find_config("./7b_mamba")


def test_a_folder_wins_over_a_known_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen2.5-7B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **DENSE}))
    monkeypatch.chdir(tmp_path)
    assert load_model("Qwen/Qwen2.5-7B").model_type == "llama"


def test_a_known_gemma_is_the_language_model_of_its_config() -> None:
    """As if the published wrapper had been read."""
    known = load_model("google/gemma-3-27b-it")
    text = {key: value for key, value in PRESETS["gemma-3-27b"].config.items() if key != "model_type"}
    read = shape_from_config({"model_type": "gemma3", "text_config": text}, "google/gemma-3-27b-it")
    assert (known.name, known.tensors, known.model_type) == (read.name, read.tensors, read.model_type)
    assert set(read.notes) <= set(known.notes)


def test_a_yaml_file_may_hold_the_shape_fields(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model_type: mamba\nnum_gpus: 4\nmodel:\n  d_model: 64\n  n_layers: 2\n  vocab_size: 96\n")
    shape = load_model(str(path))
    assert (shape.name, shape.model_type, shape.hidden_size, shape.n_layers) == ("mine", "mamba", 64, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model_type: mamba\nmodel:\n  d_model: 64\n  n_layers: 2\n  vocab_size: 9\n  d_covn: 4\n", "d_conv"),
        ("- 1\n", "no block of shape fields"),
        ("a: [", "cannot read shape fields"),
    ],
)
def test_a_yaml_file_that_is_no_model(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ModelError, match=says):
        load_model(str(path))


def test_a_new_mamba_is_drawn_small_enough_for_fp16() -> None:
    """With transformers' own 0.1 the first layer of a wide one gives millions."""
    assert models.config_from_fields(NOTE_002, "mine")["initializer_range"] == 0.02
    said = models.config_from_fields({**NOTE_002, "initializer_range": 0.05}, "mine")
    assert said["initializer_range"] == 0.05
    same = shape_from_fields({**NOTE_002, "initializer_range": 0.05}, "mine")
    assert asdict(same) == asdict(shape_from_fields(NOTE_002, "mine"))
    assert find_config("7b_mamba").config["initializer_range"] == 0.02


@pytest.mark.parametrize("std", ["small", 0, -0.1, 2, True, None])
def test_a_spread_that_is_none_is_refused(std: object) -> None:
    with pytest.raises(ModelError, match="initializer_range must be a number above 0 and up to 1"):
        models.config_from_fields({**NOTE_002, "initializer_range": std}, "mine")
