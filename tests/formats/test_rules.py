"""Every rule, with a file that breaks it and the smallest correction that clears it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.formats.dialect import kinds
from tightfit.formats.lint import lint
from tightfit.formats.rules import Finding
from tightfit.formats.target import Target

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "zero_optimization": {"stage": 2},
}
ZERO3: dict[str, Any] = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
PAIRED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
ACCELERATE: dict[str, Any] = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 4,
    "deepspeed_config": {"zero_stage": 2},
}
MULTI_GPU: dict[str, Any] = {"distributed_type": "MULTI_GPU", "deepspeed_config": None}
FSDP: dict[str, Any] = {
    "distributed_type": "FSDP",
    "deepspeed_config": None,
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
LLAMAFACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_alpha": 16,
    "dataset": "identity",
    "template": "qwen3",
    "cutoff_len": 2048,
    "output_dir": "out",
    "per_device_train_batch_size": 1,
    "learning_rate": 1.0e-4,
    "bf16": True,
}
ARGUMENTS: dict[str, Any] = {"output_dir": "out", "per_device_train_batch_size": 1, "learning_rate": 1e-4, "bf16": True}
JOB: dict[str, Any] = {"model": "7b_mamba", "method": "full", "hardware": {"gpus": "6x32GB"}}

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepspeed": ("ds.json", DEEPSPEED),
    "accelerate": ("accelerate.yaml", ACCELERATE),
    "llamafactory": ("train.yaml", LLAMAFACTORY),
    "huggingface": ("arguments.json", ARGUMENTS),
    "job": ("job.yaml", JOB),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is laid over the kind's well-formed file: a block of keys, or lines of text after it."""

    rule: str
    kind: str
    bad: dict[str, Any] | str
    good: dict[str, Any] | str = field(default_factory=dict)
    place: str | None = None
    """Where the finding must be."""
    world: int | None = None
    target: Target = field(default_factory=Target)
    beside: dict[str, Any] | str | None = None
    """The DeepSpeed file `beside.json`, laid over a well-formed one with `auto`."""
    good_beside: dict[str, Any] | str | None = None
    """The same for the corrected pair; None: as it is."""


def old(version: str) -> Target:
    return Target(deepspeed_version=version)


def factory(version: str) -> Target:
    return Target(llamafactory_version=version)


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **keys}}


def zero3(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {**ZERO3, **keys}}


def ds(rule: str, bad: dict[str, Any] | str, good: dict[str, Any] | str | None = None, **more: Any) -> Case:
    return Case(rule=rule, kind="deepspeed", bad=bad, good=good or {}, **more)


def acc(rule: str, bad: dict[str, Any] | str, good: dict[str, Any] | str | None = None, **more: Any) -> Case:
    return Case(rule=rule, kind="accelerate", bad=bad, good=good or {}, **more)


def lf(rule: str, bad: dict[str, Any] | str, good: dict[str, Any] | str | None = None, **more: Any) -> Case:
    return Case(rule=rule, kind="llamafactory", bad=bad, good=good or {}, **more)


def hf(rule: str, bad: dict[str, Any] | str, good: dict[str, Any] | str | None = None, **more: Any) -> Case:
    return Case(rule=rule, kind="huggingface", bad=bad, good=good or {}, **more)


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "pin_memory": True}
PAIR: dict[str, Any] = {"deepspeed": "beside.json"}

