"""Rules for a DeepSpeed JSON, first half: is every key one that DeepSpeed reads, and every value of its kind?

DeepSpeed has two ways with a key that it does not know. Blocks that pydantic reads refuse it; everywhere else, the top
level included, it is ignored, so that `zero_optimisation` trains unsharded and says nothing. The same holds for values:
pydantic turns "500000000" into a number, the rest of the config takes text for text and fails later, or never.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tightfit.formats.deepspeed.check_kinds import TAKES
from tightfit.formats.deepspeed.keys import KEYS, LOUD, REMOVED, REMOVED_FROM_ZERO, REMOVED_IN, SCHEDULERS
from tightfit.formats.deepspeed.versions import ARRIVED, GONE, LEARNT_AFTER, MOVED_DEFAULTS, PYDANTIC_BF16
from tightfit.formats.sheet import Sheet
from tightfit.inputs.spelling import as_number, nearest, shown
from tightfit.inputs.versions import release

FILLED = frozenset(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer.params.lr
    optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay scheduler.params.warmup_min_lr
    scheduler.params.warmup_max_lr scheduler.params.warmup_num_steps scheduler.params.total_num_steps fp16.enabled
    bf16.enabled zero_optimization.reduce_bucket_size zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold zero_optimization.offload_optimizer.device
    zero_optimization.offload_param.device zero_optimization.offload_optimizer.nvme_path
    zero_optimization.offload_param.nvme_path
    zero_optimization.stage3_gather_16bit_weights_on_model_save""".split()
)
"""Keys in which transformers or accelerate replace `auto`."""

_TEXTS = frozenset(
    """nvme_path type job_name output_path output_file group team project workspace api_key experiment_name
    experiment_key results_dir exps_dir metric_path model_info_path""".split()
)
"""Keys whose value is text even where it looks like a number."""

