"""A plan as a DeepSpeed JSON: every value that was priced and is not DeepSpeed's default already.

A key at its default is not written: `zero_optimization` refuses keys that a release does not know, so each that says
nothing new only ties the file to a release. Defaults that moved between releases (`gradient_clipping`, `pin_memory`,
bf16's `check_grad_overflow`) are always written, and nothing is left to `auto`, which is filled in by one trainer and
not by another. Which keys a release knows is asked of `keys.py`. Left out on purpose:

- `optimizer`. Hugging Face's Trainer, LLaMA-Factory and our worker each make the optimizer themselves, with the
  weight decay of norms and biases as they see fit. With the block in the file, the Trainer hands all parameters
  to DeepSpeed as one group, ignores its own `optim`, and refuses to start once its learning rate differs from
  the file's. Offloading stays right either way: with `zero_force_ds_cpu_optimizer` accelerate swaps AdamW for
  DeepSpeed's host Adam, and DeepSpeed refuses any other. One training cannot do without the block: pure 16-bit with the
  optimizer offloaded, where only DeepSpeed makes a host Adam whose moments are 16-bit as well.
- `activation_checkpointing`. It acts on models that call `deepspeed.checkpointing`, which Hugging Face's never do.
- `leaf_module`, `zenflow`. Absent, the first is DeepSpeed's list of expert layers and the second is off.
- `stage3_model_persistence_threshold`, which is unbounded; `aio`, whose defaults are those that we would write.
- `zero_quantized_gradients`: between nodes its matrices are sums where its vectors are means, and bf16 is read as fp16
  (0.19.8); `train/zeropp.py` does it for our own worker.
- `communication_data_type`: accelerate sets it to fp32 for bf16 on ROCm, to keep an overflow from the weights.
"""

from __future__ import annotations

import json
from typing import Any

from tightfit.formats.deepspeed.keys import check_version, knows, newer_than_known, without_defaults
from tightfit.formats.target import Target
from tightfit.formats.worker.write import clip, first_scale_power, learning_rate, require_way
from tightfit.inputs.flags import LEVERS
from tightfit.memory.host import swap_buffer_numel
from tightfit.messages import Message
from tightfit.planner.plan import Plan, Way
from tightfit.priced import GIB
from tightfit.types import ConfigError, Levers

STEPS_PER_PRINT = 100
HOST_ADAM = "adamw"  # the one optimizer of ours that DeepSpeed has a host version of
ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
"""AdamW's usual ones, which every trainer here shares; a job has no field for them."""

Block = dict[str, Any]


def deepspeed_json(plan: Plan, target: Target) -> str:
    """The file for the chosen way."""
    way, job = require_way(plan), plan.job
    levers, pure = way.levers, pure_16bit(way.levers)
    check_version(target.deepspeed_version)
    on_host, is_adam = levers.offload_optimizer != "none", levers.optimizer == HOST_ADAM
    refused = (
        (levers.streams, Message("planfile.stream-is-ours", program="DeepSpeed")),
        (not levers.uses_deepspeed, Message("deepspeed.fsdp2-has-no-file", engine=levers.engine)),
        (pure and levers.engine == "zero0", Message("deepspeed.pure-needs-sharding")),
        (pure and levers.precision == "fp16" and not on_host, Message("deepspeed.pure-fp16-needs-offload")),
        (pure and on_host and not is_adam, Message("deepspeed.pure-offload-needs-adamw")),
    )
    for holds, why in refused:
        if holds:
            raise ConfigError(why)
    values: Block = {
        # DeepSpeed takes every rank for one that reads samples of its own, and would count more than there are.
        **({"train_batch_size": way.effective_batch} if levers.sequence_parallel == 1 else {}),
        "train_micro_batch_size_per_gpu": levers.micro_batch,
        "gradient_accumulation_steps": levers.accumulation,
        "gradient_clipping": clip(job, levers),
        "bf16": {"enabled": False} if levers.precision == "fp32" else {},  # that it is fp32 stands nowhere else
        "fp16": {},
        "zero_optimization": _zero(way, job.hardware.nvme_path),
        "zero_allow_untested_optimizer": not is_adam,
        "zero_force_ds_cpu_optimizer": is_adam,
    }
    if levers.precision == "bf16":
        values["bf16"] = {
            "enabled": True,
            "immediate_grad_update": False,
            "check_grad_overflow": True,
            "bf16_master_weights_and_grads": pure,
            "bf16_optimizer_states": pure,
        }
    elif levers.precision == "fp16":
        values["fp16"] = {
            "enabled": True,
            "initial_scale_power": first_scale_power(job),
            "fp16_master_weights_and_grads": pure,
        }
    if pure and on_host:
        adam = {"lr": learning_rate(job, levers), "betas": list(ADAM_BETAS), "eps": ADAM_EPS}
        adam |= {"weight_decay": float(job.weight_decay), "fp32_optimizer_states": False}
        values["optimizer"] = {"type": "AdamW", "params": adam}
    values["steps_per_print"] = STEPS_PER_PRINT
    return json.dumps(without_defaults(_keep_known(values, target.deepspeed_version)), indent=2) + "\n"


