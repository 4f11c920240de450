"""A plan as a file of Hugging Face `TrainingArguments`, for `HfArgumentParser.parse_json_file`.

The parser refuses a name that it does not know, and names changed between 4.40 and 5.22. Each change was read
in `training_args.py` of the releases on both sides of it; `_NAMES` has those that matter here. Some memory
hangs on values that look harmless: `prediction_loss_only` keeps an evaluation from collecting all logits on the
GPU, and `optim` without `fused` takes temporaries of the size of the weights.

What must agree with the DeepSpeed file (batch sizes, clipping, precision) comes from the same place; the Trainer
compares them and refuses to start otherwise.

What the Trainer cannot do of a plan (our scan, a fused loss for every model, layer inputs on the host) is said in
PLAN.md with what it then needs: the same levers, as the Trainer would run them, are priced again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tightfit.formats.accelerate.write import all_or_none, layer_class, loads_once
from tightfit.formats.deepspeed.write import ADAM_BETAS, ADAM_EPS, pure_16bit
from tightfit.formats.launch.environment import HIP
from tightfit.formats.target import Target
from tightfit.formats.worker.write import clip, epochs, learning_rate, logging_steps, require_way, save_steps
from tightfit.inputs.versions import release
from tightfit.memory import estimate
from tightfit.messages import Message, Said
from tightfit.planner.plan import Plan, Way
from tightfit.planner.trainers import LIGER_UNDER_THE_TRAINER
from tightfit.priced import amounts
from tightfit.types import DDP, Checkpointing, ConfigError, Hardware, Levers, Optimizer

OLDEST, NEWEST = "4.40.0", "5.22.2"  # the range whose sources were read

_NAMES: dict[str, tuple[str, str | None]] = {
    "evaluation_strategy": ("4.0.0", "4.41.0"),  # gone in 4.51 only, but the new name is there from 4.41 on
    "eval_strategy": ("4.41.0", None),
    "use_liger_kernel": ("4.45.0", None),
    "average_tokens_across_devices": ("4.47.0", None),
    "save_safetensors": ("4.0.0", "5.0.0"),
    "warmup_ratio": ("4.0.0", "5.0.0"),  # from 5.0 on `warmup_steps` below one is the share
    "group_by_length": ("4.0.0", "5.2.0"),
    "train_sampling_strategy": ("5.2.0", None),
}
"""The first release to write a name for, and the first that must not see it."""

FSDP2_SINCE = "5.0.0"  # before, the Trainer took FSDP2 from `accelerate launch` alone
FSDP_SWITCH_SINCE = "5.10.0"
"""From here on `fsdp` is true, and the rest stands in `fsdp_config`; before, it was a list of words."""

OPTIM: dict[Optimizer, str] = {
    "adamw": "adamw_torch_fused",
    "adamw8bit": "adamw_bnb_8bit",
    "paged_adamw8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}

Values = dict[str, Any]


DTK_TORCH, OLD_TORCH_LAST = "2.4", (5, 10)
"""The PyTorch that Hygon's toolkit documents, and the newest transformers that we have seen accept it."""


