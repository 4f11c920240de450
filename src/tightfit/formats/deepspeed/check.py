"""Rules for a trainer's config and the DeepSpeed file that it names, read together.

transformers replaces every `auto` in the DeepSpeed file by its own value and refuses a number that differs from it.
Where the file offloads the optimizer, accelerate swaps the trainer's optimizer for DeepSpeed's CPU Adam, whatever it
was. And LLaMA-Factory has a list of its own of what does not go with ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tightfit.formats.deepspeed.check_keys import check_keys
from tightfit.formats.deepspeed.check_kinds import check_kinds
from tightfit.formats.deepspeed.check_values import check_values, offload_of, stage_of
from tightfit.formats.deepspeed.read import read_deepspeed
from tightfit.formats.document import Document, read_document
from tightfit.formats.sentences import begun, parted, place_in
from tightfit.formats.sheet import Sheet
from tightfit.formats.versions import MOVED_DEFAULTS
from tightfit.inputs.spelling import nearest, shown
from tightfit.inputs.versions import release
from tightfit.types import ConfigError

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

_ZERO3_REFUSES = {
    "pure_bf16": "bf16: true instead",
    "use_unsloth": "a stage below 3, or no Unsloth",
    "use_kt": "a stage below 3",
    "pissa_init": "scripts/pissa_init.py before the training",
    "predict_with_generate": "a stage below 3 for the evaluation",
}


def check_deepspeed(sheet: Sheet) -> None:
    """Every rule for a DeepSpeed file, and as a last net what our own reader of such files refuses."""
    check_keys(sheet)
    check_kinds(sheet)
    check_values(sheet)
    if sheet.document.within or any(finding.severity == "error" for finding in sheet.found):
        return
    try:
        read_deepspeed(sheet.document.path, hidden_size=4096, version=sheet.target.deepspeed_version)
    except ConfigError as error:
        sentence = str(error)
        # Unknown keys have rules of their own, and what cannot be priced may be quite right.
        if not any(words in sentence for words in ("unknown key", "not priced", "'auto', and nobody")):
            what, fix = parted(sentence)
            place = place_in(sentence, sheet.document)
            if any(place and finding.place == place for finding in sheet.found):
                return  # a switch as "yes", say: DeepSpeed takes what we do not
            sheet.say("ds-value", place, begun(what, sheet.document), fix or "write what DeepSpeed's own docs give")


def deepspeed_beside(sheet: Sheet, place: str) -> Sheet | None:
    """The DeepSpeed file that a config names at a place, or that it holds as a block; None where there is none."""
    value = sheet.get(place)
    if isinstance(value, Mapping) and value and "." not in place:
        document = sheet.document.block(place)
    elif isinstance(value, str) and value.strip() not in ("", "none"):
        named = _read(sheet, place, value)
        if named is None:
            return None
        document = named
    else:
        return None
    other = Sheet(document=document, target=sheet.target, world=sheet.world, paired=True)
    if document.syntax == "hjson" and not document.within:
        what = f"{document.path.name} has comments or other Hjson: transformers and accelerate read plain JSON and fail"
        sheet.say("pair-hjson", place, what, document.json_remedy)
    return other


def _read(sheet: Sheet, place: str, name: str) -> Document | None:
    """The file of that name. Where there is none, the trainer fails as well."""
    found = _find(name, sheet.document.path)
    if found is None:
        folder = sheet.document.path.parent
        close = nearest(Path(name).name, [other.name for other in folder.glob("*.json")]) if folder.is_dir() else None
        what = (
            f"{shown(name)} is neither in this folder nor beside {sheet.document.path.name}: the training cannot start"
        )
        fix = f"write {close}" if close else "write its path as seen from where the training is started"
        sheet.say("pair-missing", place, what, fix)
        return None
    try:
        return read_document(found)
    except ConfigError as error:
        what, fix = parted(str(error))
        sheet.say("pair-missing", place, f"{what}: the training cannot start", fix or "write a DeepSpeed config there")
        return None


def _find(name: str, beside: Path) -> Path | None:
    try:
        places = (Path(name).expanduser(), beside.parent / name)
        return next((place for place in places if place.is_file()), None)
    except (ValueError, RuntimeError, OSError):  # a path that no file system can hold, a home that nobody has
        return None


# --- TrainingArguments --------------------------------------------------------------------------


def check_arguments_pair(sheet: Sheet, deepspeed: Sheet) -> None:
    """What transformers refuses, replaces or overrules."""
    for field, default, key in _MATCHED:
        theirs = deepspeed.number(key)
        ours = default if sheet.get(field) is None else sheet.number(field)
        if theirs is not None and ours is not None and theirs != ours:
            _mismatch(sheet, deepspeed, field, ours, key)
    micro, steps = _said(sheet, "per_device_train_batch_size", 8), _said(sheet, "gradient_accumulation_steps", 1)
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
    does = f"clips at {clips}" if clips else "clips nothing"
    what = (
        f"DeepSpeed does the clipping, transformers fills in only what {file} has, and gradient_clipping is not there: "
        f"DeepSpeed {version} {does}, whatever max_grad_norm says"
    )
    sheet.say("pair-clipping", "max_grad_norm", what, f'add "gradient_clipping": "auto" to {file}, or {wanted:g}')


def _said(sheet: Sheet, field: str, default: float) -> float:
    number = sheet.number(field)
    return default if number is None else number


def _mismatch(sheet: Sheet, deepspeed: Sheet, field: str, ours: float | bool, key: str) -> None:
    here = shown(ours) if isinstance(ours, bool) else f"{ours:g}"
    left_out = "" if sheet.has(field) else ", by default"
    what = (
        f"{field} makes it {here}{left_out}, and {key} in {deepspeed.document.path.name} is "
        f"{shown(deepspeed.get(key))}: transformers refuses the pair"
    )
    sheet.say("pair-mismatch", field, what, f'write "auto" for {key} in {deepspeed.document.path.name}, or {here}')


def _check_optimizer(sheet: Sheet, deepspeed: Sheet) -> None:
    optim = sheet.get("optim")
    file = deepspeed.document.path.name
    if deepspeed.block("optimizer"):
        kind = deepspeed.get("optimizer.type")
        if isinstance(optim, str) and not optim.startswith("adamw_torch"):
            what = f"{file} brings its own optimizer, {kind}, and optim {optim} has no effect"
            sheet.say("pair-optim-ignored", "optim", what, f"delete optim, or the optimizer block of {file}")
    elif isinstance(optim, str) and optim not in _STAYS and stage_of(deepspeed):
        forced = deepspeed.get("zero_force_ds_cpu_optimizer") is not False
        if offload_of(deepspeed, "offload_optimizer") != "none" and forced:
            what = f"{file} offloads the optimizer, and accelerate trains with DeepSpeed's CPU Adam instead of {optim}"
            sheet.say("pair-optimizer", "optim", what, f"write optim: adamw_torch, or stop offloading in {file}")
    if deepspeed.block("scheduler") and sheet.has("lr_scheduler_type"):
        what = f"{file} brings its own scheduler, {deepspeed.get('scheduler.type')}: lr_scheduler_type has no effect"
        sheet.say("pair-optim-ignored", "lr_scheduler_type", what, f"delete it, or the scheduler block of {file}")


# --- LLaMA-Factory ------------------------------------------------------------------------------


def check_llamafactory_pair(sheet: Sheet, deepspeed: Sheet | None) -> None:
    """LLaMA-Factory's own list of what does not go together. None: FSDP, or neither."""
    stage3 = deepspeed is not None and stage_of(deepspeed) == 3
    fsdp = bool(sheet.get("fsdp"))
    if stage3 or fsdp:
        _check_quantization(sheet, "ZeRO-3" if stage3 else "FSDP")
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


def _check_quantization(sheet: Sheet, engine: str) -> None:
    bits, library = sheet.number("quantization_bit"), str(sheet.get("quantization_method") or "bnb")
    if bits is None:
        return
    if library in ("hqq", "eetq"):
        what = f"LLaMA-Factory refuses {library} quantisation under {engine}"
        sheet.say("pair-quantization", "quantization_method", what, "write bnb with quantization_bit: 4, or use ZeRO-2")
    elif bits != 4:
        what = f"LLaMA-Factory refuses {bits:g}-bit quantisation under {engine}: only 4 bits can be sharded"
        sheet.say("pair-quantization", "quantization_bit", what, "write 4, or use ZeRO-2")


# --- accelerate ---------------------------------------------------------------------------------


def check_accelerate_pair(sheet: Sheet, deepspeed: Sheet) -> None:
    """What accelerate refuses of the file that it is given."""
    if not deepspeed.has("zero_optimization"):
        file = deepspeed.document.path.name
        what = f"accelerate refuses a DeepSpeed file without zero_optimization, and {file} has none"
        sheet.say(
            "pair-no-zero", "deepspeed_config.deepspeed_config_file", what, f'add it to {file}, {{"stage": 0}} at least'
        )
