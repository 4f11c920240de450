"""A plan as an accelerate YAML: how many processes on which GPUs, and who shards.

Two shapes. For DeepSpeed's engines the file points at the DeepSpeed JSON, and then says nothing that stands
there as well: accelerate refuses a stage, an offload, an accumulation, a clipping or a `mixed_precision` beside
`deepspeed_config_file`. For FSDP2 everything stands here.

On several machines DeepSpeed's part says `deepspeed_multinode_launcher: standard`: `accelerate launch` is then
started on each machine, as it is for FSDP2, instead of being sent over ssh from a hostfile.

`gpu_ids` stands there only where GPUs were chosen by number: it overrules CUDA_VISIBLE_DEVICES, and without it
accelerate takes the first of those that are visible.
"""

from __future__ import annotations

from typing import Any

import yaml

from tightfit.formats.accelerate.check import LAYER_CLASSES
from tightfit.formats.deepspeed.write import pure_16bit
from tightfit.formats.launch.environment import gpu_ids_of
from tightfit.formats.launch.hostfile import hosts_for
from tightfit.formats.target import Target
from tightfit.formats.worker.write import LOW_SCALE_TIERS, require_way
from tightfit.inputs.versions import release
from tightfit.messages import Message
from tightfit.planner.plan import Plan, Way
from tightfit.types import ConfigError, Moe, Precision

Block = dict[str, Any]

EXPERT_CLASSES = {
    kind: LAYER_CLASSES[kind].replace("DecoderLayer", "SparseMoeBlock")
    for kind in ("mixtral", "qwen2_moe", "qwen3_moe")
}
EXPERTS_FUSED_SINCE = (5,)
"""Before this transformers each expert was a module of its own, which ZeRO-3 must gather together or hang."""

MIXED: dict[Precision, str] = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


def accelerate_yaml(plan: Plan, target: Target, deepspeed_file: str | None) -> str:
    """The file for `accelerate launch --config_file`. `deepspeed_file` is the JSON's name; None: FSDP2."""
    way = require_way(plan)
    if way.levers.streams:
        raise ConfigError(Message("planfile.stream-is-ours", program="accelerate"))
    if way.levers.is_fsdp2 != (deepspeed_file is None):
        if way.levers.is_fsdp2:
            raise ConfigError(Message("accelerate.fsdp2-has-no-file"))
        raise ConfigError(Message("accelerate.engine-needs-file", engine=way.levers.engine))
    hardware, on_cpu = way.hardware, way.hardware.gpu.vendor == "cpu"
    levers = way.levers
    if deepspeed_file is None:
        block: Block = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": layer_class(way),
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": levers.offload_param == "cpu",
            "fsdp_cpu_ram_efficient_loading": loads_once(way),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": all_or_none(way),
        }
        if block["fsdp_transformer_layer_cls_to_wrap"] is None:
            del block["fsdp_transformer_layer_cls_to_wrap"]
        if levers.checkpointing.offload:
            block["fsdp_activation_checkpointing_offload"] = True
        precision = "no" if pure_16bit(levers) else MIXED[levers.precision]
        engine = {"distributed_type": "FSDP", "mixed_precision": precision, "fsdp_config": block}
    else:
        block = {
            "deepspeed_config_file": deepspeed_file,
            "zero3_init_flag": levers.stage == 3 and levers.method != "qlora",
        }
        experts = any(isinstance(kind.mlp, Moe) for kind in way.shape.blocks)
        classes = EXPERT_CLASSES.get(way.shape.model_type)
        separate = release(target.transformers_version) < EXPERTS_FUSED_SINCE
        if experts and classes and levers.stage == 3 and separate:
            block["deepspeed_moe_layer_cls_names"] = classes
        if hardware.nodes > 1:
            block["deepspeed_multinode_launcher"] = "standard"
        engine = {"distributed_type": "DEEPSPEED", "deepspeed_config": block}
    ids = gpu_ids_of(plan, target)
    values: Block = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        **engine,
        "num_machines": hardware.nodes,
        "num_processes": hardware.world,
        "machine_rank": 0,
        "main_process_port": target.port,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "use_cpu": on_cpu,
    }
    if not on_cpu and target.gpu_ids is not None:
        values["gpu_ids"] = ",".join(map(str, ids))
    if hardware.nodes > 1:
        values["main_process_ip"] = hosts_for(target.hostfile, hardware.nodes, ids)[0][0]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def accelerate_notes(plan: Plan, target: Target) -> tuple[Message, ...]:
    """What differs from the plan, or has to be known, a sentence each."""
    way = require_way(plan)
    levers, checkpointing, fsdp2 = way.levers, way.levers.checkpointing, way.levers.is_fsdp2
    pure, high = pure_16bit(levers), levers.precision == "fp16" and plan.job.tier in LOW_SCALE_TIERS
    notes = (
        (fsdp2, Message("accelerate.sharded-state-dict")),
        (fsdp2 and checkpointing.layers, Message("accelerate.recomputes-all", layers=checkpointing.layers)),
        (fsdp2 and checkpointing.offload, Message("accelerate.offload-needs-newer")),
        (fsdp2 and pure, Message("accelerate.pure-16bit", precision=levers.precision)),
        (fsdp2 and high and not pure, Message("accelerate.high-first-scale", tier=plan.job.tier)),
        (levers.stage == 3 and levers.method == "qlora", Message("accelerate.zero3-init-flag-off")),
        (way.hardware.nodes > 1 and target.hostfile is None, Message("accelerate.placeholder-ip")),
    )
    return tuple(note for holds, note in notes if holds)


def layer_class(way: Way) -> str | None:
    """The class of the model's layers; None: not known, and accelerate asks the model."""
    return LAYER_CLASSES.get(way.shape.model_type)


def all_or_none(way: Way) -> bool:
    """Whether trainers that recompute all layers or none should recompute: none would need more than was priced."""
    return way.levers.checkpointing.layers != 0


def loads_once(way: Way) -> bool:
    """One process reads the weights and hands them out; packed 4-bit weights cannot be handed out."""
    return way.levers.method != "qlora"
