"""Every preset is what transformers builds of it, at full size, and says its true count."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.model.load import load_model
from tightfit.model.presets import CHECKPOINTS, PRESETS, PUBLISHED, checkpoint_of

# From the public model cards and checkpoints (safetensors totals), or counted by hand where there is none.
COUNTS = {
    "7b_mamba": 6_922_702_592,
    "3b_mamba": 2_768_345_600,
    "3b_mamba_lite": 868_858_880,
    "1b_mamba": 1_372_178_432,
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-1.8b": 1_836_828_672,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "llama-3.1-8b": 8_030_261_248,
    "gemma-3-27b": 27_009_346_304,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_tensors_of_the_model_that_transformers_builds(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = dict(PRESETS[name].config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    shape = load_model(name)
    assert [(t.name, t.shape) for t in shape.tensors] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert shape.name == name


def test_counts_are_those_of_the_public_checkpoints() -> None:
    assert {name: load_model(name).parameters for name in COUNTS} == COUNTS
    assert set(PRESETS) - set(COUNTS) == {"tiny_mamba", "tiny_llama"}


def test_names_that_promise_say_the_truth_beside_it() -> None:
    assert str(load_model("3b_mamba_lite").notes[0]) == "called 3B, really 0.87B"
    assert tuple(map(str, load_model("3b_mamba").notes))[:2] == (
        "called 3B, really 2.77B",
        "the shape of state-spaces/mamba-2.8b-hf",
    )
    assert not any("called" in note for note in map(str, load_model("7b_mamba").notes)), "6.92B is an honest 7B"
    assert any("vision tower is not counted" in note for note in map(str, load_model("gemma-3-27b").notes))
    assert any("DeepSeek-R1-Distill-Qwen-32B" in note for note in map(str, load_model("Qwen2.5-32B").notes))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_a_presets_shape_needs_no_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it is an error now
    preset, shape = load_model(CHECKPOINTS[name].preset), load_model(name)
    assert (shape.name, load_model(name.lower()).name) == (name, name)
    assert shape.tensors == preset.tensors
    assert str(shape.notes[0]) == f"known here as the shape of {preset.name}; Hugging Face was not asked"
    assert not any("called" in note for note in map(str, shape.notes)), (
        "the promise is the preset's name's, not this one's"
    )


def test_models_that_are_known_by_their_ids_have_the_published_number_of_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the Hub shows them, counted in the weights' files."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it is an error now
    found = {name: load_model(name.lower()) for name in PUBLISHED}
    assert [shape.name for shape in found.values()] == list(PUBLISHED)
    counts = {
        "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
        "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-72B": 72_706_203_648, "Qwen3-0.6B": 596_049_920,
        "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360,
        "Qwen3-14B": 14_768_307_200, "Qwen3-32B": 32_762_123_264, "Llama-3.2-1B": 1_235_814_400,
        "Llama-3.2-3B": 3_212_749_824, "Llama-3.1-70B": 70_553_706_496, "Llama-3.3-70B": 70_553_706_496,
    }  # fmt: skip
    assert {
        name.partition("/")[2].removesuffix("-Instruct"): shape.parameters for name, shape in found.items()
    } == counts


def test_chat_models_promise_fewer_positions() -> None:
    found = {name: load_model(name).max_positions for name in CHECKPOINTS if name.startswith("Qwen/Qwen2.5")}
    assert found == {
        "Qwen/Qwen2.5-7B": 131_072,
        "Qwen/Qwen2.5-7B-Instruct": 32_768,
        "Qwen/Qwen2.5-32B": 131_072,
        "Qwen/Qwen2.5-32B-Instruct": 32_768,
    }


def test_presets_and_checkpoints_name_each_other() -> None:
    for name, preset in PRESETS.items():
        checkpoint = checkpoint_of(name)
        assert checkpoint is None or checkpoint in str(preset.source)
        assert (checkpoint is None) == (name.startswith("tiny") or "no public checkpoint" in str(preset.source))
    assert {checkpoint.preset for checkpoint in CHECKPOINTS.values()} <= set(PRESETS)


def test_the_page_lists_the_known_ids() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (`.*`) \|$", page, flags=re.MULTILINE)
    listed = {name: preset for preset, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert listed == {name: checkpoint.preset for name, checkpoint in CHECKPOINTS.items()}


def test_tiny_presets_train_on_a_cpu() -> None:
    for name in ("tiny_mamba", "tiny_llama"):
        assert load_model(name).parameters < 5_000_000
