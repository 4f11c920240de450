"""Rules for transformers' TrainingArguments, which LLaMA-Factory's files hold too.

A file becomes TrainingArguments by `HfArgumentParser.parse_dict`, which converts nothing: text stays text, and fails in
the optimizer, in the scheduler, or never. Whether `1e-4` without quotes is text depends on who reads the YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.formats.deepspeed.check import check_deepspeed, deepspeed_beside, offload_of, stage_of
from tightfit.formats.deepspeed.keys import MOVED_DEFAULTS
from tightfit.formats.rules import DELETE, KEEP_ONE, Sheet, propose, rules
from tightfit.inputs.spelling import as_number, find_slip, read_tables, shown
from tightfit.inputs.versions import release
from tightfit.job.training import ARGUMENT_MARKS, OLDER_ARGUMENT_MARKS
from tightfit.messages import Message

DEEPSPEED_AT = "deepspeed"  # the field that names a DeepSpeed file, or holds its block

_INSTEAD = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "use_mps_device": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "adafactor": "optim: adafactor",
    "logging_dir": Message("huggingface.tensorboard-variable"),
}


def check_training_arguments(sheet: Sheet) -> Sheet | None:
    """Every rule for a file of TrainingArguments, and for the DeepSpeed file that it names, which is returned."""
    for place in sheet.document.doubles:
        sheet.note("key-twice", place, "huggingface.last-counts", KEEP_ONE)
    known_too = TRL_ARGUMENTS if is_trls(sheet.document.values) else frozenset()
    for key, value in sheet.document.values.items():
        if key in ARGUMENT_MARKS or key in OLDER_ARGUMENT_MARKS or key in known_too:
            continue
        if known := meant_by_arguments(key, value):
            sheet.say("hf-foreign", key, *known)
            continue
        if (close := find_slip(key, ARGUMENT_MARKS)) and close not in sheet.document.values:
            sheet.note("hf-unknown", key, "huggingface.refuses-key", propose(close), key=key)
        else:
            sheet.note("hf-foreign", key, "huggingface.script-must-read", "huggingface.delete-unless-read", key=key)
    check_values(sheet, ARGUMENT_MARKS | OLDER_ARGUMENT_MARKS)
    check_gone(sheet, sheet.target.transformers_version)
    check_together(sheet)
    return check_deepspeed_pair(sheet)


def check_gone(sheet: Sheet, version: str) -> None:
    """Fields that this transformers no longer has."""
    for key in [key for key in sheet.document.values if key in OLDER_ARGUMENT_MARKS]:
        last = EVALUATION_STRATEGY_GONE if key == "evaluation_strategy" else OLDER_ARGUMENTS_GONE
        if release(version) < release(last):
            continue
        instead = _INSTEAD.get(key)
        fix = DELETE if instead in sheet.document.values else propose(instead)
        if fix != DELETE and key == "warmup_ratio":
            fix = Message("huggingface.write-share", instead=instead, value=sheet.get(key))
        sheet.note("hf-gone", key, "huggingface.has-no-longer", fix, version=version, key=key)


def check_values(sheet: Sheet, marks: Mapping[str, str], *, exponents_are_numbers: bool = False) -> None:
    """Numbers and switches that are text, and fractions where only whole numbers go."""
    for key, value in sheet.document.values.items():
        mark = marks.get(key)
        if isinstance(value, str) and mark == "?" and value.lower() in ("true", "false"):
            fix = Message("lint.write-unquoted", what=value.lower())
            sheet.note("hf-text-switch", key, "huggingface.text-is-true", fix, value=shown(value))
        if mark not in ("#", "~"):
            continue
        number = value
        if isinstance(value, str):
            number = as_number(value)
            if number is None:
                continue
            if not exponents_are_numbers or key in sheet.document.quoted:
                plain = sheet.document.syntax == "yaml" and key not in sheet.document.quoted
                mantissa, _, exponent = value.lower().partition("e")
                right = f"{mantissa}.0e{exponent}" if plain and exponent else value
                fix = propose(right) if plain else Message("lint.write-unquoted", what=right)
                fix = propose(round(number)) if mark == "#" else fix
                what = Message(
                    "huggingface.text-without-point" if plain else "huggingface.text-in-quotes", value=shown(value)
                )
                sheet.say("hf-number-text", key, what, fix)
                continue
        if mark == "#" and isinstance(number, float):
            sheet.note("hf-not-whole", key, "huggingface.fraction", propose(round(number)), value=shown(value), key=key)


def check_together(sheet: Sheet) -> None:
    """Fields that transformers refuses together."""
    if sheet.on("bf16") and sheet.on("fp16"):
        sheet.note("hf-two-precisions", "fp16", "huggingface.refuses-both-precisions", KEEP_ONE)
    if not sheet.on("load_best_model_at_end"):
        return
    save = sheet.get("save_strategy") or "steps"
    evaluate = sheet.get("eval_strategy") or sheet.get("evaluation_strategy") or "no"
    if save == "best":
        return
    if save != evaluate:
        what = Message("huggingface.save-and-evaluate", save=save, evaluate=evaluate)
        sheet.say("hf-best-model", "load_best_model_at_end", what, propose(f"eval_strategy: {save}"))
        return
    every, saved = sheet.number("eval_steps") or sheet.number("logging_steps") or 500, sheet.number("save_steps") or 500
    if save == "steps" and min(every, saved) >= 1 and saved % every:
        what = Message("huggingface.saved-not-evaluated", saved=saved)
        sheet.say("hf-best-model", "save_steps", what, Message("huggingface.write-multiple", every=every))


_MATCHED: tuple[tuple[str, float, str], ...] = (
    ("per_device_train_batch_size", 8, "train_micro_batch_size_per_gpu"),
    ("gradient_accumulation_steps", 1, "gradient_accumulation_steps"),
    ("max_grad_norm", 1.0, "gradient_clipping"),
    ("learning_rate", 5e-5, "optimizer.params.lr"),
    ("weight_decay", 0.0, "optimizer.params.weight_decay"),
    ("adam_epsilon", 1e-8, "optimizer.params.eps"),
    ("learning_rate", 5e-5, "scheduler.params.warmup_max_lr"),
)
"""The trainer's field, its default, and the key of the DeepSpeed file that must equal it."""

