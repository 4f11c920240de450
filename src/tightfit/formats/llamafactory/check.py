"""Rules for a LLaMA-Factory YAML, from its own argument classes and the checks of its `hparams/parser.py`.

LLaMA-Factory does check much, but only after the launcher has started a process a GPU, and each release its own way.
"""

from __future__ import annotations

from tightfit.formats.deepspeed.check_values import stage_of
from tightfit.formats.huggingface.check import (
    FRACTIONS,
    SWITCHES,
    WHOLE,
    check_deepspeed_pair,
    check_gone,
    check_together,
    check_values,
)
from tightfit.formats.huggingface.other_names import meant_by_llamafactory
from tightfit.formats.huggingface.versions import EVALUATION_STRATEGY_GONE
from tightfit.formats.llamafactory.keys import KNOWN
from tightfit.formats.llamafactory.versions import (
    BROKEN_JSON_SINCE,
    LLAMAFACTORY_ADDED,
    LLAMAFACTORY_GONE,
    OMEGACONF_SINCE,
    templates,
)
from tightfit.formats.sheet import Sheet
from tightfit.inputs.spelling import listed, misspelt, nearest, shown
from tightfit.inputs.versions import release

OWN_WHOLE = frozenset(
    """cutoff_len max_samples preprocessing_batch_size preprocessing_num_workers buffer_size lora_rank lora_alpha
    quantization_bit freeze_trainable_layers galore_rank galore_update_interval apollo_rank apollo_update_interval
    image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_maxlen""".split()
)
OWN_FRACTIONS = frozenset("val_size lora_dropout pref_beta pref_ftx loraplus_lr_ratio galore_scale".split())
OWN_SWITCHES = frozenset(
    """packing neat_packing streaming train_on_prompt mask_history pure_bf16 plot_loss use_unsloth use_unsloth_gc
    disable_gradient_checkpointing enable_liger_kernel upcast_layernorm double_quantization trust_remote_code
    overwrite_cache overwrite_output_dir""".split()
)

_LORA_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target")
_LORA_ONLY = ("loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init")
_BITS = {"bnb": (4, 8), "bitsandbytes": (4, 8), "hqq": (1, 2, 3, 4, 5, 6, 8), "eetq": (8,)}
_ATTENTION = ("auto", "disabled", "sdpa", "fa2", "fa3")
_TRAINS = ("dataset", "per_device_train_batch_size", "learning_rate", "num_train_epochs")
_MEGATRONS = frozenset(
    """apply_rope_fusion bias_activation_fusion context_parallel_size expert_model_parallel_size export_hf_on_finish
    mixed_precision moe_grouped_gemm moe_token_dispatcher_type overlap_grad_reduce overlap_param_gather
    pipeline_model_parallel_size recompute_granularity recompute_method recompute_num_layers sequence_parallel
    tensor_model_parallel_size use_distributed_optimizer use_packed_sequences virtual_pipeline_model_parallel_size
    expert_tensor_parallel_size moe_aux_loss_coeff moe_router_load_balancing_type""".split()
)
"""What LLaMA-Factory hands on to Megatron, where it is started with USE_MCA=1 or USE_MEGATRON_BRIDGE=1."""
_CHAT_STAGES = ("sft", "dpo", "kto", "rm", "ppo")


def check_llamafactory(sheet: Sheet) -> Sheet | None:
    """Every rule for the YAML, and for the DeepSpeed file that it names, which is returned."""
    version = sheet.target.llamafactory_version
    for place in sheet.document.doubles:
        sheet.say("key-twice", place, "LLaMA-Factory's reader refuses it, or keeps the last without a word", "keep one")
    if sheet.document.syntax != "yaml" and release(version) >= release(BROKEN_JSON_SINCE):
        what = f"LLaMA-Factory {version} cannot read a JSON file: it dies before it has opened it"
        sheet.say("lf-json-file", "", what, "write the same keys as YAML")
    _check_keys(sheet, version)
    check_values(
        sheet,
        WHOLE | OWN_WHOLE,
        FRACTIONS | OWN_FRACTIONS,
        SWITCHES | OWN_SWITCHES,
        exponents_are_numbers=release(version) >= release(OMEGACONF_SINCE),
    )
    # LLaMA-Factory holds transformers back, so that of the older fields only this one is surely gone.
    if release(version) >= release("0.9.3"):
        check_gone(sheet, EVALUATION_STRATEGY_GONE)
    check_together(sheet)
    _check_template(sheet, version)
    _check_data(sheet)
    _check_method(sheet)
    _check_memory_keys(sheet)
    deepspeed = check_deepspeed_pair(sheet)
    _check_pair(sheet, deepspeed)
    return deepspeed


