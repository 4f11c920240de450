"""Small bases and adapters as other programs save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import config_of, real
from transformers import AutoModelForCausalLM


def base_of(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    model = real(config_of(family, **changes)).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}', encoding="utf-8")
    return folder


def adapter_of(folder: Path, base: Path, config: dict[str, Any]) -> Path:
    """An adapter as PEFT saves it after some training."""
    torch.manual_seed(1)
    lora = LoraConfig(**({"r": 4, "task_type": "CAUSAL_LM"} | config))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return folder


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    state: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return state


def loaded(folder: Path, dtype: str = "auto") -> dict[str, torch.Tensor]:
    model, said = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state: dict[str, torch.Tensor] = model.state_dict()
    return state
