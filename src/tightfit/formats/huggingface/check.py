"""Rules for transformers' TrainingArguments, which LLaMA-Factory's files hold too.

A file becomes TrainingArguments by `HfArgumentParser.parse_dict`, which converts nothing: text stays text, and fails in
the optimizer, in the scheduler, or never. Whether `1e-4` without quotes is text depends on who reads the YAML.
"""

from __future__ import annotations

from tightfit.formats.deepspeed.check import check_deepspeed, deepspeed_beside
from tightfit.formats.deepspeed.check_values import offload_of, stage_of
from tightfit.formats.deepspeed.versions import MOVED_DEFAULTS
from tightfit.formats.huggingface.other_names import meant_by_arguments
from tightfit.formats.huggingface.trl import TRL_ARGUMENTS, is_trls
from tightfit.formats.huggingface.versions import EVALUATION_STRATEGY_GONE, OLDER_ARGUMENTS_GONE
from tightfit.formats.sheet import Sheet
from tightfit.inputs.spelling import as_number, find_slip, shown
from tightfit.inputs.versions import release
from tightfit.job.training_arguments import OLDER_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS
from tightfit.messages import Message

DEEPSPEED_AT = "deepspeed"
"""The field that names a DeepSpeed file, or holds its block."""

WHOLE = frozenset(
    """per_device_train_batch_size max_steps gradient_accumulation_steps torch_empty_cache_steps
    per_device_eval_batch_size eval_accumulation_steps save_total_limit seed data_seed dataloader_num_workers
    dataloader_prefetch_factor ddp_bucket_cap_mb ddp_timeout generation_max_length generation_num_beams""".split()
)
FRACTIONS = frozenset(
    """num_train_epochs learning_rate warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm label_smoothing_factor neftune_noise_alpha logging_steps eval_steps eval_delay save_steps""".split()
)
SWITCHES = frozenset(
    """bf16 fp16 tf32 bf16_full_eval fp16_full_eval gradient_checkpointing torch_compile use_liger_kernel
    auto_find_batch_size do_train do_eval do_predict load_best_model_at_end save_only_model use_cpu
    predict_with_generate dataloader_pin_memory dataloader_drop_last remove_unused_columns
    ddp_find_unused_parameters""".split()
)

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
        sheet.say("key-twice", place, Message("huggingface.last-counts"), Message("lint.keep-one"))
    known_too = TRL_ARGUMENTS if is_trls(sheet.document.values) else frozenset()
    for key, value in sheet.document.values.items():
        if key in TRAINING_ARGUMENTS or key in OLDER_TRAINING_ARGUMENTS or key in known_too:
            continue
        if known := meant_by_arguments(key, value):
            sheet.say("hf-foreign", key, *known)
            continue
        close = find_slip(key, TRAINING_ARGUMENTS)
        if close and close not in sheet.document.values:
            what = Message("huggingface.refuses-key", key=key)
            sheet.say("hf-unknown", key, what, Message("lint.write", what=close))
        else:
            what = Message("huggingface.script-must-read", key=key)
            sheet.say("hf-foreign", key, what, Message("huggingface.delete-unless-read"))
    check_values(sheet, WHOLE, FRACTIONS, SWITCHES)
    check_gone(sheet, sheet.target.transformers_version)
    check_together(sheet)
    return check_deepspeed_pair(sheet)


def check_gone(sheet: Sheet, version: str) -> None:
    """Fields that this transformers no longer has."""
    for key in sheet.document.values:
        gone = key in OLDER_TRAINING_ARGUMENTS and release(version) >= release(OLDER_ARGUMENTS_GONE)
        gone = gone or (key == "evaluation_strategy" and release(version) >= release(EVALUATION_STRATEGY_GONE))
        if gone:
            instead = _INSTEAD.get(key)
            what = Message("huggingface.has-no-longer", version=version, key=key)
            there = instead is None or instead in sheet.document.values
            fix = Message("lint.delete") if there else Message("lint.write", what=instead)
            if not there and key == "warmup_ratio":
                fix = Message("huggingface.write-share", instead=instead, value=sheet.get(key))
            sheet.say("hf-gone", key, what, fix)


def check_values(
    sheet: Sheet,
    whole: frozenset[str],
    fractions: frozenset[str],
    switches: frozenset[str],
    *,
    exponents_are_numbers: bool = False,
) -> None:
    """Numbers and switches that are text, and fractions where only whole numbers go."""
    for key, value in sheet.document.values.items():
        if isinstance(value, str) and key in switches and value.lower() in ("true", "false"):
            what = Message("huggingface.text-is-true", value=shown(value))
            sheet.say("hf-text-switch", key, what, Message("lint.write-unquoted", what=value.lower()))
        if key not in whole and key not in fractions:
            continue
        number = value
        if isinstance(value, str):
            number = as_number(value)
            if number is None:
                continue
            if not exponents_are_numbers or key in sheet.document.quoted:
                _text(sheet, key, value, number)
                continue
        if key in whole and isinstance(number, float):
            what = Message("huggingface.fraction", value=shown(value), key=key)
            sheet.say("hf-not-whole", key, what, Message("lint.write", what=round(number)))