def _check_keys(sheet: Sheet, version: str) -> None:
    megatron = any(key.endswith("_model_parallel_size") for key in sheet.document.values)
    since = {key: first for first, keys in LLAMAFACTORY_ADDED.items() for key in keys.split()}
    for key, value in sheet.document.values.items():
        if key in LLAMAFACTORY_GONE:
            gone, instead = LLAMAFACTORY_GONE[key]
            if release(version) >= release(gone):
                what = f"LLaMA-Factory {version} no longer takes {key} and refuses the file"
                sheet.say("lf-version", key, what, f"write {instead}" if instead else "delete it")
        elif key in since and release(version) < release(since[key]):
            what = f"LLaMA-Factory {version} does not know {key} yet and refuses the file"
            sheet.say("lf-version", key, what, f"delete it, or use LLaMA-Factory {since[key]} or newer")
        elif key not in KNOWN:
            if key in _MEGATRONS and megatron:
                continue
            close = misspelt(key, KNOWN)
            fix = meant_by_llamafactory(key, value) or (f"write {close}" if close else None)
            if fix:
                what = f"LLaMA-Factory knows no {key} and refuses the file"
                sheet.say("lf-unknown", key, what, fix)
            else:
                what = f"no LLaMA-Factory up to 0.9.6 has {key}; one that does not know it refuses the file"
                sheet.say("lf-foreign", key, what, "delete it if it is not one of yours")


def _check_template(sheet: Sheet, version: str) -> None:
    name, known = sheet.get("template"), templates(version)
    if isinstance(name, str):
        if known is not None and name not in known:
            close = "deepseek3" if name == "deepseekr1" else nearest(name, known)
            what = f"LLaMA-Factory {version} has no template {shown(name)}"
            sheet.say("lf-template", "template", what, f"write {close}" if close else "take the model's own template")
        model = str(sheet.get("model_name_or_path") or "")
        if "DeepSeek-R1-Distill" in model and name == "deepseek3" and release(version) >= release("0.9.3"):
            what = (
                "since 0.9.3 the distilled DeepSeek-R1 models have a template of their own, which keeps their thoughts"
            )
            sheet.say("lf-reasoning-template", "template", what, "write deepseekr1")
    elif sheet.on("do_train") and (sheet.get("stage") or "sft") in _CHAT_STAGES:
        what = (
            "LLaMA-Factory guesses a template from the tokenizer, or takes none: the model may learn a foreign format"
        )
        sheet.say("lf-no-template", "template", what, "write the model's template, qwen3 say")


# --- data ---------------------------------------------------------------------------------------


def _check_data(sheet: Sheet) -> None:
    acts = any(sheet.on(key) for key in ("do_train", "do_eval", "do_predict"))
    if not acts and any(sheet.has(key) for key in _TRAINS) and not sheet.has("export_dir"):
        what = "LLaMA-Factory loads the model and ends: nothing says that it should train"
        sheet.say("lf-not-training", "do_train", what, "write do_train: true")
    if sheet.on("do_train") and not sheet.get("dataset"):
        sheet.say(
            "lf-no-dataset", "dataset", "LLaMA-Factory refuses to train without a data set", "write dataset: NAME"
        )
    split, data = sheet.number("val_size") or 0, sheet.get("eval_dataset")
    strategy = sheet.get("eval_strategy") or sheet.get("evaluation_strategy")
    judged = sheet.on("do_eval") or sheet.on("do_predict") or strategy in ("steps", "epoch")
    if judged and not data and split < 1e-6:
        what = "evaluation is on and there is nothing to evaluate on: LLaMA-Factory refuses it"
        place = "eval_strategy" if sheet.has("eval_strategy") else "do_eval"
        sheet.say("lf-evaluation", place, what, "write val_size: 0.05, or eval_dataset")
    if data and split > 1e-6:
        what = "LLaMA-Factory refuses val_size beside eval_dataset"
        sheet.say("lf-evaluation", "val_size", what, "keep one")
    if sheet.on("streaming"):
        _check_streaming(sheet, split)