DEEPSPEED_CASES = [
    ds("key-twice", '"gradient_clipping": 1.0', "", place="gradient_clipping"),
    ds("not-finite", {"gradient_clipping": float("inf")}, place="gradient_clipping"),
    ds("ds-typo", {"zero_optimisation": {"stage": 3}}, place="zero_optimisation"),
    ds(
        "ds-typo",
        {"flops_profiler": {"enable": True}},
        {"flops_profiler": {"enabled": True}},
        place="flops_profiler.enable",
    ),
    ds("ds-misplaced", {"overlap_comm": True}, zero(overlap_comm=True), place="overlap_comm"),
    ds("ds-misplaced", {"stage3_max_live_parameters": 1e8}, zero3(stage3_max_live_parameters=1e8)),
    ds("ds-refused-key", zero(contiguous_gradient=True), zero(contiguous_gradients=True)),
    ds("ds-refused-key", {"optimizer": {"type": "AdamW", "params": {"learningrate": 1}}}),
    ds("ds-unknown", {"my_own_thing": 1}, {"_comment": "mine"}),
    ds("ds-removed", {"elasticity": {"enabled": False}}, place="elasticity"),
    ds("ds-removed", zero3(mics_shard_size=2), zero3()),
    ds("ds-too-new", zero(zenflow={"topk_ratio": 0.1}), {"bf16": {"enabled": True}}, target=old("0.14.2")),
    ds("ds-removed", {"nebula": {"enabled": False}}, target=old("0.19.7")),
    ds("ds-unknown", {"aio": {"thread_count": 1}}, {"aio": {"intra_op_parallelism": 1}}),
    ds(
        "ds-not-yet",
        {"aio": {"intra_op_parallelism": 1}},
        {"aio": {"thread_count": 1}, "bf16": {"enabled": True}},
        place="aio.intra_op_parallelism",
        target=old("0.14.2"),
    ),
    ds(
        "ds-not-yet",
        {"torch_autocast": {"enabled": True}},
        {"bf16": {"enabled": True}},
        place="torch_autocast",
        target=old("0.14.2"),
    ),
    ds("ds-too-new", zero3(offload_optimizer={**CPU, "super_offload": True}), zero3(), target=old("0.17.6")),
    ds("ds-moved-default", {"gradient_clipping": None, "bf16": {"enabled": True}}, place="bf16.check_grad_overflow"),
    ds("ds-moved-default", zero(offload_optimizer={"device": "cpu"}), zero(offload_optimizer=CPU)),
    ds("ds-deprecated", zero(cpu_offload=True), zero(offload_optimizer=CPU)),
    ds("ds-same-key", zero(cpu_offload=True, offload_optimizer=CPU), zero(offload_optimizer=CPU)),
    ds("ds-same-key", zero3(max_live_parameters=1, stage3_max_live_parameters=1), zero3(max_live_parameters=1)),
    ds("ds-not-a-block", {"zero_optimization": True}, zero()),
    ds("ds-not-a-block", {"fp16": True}, {"fp16": {"enabled": False}}),
    ds("ds-number-text", zero(reduce_bucket_size="5e8"), zero(reduce_bucket_size=5e8)),
    ds("ds-number-text", {"train_micro_batch_size_per_gpu": "1"}),
    ds("ds-number-text", {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}),
    ds("ds-quoted", {"zero_optimization": {**ZERO3, "stage": "3"}}, zero3()),
    ds("ds-text-switch", {"prescale_gradients": "false"}, {"prescale_gradients": False}),
    ds("ds-stage", {"zero_optimization": {"stage": "auto"}}),
    ds("ds-stage", {"zero_optimization": {"stage": 4}}),
    ds("ds-value", {"train_micro_batch_size_per_gpu": 0}, place="train_micro_batch_size_per_gpu"),
    ds("ds-auto", {"train_micro_batch_size_per_gpu": "auto"}),
    ds("ds-auto-unfilled", {"steps_per_print": "auto"}, {"steps_per_print": 10}),
    ds("ds-hjson", '"steps_per_print": 10 # often', '"steps_per_print": 10'),
    ds("ds-offload-param-stage", zero(offload_param=CPU), zero3(offload_param=CPU)),
    ds("ds-offload-stage0", {"zero_optimization": {"stage": 0, "offload_optimizer": CPU}}, zero(offload_optimizer=CPU)),
    ds("ds-nvme-stage", zero(offload_optimizer={**NVME, "nvme_path": "/n"}), zero(offload_optimizer=CPU)),
    ds("ds-nvme-path", zero3(offload_param=NVME), zero3(offload_param={**NVME, "nvme_path": "/n"})),
    ds("ds-super-offload-stage", zero(offload_optimizer={**CPU, "super_offload": True}), zero(offload_optimizer=CPU)),
    ds(
        "ds-ratio-stage",
        zero(offload_optimizer={**CPU, "ratio": 0.5}),
        zero3(offload_optimizer={**CPU, "ratio": 0.5}),
    ),
    ds("ds-stage3-keys", zero(stage3_max_live_parameters=1e8), zero3(stage3_max_live_parameters=1e8)),
    ds("ds-round-robin", zero3(round_robin_gradients=True), zero(round_robin_gradients=True)),
    ds("ds-buckets", zero(overlap_comm=True, reduce_bucket_size=2e9), zero(overlap_comm=True, reduce_bucket_size=5e8)),
    ds("ds-gather", {"zero_optimization": {"stage": 3}}, zero3()),
    ds("ds-two-precisions", {"fp16": {"enabled": True}}, {"fp16": {"enabled": False}}),
    ds("ds-no-precision", {"bf16": None}, {"bf16": {"enabled": False}}),
    ds(
        "ds-static-scale",
        {"bf16": None, "fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 8}},
        {"bf16": None, "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}},
    ),
    ds(
        "ds-first-scale",
        {"bf16": None, "fp16": {"enabled": True}},
        {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 12}},
    ),
    ds("ds-master-weights", {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
    ds(
        "ds-master-weights",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **zero(offload_optimizer=CPU)},
    ),
    ds("ds-optimizer", {"optimizer": {"type": "AdamX"}}, {"optimizer": {"type": "AdamW"}}),
    ds("ds-optimizer", {"optimizer": {"type": "OneBitAdam"}}, {"optimizer": {"type": "Lion"}}),
    ds(
        "ds-untested-optimizer",
        {"optimizer": {"type": "SGD"}},
        {"optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True},
    ),
    ds(
        "ds-slow-offload",
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, **zero(offload_optimizer=CPU)},
        {"optimizer": {"type": "AdamW"}, **zero(offload_optimizer=CPU)},
    ),
    ds("ds-adam-is-adamw", {"optimizer": {"type": "Adam"}}, {"optimizer": {"type": "AdamW"}}),
    ds("ds-scheduler", {"scheduler": {"type": "Cosine"}}, scheduler("WarmupCosineLR", total_num_steps=100)),
    ds(
        "ds-scheduler-params",
        scheduler("WarmupDecayLR", warmup_num_steps=10),
        scheduler("WarmupDecayLR", warmup_num_steps=10, total_num_steps=100),
        place="scheduler.params",
    ),
    ds("ds-no-batch", {"train_micro_batch_size_per_gpu": None}),
    ds("ds-batch", {"train_batch_size": 100}, {"train_batch_size": 96}, place="train_batch_size"),
    ds("ds-batch", {"train_batch_size": 96}, {"train_batch_size": 64}, world=8),
    ds("ds-activation-checkpointing", {"activation_checkpointing": {"partition_activations": True}}),
]

ACCELERATE_CASES = [
    acc("key-twice", "num_processes: 8", ""),
    acc("not-finite", {"num_processes": float("nan")}, place="num_processes"),
    acc("acc-unknown", {"num_process": 4}),
    acc("acc-typo", {"deepspeed_config": {"zero_stag": 3}}, place="deepspeed_config.zero_stag"),
    acc(
        "acc-typo",
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_offload_param": True}},
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "offload_params": True}},
    ),
    acc("acc-distributed-type", {"distributed_type": "DEEPSPED"}),
    acc("acc-distributed-type", {"distributed_type": None}),
    acc("acc-block-unused", {"distributed_type": "MULTI_GPU"}, MULTI_GPU),
    acc("acc-bare-no", "mixed_precision: no", "mixed_precision: 'no'", place="mixed_precision"),
    acc("acc-bare-no", {**MULTI_GPU, "distributed_type": False}, {**MULTI_GPU, "distributed_type": "NO"}),
    acc("acc-mixed-precision", {"mixed_precision": "bfloat16"}, {"mixed_precision": "bf16"}),
    acc("acc-gpu-ids", "gpu_ids: 0", "gpu_ids: 0,1,2,3"),
    acc("acc-gpu-ids", {"gpu_ids": "0,1"}, {"gpu_ids": "all"}),
    acc("acc-idle-gpus", {"gpu_ids": "0,1,2,3,4,5"}, {"gpu_ids": "0,1,4,5"}),
    acc(
        "acc-processes",
        {**MULTI_GPU, "num_machines": 3, "main_process_ip": "10.0.0.1"},
        {**MULTI_GPU, "num_machines": 2, "main_process_ip": "10.0.0.1"},
    ),
    acc("acc-processes", {}, {"num_processes": 8}, world=8),
    acc("acc-no-processes", {"num_processes": None}),
    acc(
        "acc-machines",
        {**MULTI_GPU, "num_machines": 2},
        {**MULTI_GPU, "num_machines": 2, "main_process_ip": "10.0.0.1"},
    ),
    acc(
        "acc-machines",
        {**MULTI_GPU, "num_machines": 2, "machine_rank": 2, "main_process_ip": "10.0.0.1"},
        {**MULTI_GPU, "num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"},
    ),
    acc(
        "acc-hostfile",
        {"num_machines": 2},
        {"num_machines": 2, "deepspeed_config": {"zero_stage": 2, "deepspeed_hostfile": "hosts"}},
    ),
    acc(
        "acc-config-file",
        {"deepspeed_config": {"deepspeed_config_file": "beside.json", "zero_stage": 2}},
        {"deepspeed_config": {"deepspeed_config_file": "beside.json"}},
        beside={},
    ),
    acc(
        "acc-config-file",
        {"mixed_precision": "bf16", "deepspeed_config": {"deepspeed_config_file": "beside.json"}},
        {"deepspeed_config": {"deepspeed_config_file": "beside.json"}},
        place="mixed_precision",
        beside={},
    ),
    acc(
        "acc-nvme-path",
        {
            "deepspeed_config": {
                "zero_stage": 3,
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/nvme",
            }
        },
        {"deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "zero3_save_16bit_model": True}},
    ),
    acc(
        "acc-offload-stage",
        {"deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}},
        {"deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu", "zero3_save_16bit_model": True}},
    ),
    acc(
        "acc-save-16bit",
        {"deepspeed_config": {"zero_stage": 3}},
        {"deepspeed_config": {"zero_stage": 3, "zero3_save_16bit_model": True}},
    ),
    acc(
        "acc-zero-init",
        {"deepspeed_config": {"zero_stage": 3, "zero3_init_flag": False}},
        {"deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True}},
    ),
    acc(
        "acc-fsdp1-key",
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_version": 1, "fsdp_reshard_after_forward": True}},
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_reshard_after_forward": True}},
    ),
    acc(
        "acc-fsdp2-key",
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_reshard_after_forward": False}},
    ),
    acc(
        "acc-fsdp-value",
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_reshard_after_forward": "FULL_SHARD"}},
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_reshard_after_forward": True}},
    ),
    acc(
        "acc-fsdp-sync",
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_sync_module_states": False}},
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_sync_module_states": True}},
    ),
    acc("acc-fsdp-unwrapped", {**FSDP, "fsdp_config": {"fsdp_version": 2}}, FSDP),
    acc(
        "pair-no-zero",
        {"deepspeed_config": {"deepspeed_config_file": "beside.json"}},
        {"deepspeed_config": {"deepspeed_config_file": "beside.json"}},
        beside={"zero_optimization": None},
        good_beside={},
    ),
]

LLAMAFACTORY_CASES = [
    lf("key-twice", "cutoff_len: 1024", ""),
    lf("not-finite", {"learning_rate": float("inf")}, place="learning_rate"),
    lf("lf-unknown", {"cutoff_length": 1024}),
    lf("lf-unknown", {"lora_r": 16, "lora_rank": None}, place="lora_r"),
    lf("lf-unknown", {"deepspeed_stage": 3}, place="deepspeed_stage"),
    lf("lf-foreign", {"flux_capacitor": 1}),
    lf("lf-version", {"enable_thinking": False}, target=factory("0.9.2"), good={"template": "qwen"}),
    lf("lf-version", {"ray_run_name": "x"}),
    lf("lf-template", {"template": "qwen4"}),
    lf("lf-template", {"template": "deepseekr1"}, {"template": "deepseek3"}, target=factory("0.9.2")),
    lf(
        "lf-reasoning-template",
        {"model_name_or_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "template": "deepseek3"},
        {"model_name_or_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "template": "deepseekr1"},
    ),
    lf("lf-no-template", {"template": None}),
    lf("lf-not-training", {"do_train": None}),
    lf("lf-no-dataset", {"dataset": None}),
    lf("lf-evaluation", {"eval_strategy": "steps"}, {"eval_strategy": "steps", "val_size": 0.1}),
    lf("lf-evaluation", {"eval_dataset": "x", "val_size": 0.1}, {"eval_dataset": "x"}),
    lf("lf-streaming", {"streaming": True}, {"streaming": True, "max_steps": 100}),
    lf("lf-quantization", {"finetuning_type": "full", "quantization_bit": 4}, {"quantization_bit": 4}),
    lf("lf-quantization", {"quantization_bit": 6}, {"quantization_bit": 6, "quantization_method": "hqq"}),
    lf(
        "lf-method-keys",
        {"finetuning_type": "full"},
        {"finetuning_type": "full", "lora_rank": None, "lora_alpha": None},
    ),
    lf("lf-method", {"finetuning_type": "qlora"}, {"quantization_bit": 4}),
    lf("lf-method", {"use_galore": True}),
    lf("lf-attention", "flash_attn: off", "flash_attn: disabled"),
    lf("lf-checkpointing", {"gradient_checkpointing": False}, {"disable_gradient_checkpointing": True}),
    lf("lf-lora-alpha", {"lora_alpha": None}),
    lf("lf-packing", {"packing": True}, {"neat_packing": True}),
    lf("lf-force-torchrun", PAIR, PAIR | {"deepspeed": None}, world=1, beside={}),
    lf("hf-gone", {"evaluation_strategy": "no"}, {"eval_strategy": "no"}),
    lf("hf-number-text", {"learning_rate": "1.0e-4"}, place="learning_rate"),
    lf("hf-number-text", 'weight_decay: "1e-4"', "weight_decay: 1e-4"),
    lf("hf-number-text", "weight_decay: 1e-4", "weight_decay: 1.0e-4", target=factory("0.9.3")),
    lf("hf-not-whole", {"max_samples": 1000.0}, {"max_samples": 1000}),
    lf("hf-text-switch", {"packing": "false"}),
    lf("hf-two-precisions", {"fp16": True}),
    lf("pair-missing", {"deepspeed": "elsewhere.json"}, PAIR, beside={}, place="deepspeed"),
    lf(
        "pair-clipping",
        PAIR | {"max_grad_norm": 0.5},
        beside={"gradient_clipping": None},
        good=PAIR | {"max_grad_norm": 0.0},
    ),
    lf("pair-hjson", PAIR, PAIR, beside='"steps_per_print": 10 # often', good_beside={}),
    lf("pair-mismatch", PAIR, PAIR, beside={"train_micro_batch_size_per_gpu": 4}, good_beside={}),
    lf("pair-mismatch", PAIR, PAIR, beside={"train_batch_size": 4}, good_beside={"train_batch_size": 8}, world=8),
    lf("pair-mismatch", PAIR, PAIR, beside={"bf16": {"enabled": False}}, good_beside={"bf16": {"enabled": True}}),
    lf("pair-optimizer", PAIR | {"optim": "adafactor"}, PAIR, beside=zero(offload_optimizer=CPU)),
    lf("pair-optim-ignored", PAIR | {"lr_scheduler_type": "cosine"}, PAIR, beside=scheduler("WarmupLR")),
    lf("pair-optim-ignored", PAIR | {"optim": "adafactor"}, PAIR, beside={"optimizer": {"type": "AdamW"}}),
    lf("pair-quantization", PAIR | {"quantization_bit": 8}, PAIR | {"quantization_bit": 4}, beside=zero3()),
    lf("pair-quantization", PAIR | {"quantization_bit": 8}, beside=zero3(), good_beside=zero()),
    lf("pair-zero3", PAIR | {"bf16": False, "pure_bf16": True}, PAIR, beside=zero3()),
    lf("pair-deepspeed", PAIR | {"finetuning_type": "full", "use_galore": True}, PAIR, beside={}),
]

ARGUMENT_CASES = [
    hf("hf-unknown", {"per_device_train_batchsize": 2, "per_device_train_batch_size": None}),
    hf("hf-foreign", {"max_seq_length": 1024}),
    hf("hf-foreign", {"cpu_offload": True}, place="cpu_offload"),
    hf("json-comments", '"seed": 1 // comment', '"seed": 1'),
    hf("hf-gone", {"no_cuda": True}, {"use_cpu": True}),
    hf("hf-number-text", {"learning_rate": "1e-4"}),
    hf("hf-not-whole", {"max_steps": 1e3}, {"max_steps": 1000}),
    hf("hf-text-switch", {"gradient_checkpointing": "false"}),
    hf("hf-best-model", {"load_best_model_at_end": True}, {"load_best_model_at_end": True, "eval_strategy": "steps"}),
    hf(
        "hf-best-model",
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 200, "save_steps": 500},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 250, "save_steps": 500},
    ),
    hf("pair-mismatch", PAIR | {"max_grad_norm": 0.5}, PAIR, beside={"gradient_clipping": 1.0}),
    hf("ds-offload-param-stage", {"deepspeed": PAIRED | zero(offload_param=CPU)}, {"deepspeed": PAIRED}),
]

JOB_CASES = [
    Case(rule="key-twice", kind="job", bad="method: lora", good=""),
    Case(rule="job-refused", kind="job", bad={"sequenc": 4096}, good={"sequence": 4096}, place="sequenc"),
    Case(rule="job-said", kind="job", bad="learning_rate: 1e-4", good="learning_rate: 1.0e-4"),
]

CASES = DEEPSPEED_CASES + ACCELERATE_CASES + LLAMAFACTORY_CASES + ARGUMENT_CASES + JOB_CASES


def laid_over(base: dict[str, Any], over: dict[str, Any] | str) -> dict[str, Any]:
    """None takes a key away."""
    merged = base | over if isinstance(over, dict) else dict(base)
    return {key: value for key, value in merged.items() if value is not None}


def write(path: Path, base: dict[str, Any], over: dict[str, Any] | str) -> Path:
    values = laid_over(base, over)
    lines = over if isinstance(over, str) else ""
    if path.suffix == ".json":
        text = json.dumps(values, indent=2)
        path.write_text(text.removesuffix("\n}") + f",\n{lines}\n}}" if lines else text, encoding="utf-8")
    else:
        path.write_text(yaml.safe_dump(values, sort_keys=False) + lines + "\n", encoding="utf-8")
    return path


def found(folder: Path, case: Case, over: dict[str, Any] | str, beside: dict[str, Any] | str | None) -> list[Finding]:
    name, base = BASES[case.kind]
    path = write(folder / name, base, over)
    if beside is not None:
        write(folder / "beside.json", PAIRED, beside)
    return list(lint(path, case.target, kind=case.kind, world=case.world))


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case.rule}" for number, case in enumerate(CASES)])
def test_a_rule_finds_what_it_is_for_and_nothing_once_that_is_corrected(tmp_path: Path, case: Case) -> None:
    findings = [finding for finding in found(tmp_path, case, case.bad, case.beside) if finding.rule == case.rule]
    assert findings, "not found"
    if case.place is not None:
        assert case.place in [finding.place for finding in findings]
    for finding in findings:
        assert str(finding.what)
        assert str(finding.fix)
        assert not str(finding.fix).endswith("."), finding.fix
    cleared = found(tmp_path, case, case.good, case.beside if case.good_beside is None else case.good_beside)
    assert [finding for finding in cleared if finding.severity != "note"] == []
    assert case.rule not in [finding.rule for finding in cleared]


def test_every_rule_is_tried() -> None:
    elsewhere = {"lf-json-file", "job-generated"}  # test_lint.py, test_rendered.py
    assert {case.rule for case in CASES} | elsewhere == {rule for dialect in kinds().values() for rule in dialect.rules}


def test_a_rule_is_looked_for_in_the_kinds_it_names() -> None:
    for case in CASES:
        named = [name for name, dialect in kinds().items() if case.rule in dialect.rules]
        assert case.kind in named or (case.rule.startswith("ds-") and named == ["deepspeed"]), case.rule


@pytest.mark.parametrize("kind", list(BASES))
def test_the_well_formed_files_are_clean(tmp_path: Path, kind: str) -> None:
    name, base = BASES[kind]
    assert lint(write(tmp_path / name, base, {})) == ()