def _text(sheet: Sheet, key: str, value: str, number: float) -> None:
    plain = sheet.document.syntax == "yaml" and key not in sheet.document.quoted
    mantissa, _, exponent = value.lower().partition("e")
    right = f"{mantissa}.0e{exponent}" if plain and exponent else value
    what = Message("huggingface.text-without-point" if plain else "huggingface.text-in-quotes", value=shown(value))
    fix = Message("lint.write", what=right) if plain else Message("lint.write-unquoted", what=right)
    sheet.say("hf-number-text", key, what, Message("lint.write", what=round(number)) if key in WHOLE else fix)


def check_together(sheet: Sheet) -> None:
    """Fields that transformers refuses together."""
    if sheet.on("bf16") and sheet.on("fp16"):
        sheet.say("hf-two-precisions", "fp16", Message("huggingface.refuses-both-precisions"), Message("lint.keep-one"))
    if not sheet.on("load_best_model_at_end"):
        return
    save = sheet.get("save_strategy") or "steps"
    evaluate = sheet.get("eval_strategy") or sheet.get("evaluation_strategy") or "no"
    evaluate = "no" if evaluate is False else evaluate
    if save == "best":
        return
    if save != evaluate:
        what = Message("huggingface.save-and-evaluate", save=save, evaluate=evaluate)
        sheet.say("hf-best-model", "load_best_model_at_end", what, Message("lint.write", what=f"eval_strategy: {save}"))
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
    micro, steps = _number(sheet, "per_device_train_batch_size", 8), _number(sheet, "gradient_accumulation_steps", 1)
    total = deepspeed.number("train_batch_size")
    if total is not None and sheet.world and total != micro * steps * sheet.world:
        _mismatch(sheet, deepspeed, "per_device_train_batch_size", micro * steps * sheet.world, "train_batch_size")
    for name in ("bf16", "fp16"):
        theirs_on = deepspeed.get(f"{name}.enabled")
        if (
            isinstance(theirs_on, bool)
            and theirs_on != sheet.on(name)
            and not (name == "bf16" and sheet.on("pure_bf16"))
        ):
            _mismatch(sheet, deepspeed, name, sheet.on(name), f"{name}.enabled")
    _check_clipping(sheet, deepspeed)
    _check_optimizer(sheet, deepspeed)
    check_deepspeed(deepspeed)
    return deepspeed


def _check_clipping(sheet: Sheet, deepspeed: Sheet) -> None:
    """DeepSpeed clips, not the trainer; and transformers fills in a key only where it is written."""
    wanted, file = sheet.number("max_grad_norm"), deepspeed.document.path.name
    if wanted is None or deepspeed.get("gradient_clipping") is not None:
        return
    version = sheet.target.deepspeed_version
    ((since, before, now),) = [moved[1:] for moved in MOVED_DEFAULTS if moved[0] == "gradient_clipping"]
    clips = now if release(version) >= release(since) else before
    if clips == wanted:
        return
    does = Message("huggingface.clips-at", clips=clips) if clips else Message("huggingface.clips-nothing")
    what = Message("huggingface.clipping-not-there", file=file, version=version, does=does)
    sheet.say("pair-clipping", "max_grad_norm", what, Message("huggingface.add-clipping", file=file, wanted=wanted))


def _number(sheet: Sheet, field: str, default: float) -> float:
    number = sheet.number(field)
    return default if number is None else number


def _mismatch(sheet: Sheet, deepspeed: Sheet, field: str, ours: float | bool, key: str) -> None:
    here = shown(ours) if isinstance(ours, bool) else f"{ours:g}"
    what = Message(
        "huggingface.pair-differs" if sheet.has(field) else "huggingface.pair-differs-by-default",
        field=field,
        here=here,
        key=key,
        file=deepspeed.document.path.name,
        there=shown(deepspeed.get(key)),
    )
    fix = Message("huggingface.write-auto", key=key, file=deepspeed.document.path.name, here=here)
    sheet.say("pair-mismatch", field, what, fix)


def _check_optimizer(sheet: Sheet, deepspeed: Sheet) -> None:
    optim = sheet.get("optim")
    file = deepspeed.document.path.name
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