def _check_streaming(sheet: Sheet, split: float) -> None:
    if sheet.on("do_train") and (sheet.number("max_steps") or -1) < 1:
        what = "a stream has no end that could be counted in epochs: LLaMA-Factory refuses it without max_steps"
        sheet.say("lf-streaming", "streaming", what, "write max_steps")
    if sheet.get("max_samples") is not None:
        what = "LLaMA-Factory refuses max_samples with streaming"
        sheet.say("lf-streaming", "max_samples", what, "delete it, or streaming")
    if 1e-6 < split < 1:
        what = "of a stream no share can be taken: LLaMA-Factory refuses a val_size below 1 with streaming"
        sheet.say("lf-streaming", "val_size", what, "write a number of samples")


# --- the method ---------------------------------------------------------------------------------


def _check_method(sheet: Sheet) -> None:
    method = sheet.get("finetuning_type") or "lora"
    if method not in ("lora", "oft", "freeze", "full"):
        close = nearest(str(method), ("lora", "oft", "freeze", "full")) or "lora, oft, freeze or full"
        what = f"LLaMA-Factory refuses finetuning_type {shown(method)}"
        fix = "write lora with quantization_bit: 4" if str(method).lower() == "qlora" else f"write {close}"
        sheet.say("lf-method", "finetuning_type", what, fix)
        return
    idle = [key for key in _LORA_KEYS if sheet.has(key)]
    if method in ("full", "freeze") and idle:
        what = f"finetuning_type {method} trains no adapters: {', '.join(idle)} have no effect"
        sheet.say("lf-method-keys", idle[0], what, "delete them, or write finetuning_type: lora")
    for key in _LORA_ONLY:
        if method != "lora" and sheet.on(key):
            what = f"LLaMA-Factory refuses {key} with finetuning_type {method}"
            sheet.say("lf-method", key, what, "delete it, or write finetuning_type: lora")
    if method != "lora" and sheet.get("adapter_name_or_path"):
        what = f"LLaMA-Factory refuses an adapter with finetuning_type {method}"
        sheet.say("lf-method", "adapter_name_or_path", what, "write finetuning_type: lora")
    heavy = [key for key in ("use_galore", "use_apollo", "use_badam") if sheet.on(key)]
    if heavy and (method == "lora" or len(heavy) > 1):
        what = f"LLaMA-Factory refuses {' and '.join(heavy)} " + ("with LoRA" if method == "lora" else "together")
        sheet.say("lf-method", heavy[0], what, "keep one of them, with finetuning_type: full")
    if method == "lora" and sheet.has("lora_rank") and not sheet.get("lora_alpha"):
        what = f"lora_alpha is left out: LLaMA-Factory takes twice the rank, {2 * (sheet.number('lora_rank') or 8):g}"
        sheet.say("lf-lora-alpha", "lora_rank", what, "write lora_alpha if you mean another")
    _check_quantization(sheet, str(method))


def _check_quantization(sheet: Sheet, method: str) -> None:
    bits = sheet.number("quantization_bit")
    if bits is None:
        return
    place = "quantization_bit"
    if method not in ("lora", "oft"):
        what = f"LLaMA-Factory refuses a quantised model with finetuning_type {method}"
        sheet.say("lf-quantization", place, what, "write finetuning_type: lora, or delete quantization_bit")
    library = str(sheet.get("quantization_method") or "bnb")
    if library in _BITS and bits not in _BITS[library]:
        takes = listed(map(str, _BITS[library]))
        sheet.say("lf-quantization", place, f"{library} refuses {bits:g} bits: it takes {takes}", f"write {takes}")
    for key in ("pissa_init", "resize_vocab"):
        if sheet.on(key):
            what = f"LLaMA-Factory refuses {key} on a quantised model"
            sheet.say("lf-quantization", key, what, "delete it, or quantization_bit")


