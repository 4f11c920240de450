"""The fix is the user's own: their numbers, the name that was meant, what makes the product right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.formats.lint import lint
from tightfit.formats.rules import Finding
from tightfit.formats.target import Target

BASE = {"gradient_clipping": 1.0, "bf16": {"enabled": True, "check_grad_overflow": True}}


def found(folder: Path, values: dict[str, Any], rule: str, kind: str = "deepspeed", **more: Any) -> Finding:
    path = folder / "a.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    (one,) = [each for each in lint(path, kind=kind, **more) if each.rule == rule]
    return one


@pytest.mark.parametrize(
    ("total", "micro", "steps", "world", "fix"),
    [
        (64, 2, 2, 8, "write 32, or gradient_accumulation_steps 4 to keep 64"),
        (24, 2, 2, 6, None),
        (48, 4, 3, 8, "write 96, or train_micro_batch_size_per_gpu 2 to keep 48"),
        (100, 4, 3, 8, "write 96, or delete train_batch_size"),
        (100, 4, 3, None, "write 96, or delete train_batch_size"),
        (12, 1, None, 8, "write 16, or delete train_batch_size"),
    ],
)
def test_batch_sizes(
    tmp_path: Path, total: int, micro: int, steps: int | None, world: int | None, fix: str | None
) -> None:
    sizes = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    values = BASE | {key: value for key, value in sizes.items() if value is not None}
    if fix is None:
        assert lint_of(tmp_path, values, world) == ()
    else:
        assert str(found(tmp_path, values, "ds-batch", world=world).fix) == fix


def lint_of(folder: Path, values: dict[str, Any], world: int | None) -> tuple[Finding, ...]:
    path = folder / "a.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return lint(path, world=world)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("lora_r", 16, "write lora_rank"),
        ("lora_target_modules", "q_proj", "write lora_target"),
        ("max_seq_length", 1024, "write cutoff_len"),
        ("batch_size", 1, "write per_device_train_batch_size"),
        ("load_in_4bit", True, "write quantization_bit: 4"),
        ("deepspeed_stage", 3, 'write "zero_optimization": {"stage": 3} into the DeepSpeed file'),
        (
            "cpu_offload",
            True,
            'write "offload_optimizer": {"device": "cpu"} into zero_optimization of the DeepSpeed file',
        ),
    ],
)
def test_other_trainers_names_in_a_llamafactory_file(tmp_path: Path, key: str, value: object, fix: str) -> None:
    values = {"model_name_or_path": "x", "template": "qwen", key: value}
    assert str(found(tmp_path, values, "lf-unknown", "llamafactory").fix) == fix


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        (
            "lora_target_modules",
            "have your script hand it to target_modules of peft's LoraConfig; LLaMA-Factory calls it lora_target",
        ),
        ("lora_r", "have your script hand it to r of peft's LoraConfig; LLaMA-Factory calls it lora_rank"),
        ("batch_size", "write per_device_train_batch_size"),
        ("deepspeed_stage", 'write "zero_optimization": {"stage": 3} into the DeepSpeed file'),
    ],
)
def test_names_that_are_no_training_arguments(tmp_path: Path, key: str, fix: str) -> None:
    one = found(tmp_path, {"output_dir": "x", key: 3}, "hf-foreign", "huggingface")
    assert "is no field of TrainingArguments" in str(one.what)
    assert str(one.fix) == fix


def test_a_share_of_warmup_is_kept(tmp_path: Path) -> None:
    one = found(tmp_path, {"output_dir": "x", "warmup_ratio": 0.1}, "hf-gone", "huggingface")
    assert str(one.fix) == "write warmup_steps: 0.1, which below 1 is a share of all steps"


def test_clipping_that_never_reaches_deepspeed(tmp_path: Path) -> None:
    deepspeed = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    values = {"output_dir": "x", "max_grad_norm": 1.0, "deepspeed": deepspeed}
    old = found(tmp_path, values, "pair-clipping", "huggingface", target=Target(deepspeed_version="0.14.2"))
    assert "DeepSpeed 0.14.2 clips nothing" in str(old.what)
    assert str(old.fix) == 'add "gradient_clipping": "auto" to a.json, or 1'
    assert [each.rule for each in lint(tmp_path / "a.json") if each.severity == "error"] == []
    differs = values | {"deepspeed": deepspeed | {"gradient_clipping": 0.5}}
    assert str(found(tmp_path, differs, "pair-mismatch", "huggingface").fix) == (
        'write "auto" for gradient_clipping in a.json, or 1'
    )


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "gpu"}}},
            'write "cpu" or "nvme", or delete',
        ),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "CPU"}}}, 'write "cpu"'),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": -1}}, "write a whole number of at least 0"),
        ({"train_micro_batch_size_per_gpu": 1.5}, "write 2"),
    ],
)
def test_values_that_deepspeed_refuses(tmp_path: Path, values: dict[str, Any], fix: str) -> None:
    one = found(tmp_path, {"train_micro_batch_size_per_gpu": 1} | values, "ds-value")
    assert str(one.fix).startswith(fix)
