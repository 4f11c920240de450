"""The user's own LLaMA-Factory YAML with what a plan changes in it, and a head that says each change with its reason.

The text is kept, with its comments and the order of its keys: values are replaced where they stand, and keys that were
not there come at the end. A key is changed only where what it means, be it by LLaMA-Factory's default, differs from the
plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from tightfit.formats.beside import change_in_place, scalar
from tightfit.formats.llamafactory.keys import FIELD_OF
from tightfit.formats.target import Original
from tightfit.formats.worker.write import require_way
from tightfit.job.file import field_at
from tightfit.messages import Message, Said, text
from tightfit.planner.plan import Plan
from tightfit.priced import amounts, strategy_name

HEAD = "# tightfit: "
"""How each line of ours begins, so that those of an earlier plan are known."""
AS_SAID = Message("llamafactory.as-said")
UNFUSED, FUSED = ("adamw_torch", "adamw_hf"), "adamw_torch_fused"
PAIRS = (("warmup_steps", "warmup_ratio"), ("num_train_epochs", "max_steps"))
"""Two keys for one thing: where one is written, the other goes."""


class Edit(NamedTuple):
    key: str
    value: Any
    """None: the key goes."""
    reason: Said


def write_edits(plan: Plan, original: Original, values: Mapping[str, Any], head: Message) -> str:
    """The file; `values`: what a file written from nothing would say; `head`: what stands at its top."""
    edits = edits_of(plan, original, values)
    lines = [str(head), text("llamafactory.made-from", name=original.name)]
    for edit in edits:
        if edit.key not in original.written:
            lines.append(text("llamafactory.was-not-there", key=edit.key, reason=edit.reason))
        else:
            before = scalar(original.written[edit.key])
            lines.append(text("llamafactory.was", key=edit.key, before=before, reason=edit.reason))
    kept = "\n".join(line for line in original.text.splitlines() if not line.startswith(HEAD)).strip("\n")
    wanted = {**original.written, **{edit.key: edit.value for edit in edits}}
    wanted = {key: value for key, value in wanted.items() if value is not None or key not in {e.key for e in edits}}
    changed = change_in_place(kept, {edit.key: edit.value for edit in edits})
    body = None
    if changed is not None:
        body, added = changed
        body = "\n".join([body.rstrip("\n"), *(["", *added] if added else [])])
    if body is None or yaml.safe_load(body) != wanted:  # a form that cannot be changed in place
        body = yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True, width=10**6).rstrip("\n")
    return "\n".join([*(HEAD + " ".join(line.split()) for line in lines), "", body]) + "\n"


def keeps_data(plan: Plan, original: Original) -> bool:
    """Whether it trains on what the file names."""
    return plan.job.data.path == original.job.data.path


# --- what changes -------------------------------------------------------------------------------


def edits_of(plan: Plan, original: Original, values: Mapping[str, Any]) -> list[Edit]:
    """Every key that has to change, in the order in which they are said."""
    way, settings, written = require_way(plan), original.settings, original.written
    levers = way.levers
    found: dict[str, Edit] = {}

    def put(key: str, value: Any, reason: Said) -> None:
        """The first reason for a key counts, and a key that says so already stays."""
        if (key in written and written[key] != value) or (key not in written and value is not None):
            found.setdefault(key, Edit(key, value, reason))

    # what the command line says instead of the file
    if plan.job.model != original.job.model:
        put("model_name_or_path", values["model_name_or_path"], AS_SAID)
    for key, field in FIELD_OF.items():
        if key in values and field_at(plan.job, field) != field_at(original.job, field):
            put(key, values[key], AS_SAID)
            for other in (other for pair in PAIRS if key in pair for other in pair if other != key):
                put(other, None, AS_SAID)
    if plan.job.clip != original.job.clip:
        put("max_grad_norm", values["max_grad_norm"], AS_SAID)
    if not keeps_data(plan, original):
        put("dataset", values["dataset"], AS_SAID)
        put("dataset_dir", values["dataset_dir"], AS_SAID)

    # what changes the result: because it was asked for, or allowed and needed
    why: Said = "; ".join(map(str, way.changes)) if way.changes else AS_SAID
    if levers.sequence != settings.sequence:
        put("cutoff_len", levers.sequence, why)
    if levers.method != settings.method:
        quantised = ("quantization_bit", "quantization_method", "quantization_type", "double_quantization")
        for key in ("finetuning_type", *quantised):
            put(key, values.get(key), why)
    adapters, before = levers.lora, settings.lora
    if adapters is not None and (before is None or adapters.rank != before.rank):
        put("lora_rank", values["lora_rank"], why)
        put("lora_alpha", values["lora_alpha"], why)
    if adapters is not None and adapters.targets != (before.targets if before else None):
        put("lora_target", values["lora_target"], why)
    if levers.master_weights != settings.master_weights:
        put("pure_bf16", not levers.master_weights, why)
    if levers.optimizer != settings.optimizer:
        put("optim", values["optim"], why)
    for name in ("bf16", "fp16"):
        wanted = levers.precision == name
        if bool(written.get(name)) != wanted:
            same = levers.precision == settings.precision
            put(name, wanted, Message("llamafactory.both-precisions", precision=levers.precision) if same else why)

    # how it is computed, which is what the plan is for
    each = f"{levers.micro_batch} × {levers.accumulation}"
    split = Message("llamafactory.batch-split", effective_batch=plan.effective_batch, world=way.world, each=each)
    if levers.micro_batch != settings.micro_batch:
        put("per_device_train_batch_size", levers.micro_batch, split)
    if levers.accumulation != settings.accumulation:
        put("gradient_accumulation_steps", levers.accumulation, split)
    if "deepspeed" in values:
        said = Message("llamafactory.sizes-of-plan", strategy=strategy_name(levers))
        put("deepspeed", values["deepspeed"], said)
    room = amounts(way.footprint.gpu.required_bytes)[0]
    keeps_all, offloads = levers.checkpointing.layers == 0, levers.checkpointing.offload
    if keeps_all != (settings.checkpointing.layers == 0):
        said = Message("llamafactory.kept" if keeps_all else "llamafactory.recomputed", room=room)
        put("disable_gradient_checkpointing", keeps_all, said)
    if offloads != settings.checkpointing.offload:
        said = Message("llamafactory.inputs-on-host" if offloads else "llamafactory.inputs-on-gpu", room=room)
        put("use_unsloth_gc", offloads, said)
    if levers.loss != settings.loss:
        said = Message("llamafactory.fused-loss" if levers.loss == "fused" else "llamafactory.plain-loss")
        put("enable_liger_kernel", levers.loss == "fused", said)
    if levers.attention != settings.attention:
        said = Message("llamafactory.counts-on-attention", attention=levers.attention)
        put("flash_attn", values["flash_attn"], said)
    if levers.dataloader_workers != settings.dataloader_workers:
        put("dataloader_num_workers", levers.dataloader_workers, AS_SAID)
    # which of torch's AdamWs: those that are not fused make two copies of what they step, if there is room
    named = written.get("optim", UNFUSED[0])
    if levers.optimizer == settings.optimizer == "adamw":
        copies = 2 * 4 * way.footprint.trainable_parameters // (way.world if levers.engine != "zero0" else 1)
        if levers.offload_optimizer != "none":
            if named == FUSED:
                put("optim", UNFUSED[0], Message("llamafactory.host-adam"))
        elif named in UNFUSED and way.footprint.gpu.required_bytes + copies > way.gpu_limit_bytes:
            put("optim", FUSED, Message("llamafactory.optimizer-copies", named=named, copies=amounts(copies)[0]))

    # this file lies elsewhere than the one that it was made from
    for key, path in original.paths.items():
        if key != "dataset_dir" or keeps_data(plan, original):
            put(key, path, Message("llamafactory.other-folder"))
    return list(found.values())
