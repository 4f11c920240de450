"""Rules for a LLaMA-Factory YAML, from its own argument classes and the checks of its `hparams/parser.py`.

LLaMA-Factory does check much, but only after the launcher has started a process a GPU, and each release its own way.
"""

from __future__ import annotations

from tightfit.formats.deepspeed.check import stage_of
from tightfit.formats.huggingface import check as arguments
from tightfit.formats.llamafactory.keys import LLAMAFACTORY_ADDED, LLAMAFACTORY_GONE, MARKS, MEGATRONS, templates
from tightfit.formats.rules import DELETE, KEEP_ONE, Sheet, propose, rules
from tightfit.inputs.spelling import find_slip, listed, nearest, shown
from tightfit.inputs.versions import release
from tightfit.messages import Choice, Listing, Message

OMEGACONF_SINCE = "0.9.4"
"""From here on LLaMA-Factory reads YAML with OmegaConf, for which `1e-4` is a number; before, with PyYAML."""
BROKEN_JSON_SINCE = "0.9.5"  # from here on `llamafactory-cli train FILE.json` dies in `json.load` of a path
_METHODS = ("lora", "oft", "freeze", "full")
_LORA_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target")
_LORA_ONLY = ("loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init")
_BITS = {"bnb": (4, 8), "bitsandbytes": (4, 8), "hqq": (1, 2, 3, 4, 5, 6, 8), "eetq": (8,)}
_ATTENTION = ("auto", "disabled", "sdpa", "fa2", "fa3")
_TRAINS = ("dataset", "per_device_train_batch_size", "learning_rate", "num_train_epochs")
_CHAT_STAGES = ("sft", "dpo", "kto", "rm", "ppo")