_DEPRECATED = {
    "cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "cpu_offload_use_pin_memory": "pin_memory in offload_optimizer and offload_param",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
_NULL_IS_FINE = ("aio", "bf16", "optimizer.params", "scheduler.params")
"""Blocks that may be null, besides those of zero_optimization."""


def check_keys(sheet: Sheet) -> None:
    """Every rule about keys and the kinds of their values."""
    for place in sheet.document.doubles:
        sheet.say(
            "key-twice",
            place,
            "DeepSpeed refuses a key that stands twice; most other readers keep the last",
            "keep one",
        )
    _check_block(sheet, "")
    _check_deprecated(sheet)
    _check_moved_defaults(sheet)
    _check_texts(sheet)
    _check_auto(sheet)
    if sheet.document.syntax == "hjson" and not sheet.paired:
        sheet.say(
            "ds-hjson",
            "",
            "the file is Hjson (comments, a trailing comma …): DeepSpeed reads it, the Hugging Face layer only plain "
            "JSON",
            f"if transformers or accelerate read the file, {sheet.document.json_remedy}",
        )


def walk(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its value, blocks included, that stands where DeepSpeed looks."""
    for key, value in values.items():
        inner = f"{place}.{key}" if place else key
        yield inner, value
        if isinstance(value, Mapping):
            yield from walk(value, inner)


# --- keys ---------------------------------------------------------------------------------------


def _check_block(sheet: Sheet, path: str) -> None:
    block = sheet.block(path)
    for key, value in block.items():
        place = f"{path}.{key}" if path else key
        if key not in KEYS[path]:
            _unknown(sheet, path, key, place)
        elif _too_new(sheet, place):
            continue
        elif place in KEYS and isinstance(value, Mapping):
            if place != "scheduler.params" or block.get("type") in SCHEDULERS:
                _check_block(sheet, place)
        elif place in KEYS and not _may_stand(place, value):
            _not_a_block(sheet, place, value)


def _unknown(sheet: Sheet, path: str, key: str, place: str) -> None:
    version = sheet.target.deepspeed_version
    if place in GONE or key in (REMOVED if not path else REMOVED_FROM_ZERO if path == "zero_optimization" else ()):
        _removed(sheet, place, GONE.get(place, REMOVED_IN), version)
        return
    if not path and key.startswith(("_", "#", "//", "$")):
        return  # the usual way to leave a comment in plain JSON
    where = f"in {path}" if path else "at the top level"
    ends = f"DeepSpeed knows no {key} {where} and " + (
        "refuses the file" if path in LOUD else "ignores it without a word"
    )
    homes = [home for home, keys in KEYS.items() if key in keys and home != "bfloat16"]
    close = nearest(key, KEYS[path], cutoff=0.75)
    if len(homes) == 1 and not nearest(key, KEYS[path], cutoff=0.9):
        home = f"into {homes[0]}" if homes[0] else "to the top level"
        sheet.say("ds-misplaced", place, ends, f"move it {home}")
    elif path in LOUD:
        sheet.say("ds-refused-key", place, ends, f"write {close}" if close else "delete it")
    elif close:
        sheet.say("ds-typo", place, ends, f"write {close}")
    else:
        sheet.say("ds-unknown", place, ends, "delete it, unless your own script reads it")


def _removed(sheet: Sheet, place: str, gone: str, version: str) -> None:
    if release(version) < release(gone):
        _too_new(sheet, place)
    elif place == "aio.thread_count":
        what = f"DeepSpeed {version} ignores thread_count without a word: it has another name since {gone}"
        sheet.say("ds-unknown", place, what, "write intra_op_parallelism")
    else:
        what = f"DeepSpeed {version} has removed {place} and refuses the file"
        sheet.say("ds-removed", place, what, "delete it")


def _too_new(sheet: Sheet, place: str) -> bool:
    version = sheet.target.deepspeed_version
    first, without = ARRIVED.get(place), LEARNT_AFTER.get(place)
    if first is not None and release(version) < release(first):
        newer = f"use DeepSpeed {first} or newer"
    elif without is not None and release(version) <= release(without):
        newer = f"use a DeepSpeed newer than {without}"
    else:
        return False
    # Before it was pydantic's, bf16 took any key; the top level and aio still do.
    bf16 = place.startswith("bf16.") and release(version) < release(PYDANTIC_BF16)
    if "." not in place or place.startswith("aio.") or bf16:
        what = f"DeepSpeed {version} does not know {place} yet and ignores it without a word"
        sheet.say("ds-not-yet", place, what, f"delete it, or {newer}")
    else:
        what = f"DeepSpeed {version} does not know {place} yet and refuses the file"
        sheet.say("ds-too-new", place, what, f"delete it, or {newer}")
    return True


def _may_stand(place: str, value: object) -> bool:
    """Whether DeepSpeed takes this in place of a block."""
    if value is None:
        return place in _NULL_IS_FINE or place.startswith("zero_optimization.")
    return value == "auto" and "." in place


def _not_a_block(sheet: Sheet, place: str, value: object) -> None:
    if place == "zero_optimization" and isinstance(value, bool):
        what = f"{shown(value)} is an old form: DeepSpeed makes stage {int(value)} of it, whatever you meant"
        sheet.say("ds-not-a-block", place, what, 'write {"stage": 2}, say')
        return
    what = f"{place} must be a block in braces; DeepSpeed fails on {shown(value)}, or ignores it"
    sheet.say("ds-not-a-block", place, what, 'write {"enabled": true}, say, or delete it')


def _check_deprecated(sheet: Sheet) -> None:
    zero = sheet.block("zero_optimization")
    heirs = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
    for old, new in _DEPRECATED.items():
        place = f"zero_optimization.{old}"
        if zero.get(old) is None:
            continue
        if heirs.get(old) in zero:
            sheet.say(
                "ds-same-key", place, f"DeepSpeed refuses {old} beside {heirs[old]}, which replaces it", f"delete {old}"
            )
        else:
            sheet.say("ds-deprecated", place, f"{old} is an old spelling that DeepSpeed still takes", f"write {new}")
    for key in zero:
        if f"stage3_{key}" in zero and key in KEYS["zero_optimization"]:
            what = f"{key} and stage3_{key} are one key, and DeepSpeed refuses both together"
            sheet.say("ds-same-key", f"zero_optimization.{key}", what, f"keep stage3_{key}")


def _check_moved_defaults(sheet: Sheet) -> None:
    """Only where the key would act: clipping always, the others in a block that is there and on."""
    version = sheet.target.deepspeed_version
    for place, since, before, now in MOVED_DEFAULTS:
        if release(version) < release(ARRIVED.get(place, "0")):
            continue
        outer, _, key = place.rpartition(".")
        acts = not outer or (outer == "bf16" and sheet.on("bf16.enabled"))
        acts = acts or sheet.get(f"{outer}.device") in ("cpu", "nvme")
        if acts and not sheet.has(place):
            value = now if release(version) >= release(since) else before
            what = f"{key} is left out: {shown(before)} before DeepSpeed {since} and {shown(now)} since"
            fix = f"write it, {shown(value)} to keep what DeepSpeed {version} does"
            if sheet.paired and place == "gradient_clipping":
                fix = 'write "auto", which becomes the trainer\'s max_grad_norm'
            sheet.say("ds-moved-default", place, what, fix)


# --- values -------------------------------------------------------------------------------------


def _check_texts(sheet: Sheet) -> None:
    """Numbers and switches in quotes."""
    for place, value in walk(sheet.document.values):
        outer, _, key = place.rpartition(".")
        if not isinstance(value, str) or key in _TEXTS or outer not in KEYS or key not in KEYS[outer]:
            continue
        coerced = outer in LOUD and not outer.endswith("params")
        if value.lower() in ("true", "false") and not coerced:
            what = f"{shown(value)} is text, and Python takes any text for true"
            sheet.say("ds-text-switch", place, what, f"write {value.lower()} without quotes")
            continue
        number = as_number(value)
        if number is None or (coerced and place in TAKES and TAKES[place].kind == "switch"):
            continue
        if coerced and not (set("eE.") & set(value) and not key.endswith(("ratio", "scale", "perc"))):
            what = f"DeepSpeed makes a number of {shown(value)}, but the Hugging Face layer compares it as text"
            sheet.say("ds-quoted", place, what, f"write {value} without quotes")
        else:
            what = (
                f"{shown(value)} is text: DeepSpeed does not make a number of it and fails, here or in the first step"
            )
            sheet.say("ds-number-text", place, what, f"write {value} without quotes")


def _check_auto(sheet: Sheet) -> None:
    filled = []
    for place, value in walk(sheet.document.values):
        outer, _, key = place.rpartition(".")
        if value != "auto" or outer not in KEYS or key not in KEYS[outer]:
            continue
        if place in FILLED:
            filled.append(place)
        elif place != "zero_optimization.stage" and outer not in LOUD and place not in KEYS:
            what = f"nobody fills in {place}: DeepSpeed gets the text 'auto'"
            sheet.say("ds-auto-unfilled", place, what, "write a value, or delete it")
    if filled and not sheet.paired:
        sheet.say(
            "ds-auto",
            filled[0],
            f"{len(filled)} values are 'auto', which transformers and accelerate fill in; DeepSpeed alone fails on "
            "them or uses its defaults",
            "write numbers if your script calls deepspeed.initialize itself",
        )