def training_args_json(plan: Plan, target: Target, deepspeed_file: str | None) -> str:
    """The file; `deepspeed_file` is the JSON's name, as the training's working folder sees it, or None for FSDP2."""
    way, job, version = require_way(plan), plan.job, target.transformers_version
    if release(version) < release(OLDEST):
        raise ConfigError(Message("huggingface.version-too-old", version=version, oldest=OLDEST))
    if release(version)[0] > release(NEWEST)[0]:
        raise ConfigError(Message("huggingface.version-unknown", version=version, newest=NEWEST))
    passes = epochs(job)
    share, steps = (job.warmup, 0) if job.warmup < 1 else (0.0, int(job.warmup))
    # There DeepSpeed's own takes the place of torch's, which must not be the fused one then.
    levers = way.levers
    on_host = levers.optimizer == "adamw" and levers.offload_optimizer != "none"
    every, saved_every = job.evaluation.every_steps if job.evaluation.split > 0 else None, save_steps(job)
    strategy = "no" if every is None else "steps"
    mixed = not (levers.is_fsdp2 and pure_16bit(levers))
    recompute = not levers.is_fsdp2 and all_or_none(way)
    values: Values = {
        "output_dir": job.saving.folder,
        "do_train": True,
        "do_eval": job.evaluation.split > 0,
        "per_device_train_batch_size": levers.micro_batch,
        "per_device_eval_batch_size": levers.micro_batch,
        "gradient_accumulation_steps": levers.accumulation,
        "learning_rate": learning_rate(job, levers),
        "lr_scheduler_type": job.schedule,
        "warmup_ratio": share,
        "warmup_steps": steps,
        "num_train_epochs": 1.0 if passes is None else passes,
        "max_steps": -1 if job.max_steps is None else job.max_steps,
        "optim": "adamw_torch" if on_host else OPTIM[levers.optimizer],
        "adam_beta1": ADAM_BETAS[0],
        "adam_beta2": ADAM_BETAS[1],
        "adam_epsilon": ADAM_EPS,
        "weight_decay": float(job.weight_decay),
        "max_grad_norm": clip(job, levers),
        "average_tokens_across_devices": True,
        "seed": job.seed,
        "evaluation_strategy": strategy,
        "eval_strategy": strategy,
        "prediction_loss_only": True,
        "save_strategy": "no" if saved_every is None else "steps",
        "save_total_limit": job.saving.keep_last,
        "save_only_model": False,
        "save_safetensors": True,
        "logging_strategy": "steps",
        "logging_steps": logging_steps(job),
        "report_to": "none",
        "group_by_length": False,
        "train_sampling_strategy": "random",
        "dataloader_num_workers": levers.dataloader_workers,
        "dataloader_pin_memory": True,
        "eval_steps": every,
        "save_steps": saved_every,
        "bf16": levers.precision == "bf16" and mixed,
        "fp16": levers.precision == "fp16" and mixed,
        "use_liger_kernel": fuses(way, version),
        "gradient_checkpointing": recompute,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if recompute else None,
    }
    for name in ("eval_steps", "save_steps", "gradient_checkpointing_kwargs"):
        if values[name] is None:
            del values[name]
    values |= _sharding(way, target, deepspeed_file)
    if way.hardware.gpu.vendor == "cpu":
        values["use_cpu"] = True
    if not _knows(version, "warmup_ratio"):
        values["warmup_steps"] = values["warmup_steps"] or values["warmup_ratio"]
    known = {name: value for name, value in values.items() if _knows(version, name)}
    return json.dumps(known, indent=2, ensure_ascii=False) + "\n"


def training_args_notes(plan: Plan, target: Target) -> tuple[Message, ...]:
    """What differs from the plan, or has to be known, a sentence each."""
    way, version, saving = require_way(plan), target.transformers_version, plan.job.saving
    levers, knows_liger = way.levers, _knows(version, "use_liger_kernel")
    fused, offloads, scans = levers.loss == "fused", levers.checkpointing.offload, way.shape.scans
    if offloads and levers.is_fsdp2:
        need = _required_bytes(way, replace(levers, checkpointing=Checkpointing(layers=None)))
        no_offload = Message("huggingface.input-offload-by-accelerate", need=amounts(need)[0])
    else:
        no_offload = Message("huggingface.no-input-offload")
    notes = (
        (release(version) > release(NEWEST), Message("huggingface.newer-than-known", version=version, newest=NEWEST)),
        (fused and not knows_liger, Message("huggingface.no-liger-switch", version=version)),
        (
            fused and knows_liger and not fuses(way, version),
            Message("huggingface.no-liger-for-model", model_type=way.shape.model_type),
        ),
        (fuses(way, version), Message("huggingface.liger-instead")),
        (fuses(way, version), liger_unproven(way.hardware)),
        (
            levers.checkpointing.layers and not levers.is_fsdp2,
            Message("huggingface.recomputes-all", layers=levers.checkpointing.layers),
        ),
        (levers.trains != "all", Message("huggingface.trains-alone", trains=levers.trains)),
        (offloads, no_offload),
        (scans and levers.scan == "tightfit", Message("huggingface.no-tightfit-scan")),
        (scans and levers.scan != "tightfit", Message("huggingface.other-scan", scan=levers.scan)),
        (True, _needs(way, version)),
        (
            levers.is_fsdp2 and release(version) < release(FSDP2_SINCE),
            Message("huggingface.fsdp2-by-accelerate", version=version),
        ),
        (way.skips_long, Message("huggingface.filter-long", sequence=levers.sequence)),
        (saving.every_minutes is not None, Message("huggingface.saves-by-steps", steps=save_steps(plan.job))),
        (saving.keep_every is not None, Message("huggingface.keeps-newest")),
        (plan.job.timeout is not None, Message("huggingface.no-time-limit", timeout=plan.job.timeout)),
    )
    return tuple(note for holds, note in notes if holds and note)