def check_llamafactory(sheet: Sheet) -> Sheet | None:
    """Every rule for the YAML, and for the DeepSpeed file that it names, which is returned."""
    version = sheet.target.llamafactory_version
    for place in sheet.document.doubles:
        sheet.note("key-twice", place, "llamafactory.twice", KEEP_ONE)
    if sheet.document.syntax != "yaml" and release(version) >= release(BROKEN_JSON_SINCE):
        sheet.note("lf-json-file", "", "llamafactory.cannot-read-json", "llamafactory.write-yaml", version=version)
    megatron = any(key.endswith("_model_parallel_size") for key in sheet.document.values)
    since = {key: first for first, keys in LLAMAFACTORY_ADDED.items() for key in keys}
    for key, value in sheet.document.values.items():
        if key in LLAMAFACTORY_GONE:
            gone, instead = LLAMAFACTORY_GONE[key]
            if release(version) >= release(gone):
                what = Message("llamafactory.no-longer-takes", version=version, key=key)
                sheet.say("lf-version", key, what, propose(instead))
        elif key in since and release(version) < release(since[key]):
            what = Message("llamafactory.not-yet", version=version, key=key)
            sheet.say("lf-version", key, what, Message("llamafactory.delete-or-newer", since=since[key]))
        elif key not in MARKS:
            if key in MEGATRONS and megatron:
                continue
            close = find_slip(key, MARKS)
            fix = arguments.meant_by_llamafactory(key, value) or (propose(close) if close else None)
            if fix:
                sheet.note("lf-unknown", key, "llamafactory.unknown-key", fix, key=key)
            else:
                sheet.note("lf-foreign", key, "llamafactory.foreign-key", "llamafactory.delete-unless-yours", key=key)
    arguments.check_values(sheet, MARKS, exponents_are_numbers=release(version) >= release(OMEGACONF_SINCE))
    # LLaMA-Factory holds transformers back, so that of the older fields only this one is surely gone.
    if release(version) >= release("0.9.3"):
        arguments.check_gone(sheet, arguments.EVALUATION_STRATEGY_GONE)
    arguments.check_together(sheet)
    name, known = sheet.get("template"), templates(version)
    if isinstance(name, str):
        if known is not None and name not in known:
            close = "deepseek3" if name == "deepseekr1" else nearest(name, known)
            fix = propose(close) if close else Message("llamafactory.take-models-template")
            sheet.note("lf-template", "template", "llamafactory.no-template", fix, version=version, name=shown(name))
        model = str(sheet.get("model_name_or_path") or "")
        if "DeepSeek-R1-Distill" in model and name == "deepseek3" and release(version) >= release("0.9.3"):
            sheet.note("lf-reasoning-template", "template", "llamafactory.distilled-template", propose("deepseekr1"))
    elif sheet.on("do_train") and (sheet.get("stage") or "sft") in _CHAT_STAGES:
        sheet.note("lf-no-template", "template", "llamafactory.template-guessed", "llamafactory.write-template")
    acts = any(sheet.on(key) for key in ("do_train", "do_eval", "do_predict"))
    if not acts and any(sheet.has(key) for key in _TRAINS) and not sheet.has("export_dir"):
        sheet.note("lf-not-training", "do_train", "llamafactory.not-training", propose("do_train: true"))
    if sheet.on("do_train") and not sheet.get("dataset"):
        sheet.note("lf-no-dataset", "dataset", "llamafactory.no-dataset", propose("dataset: NAME"))
    split, data = sheet.number("val_size") or 0, sheet.get("eval_dataset")
    strategy = sheet.get("eval_strategy") or sheet.get("evaluation_strategy")
    judged = sheet.on("do_eval") or sheet.on("do_predict") or strategy in ("steps", "epoch")
    if judged and not data and split < 1e-6:
        what = Message("llamafactory.nothing-to-evaluate")
        place = "eval_strategy" if sheet.has("eval_strategy") else "do_eval"
        sheet.say("lf-evaluation", place, what, Message("llamafactory.write-evaluation"))
    if data and split > 1e-6:
        sheet.note("lf-evaluation", "val_size", "llamafactory.two-evaluations", KEEP_ONE)
    if sheet.on("streaming"):
        if sheet.on("do_train") and (sheet.number("max_steps") or -1) < 1:
            sheet.note("lf-streaming", "streaming", "llamafactory.stream-needs-steps", propose("max_steps"))
        if sheet.get("max_samples") is not None:
            fix = Message("llamafactory.delete-or-streaming")
            sheet.note("lf-streaming", "max_samples", "llamafactory.stream-max-samples", fix)
        if 1e-6 < split < 1:
            sheet.note("lf-streaming", "val_size", "llamafactory.stream-share", "llamafactory.write-samples")
    _check_method(sheet)
    attention = sheet.get("flash_attn")
    if attention is not None and attention not in _ATTENTION:
        is_bare, words = isinstance(attention, bool), {"False": "disabled", "off": "disabled", "True": "fa2"}
        said = "llamafactory.bare-attention" if is_bare else "llamafactory.refuses-attention"
        right = words.get(str(attention)) or Choice(("auto", "sdpa", "fa2", "disabled"))
        sheet.say("lf-attention", "flash_attn", Message(said, attention=shown(attention)), propose(right))
    if sheet.get("gradient_checkpointing") is False and not sheet.on("disable_gradient_checkpointing"):
        fix = propose("disable_gradient_checkpointing: true")
        sheet.note("lf-checkpointing", "gradient_checkpointing", "llamafactory.switches-on", fix)
    if sheet.on("packing") and not sheet.on("neat_packing") and (sheet.get("stage") or "sft") == "sft":
        sheet.note("lf-packing", "packing", "llamafactory.packed-see-each-other", "llamafactory.write-neat")
    if sheet.on("neat_packing") and (sheet.get("stage") or "sft") != "sft":
        sheet.note("lf-method", "neat_packing", "llamafactory.neat-only-sft", DELETE)
    if sheet.get("deepspeed") and sheet.world == 1:
        what = Message("llamafactory.one-gpu-no-torchrun")
        sheet.say("lf-force-torchrun", "deepspeed", what, Message("llamafactory.use-force-torchrun"))
    deepspeed = arguments.check_deepspeed_pair(sheet)
    # LLaMA-Factory's own list of what does not go together. None: FSDP, or neither
    stage3 = deepspeed is not None and stage_of(deepspeed) == 3
    fsdp = bool(sheet.get("fsdp"))
    bits, library = sheet.number("quantization_bit"), str(sheet.get("quantization_method") or "bnb")
    if (stage3 or fsdp) and bits is not None:
        engine = "ZeRO-3" if stage3 else "FSDP"
        if library in ("hqq", "eetq"):
            what = Message("llamafactory.refuses-library", library=library, engine=engine)
            sheet.say("pair-quantization", "quantization_method", what, Message("llamafactory.write-bnb"))
        elif bits != 4:
            what = Message("llamafactory.refuses-sharded-bits", bits=bits, engine=engine)
            sheet.say("pair-quantization", "quantization_bit", what, Message("llamafactory.write-4-bits"))
    if stage3:
        for key, fix in _ZERO3_REFUSES.items():
            if sheet.on(key):
                sheet.note("pair-zero3", key, "llamafactory.refuses-under-zero3", fix, key=key)
    if deepspeed is not None:
        for key in ("use_galore", "use_apollo"):
            if sheet.on(key):
                what = Message("llamafactory.refuses-with-deepspeed", key=key)
                sheet.say("pair-deepspeed", key, what, Message("llamafactory.delete-deepspeed"))
        if sheet.on("use_badam") and not stage3:
            sheet.note("pair-deepspeed", "use_badam", "llamafactory.badam-needs-zero3", "llamafactory.use-stage3")
    return deepspeed