def deepspeed_notes(plan: Plan, target: Target) -> tuple[Message, ...]:
    """What a reader of the file should know, a sentence each."""
    way = require_way(plan)
    levers, on_rocm = way.levers, way.hardware.gpu.vendor in ("amd", "hygon")
    if not levers.uses_deepspeed:
        return ()
    extra = 4 * levers.buckets.reduce_bucket / GIB
    has_block = pure_16bit(levers) and levers.offload_optimizer != "none"
    block = "deepspeed.has-optimizer-block" if has_block else "deepspeed.no-optimizer-block"
    notes = (
        (True, Message("deepspeed.no-checkpointing-block")),
        (True, Message(block)),
        (True, newer_than_known(target.deepspeed_version)),
        (levers.stage == 3 and not _can_gather(way), Message("deepspeed.gather-off", more=_whole_bytes(way) / GIB)),
        (on_rocm and levers.precision == "bf16", Message("deepspeed.fp32-reduce-on-rocm", extra=extra)),
    )
    return tuple(note for holds, note in notes if holds and note)


def pure_16bit(levers: Levers) -> bool:
    """No fp32 copy of the weights anywhere."""
    return not levers.master_weights and levers.precision != "fp32"


def _zero(way: Way, nvme_path: str | None) -> Block:
    levers, buckets = way.levers, way.levers.buckets
    stage = levers.stage
    block: Block = {
        "stage": stage,
        "contiguous_gradients": buckets.contiguous_gradients,
        "reduce_bucket_size": buckets.reduce_bucket,
        "allgather_bucket_size": buckets.allgather_bucket,
    }
    if buckets.overlap_comm is not None and buckets.overlap_comm != (stage == 3):
        block["overlap_comm"] = buckets.overlap_comm
    if stage == 3:
        threes = [each for each in LEVERS.values() if each.deepspeed.startswith("stage3")]
        block["sub_group_size"] = buckets.sub_group_size
        block |= {each.deepspeed: getattr(buckets, each.name) for each in threes}
        block["stage3_gather_16bit_weights_on_model_save"] = _can_gather(way)
        if levers.shard_within:
            block["zero_hpz_partition_size"] = levers.shard_within
        if levers.compress == "zeropp":
            block["zero_quantized_weights"] = True
    return block | _offload(way, nvme_path)


def _offload(way: Way, nvme_path: str | None) -> Block:
    levers, buckets = way.levers, way.levers.buckets
    blocks: Block = {}
    if levers.offload_optimizer != "none":
        blocks["offload_optimizer"] = {
            "device": levers.offload_optimizer,
            "nvme_path": nvme_path,
            "pin_memory": buckets.pin_memory,
            "buffer_count": buckets.optimizer_buffer_count,
        }
    if levers.offload_param != "none":
        blocks["offload_param"] = {
            "device": levers.offload_param,
            "nvme_path": nvme_path,
            "pin_memory": buckets.pin_memory,
            "buffer_count": buckets.param_buffer_count,
            "buffer_size": swap_buffer_numel(way.shape, levers, way.world),
            "max_in_cpu": 0,  # what is on NVMe is there: host RAM was priced without it
        }
    for block in blocks.values():
        if block["device"] != "nvme":
            del block["nvme_path"]
        elif nvme_path is None:
            raise ConfigError(Message("planfile.no-nvme-path"))
    return blocks


def _keep_known(values: Block, version: str, path: str = "") -> Block:
    """The same without what this release does not know."""
    kept: Block = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if knows(version, where):
            kept[name] = _keep_known(value, version, where) if isinstance(value, dict) else value
        elif value is True and name.startswith("bf16_"):
            raise ConfigError(Message("deepspeed.pure-bf16-since", version=version))
    return kept


def _whole_bytes(way: Way) -> int:
    return way.shape.parameters * (4 if way.levers.precision == "fp32" else 2)


def _can_gather(way: Way) -> bool:
    """Saving gathers the whole model on the first rank's host, beside what the training keeps there."""
    ram = way.hardware.host_ram_bytes
    return ram is None or way.footprint.host.peak_bytes_per_node + _whole_bytes(way) <= ram
