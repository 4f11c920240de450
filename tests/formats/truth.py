"""What the real tools do with the files that lint talks about. Run as a script; prints one JSON object."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", ACCELERATE_USE_CPU="true")
warnings.simplefilter("ignore")

BATCH = {"train_micro_batch_size_per_gpu": 1}
BF16 = {"bf16": {"enabled": True}}
CPU = {"device": "cpu"}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "typo": {**BATCH, "zero_optimisation": {"stage": 3}},
    "typo in a silent block": {**BATCH, "activation_checkpointing": {"partitioned_activations": True}},
    "typo in a loud block": {**BATCH, "zero_optimization": {"stag": 3}},
    "offload_param at stage 2": {**BATCH, "zero_optimization": {"stage": 2, "offload_param": CPU}},
    "super_offload at stage 2": {
        **BATCH,
        "zero_optimization": {"stage": 2, "offload_optimizer": {**CPU, "super_offload": True}},
    },
    "nvme without a path": {**BATCH, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
    "nvme at stage 2": {
        **BATCH,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}},
    },
    "ratio at stage 2": {**BATCH, "zero_optimization": {"stage": 2, "offload_optimizer": {**CPU, "ratio": 0.5}}},
    "round robin at stage 3": {**BATCH, "zero_optimization": {"stage": 3, "round_robin_gradients": True}},
    "stage3 keys at stage 2": {**BATCH, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}},
    "both precisions": {**BATCH, **BF16, "fp16": {"enabled": True}},
    "old and new offload": {**BATCH, "zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": CPU}},
    "bucket as 5e8 text": {**BATCH, "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}},
    "stage as text": {**BATCH, "zero_optimization": {"stage": "3"}},
    "micro batch as text": {"train_micro_batch_size_per_gpu": "1"},
    "micro batch auto": {"train_micro_batch_size_per_gpu": "auto"},
    "stage auto": {**BATCH, "zero_optimization": {"stage": "auto"}},
    "zero true": {**BATCH, "zero_optimization": True},
    "zero null": {**BATCH, "zero_optimization": None},
    "no batch": {"zero_optimization": {"stage": 2}},
    "batch": {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    "elasticity": {**BATCH, "elasticity": {"enabled": False}},
    "mics": {**BATCH, "zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    "both spellings": {
        **BATCH,
        "zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 1},
    },
    "clipping left out": BATCH,
    "micro batch 0": {"train_micro_batch_size_per_gpu": 0},
    "accumulation 0": {**BATCH, "gradient_accumulation_steps": 0},
    "micro batch 1.5": {"train_micro_batch_size_per_gpu": 1.5},
    "switch as yes": {**BATCH, "zero_optimization": {"stage": 3, "overlap_comm": "yes"}},
    "gradients in fp8": {**BATCH, "communication_data_type": "fp8"},
    "optimizer 1": {**BATCH, "optimizer": {"type": 1}},
}

VALUES: list[Any] = [-1, 0, 1, 2, 0.5, 1.5, 2.0, 1e9, True, False, None, "yes", "maybe", "12", "abc", "cpu", "gpu", [1]]
"""What each key of the blocks that pydantic reads is tried with."""

SCHEDULERS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "without params": ("WarmupLR", None),
    "without total_num_steps": ("WarmupDecayLR", {}),
    "with a parameter of another": ("WarmupCosineLR", {"total_num_steps": 10, "warmup_max_lr": 1}),
    "without warmup": ("WarmupLR", {"warmup_num_steps": 0}),
    "right": ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 2}),
}

ACCELERATE = {
    "typo in deepspeed_config": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stag: 3}",
    "typo in fsdp_config": "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_offload_param: true}",
    "unknown at the top": "distributed_type: FSDP\nnum_process: 2",
    "bare no": "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: no",
    "gpu_ids a number": "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0",
    "a block unused": "distributed_type: MULTI_GPU\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3}",
    "nvme path": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3, "
    "offload_optimizer_device: nvme, offload_optimizer_nvme_path: /nvme}",
    "no processes": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}",
    "sync off": "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2, "
    "fsdp_sync_module_states: false}",
    "a type that is none": "distributed_type: DEEPSPED\nnum_processes: 2",
    "a precision that is none": "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bfloat16",
}

ARGUMENTS: dict[str, dict[str, Any]] = {
    "learning rate as text": {"learning_rate": "1e-4", "use_cpu": True},
    "evaluation_strategy": {"evaluation_strategy": "no"},
    "warmup_ratio": {"warmup_ratio": 0.1},
    "both precisions": {"fp16": True, "bf16": True, "use_cpu": True},
    "best model": {"load_best_model_at_end": True, "use_cpu": True},
}


JSON = ('{"output_dir": "x"}', '{"output_dir": "x"} // why', '{"output_dir": "x",}')
CLIPPING: dict[str, dict[str, Any]] = {
    "left out": {},
    "auto": {"gradient_clipping": "auto"},
    "another": {"gradient_clipping": 1.0},
}


def tried(what: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"accepted": True, "value": what()}
    except Exception as error:
        return {"accepted": False, "value": f"{type(error).__name__}: {error}"[:300]}


def laid_out(place: str, value: Any) -> dict[str, Any]:
    """A small file at stage 3 with a value at a dotted place."""
    values: dict[str, Any] = {**BATCH, "zero_optimization": {"stage": 3}}
    *blocks, key = place.split(".")
    inner = values
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[key] = value
    return values


def deepspeed() -> dict[str, Any]:
    import inspect
    from types import SimpleNamespace

    import torch
    from deepspeed.runtime import config, lr_schedules, precision_config
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import config as zero

    from tightfit.formats.deepspeed.check import TAKES
    from tightfit.formats.deepspeed.keys import LOUD

    def read(values: dict[str, Any]) -> dict[str, Any]:
        made = config.DeepSpeedConfig(json.loads(json.dumps(values)))
        return {"stage": int(made.zero_config.stage), "clipping": made.gradient_clipping}

    def schedule(kind: str, params: dict[str, Any] | None) -> None:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        engine = SimpleNamespace(scheduler_name=lambda: kind, scheduler_params=lambda: params)
        DeepSpeedEngine._scheduler_from_config(engine, optimizer)

    def parameters(kind: str) -> dict[str, bool]:
        known = list(inspect.signature(getattr(lr_schedules, kind).__init__).parameters.values())[2:]
        return {each.name: each.default is each.empty for each in known}

    blocks = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": zero.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": zero.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.zenflow": zero.ZenFlowConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
        "compile": config.CompileConfig,
        "hybrid_engine": config.HybridEngineConfig,
    }
    strict = [place for place in TAKES if place.rpartition(".")[0] in LOUD]
    return {
        "files": {name: tried(lambda values=values: read(values)) for name, values in DEEPSPEED.items()},
        "values": {
            place: [tried(lambda p=place, v=value: read(laid_out(p, v)))["accepted"] for value in VALUES]
            for place in strict
        },
        "fields": {
            f"{block}.{field.alias or name}": str(field.annotation)
            for block, fields in blocks.items()
            for name, field in fields.model_fields.items()
        },
        "scheduler files": {name: tried(lambda args=args: schedule(*args)) for name, args in SCHEDULERS.items()},
        "scheduler params": {kind: parameters(kind) for kind in lr_schedules.VALID_LR_SCHEDULES},
        "optimizers": list(config.DEEPSPEED_OPTIMIZERS),
        "torch optimizers": [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)],
        "schedulers": list(lr_schedules.VALID_LR_SCHEDULES),
        "torch schedulers": [name for name in dir(torch.optim.lr_scheduler) if name[0].isupper()],
    }


def accelerate() -> dict[str, Any]:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DistributedType
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    def launch(text: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.yaml")
            path.write_text(text, encoding="utf-8")
            args, _, _ = _validate_launch_command(
                launch_command_parser().parse_args(["--config_file", str(path), "x.py"])
            )
        args.deepspeed_fields_from_accelerate_config = ""
        args.main_process_port = 0
        made = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
        return {key: value for key, value in made.items() if key.startswith(("ACCELERATE_", "FSDP_"))}

    return {
        "files": {name: tried(lambda text=text: launch(text)) for name, text in ACCELERATE.items()},
        "keys": [field.name for field in dataclasses.fields(ClusterConfig)],
        "types": [kind.value for kind in DistributedType],
        "flags": [action.dest for action in launch_command_parser()._actions],
    }


def transformers() -> dict[str, Any]:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):  # or transformers looks for the other ranks
        os.environ.pop(name, None)
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    def read(values: dict[str, Any]) -> Any:
        (made,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_dict({"output_dir": "x", **values})
        return getattr(made, next(iter(values)))

    def from_json(text: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.json")
            path.write_text(text, encoding="utf-8")
            (made,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_json_file(str(path))
        return str(made.output_dir)

    def clipping(values: dict[str, Any]) -> Any:
        """What is left for DeepSpeed after transformers has filled in a trainer's max_grad_norm of 0.5."""
        from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

        config = HfTrainerDeepSpeedConfig({**BATCH, "zero_optimization": {"stage": 2}, **values})
        args = Seq2SeqTrainingArguments(output_dir="x", use_cpu=True, max_grad_norm=0.5, per_device_train_batch_size=1)
        config.trainer_config_process(args)
        return [config.config.get("gradient_clipping"), config.mismatches]

    return {
        "json": {text: tried(lambda text=text: from_json(text)) for text in JSON},
        "clipping": {name: tried(lambda values=values: clipping(values)) for name, values in CLIPPING.items()},
        "files": {name: tried(lambda values=values: read(values)) for name, values in ARGUMENTS.items()},
        "kinds": {field.name: str(field.type) for field in dataclasses.fields(Seq2SeqTrainingArguments)},
    }


if __name__ == "__main__":
    truth = {"deepspeed": deepspeed(), "accelerate": accelerate(), "transformers": transformers()}
    Path(sys.argv[1]).write_text(json.dumps(truth, default=str), encoding="utf-8")
