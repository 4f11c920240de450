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
from tightfit.messages import Message, Said

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

_DEPRECATED: dict[str, Said] = {
    "cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "cpu_offload_use_pin_memory": Message("deepspeed.pin-memory-in-both"),
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
            Message("deepspeed.refuses-twice"),
            Message("lint.keep-one"),
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
            Message("deepspeed.file-is-hjson"),
            Message("deepspeed.if-hugging-face-reads", remedy=sheet.document.json_remedy),
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
        _say_removed(sheet, place, GONE.get(place, REMOVED_IN), version)
        return
    if not path and key.startswith(("_", "#", "//", "$")):
        return  # the usual way to leave a comment in plain JSON
    where = Message("deepspeed.in-block", block=path) if path else Message("deepspeed.at-top")
    ends = Message("deepspeed.refuses-key" if path in LOUD else "deepspeed.ignores-key", key=key, where=where)
    homes = [home for home, keys in KEYS.items() if key in keys and home != "bfloat16"]
    close = nearest(key, KEYS[path], cutoff=0.75)
    if len(homes) == 1 and not nearest(key, KEYS[path], cutoff=0.9):
        home = Message("deepspeed.move-into", block=homes[0]) if homes[0] else Message("deepspeed.move-to-top")
        sheet.say("ds-misplaced", place, ends, home)
    elif path in LOUD:
        sheet.say("ds-refused-key", place, ends, Message("lint.write", what=close) if close else Message("lint.delete"))
    elif close:
        sheet.say("ds-typo", place, ends, Message("lint.write", what=close))
    else:
        sheet.say("ds-unknown", place, ends, Message("deepspeed.delete-unless-yours"))


def _say_removed(sheet: Sheet, place: str, gone: str, version: str) -> None:
    if release(version) < release(gone):
        _too_new(sheet, place)
    elif place == "aio.thread_count":
        what = Message("deepspeed.thread-count", version=version, gone=gone)
        sheet.say("ds-unknown", place, what, Message("lint.write", what="intra_op_parallelism"))
    else:
        what = Message("deepspeed.has-removed", version=version, place=place)
        sheet.say("ds-removed", place, what, Message("lint.delete"))


def _too_new(sheet: Sheet, place: str) -> bool:
    version = sheet.target.deepspeed_version
    first, without = ARRIVED.get(place), LEARNT_AFTER.get(place)
    if first is not None and release(version) < release(first):
        fix = Message("deepspeed.delete-or-since", version=first)
    elif without is not None and release(version) <= release(without):
        fix = Message("deepspeed.delete-or-after", version=without)
    else:
        return False
    # Before it was pydantic's, bf16 took any key; the top level and aio still do.
    bf16 = place.startswith("bf16.") and release(version) < release(PYDANTIC_BF16)
    if "." not in place or place.startswith("aio.") or bf16:
        what = Message("deepspeed.not-yet-ignored", version=version, place=place)
        sheet.say("ds-not-yet", place, what, fix)
    else:
        what = Message("deepspeed.not-yet-refused", version=version, place=place)
        sheet.say("ds-too-new", place, what, fix)
    return True


def _may_stand(place: str, value: object) -> bool:
    """Whether DeepSpeed takes this in place of a block."""
    if value is None:
        return place in _NULL_IS_FINE or place.startswith("zero_optimization.")
    return value == "auto" and "." in place


def _not_a_block(sheet: Sheet, place: str, value: object) -> None:
    if place == "zero_optimization" and isinstance(value, bool):
        what = Message("deepspeed.old-form", value=shown(value), stage=int(value))
        sheet.say("ds-not-a-block", place, what, Message("deepspeed.write-stage-block"))
        return
    what = Message("deepspeed.must-be-block", place=place, value=shown(value))
    sheet.say("ds-not-a-block", place, what, Message("deepspeed.write-enabled-block"))


def _check_deprecated(sheet: Sheet) -> None:
    zero = sheet.block("zero_optimization")
    heirs = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
    for old, new in _DEPRECATED.items():
        place = f"zero_optimization.{old}"
        if zero.get(old) is None:
            continue
        if heirs.get(old) in zero:
            sheet.say(
                "ds-same-key",
                place,
                Message("deepspeed.refuses-old-beside-new", old=old, heirs=heirs[old]),
                Message("lint.delete-key", key=old),
            )
        else:
            sheet.say(
                "ds-deprecated", place, Message("deepspeed.old-spelling", old=old), Message("lint.write", what=new)
            )
    for key in zero:
        if f"stage3_{key}" in zero and key in KEYS["zero_optimization"]:
            what = Message("deepspeed.one-key-twice", key=key)
            sheet.say("ds-same-key", f"zero_optimization.{key}", what, Message("lint.keep", key=f"stage3_{key}"))


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
            what = Message("deepspeed.default-moved", key=key, before=shown(before), since=since, now=shown(now))
            fix = Message("deepspeed.write-to-keep", value=shown(value), version=version)
            if sheet.paired and place == "gradient_clipping":
                fix = Message("deepspeed.write-auto-clipping")
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
            what = Message("deepspeed.text-is-true", value=shown(value))
            sheet.say("ds-text-switch", place, what, Message("lint.write-unquoted", what=value.lower()))
            continue
        number = as_number(value)
        if number is None or (coerced and place in TAKES and TAKES[place].kind == "switch"):
            continue
        if coerced and not (set("eE.") & set(value) and not key.endswith(("ratio", "scale", "perc"))):
            what = Message("deepspeed.compared-as-text", value=shown(value))
            sheet.say("ds-quoted", place, what, Message("lint.write-unquoted", what=value))
        else:
            what = Message("deepspeed.text-not-number", value=shown(value))
            sheet.say("ds-number-text", place, what, Message("lint.write-unquoted", what=value))


def _check_auto(sheet: Sheet) -> None:
    filled = []
    for place, value in walk(sheet.document.values):
        outer, _, key = place.rpartition(".")
        if value != "auto" or outer not in KEYS or key not in KEYS[outer]:
            continue
        if place in FILLED:
            filled.append(place)
        elif place != "zero_optimization.stage" and outer not in LOUD and place not in KEYS:
            what = Message("deepspeed.auto-unfilled", place=place)
            sheet.say("ds-auto-unfilled", place, what, Message("deepspeed.write-value"))
    if filled and not sheet.paired:
        sheet.say(
            "ds-auto",
            filled[0],
            Message("deepspeed.autos", filled=len(filled)),
            Message("deepspeed.write-numbers"),
        )