_STAYS = frozenset(
    """adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf paged_adamw_32bit
    paged_adamw adagrad lion_32bit paged_lion_32bit""".split()
)
"""Optimizers of which accelerate finds DeepSpeed's CPU twin."""


def check_deepspeed_pair(sheet: Sheet) -> Sheet | None:
    """What transformers refuses, replaces or overrules of the DeepSpeed file that is named; that file, checked."""
    deepspeed = deepspeed_beside(sheet, DEEPSPEED_AT)
    if deepspeed is None:
        return None
    for field, default, key in _MATCHED:
        theirs = deepspeed.number(key)
        ours = default if sheet.get(field) is None else sheet.number(field)
        if theirs is not None and ours is not None and theirs != ours:
            _mismatch(sheet, deepspeed, field, ours, key)
    micro, steps = (sheet.number(field) for field, _, _ in _MATCHED[:2])
    batch = (8 if micro is None else micro) * (1 if steps is None else steps) * (sheet.world or 1)
    if sheet.world and deepspeed.number("train_batch_size") not in (None, batch):
        _mismatch(sheet, deepspeed, "per_device_train_batch_size", batch, "train_batch_size")
    for name in ("bf16", "fp16"):
        theirs_on, ours_on = deepspeed.get(f"{name}.enabled"), sheet.on(name)
        is_pure = name == "bf16" and sheet.on("pure_bf16")
        if isinstance(theirs_on, bool) and theirs_on != ours_on and not is_pure:
            _mismatch(sheet, deepspeed, name, ours_on, f"{name}.enabled")
    file, version = deepspeed.document.path.name, sheet.target.deepspeed_version
    # DeepSpeed clips, not the trainer; and transformers fills in a key only where it is written
    wanted = sheet.number("max_grad_norm")
    ((since, before, now),) = [moved[1:] for moved in MOVED_DEFAULTS if moved[0] == "gradient_clipping"]
    clips = now if release(version) >= release(since) else before
    if wanted is not None and deepspeed.get("gradient_clipping") is None and clips != wanted:
        does = Message("huggingface.clips-at", clips=clips) if clips else Message("huggingface.clips-nothing")
        what = Message("huggingface.clipping-not-there", file=file, version=version, does=does)
        sheet.say("pair-clipping", "max_grad_norm", what, Message("huggingface.add-clipping", file=file, wanted=wanted))
    optim = sheet.get("optim")
    if deepspeed.block("optimizer"):
        kind = deepspeed.get("optimizer.type")
        if isinstance(optim, str) and not optim.startswith("adamw_torch"):
            what = Message("huggingface.own-optimizer", file=file, kind=kind, optim=optim)
            sheet.say("pair-optim-ignored", "optim", what, Message("huggingface.delete-optim", file=file))
    elif isinstance(optim, str) and optim not in _STAYS and stage_of(deepspeed):
        forced = deepspeed.get("zero_force_ds_cpu_optimizer") is not False
        if offload_of(deepspeed, "offload_optimizer") != "none" and forced:
            what = Message("huggingface.cpu-adam-instead", file=file, optim=optim)
            sheet.say("pair-optimizer", "optim", what, Message("huggingface.write-adamw", file=file))
    if deepspeed.block("scheduler") and sheet.has("lr_scheduler_type"):
        what = Message("huggingface.own-scheduler", file=file, value=deepspeed.get("scheduler.type"))
        sheet.say("pair-optim-ignored", "lr_scheduler_type", what, Message("huggingface.delete-scheduler", file=file))
    check_deepspeed(deepspeed)
    return deepspeed


