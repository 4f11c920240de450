"""Values of a DeepSpeed file that its key does not take, each with the nearest one that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.formats.lint import lint
from tightfit.formats.target import Target

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "zero_optimization": {"stage": 2},
}
CPU = {"device": "cpu", "pin_memory": True}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **keys}}


def zero3(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, **keys}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


WRONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ds-value", {"train_micro_batch_size_per_gpu": 1.5}, {}),
    ("ds-value", {"gradient_accumulation_steps": 0}, {}),
    ("ds-value", {"gradient_clipping": -1}, {"gradient_clipping": 0.0}),
    ("ds-value", {"communication_data_type": "fp8"}, {"communication_data_type": "FP16"}),
    ("ds-value", zero(offload_optimizer={**CPU, "device": "gpu"}), zero(offload_optimizer=CPU)),
    ("ds-value", zero3(stage3_max_live_parameters=-1), zero3(stage3_max_live_parameters=0)),
    ("ds-value", zero3(max_live_parameters=1.5), zero3(max_live_parameters=1e9)),
    ("ds-value", zero3(max_live_parameters=True), zero3(max_live_parameters=1)),
    ("ds-value", zero(overlap_comm="maybe"), zero(overlap_comm=None)),
    ("ds-value", zero3(sub_group_size=None), zero3(sub_group_size=1000)),
    ("ds-value", zero3(offload_optimizer={**CPU, "ratio": 2}), zero3(offload_optimizer={**CPU, "ratio": 0.5})),
    ("ds-value", {"optimizer": {"type": 1}}, {"optimizer": {"type": "AdamW"}}),
    ("ds-value", zero3(compute_grad_norm=False), zero(compute_grad_norm=False)),
    ("ds-quoted", zero(overlap_comm="yes"), zero(overlap_comm=True)),
    ("ds-text-switch", {"prescale_gradients": "no"}, {"prescale_gradients": False}),
    ("ds-scheduler-params", {"scheduler": {"type": "WarmupLR"}}, scheduler("WarmupLR")),
    ("ds-scheduler-params", scheduler("WarmupLR", warmup_num_steps=0), scheduler("WarmupLR", warmup_num_steps=1)),
    (
        "ds-scheduler-params",
        scheduler("WarmupCosineLR", total_num_steps=100, warmup_max_lr=1e-4),
        scheduler("WarmupCosineLR", total_num_steps=100),
    ),
    (
        "ds-scheduler-params",
        scheduler("OneCycle", cycle_min_lr=1e-5),
        scheduler("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-4),
    ),
]


def rules(folder: Path, values: dict[str, Any], target: Target | None = None) -> list[str]:
    path = folder / "ds.json"
    path.write_text(json.dumps(BASE | values), encoding="utf-8")
    return [found.rule for found in lint(path, target)]


@pytest.mark.parametrize(("rule", "bad", "good"), WRONG, ids=[f"{at}-{rule}" for at, (rule, *_) in enumerate(WRONG)])
def test_a_wrong_value_is_said_once_and_a_right_one_never(
    tmp_path: Path, rule: str, bad: dict[str, Any], good: dict[str, Any]
) -> None:
    assert rules(tmp_path, bad) == [rule]
    assert rules(tmp_path, good) == []


def test_text_for_a_switch_before_pydantic_read_it(tmp_path: Path) -> None:
    values = {"bf16": {"enabled": "no"}}
    assert "ds-text-switch" in rules(tmp_path, values, Target(deepspeed_version="0.14.2"))
    assert "ds-quoted" in rules(tmp_path, values)