def _check_method(sheet: Sheet) -> None:
    method = sheet.get("finetuning_type") or "lora"
    if method not in _METHODS:
        close = nearest(str(method), _METHODS) or Choice(_METHODS)
        what = Message("llamafactory.refuses-method", method=shown(method))
        fix = Message("llamafactory.write-qlora") if str(method).lower() == "qlora" else propose(close)
        sheet.say("lf-method", "finetuning_type", what, fix)
        return
    idle = [key for key in _LORA_KEYS if sheet.has(key)]
    if method in ("full", "freeze") and idle:
        what = Message("llamafactory.no-adapters", method=method, idle=", ".join(idle))
        sheet.say("lf-method-keys", idle[0], what, Message("llamafactory.delete-them-or-lora"))
    for key in _LORA_ONLY:
        if method != "lora" and sheet.on(key):
            what = Message("llamafactory.refuses-with-method", key=key, method=method)
            sheet.say("lf-method", key, what, Message("llamafactory.delete-or-lora"))
    if method != "lora" and sheet.get("adapter_name_or_path"):
        what = Message("llamafactory.refuses-adapter", method=method)
        sheet.say("lf-method", "adapter_name_or_path", what, propose("finetuning_type: lora"))
    heavy = [key for key in ("use_galore", "use_apollo", "use_badam") if sheet.on(key)]
    if heavy and (method == "lora" or len(heavy) > 1):
        said = "llamafactory.refuses-with-lora" if method == "lora" else "llamafactory.refuses-together"
        what = Message(said, keys=Listing(heavy, "and"))
        sheet.say("lf-method", heavy[0], what, Message("llamafactory.keep-one-full"))
    if method == "lora" and sheet.has("lora_rank") and not sheet.get("lora_alpha"):
        what = Message("llamafactory.alpha-left-out", value=2 * (sheet.number("lora_rank") or 8))
        sheet.say("lf-lora-alpha", "lora_rank", what, Message("llamafactory.write-alpha"))
    bits, library = sheet.number("quantization_bit"), str(sheet.get("quantization_method") or "bnb")
    if bits is None:
        return
    if method not in ("lora", "oft"):
        what = Message("llamafactory.refuses-quantised", method=method)
        sheet.say("lf-quantization", "quantization_bit", what, Message("llamafactory.lora-or-no-bits"))
    if library in _BITS and bits not in _BITS[library]:
        takes = listed(map(str, _BITS[library]))
        what = Message("llamafactory.refuses-bits", library=library, bits=bits, takes=takes)
        sheet.say("lf-quantization", "quantization_bit", what, propose(takes))
    for key in ("pissa_init", "resize_vocab"):
        if sheet.on(key):
            what = Message("llamafactory.refuses-on-quantised", key=key)
            sheet.say("lf-quantization", key, what, Message("llamafactory.delete-or-bits"))


_ZERO3_REFUSES = {
    "pure_bf16": Message("llamafactory.use-bf16"),
    "use_unsloth": Message("llamafactory.use-lower-no-unsloth"),
    "use_kt": Message("llamafactory.use-lower"),
    "pissa_init": Message("llamafactory.use-pissa-script"),
    "predict_with_generate": Message("llamafactory.use-lower-evaluating"),
}


RULES = rules(
    """lf-unknown! lf-foreign? lf-version! lf-json-file! lf-template! lf-reasoning-template? lf-no-template?
    lf-not-training! lf-no-dataset! lf-evaluation! lf-streaming! lf-quantization! lf-method-keys? lf-method!
    lf-attention! lf-checkpointing? lf-lora-alpha. lf-packing. lf-force-torchrun. pair-quantization! pair-zero3!
    pair-deepspeed!"""
)
