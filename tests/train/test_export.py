"""Adapters merged into their bases: what PEFT would make of them, a tensor at a time."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from small_adapters import adapter_of, base_of, loaded, merged_by_peft

from tightfit.messages import Message
from tightfit.train.export import export
from tightfit.train.export_source import Spec
from tightfit.types import UserError

pytestmark = pytest.mark.thorough

Config = dict[str, Any]


def merge(adapter: Path, to: Path, **more: Any) -> tuple[str, ...]:
    """Export, and what was said of it."""
    said: list[tuple[Message, int, int]] = []
    done = export(Spec(source=str(adapter), to=str(to), **more), lambda *event: said.append(event))
    assert said[-1][1] == said[-1][2] > 0
    assert done.bytes == (to / "model.safetensors").stat().st_size
    return tuple(map(str, done.notes))


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Equal but for one rounding of fp32 sums."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


ADAPTERS: dict[str, tuple[str, Config]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "up_proj"], "lora_alpha": 16}),
    "rslora": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 3},
        },
    ),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "mamba": ("mamba", {"target_modules": ["in_proj", "x_proj", "dt_proj"]}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "saved modules": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "experts": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_adapter_is_what_peft_merges(tmp_path: Path, kind: str) -> None:
    family, config = ADAPTERS[kind]
    changes = {"rescale_prenorm_residual": False} if family == "mamba" else {}
    base = base_of(tmp_path / "base", family, **changes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
        adapter = adapter_of(tmp_path / "adapter", base, config)
    merge(adapter, tmp_path / "merged")
    assert_near(loaded(tmp_path / "merged"), merged_by_peft(base, adapter))
    assert (tmp_path / "merged" / "tokenizer_config.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_bf16_base_is_rounded_once(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama", torch.bfloat16)
    adapter = adapter_of(tmp_path / "adapter", base, {"target_modules": ["q_proj"]})
    merge(adapter, tmp_path / "merged", merge=True)
    ours, theirs = loaded(tmp_path / "merged"), merged_by_peft(base, adapter)
    for name, tensor in theirs.items():
        assert ours[name].dtype == torch.bfloat16
        torch.testing.assert_close(ours[name], tensor.bfloat16(), rtol=2**-7, atol=1e-4)


def test_the_base_may_be_named(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    adapter = adapter_of(tmp_path / "adapter", base, {"target_modules": ["q_proj"]})
    theirs = merged_by_peft(base, adapter)
    base.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="there is no folder"):
        merge(adapter, tmp_path / "merged")
    merge(adapter, tmp_path / "merged", base=str(tmp_path / "moved"))
    assert_near(loaded(tmp_path / "merged"), theirs)


def problem(adapter: Path, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        merge(adapter, adapter.parent / "out", **more)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "an adapter of the kind IA3"),
        ({"use_dora": True}, "DoRA's magnitudes"),
        ({"init_lora_weights": "pissa"}, "began as pissa, which changes the base too"),
        ({"base_model_name_or_path": None}, "does not say which model it adapts: name it with --base"),
    ],
)
def test_adapters_that_cannot_be_merged(tmp_path: Path, change: Config, said: str) -> None:
    base = base_of(tmp_path / "base", "llama")
    adapter = adapter_of(tmp_path / "adapter", base, {"target_modules": ["q_proj"]})
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    assert said in problem(adapter)
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    adapter = adapter_of(tmp_path / "adapter", base, {"target_modules": ["q_proj"]})
    other = base_of(tmp_path / "other", "mamba")
    assert "nothing that it fits: name its base with --base" in problem(adapter, base=str(other))
    wider = base_of(tmp_path / "wider", "llama", hidden_size=128)
    assert "is for a weight of [64, 64], and the model's is [128, 128]" in problem(adapter, base=str(wider))


def test_a_tied_head_is_not_merged(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "qwen2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it saves the embedding, and that the head is tied
        adapter = adapter_of(tmp_path / "adapter", base, {"target_modules": ["lm_head"]})
    assert "tied to the embedding" in problem(adapter)