def _check_memory_keys(sheet: Sheet) -> None:
    attention = sheet.get("flash_attn")
    if attention is not None and attention not in _ATTENTION:
        why = " (a bare off or on is false or true in YAML)" if isinstance(attention, bool) else ""
        what = f"LLaMA-Factory refuses flash_attn {shown(attention)}{why}"
        right = {"False": "disabled", "off": "disabled", "True": "fa2"}.get(
            str(attention), "auto, sdpa, fa2 or disabled"
        )
        sheet.say("lf-attention", "flash_attn", what, f"write {right}")
    if sheet.get("gradient_checkpointing") is False and not sheet.on("disable_gradient_checkpointing"):
        what = "LLaMA-Factory switches gradient checkpointing on by itself and never looks at this key"
        sheet.say("lf-checkpointing", "gradient_checkpointing", what, "write disable_gradient_checkpointing: true")
    if sheet.on("packing") and not sheet.on("neat_packing") and (sheet.get("stage") or "sft") == "sft":
        what = "samples that are packed into one sequence attend to each other"
        sheet.say("lf-packing", "packing", what, "write neat_packing: true to keep them apart")
    if sheet.on("neat_packing") and (sheet.get("stage") or "sft") != "sft":
        sheet.say("lf-method", "neat_packing", "LLaMA-Factory takes neat_packing with stage sft only", "delete it")
    if sheet.get("deepspeed") and sheet.world == 1:
        what = "on one GPU llamafactory-cli starts no torchrun, and DeepSpeed is refused without it"
        sheet.say("lf-force-torchrun", "deepspeed", what, "start it with FORCE_TORCHRUN=1")


_ZERO3_REFUSES = {
    "pure_bf16": "bf16: true instead",
    "use_unsloth": "a stage below 3, or no Unsloth",
    "use_kt": "a stage below 3",
    "pissa_init": "scripts/pissa_init.py before the training",
    "predict_with_generate": "a stage below 3 for the evaluation",
}


def _check_pair(sheet: Sheet, deepspeed: Sheet | None) -> None:
    """LLaMA-Factory's own list of what does not go together. None: FSDP, or neither."""
    stage3 = deepspeed is not None and stage_of(deepspeed) == 3
    fsdp = bool(sheet.get("fsdp"))
    if stage3 or fsdp:
        _check_sharded_quantization(sheet, "ZeRO-3" if stage3 else "FSDP")
    if stage3:
        for key, instead in _ZERO3_REFUSES.items():
            if sheet.on(key):
                what = f"LLaMA-Factory refuses {key} under ZeRO-3"
                sheet.say("pair-zero3", key, what, f"use {instead}")
    if deepspeed is not None:
        for key in ("use_galore", "use_apollo"):
            if sheet.on(key):
                what = f"LLaMA-Factory refuses {key} with any DeepSpeed file"
                sheet.say("pair-deepspeed", key, what, "delete deepspeed, or that optimizer")
        if sheet.on("use_badam") and not stage3:
            what = "BAdam on several GPUs needs ZeRO-3: LLaMA-Factory refuses it here"
            sheet.say("pair-deepspeed", "use_badam", what, "use a DeepSpeed file with stage 3")


def _check_sharded_quantization(sheet: Sheet, engine: str) -> None:
    bits, library = sheet.number("quantization_bit"), str(sheet.get("quantization_method") or "bnb")
    if bits is None:
        return
    if library in ("hqq", "eetq"):
        what = f"LLaMA-Factory refuses {library} quantisation under {engine}"
        sheet.say("pair-quantization", "quantization_method", what, "write bnb with quantization_bit: 4, or use ZeRO-2")
    elif bits != 4:
        what = f"LLaMA-Factory refuses {bits:g}-bit quantisation under {engine}: only 4 bits can be sharded"
        sheet.say("pair-quantization", "quantization_bit", what, "write 4, or use ZeRO-2")
