"""The user's own LLaMA-Factory YAML with what a plan changes in it, and a head that says each change with its reason.

The text is kept, with its comments and the order of its keys: values are replaced where they stand, and keys that were
not there come at the end. A key is changed only where what it means, be it by LLaMA-Factory's default, differs from the
plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from tightfit.formats.beside import change_in_place, scalar
from tightfit.formats.llamafactory.keys import FIELD_OF
from tightfit.formats.target import Original
from tightfit.formats.worker.write import require_way
from tightfit.job.file import field_at
from tightfit.messages import Message, Said, text
from tightfit.planner.plan import Plan, Way
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
    way = require_way(plan)
    found: dict[str, Edit] = {}
    for edit in (
        *_from_flags(plan, original, values),
        *_from_changes(plan, way, original, values),
        *_from_levers(plan, way, original, values),
        *_from_paths(plan, original),
    ):
        if edit.value is None and edit.key not in original.written:
            continue
        if edit.key not in original.written or original.written[edit.key] != edit.value:
            found.setdefault(edit.key, edit)
    return list(found.values())


def _from_flags(plan: Plan, original: Original, values: Mapping[str, Any]) -> Iterator[Edit]:
    """What the command line says instead of the file."""
    said = AS_SAID
    before = original.job
    if plan.job.model != before.model:
        yield Edit("model_name_or_path", values["model_name_or_path"], said)
    for key, field in FIELD_OF.items():
        if field_at(plan.job, field) == field_at(before, field):
            continue
        if key in values:
            yield Edit(key, values[key], said)
            for pair in PAIRS:
                yield from (Edit(other, None, said) for other in pair if key in pair and other != key)
    if plan.job.clip != before.clip:
        yield Edit("max_grad_norm", values["max_grad_norm"], said)
    if not keeps_data(plan, original):
        yield Edit("dataset", values["dataset"], said)
        yield Edit("dataset_dir", values["dataset_dir"], said)


def _from_changes(plan: Plan, way: Way, original: Original, values: Mapping[str, Any]) -> Iterator[Edit]:
    """What changes the result: because it was asked for, or allowed and needed."""
    levers, settings = way.levers, original.settings
    why = "; ".join(map(str, way.changes)) if way.changes else AS_SAID
    if levers.sequence != settings.sequence:
        yield Edit("cutoff_len", levers.sequence, why)
    if levers.method != settings.method:
        quantised = ("quantization_bit", "quantization_method", "quantization_type", "double_quantization")
        for key in ("finetuning_type", *quantised):
            yield Edit(key, values.get(key), why)
    adapters, before = levers.lora, settings.lora
    if adapters is not None and (before is None or adapters.rank != before.rank):
        yield Edit("lora_rank", values["lora_rank"], why)
        yield Edit("lora_alpha", values["lora_alpha"], why)
    if adapters is not None and adapters.targets != (before.targets if before else None):
        yield Edit("lora_target", values["lora_target"], why)
    if levers.master_weights != settings.master_weights:
        yield Edit("pure_bf16", not levers.master_weights, why)
    if levers.optimizer != settings.optimizer:
        yield Edit("optim", values["optim"], why)
    for name in ("bf16", "fp16"):
        wanted = levers.precision == name
        if bool(original.written.get(name)) != wanted:
            same = levers.precision == settings.precision
            yield Edit(
                name, wanted, Message("llamafactory.both-precisions", precision=levers.precision) if same else why
            )


def _from_levers(plan: Plan, way: Way, original: Original, values: Mapping[str, Any]) -> Iterator[Edit]:
    """How it is computed, which is what the plan is for."""
    levers, settings = way.levers, original.settings
    each = f"{levers.micro_batch} × {levers.accumulation}"
    split = Message("llamafactory.batch-split", effective_batch=plan.effective_batch, world=way.world, each=each)
    if levers.micro_batch != settings.micro_batch:
        yield Edit("per_device_train_batch_size", levers.micro_batch, split)
    if levers.accumulation != settings.accumulation:
        yield Edit("gradient_accumulation_steps", levers.accumulation, split)
    if "deepspeed" in values:
        yield Edit(
            "deepspeed", values["deepspeed"], Message("llamafactory.sizes-of-plan", strategy=strategy_name(levers))
        )
    room = amounts(way.footprint.gpu.required_bytes)[0]
    depth, before = levers.checkpointing, settings.checkpointing
    if (depth.layers == 0) != (before.layers == 0):
        said = Message("llamafactory.kept" if depth.layers == 0 else "llamafactory.recomputed", room=room)
        yield Edit("disable_gradient_checkpointing", depth.layers == 0, said)
    if depth.offload != before.offload:
        said = Message("llamafactory.inputs-on-host" if depth.offload else "llamafactory.inputs-on-gpu", room=room)
        yield Edit("use_unsloth_gc", depth.offload, said)
    if levers.loss != settings.loss:
        said = Message("llamafactory.fused-loss" if levers.loss == "fused" else "llamafactory.plain-loss")
        yield Edit("enable_liger_kernel", levers.loss == "fused", said)
    if levers.attention != settings.attention:
        yield Edit(
            "flash_attn", values["flash_attn"], Message("llamafactory.counts-on-attention", attention=levers.attention)
        )
    if levers.dataloader_workers != settings.dataloader_workers:
        yield Edit("dataloader_num_workers", levers.dataloader_workers, AS_SAID)
    yield from _optimizer(way, original)


def _optimizer(way: Way, original: Original) -> Iterator[Edit]:
    """Which of torch's AdamWs: those that are not fused make two copies of what they step, if there is room."""
    levers, named = way.levers, original.written.get("optim", UNFUSED[0])
    if levers.optimizer != "adamw" or original.settings.optimizer != "adamw":
        return
    if levers.offload_optimizer != "none":
        if named == FUSED:
            yield Edit("optim", UNFUSED[0], Message("llamafactory.host-adam"))
        return
    ranks = way.world if levers.engine != "zero0" else 1
    copies = 2 * 4 * way.footprint.trainable_parameters // ranks
    if named in UNFUSED and way.footprint.gpu.required_bytes + copies > way.gpu_limit_bytes:
        yield Edit(
            "optim",
            FUSED,
            Message("llamafactory.optimizer-copies", named=named, copies=amounts(copies)[0]),
        )


def _from_paths(plan: Plan, original: Original) -> Iterator[Edit]:
    """This file lies elsewhere than the one that it was made from."""
    for key, path in original.paths.items():
        if key != "dataset_dir" or keeps_data(plan, original):
            yield Edit(key, path, Message("llamafactory.other-folder"))
