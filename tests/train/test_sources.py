"""Weights read from safetensors, a range at a time, under whatever names the checkpoint has."""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from small_models import FAMILIES, config_of, on_meta, real

from tightfit.messages import Message
from tightfit.train.sources import Safetensors, map_names, open_weights
from tightfit.types import ModelError


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(source: Safetensors, model: Any) -> None:
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        assert torch.equal(source.read(name, shape, 0, math.prod(shape)), tensor.flatten()), name


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_can_be_read(tmp_path: Path, family: str) -> None:
    model = real(config_of(family))
    model.save_pretrained(tmp_path, max_shard_size="100KB" if family in ("llama", "mixtral") else "5GB")
    assert_same(open_weights(tmp_path, on_meta(config_of(family))), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_range_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 11).to(dtype)
    source = Safetensors(saved(tmp_path, {"w": tensor, "other": torch.ones(3)}))
    for start in range(0, 77, 13):
        for stop in range(start, 78, 7):
            assert torch.equal(source.read("w", (7, 11), start, stop), tensor.flatten()[start:stop])
    assert source.dtype("w") == dtype


def test_a_range_over_several_experts(tmp_path: Path) -> None:
    model = real(config_of("qwen3_moe"))
    model.save_pretrained(tmp_path)
    source = open_weights(tmp_path, on_meta(config_of("qwen3_moe")))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = model.state_dict()[name]
    for start, stop in ((0, 0), (5, 6), (3000, 3100), (3071, 3073), (2000, 40000), (whole.numel() - 1, whole.numel())):
        assert torch.equal(source.read(name, tuple(whole.shape), start, stop), whole.flatten()[start:stop])


def test_experts_in_the_models_own_form(tmp_path: Path) -> None:
    model = real(config_of("mixtral"))
    assert_same(open_weights(saved(tmp_path, state(model)), on_meta(config_of("mixtral"))), model)


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("llama", lambda name: name.removeprefix("model.")),
        ("llama", lambda name: f"language_model.{name}"),
        ("gemma3_text", lambda name: name.replace("model.", "model.language_model.", 1)),
        ("gemma3_text", lambda name: f"language_model.{name}"),
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        ("mamba", lambda name: name.replace("backbone.embeddings", "backbone.embedding")),
        ("mamba", lambda name: name.removeprefix("backbone.")),
        ("gpt_neox", lambda name: name.replace("lm_head", "embed_out")),
    ],
)
def test_other_spellings(tmp_path: Path, family: str, rename: Any) -> None:
    model = real(config_of(family))
    folder = saved(tmp_path, {rename(name): tensor for name, tensor in state(model).items()})
    assert_same(open_weights(folder, on_meta(config_of(family))), model)


@pytest.mark.thorough
def test_the_text_model_out_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = config_of("gemma3_text")
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    both = Gemma3ForConditionalGeneration(config)
    both.save_pretrained(tmp_path)
    source = open_weights(tmp_path, on_meta(config.get_text_config()))
    for name, tensor in both.model.language_model.named_parameters():
        shape = tuple(tensor.shape)
        assert torch.equal(source.read(f"model.{name}", shape, 0, tensor.numel()), tensor.flatten()), name


@pytest.mark.thorough
def test_a_form_that_only_transformers_knows_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    # No causal model that is small enough to make here is stored transposed: this one is told to be.
    turned = WeightConverter("mlp.up_proj.weight_t", "mlp.up_proj.weight", operations=[Transpose(0, 1)])
    found = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda kind: [turned] if kind == "llama" else found(kind),
    )
    model = real(config_of("llama"))
    tensors = {
        name.replace("up_proj.weight", "up_proj.weight_t"): tensor.t() if "up_proj" in name else tensor
        for name, tensor in state(model).items()
    }
    folder = saved(tmp_path / "turned", tensors)
    model.config.save_pretrained(folder)
    with pytest.raises(ModelError, match="lies in another form"):
        open_weights(folder, on_meta(config_of("llama")))
    said: list[str] = []
    for _ in range(2):
        source = open_weights(
            folder, on_meta(config_of("llama")), tmp_path / "cache", progress=lambda what, *_: said.append(what)
        )
        assert_same(source, model)
    assert said == [Message("train.converting", name="turned")] * 2  # its beginning and its end, once


def test_names_are_mapped_without_reading_weights() -> None:
    named = map_names(on_meta(config_of("llama")), {})
    assert not named.parts
    assert "model.norm.weight" in named.missing


# --- what can be wrong ---------------------------------------------------------------------------


def problem(folder: Path, family: str = "llama") -> str:
    with pytest.raises(ModelError) as caught:
        open_weights(folder, on_meta(config_of(family)))
    return str(caught.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = state(real(config_of("llama")))
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    text = problem(saved(tmp_path, tensors))
    assert "lacks 'model.layers.1.mlp.up_proj.weight' and 1 more" in text
    assert str(tmp_path) in text


def test_weights_of_another_size(tmp_path: Path) -> None:
    folder = saved(tmp_path, state(real(config_of("llama", intermediate_size=96))))
    assert "is [96, 64] in the weights and [160, 64] in the config" in problem(folder)


def test_a_truncated_file(tmp_path: Path) -> None:
    file = saved(tmp_path, state(real(config_of("llama")))) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "was cut off" in problem(tmp_path)
    file.write_bytes(file.read_bytes()[:50])
    assert "is no safetensors file, or was cut off" in problem(tmp_path)
    file.write_bytes(b"")
    assert "is no safetensors file, or was cut off" in problem(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[]",
        b'{"w": 3}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}}',
        b'{"w": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}',
    ],
)
def test_a_header_that_makes_no_sense(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "again" in problem(tmp_path)


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    real(config_of("llama")).save_pretrained(tmp_path, max_shard_size="100KB")
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    first.unlink()
    assert f"names {first.name}, which is not beside it" in problem(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    assert "is no index" in problem(tmp_path)
    outside = {"weight_map": {"w": "../other/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(outside), encoding="utf-8")
    assert "which is not beside it" in problem(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    tensors = state(real(config_of("llama")))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    assert "in F8_E4M3, which is quantised" in problem(saved(tmp_path, tensors))


def test_pickles_and_empty_folders(tmp_path: Path) -> None:
    assert "holds no model.safetensors" in problem(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "are pickled, and a pickle can run any program" in problem(tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    save_file({"w": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert "holds an adapter and no model" in problem(tmp_path)


def test_what_the_library_reads_is_what_we_read(tmp_path: Path) -> None:
    real(config_of("mamba2")).save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    source = Safetensors(tmp_path)
    assert source.stored.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(source.read(name, tuple(tensor.shape), 0, tensor.numel()), tensor.flatten())
