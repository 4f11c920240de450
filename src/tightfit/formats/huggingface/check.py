"""Rules for transformers' TrainingArguments, which LLaMA-Factory's files hold too.

A file becomes TrainingArguments by `HfArgumentParser.parse_dict`, which converts nothing: text stays text, and fails in
the optimizer, in the scheduler, or never. Whether `1e-4` without quotes is text depends on who reads the YAML.
"""

from __future__ import annotations

from tightfit.formats.dialects import TRL_ARGUMENTS, is_trls
from tightfit.formats.huggingface.other_names import meant_by_arguments
from tightfit.formats.sheet import Sheet
from tightfit.formats.versions import EVALUATION_STRATEGY_GONE, OLDER_ARGUMENTS_GONE
from tightfit.inputs.spelling import as_number, misspelt, shown
from tightfit.inputs.versions import release
from tightfit.job.training_arguments import OLDER_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS

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
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
}


def check_training_arguments(sheet: Sheet) -> None:
    """Every rule for a file of TrainingArguments alone."""
    for place in sheet.document.doubles:
        sheet.say("key-twice", place, "the last one counts and the other is forgotten without a word", "keep one")
    known_too = TRL_ARGUMENTS if is_trls(sheet.document.values) else frozenset()
    for key, value in sheet.document.values.items():
        if key in TRAINING_ARGUMENTS or key in OLDER_TRAINING_ARGUMENTS or key in known_too:
            continue
        if known := meant_by_arguments(key, value):
            sheet.say("hf-foreign", key, *known)
            continue
        close = misspelt(key, TRAINING_ARGUMENTS)
        if close and close not in sheet.document.values:
            what = f"TrainingArguments has no {key}, and transformers refuses the file"
            sheet.say("hf-unknown", key, what, f"write {close}")
        else:
            what = f"{key} is no field of TrainingArguments: your script must read it itself"
            sheet.say("hf-foreign", key, what, "delete it if your script does not")
    check_values(sheet, WHOLE, FRACTIONS, SWITCHES)
    check_gone(sheet, sheet.target.transformers_version)
    check_together(sheet)


def check_gone(sheet: Sheet, version: str) -> None:
    """Fields that this transformers no longer has."""
    for key in sheet.document.values:
        gone = key in OLDER_TRAINING_ARGUMENTS and release(version) >= release(OLDER_ARGUMENTS_GONE)
        gone = gone or (key == "evaluation_strategy" and release(version) >= release(EVALUATION_STRATEGY_GONE))
        if gone:
            instead = _INSTEAD.get(key)
            what = f"transformers {version} has no {key} and refuses the file"
            there = instead is None or instead in sheet.document.values
            share = f": {sheet.get(key)}, which below 1 is a share of all steps" if key == "warmup_ratio" else ""
            sheet.say("hf-gone", key, what, "delete it" if there else f"write {instead}{share}")


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
            what = f"{shown(value)} is text, and Python takes any text for true"
            sheet.say("hf-text-switch", key, what, f"write {value.lower()} without quotes")
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
            what = f"{shown(value)} is a fraction to Python, even where it is whole, and {key} is used to count"
            sheet.say("hf-not-whole", key, what, f"write {round(number)}")


def _text(sheet: Sheet, key: str, value: str, number: float) -> None:
    plain = sheet.document.syntax == "yaml" and key not in sheet.document.quoted
    why = "YAML takes it for text, for want of a decimal point" if plain else "in quotes it is text"
    mantissa, _, exponent = value.lower().partition("e")
    right = f"{mantissa}.0e{exponent}" if plain and exponent else value
    what = f"{shown(value)} stays text ({why}): transformers converts nothing and fails in the optimizer or later"
    fix = f"write {right}" if plain else f"write {right} without quotes"
    sheet.say("hf-number-text", key, what, f"write {round(number)}" if key in WHOLE else fix)


def check_together(sheet: Sheet) -> None:
    """Fields that transformers refuses together."""
    if sheet.on("bf16") and sheet.on("fp16"):
        sheet.say("hf-two-precisions", "fp16", "transformers refuses bf16 and fp16 together", "keep one")
    if not sheet.on("load_best_model_at_end"):
        return
    save = sheet.get("save_strategy") or "steps"
    evaluate = sheet.get("eval_strategy") or sheet.get("evaluation_strategy") or "no"
    evaluate = "no" if evaluate is False else evaluate
    if save == "best":
        return
    if save != evaluate:
        what = f"transformers refuses it while saving goes by {save!r} and evaluation by {evaluate!r}"
        sheet.say("hf-best-model", "load_best_model_at_end", what, f"write eval_strategy: {save}")
        return
    every, saved = sheet.number("eval_steps") or sheet.number("logging_steps") or 500, sheet.number("save_steps") or 500
    if save == "steps" and min(every, saved) >= 1 and saved % every:
        what = f"a checkpoint every {saved:g} steps is not always an evaluated one: transformers refuses it"
        sheet.say("hf-best-model", "save_steps", what, f"write a multiple of eval_steps, {every:g}")