def _needs(way: Way, version: str) -> Message | None:
    """What a GPU holds under the Trainer, where that is more than the plan says."""
    levers, card, needs = way.levers, way.hardware.gpu.memory_bytes, {}
    offloads = levers.checkpointing.offload and levers.is_fsdp2
    for scan in ("official", "torch") if way.shape.scans else (levers.scan,):
        run = replace(
            levers,
            loss=levers.loss if fuses(way, version) else "plain",
            checkpointing=Checkpointing(layers=None if all_or_none(way) else 0, offload=offloads),
            scan=scan,
        )
        needs[scan] = _required_bytes(way, run)
    if max(needs.values()) <= way.footprint.gpu.required_bytes:
        return None
    planned, size = amounts(way.footprint.gpu.required_bytes, card)
    ids = {"official": "huggingface.gib-official", "torch": "huggingface.gib-plain"} if len(needs) > 1 else {}
    each = [
        say_need(Message(ids.get(scan, "huggingface.gib"), gib=amounts(need)[0]), fits=need <= card)
        for scan, need in needs.items()
    ]
    if len(each) == 1:
        return Message("huggingface.trainer-needs", need=each[0], planned=planned, size=size)
    return Message("huggingface.trainer-needs-two", first=each[0], second=each[1], planned=planned, size=size)


def say_need(need: Message, *, fits: bool) -> Message:
    """What a GPU needs, and that it has not so much."""
    return need if fits else Message("huggingface.too-much", need=need)


def _required_bytes(way: Way, levers: Levers) -> int:
    return estimate(way.shape, levers, way.world, way.hardware).gpu.required_bytes


# --- the parts ----------------------------------------------------------------------------------


def fuses(way: Way, version: str) -> bool:
    """Whether the Trainer's loss is fused too: by Liger, for the models whose loss Liger fuses."""
    known = way.shape.model_type in LIGER_UNDER_THE_TRAINER and _knows(version, "use_liger_kernel")
    return way.levers.loss == "fused" and known


def _sharding(way: Way, target: Target, deepspeed_file: str | None) -> Values:
    if way.levers.engine == DDP:  # as the Trainer runs it by itself
        return {}
    if way.levers.streams:
        raise ConfigError(Message("planfile.stream-is-ours", program="the Trainer"))
    if not way.levers.is_fsdp2:
        if deepspeed_file is None:
            raise ConfigError(Message("huggingface.engine-needs-file", engine=way.levers.engine))
        return {"deepspeed": deepspeed_file}
    if deepspeed_file is not None:
        raise ConfigError(Message("huggingface.fsdp2-has-no-file"))
    asked, offloaded = release(target.transformers_version), way.levers.offload_param == "cpu"
    if asked < release(FSDP2_SINCE):
        return {}
    config: Values = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": loads_once(way),
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": all_or_none(way),
    }
    if layer := layer_class(way):
        config["transformer_layer_cls_to_wrap"] = [layer]
    if asked >= release(FSDP_SWITCH_SINCE):
        return {"fsdp": True, "fsdp_config": config | {"cpu_offload": offloaded}}
    del config["auto_wrap_policy"]
    return {"fsdp": "full_shard auto_wrap" + (" offload" if offloaded else ""), "fsdp_config": config}


# --- versions -----------------------------------------------------------------------------------


def _knows(version: str, name: str) -> bool:
    since, gone = _NAMES.get(name, (OLDEST, None))
    return release(since) <= release(version) and (gone is None or release(version) < release(gone))


def transformers_wanted(plan: Plan, target: Target) -> Said:
    """The release that the file is for, and what Hygon's toolkit says to it."""
    asked = target.transformers_version
    if require_way(plan).hardware.gpu.vendor != "hygon" or release(asked)[:2] <= OLD_TORCH_LAST:
        return f"transformers {asked}"
    return Message("huggingface.wants-newer-torch", asked=asked, torch=DTK_TORCH)


def liger_unproven(hardware: Hardware) -> Message | None:
    """A sentence where Liger's kernels meet cards on which nobody here ran them; None: they did."""
    if hardware.gpu.vendor not in HIP:
        return None
    return Message("huggingface.liger-unproven", name=hardware.gpu.name)
