"""What a skeleton must not lose: buffers, ties, dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.train import build
from tightfit.train.assemble import materialise
from tightfit.train.config import ModelSource
from tightfit.types import Levers

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16},
    "mamba": {"state_size": 4, "expand": 2},
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
}


def config_of(kind: str) -> Any:
    shared: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
    if "mamba" not in kind:
        shared |= {"intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 128}
    return AutoConfig.for_model(kind, **{**shared, **SMALL[kind]})


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_those_of_a_plain_build(kind: str, dtype: torch.dtype) -> None:
    plain: Any = AutoModelForCausalLM.from_config(config_of(kind), dtype=dtype)
    made = build.skeleton(config_of(kind), dtype, "sdpa")
    assert all(param.device.type == "meta" for param in made.parameters())
    materialise(made, torch.device("cpu"))
    ours, theirs = dict(made.named_buffers()), dict(plain.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert ours[name].dtype == buffer.dtype
        assert torch.equal(ours[name], buffer), name
    if kind not in ("mamba",):
        assert any("inv_freq" in name for name in ours), "there must be something to lose"


@pytest.mark.parametrize("kind", SMALL)
def test_names_shapes_and_ties_are_those_of_a_plain_build(kind: str) -> None:
    plain: Any = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.bfloat16)
    made = build.skeleton(config_of(kind), torch.bfloat16, "sdpa")
    want = {name: (tuple(p.shape), p.dtype) for name, p in plain.named_parameters()}
    assert {name: (tuple(p.shape), p.dtype) for name, p in made.named_parameters()} == want
    tied = made.get_output_embeddings().weight is made.get_input_embeddings().weight
    assert tied == (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight)
    materialise(made, torch.device("cpu"))
    assert tied == (made.get_output_embeddings().weight is made.get_input_embeddings().weight)


def test_freezing_leaves_the_upper_layers() -> None:
    made = build.skeleton(config_of("qwen2"), torch.float32, "sdpa")
    build.freeze(made, Levers(frozen_layers=2))
    trains = {name for name, param in made.named_parameters() if param.requires_grad}
    assert all(name.startswith(("model.layers.2.", "model.norm", "lm_head")) for name in trains)
    assert {"lm_head.weight", "model.norm.weight"} <= trains


def test_the_audit_names_and_repairs_what_is_mixed() -> None:
    made = build.skeleton(config_of("llama"), torch.float16, "sdpa")
    made.model.layers[1].input_layernorm.weight = torch.nn.Parameter(torch.empty(32, device="meta"))
    made.model.norm.register_buffer("odd", torch.zeros(2, dtype=torch.float64))
    found = build.audit(made, torch.float16)
    assert [str(each) for each in found] == [
        "model.layers.1.input_layernorm.weight was float32 and is float16",
        "model.norm.odd was float64 and is float32",
    ]
    assert {param.dtype for param in made.parameters()} == {torch.float16}
    assert build.audit(made, torch.float16) == ()


def test_flash_without_a_gpu_or_the_package_is_said() -> None:
    kernel, said = build.attention_of(Levers(attention="flash"), on_gpu=False)
    assert kernel == "sdpa"
    assert "GPU" in str(said)
    assert build.attention_of(Levers(attention="eager"), on_gpu=False) == ("eager", None)


def test_a_cap_on_attention_scores_is_not_lost_to_sdpa() -> None:
    """sdpa has none: some releases of transformers drop it silently, the others refuse."""
    config = AutoConfig.for_model("gemma2")
    kernel, said = build.attention_of(Levers(attention="sdpa"), on_gpu=False, config=config)
    assert kernel == "eager"
    assert "cap" in str(said)
    config.attn_logit_softcapping = None
    assert build.attention_of(Levers(attention="sdpa"), on_gpu=False, config=config) == ("sdpa", None)


def test_an_infinity_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba2", hidden_size=64, num_heads=8, head_dim=16, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    source = ModelSource(name="m", config=saved, weights=None, parameters=1, trust_remote_code=False)
    assert list(build.hf_config(source, None).time_step_limit) == [0.0, float("inf")]
