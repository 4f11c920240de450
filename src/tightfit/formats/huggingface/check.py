"""Rules for transformers' TrainingArguments, which LLaMA-Factory's files hold too.

A file becomes TrainingArguments by `HfArgumentParser.parse_dict`, which converts nothing: text stays text, and fails in
the optimizer, in the scheduler, or never. Whether `1e-4` without quotes is text depends on who reads the YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightfit.formats.deepspeed.check import check_deepspeed, deepspeed_beside, offload_of, stage_of
from tightfit.formats.deepspeed.keys import MOVED_DEFAULTS
from tightfit.formats.rules import rules
from tightfit.formats.sheet import DELETE, KEEP_ONE, Sheet, propose
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
        sheet.note("key-twice", place, "huggingface.last-counts", KEEP_ONE)
    known_too = TRL_ARGUMENTS if is_trls(sheet.document.values) else frozenset()
    for key, value in sheet.document.values.items():
        if key in TRAINING_ARGUMENTS or key in OLDER_TRAINING_ARGUMENTS or key in known_too:
            continue
        if known := meant_by_arguments(key, value):
            sheet.say("hf-foreign", key, *known)
            continue
        close = find_slip(key, TRAINING_ARGUMENTS)
        if close and close not in sheet.document.values:
            sheet.note("hf-unknown", key, "huggingface.refuses-key", propose(close), key=key)
        else:
            sheet.note("hf-foreign", key, "huggingface.script-must-read", "huggingface.delete-unless-read", key=key)
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
            fix = DELETE if there else propose(instead)
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
                plain = sheet.document.syntax == "yaml" and key not in sheet.document.quoted
                mantissa, _, exponent = value.lower().partition("e")
                right = f"{mantissa}.0e{exponent}" if plain and exponent else value
                fix = propose(right) if plain else Message("lint.write-unquoted", what=right)
                fix = propose(round(number)) if key in WHOLE else fix
                if plain:
                    sheet.note("hf-number-text", key, "huggingface.text-without-point", fix, value=shown(value))
                else:
                    sheet.note("hf-number-text", key, "huggingface.text-in-quotes", fix, value=shown(value))
                continue
        if key in whole and isinstance(number, float):
            sheet.note("hf-not-whole", key, "huggingface.fraction", propose(round(number)), value=shown(value), key=key)


def check_together(sheet: Sheet) -> None:
    """Fields that transformers refuses together."""
    if sheet.on("bf16") and sheet.on("fp16"):
        sheet.note("hf-two-precisions", "fp16", "huggingface.refuses-both-precisions", KEEP_ONE)
    if not sheet.on("load_best_model_at_end"):
        return
    save = sheet.get("save_strategy") or "steps"
    evaluate = sheet.get("eval_strategy") or sheet.get("evaluation_strategy") or "no"
    evaluate = "no" if evaluate is False else evaluate
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


RULES = rules(
    ("hf-unknown", "error", "a misspelt field of TrainingArguments: refused"),
    ("hf-foreign", "warning", "a key that is no field of TrainingArguments (`lora_r`, `zero_stage`)"),
)

IN_ANY_TRAINER = rules(
    ("hf-gone", "error", "a field that transformers no longer has (`evaluation_strategy`)"),
    ("hf-number-text", "error", "a number as text: in quotes, or `1e-4` where YAML takes it for text"),
    ("hf-not-whole", "error", "a fraction, or `1e3`, where a whole number belongs"),
    ("hf-text-switch", "error", 'the text `"false"`, which counts as true'),
    ("hf-two-precisions", "error", "fp16 and bf16 both on"),
    ("hf-best-model", "error", "`load_best_model_at_end` with evaluation and saving out of step"),
    ("pair-mismatch", "error", "a value that differs from the DeepSpeed file's: refused"),
    ("pair-clipping", "error", "a `max_grad_norm` that never reaches DeepSpeed, whose own default counts"),
    ("pair-optimizer", "error", "an `optim` that offloading replaces by Adam without a word"),
    ("pair-optim-ignored", "warning", "an `optim` or scheduler that the DeepSpeed file overrules"),
)
"""Also for trainers that hand their keys on to TrainingArguments."""


EVALUATION_STRATEGY_GONE = "4.46"
"""transformers' release that no longer takes `evaluation_strategy`."""