def _mismatch(sheet: Sheet, deepspeed: Sheet, field: str, ours: float | bool, key: str) -> None:
    here, file = shown(ours) if isinstance(ours, bool) else f"{ours:g}", deepspeed.document.path.name
    said = "huggingface.pair-differs" if sheet.has(field) else "huggingface.pair-differs-by-default"
    what = Message(said, field=field, here=here, key=key, file=file, there=shown(deepspeed.get(key)))
    sheet.say("pair-mismatch", field, what, Message("huggingface.write-auto", key=key, file=file, here=here))


RULES = rules("hf-unknown! hf-foreign?")

IN_ANY_TRAINER = rules(
    """hf-gone! hf-number-text! hf-not-whole! hf-text-switch! hf-two-precisions! hf-best-model! pair-mismatch!
    pair-clipping! pair-optimizer! pair-optim-ignored?"""
)
"""Also for trainers that hand their keys on to TrainingArguments."""


EVALUATION_STRATEGY_GONE = "4.46"  # transformers' release that no longer takes `evaluation_strategy`

OLDER_ARGUMENTS_GONE = "5.22"
"""A release of transformers that takes none of the older fields any more; some left earlier."""


# --------------------------------------------------------------------------------------------------
# What other trainers and scripts call the keys of LLaMA-Factory and TrainingArguments.

_TABLES = read_tables(Path(__file__).with_name("keys.txt"))

_WITH_VALUE = {
    "load_in_4bit": "quantization_bit: 4",
    "load_in_8bit": "quantization_bit: 8",
    "use_lora": "finetuning_type: lora",
    "use_peft": "finetuning_type: lora",
    "use_flash_attention": "flash_attn: fa2",
    "use_flash_attention_2": "flash_attn: fa2",
    "attn_implementation": "flash_attn",
}

_MEANT = _TABLES["elsewhere"] | _WITH_VALUE

_ZERO = {
    "zero_optimization": "",
    **dict.fromkeys(("deepspeed_stage", "zero_stage"), "stage"),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "offload_optimizer_device"), "offload_optimizer"),
    **dict.fromkeys(("offload_param", "offload_param_device"), "offload_param"),
}
"""Keys about ZeRO → where they belong in the `zero_optimization` block of a DeepSpeed file."""

_PEFT = {
    **{
        name: said
        for key, said in (
            ("lora_rank", Message("huggingface.peft-r")),
            ("lora_target", Message("huggingface.peft-targets")),
            ("cutoff_len", Message("huggingface.tokenizer-length")),
        )
        for name in (key, *(name for name, meant in _MEANT.items() if meant == key))
    },
    "lora_alpha": Message("huggingface.peft-alpha"),
    "lora_dropout": Message("huggingface.peft-dropout"),
    "load_in_4bit": Message("huggingface.load-4bit"),
    "load_in_8bit": Message("huggingface.load-8bit"),
    "attn_implementation": "attn_implementation of from_pretrained",
    "use_flash_attention_2": 'attn_implementation="flash_attention_2" of from_pretrained',
}
"""Where a script around transformers' Trainer must put them."""


def meant_by_llamafactory(key: str, value: object) -> Message | None:
    """What to write for another trainer's name in a LLaMA-Factory file; None where the name is nobody's."""
    return _in_deepspeed(key, value) or (propose(_MEANT[key]) if key in _MEANT else None)


def meant_by_arguments(key: str, value: object) -> tuple[Message, Message] | None:
    """What a name is that TrainingArguments has not, and what to do about it; None where the name is nobody's."""
    theirs, what = _MEANT.get(key), Message("huggingface.no-field", key=key)
    if zero := _in_deepspeed(key, value):
        return Message("huggingface.zero-elsewhere", key=key), zero
    if theirs in ARGUMENT_MARKS:
        return what, propose(theirs)
    if key in _PEFT:
        return what, Message("huggingface.hand-on", to=_PEFT[key], theirs=theirs)
    return (what, Message("huggingface.delete-or-llamafactory", theirs=theirs)) if theirs else None


def _in_deepspeed(key: str, value: object) -> Message | None:
    inner = _ZERO.get(key)
    if inner is None:
        return None
    if inner == "stage":
        return Message("huggingface.write-stage", value=shown(value))
    return Message("huggingface.write-offload", inner=inner) if inner else Message("huggingface.move-into-json")


_TRLS_OWN = frozenset(_TABLES["TRL alone"])
TRL_ARGUMENTS = _TRLS_OWN.union(_TABLES["TRL"])


def is_trls(values: Mapping[str, Any]) -> bool:
    """Whether the file is for a script around TRL's parser."""
    return bool(_TRLS_OWN & set(values)) and not {"finetuning_type", "cutoff_len", "template"} & set(values)