OLDER_ARGUMENTS_GONE = "5.22"
"""A release of transformers that takes none of the older fields any more; some left earlier."""


# --------------------------------------------------------------------------------------------------
# What other trainers and scripts call the keys of LLaMA-Factory and TrainingArguments.
#
# Spelling does not find these: `lora_target_modules` looks like `optim_target_modules` and means `lora_target`. Only
# names with one meaning are here. What two trainers use for two things is left to the nearest spelling.

_SAME = {
    "per_device_train_batch_size": "batch_size micro_batch_size train_batch_size train_micro_batch_size_per_gpu",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "accumulation_steps grad_accum gradient_accumulation grad_accumulation_steps",
    "num_train_epochs": "epochs num_epochs n_epochs",
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_scheduler scheduler",
    "optim": "optimizer optimizer_type",
    "max_grad_norm": "gradient_clipping grad_clip clip_grad_norm",
    "save_steps": "save_interval checkpoint_interval",
    "logging_steps": "log_interval log_steps",
    "eval_steps": "eval_interval",
    "model_name_or_path": "base_model model model_name model_path model_id",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules lora_targets target_modules lora_modules",
    "cutoff_len": "max_seq_length max_seq_len seq_length sequence_len sequence_length model_max_length block_size",
    "val_size": "val_set_size",
    "dataset": "dataset_name data_path dataset_path train_file",
    "template": "chat_template prompt_template",
    "packing": "sample_packing",
}
"""The key of LLaMA-Factory, and what it is called elsewhere."""

_WITH_VALUE = {
    "load_in_4bit": "quantization_bit: 4",
    "load_in_8bit": "quantization_bit: 8",
    "use_lora": "finetuning_type: lora",
    "use_peft": "finetuning_type: lora",
    "use_flash_attention": "flash_attn: fa2",
    "use_flash_attention_2": "flash_attn: fa2",
    "attn_implementation": "flash_attn",
}

_ZERO = {
    "deepspeed_stage": "stage",
    "zero_stage": "stage",
    "zero_optimization": "",
    "cpu_offload": "offload_optimizer",
    "offload_optimizer": "offload_optimizer",
    "offload_optimizer_device": "offload_optimizer",
    "offload_param": "offload_param",
    "offload_param_device": "offload_param",
}
"""Keys about ZeRO → where they belong in the `zero_optimization` block of a DeepSpeed file."""

_PEFT = {
    "lora_r": Message("huggingface.peft-r"),
    "lora_rank": Message("huggingface.peft-r"),
    "lora_alpha": Message("huggingface.peft-alpha"),
    "lora_dropout": Message("huggingface.peft-dropout"),
    **dict.fromkeys([*_SAME["lora_target"].split(), "lora_target"], Message("huggingface.peft-targets")),
    **dict.fromkeys([*_SAME["cutoff_len"].split(), "cutoff_len"], Message("huggingface.tokenizer-length")),
    "load_in_4bit": Message("huggingface.load-4bit"),
    "load_in_8bit": Message("huggingface.load-8bit"),
    "attn_implementation": "attn_implementation of from_pretrained",
    "use_flash_attention_2": 'attn_implementation="flash_attention_2" of from_pretrained',
}
"""Where a script around transformers' Trainer must put them."""

_MEANT = {name: key for key, names in _SAME.items() for name in names.split()} | _WITH_VALUE


def meant_by_llamafactory(key: str, value: object) -> Message | None:
    """What to write for another trainer's name in a LLaMA-Factory file; None where the name is nobody's."""
    return _in_deepspeed(key, value) or (propose(_MEANT[key]) if key in _MEANT else None)


def meant_by_arguments(key: str, value: object) -> tuple[Message, Message] | None:
    """What a name is that TrainingArguments has not, and what to do about it; None where the name is nobody's."""
    theirs = _MEANT.get(key)
    if zero := _in_deepspeed(key, value):
        return Message("huggingface.zero-elsewhere", key=key), zero
    if theirs in TRAINING_ARGUMENTS:
        what = Message("huggingface.no-field", key=key)
        return what, propose(theirs)
    if theirs is None and key not in _PEFT:
        return None
    what = Message("huggingface.no-field", key=key)
    if key not in _PEFT:
        return what, Message("huggingface.delete-or-llamafactory", theirs=theirs)
    return what, Message("huggingface.hand-on", to=_PEFT[key], theirs=theirs)


def _in_deepspeed(key: str, value: object) -> Message | None:
    if key not in _ZERO:
        return None
    inner = _ZERO[key]
    if inner == "stage":
        return Message("huggingface.write-stage", value=shown(value))
    if not inner:
        return Message("huggingface.move-into-json")
    return Message("huggingface.write-offload", inner=inner)


_TRLS_OWN = frozenset(
    """dataset_name dataset_config dataset_train_split dataset_test_split dataset_mixer dataset_mixture dataset_splits
    dataset_text_field dataset_kwargs use_peft lora_task_type lora_modules_to_save assistant_only_loss
    completion_only_loss packing_strategy padding_free max_prompt_length max_completion_length num_generations
    precompute_ref_log_probs steps_per_generation use_vllm model_init_kwargs chat_template_path""".split()
)
"""Keys that no script has by chance."""

TRL_ARGUMENTS = _TRLS_OWN | frozenset(
    """model_name_or_path model_revision trust_remote_code attn_implementation dtype torch_dtype load_in_4bit
    load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant lora_r lora_alpha lora_dropout
    lora_target_modules lora_target_parameters use_rslora use_dora datasets streaming dataset_streaming test_split_size
    dataset_num_proc dataset_configs dataset_batch_size preprocessing_num_workers auto_insert_empty_system_msg
    chat_template eos_token pad_token pad_to_multiple_of max_length max_seq_length packing eval_packing truncation_mode
    activation_offloading shuffle_dataset loss_type loss_weights beta label_smoothing ld_alpha rpo_alpha
    f_divergence_type f_alpha_divergence_coef reference_free disable_dropout use_logits_to_keep use_liger_loss
    force_use_ref_model ref_model_init_kwargs ref_adapter_name model_adapter_name sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps precompute_ref_batch_size base_model_attribute_name discopop_tau generate_during_eval
    desirable_weight undesirable_weight simpo_gamma cpo_alpha alpha gamma is_encoder_decoder label_pad_token_id
    padding_value center_rewards_coefficient reward_model_path reward_weights reward_funcs scale_rewards
    generation_batch_size generation_kwargs num_generations_eval num_iterations epsilon epsilon_high delta
    importance_sampling_level mask_truncated_completions top_entropy_quantile temperature top_p top_k min_p
    repetition_penalty cache_implementation ds3_gather_for_generation log_completions num_completions_to_print
    wandb_log_unique_prompts log_unique_prompts cast_lm_head_to_fp32 max_new_tokens missing_eos_penalty judge
    vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_gpu_memory_utilization
    vllm_tensor_parallel_size vllm_model_impl vllm_max_model_length vllm_enable_sleep_mode
    vllm_importance_sampling_correction vllm_importance_sampling_cap vllm_guided_decoding_regex vllm_group_port
    use_transformers_paged router_aux_loss_coef overwrite_output_dir hub_model_revision env ignore_bias_buffers
    accelerate_config num_processes""".split()
)
"""Fields that TRL 0.24's and 1.16's classes, and the alignment handbook's scripts around them, have beside those of
TrainingArguments."""


def is_trls(values: Mapping[str, Any]) -> bool:
    """Whether the file is for a script around TRL's parser."""
    return bool(_TRLS_OWN & set(values)) and not {"finetuning_type", "cutoff_len", "template"} & set(values)
