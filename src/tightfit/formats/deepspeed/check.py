"""Rules for a DeepSpeed config, whether it stands alone or a trainer's config names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tightfit.formats.deepspeed.keys import (
    ARRIVED,
    FILLED,
    GONE,
    KEYS,
    LEARNT_AFTER,
    LOUD,
    MOVED_DEFAULTS,
    PREFIXED,
    PYDANTIC_BF16,
    REMOVED_IN,
    SCHEDULER_PARAMS,
    TAKES,
    TEXTS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    WARMUP_CHECKED_SINCE,
    KeyTakes,
)
from tightfit.formats.deepspeed.read import read_deepspeed
from tightfit.formats.document import Document, read_document
from tightfit.formats.rules import DELETE, IN_ANY_FILE, KEEP_ONE, Sheet, part_fault, propose, rules, say_fault
from tightfit.inputs.spelling import as_number, nearest, shown
from tightfit.inputs.versions import release
from tightfit.messages import Message, Said, id_of
from tightfit.types import ConfigError


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
        # What cannot be priced may be quite right; an unknown key, which is about none, has rules of its own; and
        # DeepSpeed takes what we do not, a switch as "yes", say.
        if error.at and id_of(error.said) not in _NOT_WRONG and all(each.place != error.at for each in sheet.found):
            say_fault(sheet, "ds-value", error, Message("lint.as-deepspeeds-docs"))


_NOT_WRONG = ("deepspeed.stage-auto", "deepspeed.optimizer-meant", "deepspeed.optimizer-unknown")


def deepspeed_beside(sheet: Sheet, place: str) -> Sheet | None:
    """The DeepSpeed file that a config names at a place, or that it holds as a block; None where there is none."""
    value = sheet.get(place)
    if isinstance(value, Mapping) and value and "." not in place:
        document = sheet.document.block(place)
    elif not isinstance(value, str) or value.strip() in ("", "none") or not (named := _read(sheet, place, value)):
        return None
    else:
        document = named
    if document.syntax == "hjson" and not document.within:
        sheet.say("pair-hjson", place, Message("lint.pair-hjson", file=document.path.name), document.json_remedy)
    return Sheet(document=document, rules=RULES, target=sheet.target, world=sheet.world, paired=True)


def _read(sheet: Sheet, place: str, name: str) -> Document | None:
    """The file of that name. Where there is none, the trainer fails as well."""
    found = None
    with suppress(ValueError, RuntimeError, OSError):  # a path that no file system can hold, a home that nobody has
        places = (Path(name).expanduser(), sheet.document.path.parent / name)
        found = next((each for each in places if each.is_file()), None)
    if found is None:
        folder = sheet.document.path.parent
        close = nearest(Path(name).name, [other.name for other in folder.glob("*.json")]) if folder.is_dir() else None
        fix, file = propose(close) if close else Message("lint.write-its-path"), sheet.document.path.name
        sheet.note("pair-missing", place, "lint.pair-missing", fix, name=shown(name), file=file)
        return None
    try:
        return read_document(found)
    except ConfigError as error:
        problem, remedy = part_fault(error)
        what = Message("lint.cannot-start", what=problem)
        sheet.say("pair-missing", place, what, remedy or Message("lint.write-deepspeed-config"))
        return None


RULES = IN_ANY_FILE | rules(
    """ds-typo! ds-misplaced! ds-refused-key! ds-unknown? ds-removed! ds-too-new! ds-not-yet? ds-moved-default.
    ds-deprecated? ds-same-key! ds-not-a-block! ds-number-text! ds-quoted? ds-text-switch! ds-stage! ds-value! ds-auto.
    ds-auto-unfilled! ds-hjson. ds-offload-param-stage! ds-offload-stage0! ds-nvme-stage! ds-nvme-path!
    ds-super-offload-stage! ds-ratio-stage! ds-stage3-keys? ds-round-robin? ds-buckets? ds-gather. ds-two-precisions!
    ds-no-precision. ds-static-scale? ds-first-scale. ds-master-weights! ds-optimizer! ds-untested-optimizer!
    ds-slow-offload? ds-adam-is-adamw. ds-scheduler! ds-scheduler-params! ds-no-batch! ds-batch!
    ds-activation-checkpointing?"""
)


# --------------------------------------------------------------------------------------------------
# Rules for a DeepSpeed JSON, first half: is every key one that DeepSpeed reads, and every value of its kind?
#
# DeepSpeed has two ways with a key that it does not know. Blocks that pydantic reads refuse it; everywhere else, the
# top level included, it is ignored, so that `zero_optimisation` trains unsharded and says nothing. The same holds for
# values: pydantic turns "500000000" into a number, the rest of the config takes text for text and fails later, or
# never.

_DEPRECATED: dict[str, Said] = {
    "cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "cpu_offload_use_pin_memory": Message("deepspeed.pin-memory-in-both"),
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
_HEIRS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_NULL_IS_FINE = ("aio", "bf16", "optimizer.params", "scheduler.params")
"""Blocks that may be null, besides those of zero_optimization."""


def check_keys(sheet: Sheet) -> None:
    """Every rule about keys and the kinds of their values."""
    for place in sheet.document.doubles:
        sheet.note("key-twice", place, "deepspeed.refuses-twice", KEEP_ONE)
    _check_block(sheet, "")
    # old spellings, and two spellings of one key
    zero = sheet.block("zero_optimization")
    for old, new in _DEPRECATED.items():
        place, heir = f"{_ZERO}.{old}", _HEIRS.get(old)
        if zero.get(old) is not None and heir in zero:
            delete = Message("lint.delete-key", key=old)
            sheet.note("ds-same-key", place, "deepspeed.refuses-old-beside-new", delete, old=old, heirs=heir)
        elif zero.get(old) is not None:
            sheet.note("ds-deprecated", place, "deepspeed.old-spelling", propose(new), old=old)
    for key in zero:
        if f"stage3_{key}" in zero and key in KEYS["zero_optimization"]:
            what = Message("deepspeed.one-key-twice", key=key)
            sheet.say("ds-same-key", f"zero_optimization.{key}", what, Message("lint.keep", key=f"stage3_{key}"))
    # only where the key would act: clipping always, the others in a block that is there and on
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
    # numbers and switches in quotes
    for place, value in walk(sheet.document.values):
        outer, _, key = place.rpartition(".")
        if not isinstance(value, str) or key in TEXTS or key not in KEYS.get(outer, ()):
            continue
        coerced = outer in LOUD and not outer.endswith("params")
        if value.lower() in ("true", "false") and not coerced:
            what = Message("deepspeed.text-is-true", value=shown(value))
            sheet.say("ds-text-switch", place, what, Message("lint.write-unquoted", what=value.lower()))
            continue
        if as_number(value) is None or (coerced and place in TAKES and TAKES[place].kind == "switch"):
            continue
        fix = Message("lint.write-unquoted", what=value)
        if coerced and not (set("eE.") & set(value) and not key.endswith(("ratio", "scale", "perc"))):
            sheet.note("ds-quoted", place, "deepspeed.compared-as-text", fix, value=shown(value))
        else:
            sheet.note("ds-number-text", place, "deepspeed.text-not-number", fix, value=shown(value))
    # `auto`, which the Hugging Face layer fills in where it knows how
    filled = []
    for place, value in walk(sheet.document.values):
        outer, _, key = place.rpartition(".")
        if value != "auto" or key not in KEYS.get(outer, ()):
            continue
        if place in FILLED:
            filled.append(place)
        elif place != "zero_optimization.stage" and outer not in LOUD and place not in KEYS:
            sheet.note("ds-auto-unfilled", place, "deepspeed.auto-unfilled", "deepspeed.write-value", place=place)
    if filled and not sheet.paired:
        sheet.note("ds-auto", filled[0], "deepspeed.autos", "deepspeed.write-numbers", filled=len(filled))
    if sheet.document.syntax == "hjson" and not sheet.paired:
        fix = Message("deepspeed.if-hugging-face-reads", remedy=sheet.document.json_remedy)
        sheet.note("ds-hjson", "", "deepspeed.file-is-hjson", fix)


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
        elif _too_new(sheet, place) or place not in KEYS:
            continue
        elif isinstance(value, Mapping):
            if place != "scheduler.params" or str(block.get("type")) in SCHEDULER_PARAMS:
                _check_block(sheet, place)
        elif not (
            place in _NULL_IS_FINE or place.startswith("zero_optimization.")
            if value is None
            else value == "auto" and "." in place
        ):
            what = Message("deepspeed.must-be-block", place=place, value=shown(value))
            fix = Message("deepspeed.write-enabled-block")
            if place == "zero_optimization" and isinstance(value, bool):
                what = Message("deepspeed.old-form", value=shown(value), stage=int(value))
                fix = Message("deepspeed.write-stage-block")
            sheet.say("ds-not-a-block", place, what, fix)


def _unknown(sheet: Sheet, path: str, key: str, place: str) -> None:
    version = sheet.target.deepspeed_version
    if gone := GONE.get(place):
        if release(version) < release(gone):
            _too_new(sheet, place)
        elif place == "aio.thread_count":
            what = Message("deepspeed.thread-count", version=version, gone=gone)
            sheet.say("ds-unknown", place, what, propose("intra_op_parallelism"))
        else:
            sheet.note("ds-removed", place, "deepspeed.has-removed", DELETE, version=version, place=place)
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
        sheet.say("ds-refused-key", place, ends, propose(close))
    elif close:
        sheet.say("ds-typo", place, ends, propose(close))
    else:
        sheet.say("ds-unknown", place, ends, Message("deepspeed.delete-unless-yours"))


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
        sheet.note("ds-not-yet", place, "deepspeed.not-yet-ignored", fix, version=version, place=place)
    else:
        sheet.note("ds-too-new", place, "deepspeed.not-yet-refused", fix, version=version, place=place)
    return True


# --------------------------------------------------------------------------------------------------
# Rules for a DeepSpeed JSON: is each value one that its key takes?
#
# The blocks that pydantic reads are strict about ranges and lenient about spelling: "yes" is true and "12" is a
# number there, -1 and "maybe" are refused. The top level has no such reader. Its values are used as they are, so that
# a wrong one fails in an addition somewhere, or never. `TAKES` says what each key takes.

_ZERO = "zero_optimization"
_TRUE, _FALSE = ("1", "on", "t", "true", "y", "yes"), ("0", "off", "f", "false", "n", "no")
"""Text that pydantic takes for a switch, in any case of letters."""


def check_kinds(sheet: Sheet) -> None:
    """Every value against what its key takes. `auto`, and numbers in quotes, have rules of their own."""
    for place, takes in TAKES.items():
        value = sheet.get(place)
        if not sheet.has(place) or value == "auto":
            continue
        if takes.kind == "switch" and isinstance(value, str):
            _switch_in_words(sheet, place, value)
        elif not _is_taken(place, value, takes):
            _refuse(sheet, place, value, takes)
    if sheet.get(f"{_ZERO}.compute_grad_norm") in (False, 0) and sheet.number(f"{_ZERO}.stage") not in (1, 2):
        sheet.note("ds-value", f"{_ZERO}.compute_grad_norm", "deepspeed.grad-norm-stage", DELETE)
    kind = sheet.get("optimizer.type")
    if sheet.has("optimizer.type") and kind is not None and not isinstance(kind, str):
        what = Message("deepspeed.optimizer-is-name", kind=shown(kind))
        sheet.say("ds-value", "optimizer.type", what, propose('"AdamW"'))
    _check_scheduler(sheet)


def _is_taken(place: str, value: Any, takes: KeyTakes) -> bool:
    if value is None:
        return takes.nullable
    if takes.kind == "switch":
        return isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)) or "." not in place
    if takes.kind == "words":
        if not isinstance(value, str):
            return False
        # Devices are pydantic's; the others DeepSpeed reads in any case of letters.
        return value in takes.words or (not place.endswith(".device") and value.lower() in map(str.lower, takes.words))
    number = as_number(value) if isinstance(value, str) else value
    if isinstance(value, str) and number is not None and ("." not in place or takes.kind == "whole"):
        return True  # a number in quotes: said with the others of its kind
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    if takes.kind == "whole" and isinstance(number, float) and not number.is_integer():
        return False
    if takes.open_ends and number in (takes.least, takes.most):
        return False
    return (takes.least is None or number >= takes.least) and (takes.most is None or number <= takes.most)


def _switch_in_words(sheet: Sheet, place: str, value: str) -> None:
    """`true` and `false` outside pydantic's blocks are said where numbers in quotes are."""
    word, block = value.lower(), place.rpartition(".")[0]
    meant = "true" if word in _TRUE else "false" if word in _FALSE else None
    if as_number(value) is not None and block not in LOUD:
        return  # a number in quotes, said with the others
    if block in LOUD and (
        block not in ("fp16", "bf16", "bfloat16") or release(sheet.target.deepspeed_version) >= release(PYDANTIC_BF16)
    ):
        if meant is None:
            _refuse(sheet, place, value, TAKES[place])
        else:
            fix = Message("lint.write-unquoted", what=meant)
            sheet.note("ds-quoted", place, "deepspeed.switch-as-text", fix, meant=meant, value=shown(value))
    elif word not in ("true", "false"):
        fix = Message("lint.write-unquoted", what=meant or Message("deepspeed.true-or-false"))
        sheet.note("ds-text-switch", place, "deepspeed.text-is-true", fix, value=shown(value))


def _refuse(sheet: Sheet, place: str, value: Any, takes: KeyTakes) -> None:
    key, fix = place.rpartition(".")[2], propose(takes.phrase)
    what = Message("deepspeed.must-be", key=key, phrase=takes.phrase, value=shown(value))
    if isinstance(value, bool) and takes.kind != "words" and place != "fp16.loss_scale":
        what = Message("deepspeed.taken-for", key=key, phrase=takes.phrase, value=shown(value), number=int(value))
    elif place == "gradient_clipping":
        what = Message("deepspeed.clips-nothing", key=key, phrase=takes.phrase, value=shown(value))
        fix = Message("deepspeed.write-clipping")
    elif "." not in place and isinstance(value, float) and value > 0:
        what = Message("deepspeed.counts-wrong", key=key, phrase=takes.phrase, value=value)
        fix = propose(max(1, round(value)))
    elif takes.kind == "words" and isinstance(value, str) and (close := nearest(value, takes.words, cutoff=0.7)):
        fix = propose(f'"{close}"')
    elif place.endswith(".device"):
        fix = Message("deepspeed.write-device", block=place.split(".")[-2])
    elif value is None:
        fix = Message("deepspeed.delete-for-default", phrase=takes.phrase)
    sheet.say("ds-value", place, what, fix)


# --- the scheduler ------------------------------------------------------------------------------

_EXAMPLES = {"total_num_steps": "10000", "cycle_min_lr": "1e-5", "cycle_max_lr": "1e-4"}


def _check_scheduler(sheet: Sheet) -> None:
    kind, place = sheet.get("scheduler.type"), "scheduler.params"
    if not isinstance(kind, str) or kind not in SCHEDULER_PARAMS:
        return
    takes = SCHEDULER_PARAMS[kind]
    missing = [key for key, mark in takes.items() if mark and sheet.get(f"{place}.{key}") is None]
    if missing:
        value = '"auto"' if sheet.paired and missing == ["total_num_steps"] else _EXAMPLES[missing[0]]
        what = Message("deepspeed.scheduler-misses", kind=kind, missing=" and ".join(missing))
        sheet.say("ds-scheduler-params", place, what, Message("deepspeed.add-param", missing=missing[0], value=value))
    elif not isinstance(sheet.get(place), Mapping):
        fix = Message("deepspeed.add-empty-params")
        sheet.note("ds-scheduler-params", place, "deepspeed.scheduler-needs-params", fix, kind=kind)
    for key in sheet.block(place):
        if key in KEYS[place] - set(takes):
            what = Message("deepspeed.scheduler-has-not", kind=kind, key=key)
            fix = propose(Message("deepspeed.warmup-min-ratio") if key == "warmup_min_lr" else None)
            sheet.say("ds-scheduler-params", f"{place}.{key}", what, fix)
    steps = sheet.get(f"{place}.warmup_num_steps")
    is_checked = release(sheet.target.deepspeed_version) >= release(WARMUP_CHECKED_SINCE)
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    if steps not in (None, "auto") and is_checked and not is_count:
        what = Message("deepspeed.warmup-steps", steps=shown(steps))
        number = sheet.number(f"{place}.warmup_num_steps")
        sheet.say("ds-scheduler-params", f"{place}.warmup_num_steps", what, propose(max(1, round(number or 1))))


DEEPSPEED_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
_OLDER_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")  # gone with `REMOVED_IN`
_ZERO_KNOWS = ("adagrad", "adam", "adamw", "lion", "muon", "muadam", "muadamw")
_HAS_CPU_KERNEL = ("adam", "adamw", "adagrad", "lion", "muon")

_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "consecutive_hysteresis")
_LARGE_BUCKET = 1_000_000_000
_GIB = 1024**3


def check_values(sheet: Sheet) -> None:
    """Every rule about what the values mean together."""
    stage = _check_stage(sheet)
    if stage is not None:
        for kind in ("offload_param", "offload_optimizer"):
            device = offload_of(sheet, kind)
            place = f"zero_optimization.{kind}"
            if device == "none":
                continue
            if kind == "offload_param" and stage < 3:
                what = Message("deepspeed.weights-stay", stage=stage)
                sheet.say("ds-offload-param-stage", place, what, Message("deepspeed.stage3-or-no-param"))
            elif stage == 0:
                sheet.note("ds-offload-stage0", place, "deepspeed.stage0-offload", "deepspeed.stage-or-no-optimizer")
            elif device == "nvme" and stage < 3:
                what = Message("deepspeed.nvme-becomes-ram", stage=stage)
                sheet.say("ds-nvme-stage", f"{place}.device", what, Message("deepspeed.cpu-or-stage3"))
            elif device == "nvme" and not sheet.get(f"{place}.nvme_path"):
                sheet.note("ds-nvme-path", f"{place}.device", "deepspeed.nvme-without-path", "deepspeed.add-nvme-path")
        place = "zero_optimization.offload_optimizer"
        ratio = sheet.number(f"{place}.ratio")
        if ratio is not None and ratio < 1 and stage < 3:
            what = Message("deepspeed.ratio-needs-stage3", ratio=ratio, stage=stage)
            sheet.say("ds-ratio-stage", f"{place}.ratio", what, Message("deepspeed.stage3-or-no-ratio"))
        if sheet.on(f"{place}.super_offload") and stage < 3:
            what = Message("deepspeed.super-offload-ignored", stage=stage)
            sheet.say("ds-super-offload-stage", f"{place}.super_offload", what, Message("deepspeed.stage3-or-delete"))
        _check_stage_keys(sheet, stage)
    bf16 = "bf16" if sheet.has("bf16") else "bfloat16"
    if sheet.on("fp16.enabled") and sheet.on(f"{bf16}.enabled"):
        sheet.note("ds-two-precisions", "fp16.enabled", "deepspeed.refuses-both-precisions", "deepspeed.enable-one")
    auto = "auto" in (sheet.get("fp16.enabled"), sheet.get(f"{bf16}.enabled"))
    chosen = auto or any(sheet.on(f"{name}.enabled") for name in ("fp16", bf16, "torch_autocast"))
    meant = any(sheet.get(f"{name}.enabled") is False for name in ("fp16", bf16))
    if not chosen and not meant and not sheet.paired:
        sheet.note("ds-no-precision", "bf16.enabled", "deepspeed.trains-in-fp32", "deepspeed.write-bf16")
    if sheet.on("fp16.enabled"):
        static = sheet.number("fp16.loss_scale")
        idle = [key for key in _DYNAMIC_SCALE if sheet.has(f"fp16.{key}")]
        if static and idle:
            what = Message("deepspeed.fixed-scale", static=static, idle=", ".join(idle))
            sheet.say("ds-static-scale", f"fp16.{idle[0]}", what, Message("deepspeed.write-dynamic-scale"))
        power = sheet.number("fp16.initial_scale_power")
        if not static and (power is None or power >= 16):
            begin = 16 if power is None else int(power)
            what = Message("deepspeed.first-scale", begin=begin)
            sheet.say("ds-first-scale", "fp16.initial_scale_power", what, Message("deepspeed.write-lower-scale"))
    _check_master_weights(sheet, bf16, stage or 0)
    kind = sheet.get("optimizer.type")
    if isinstance(kind, str):
        _check_optimizer_kind(sheet, kind, stage or 0)
    scheduler = sheet.get("scheduler.type")
    if isinstance(scheduler, str) and scheduler not in (*SCHEDULER_PARAMS, *TORCH_SCHEDULERS):
        close = nearest(scheduler, SCHEDULER_PARAMS) or "WarmupDecayLR"
        what = Message("deepspeed.no-such-scheduler", scheduler=shown(scheduler))
        sheet.say("ds-scheduler", "scheduler.type", what, Message("deepspeed.write-own-scheduler", close=close))
    _check_batch(sheet)
    block = sheet.get("activation_checkpointing")
    if isinstance(block, Mapping) and any(block.values()):
        fix = Message("deepspeed.use-trainers-checkpointing")
        sheet.note("ds-activation-checkpointing", "activation_checkpointing", "deepspeed.checkpointing-block", fix)


def stage_of(sheet: Sheet) -> int:
    """The ZeRO stage that DeepSpeed would take."""
    stage = sheet.number("zero_optimization.stage")
    return int(stage) if stage in (0, 1, 2, 3) else 0


def offload_of(sheet: Sheet, kind: str) -> str:
    """Where `offload_optimizer` or `offload_param` put things: none, cpu or nvme."""
    device = sheet.get(f"zero_optimization.{kind}.device")
    if any(heir == kind and sheet.get(f"{_ZERO}.{old}") is True for old, heir in _HEIRS.items()):
        return "cpu"
    return device if device in ("cpu", "nvme") else "none"


def _check_stage(sheet: Sheet) -> int | None:
    place = "zero_optimization.stage"
    stage = sheet.get(place)
    if stage == "auto" and not sheet.paired:
        sheet.note("ds-stage", place, "deepspeed.stage-unfilled", "deepspeed.write-sharding-stage")
        return None
    if sheet.has(place) and stage != "auto" and sheet.number(place) not in (0, 1, 2, 3):
        sheet.note("ds-stage", place, "deepspeed.refuses-stage", "deepspeed.write-any-stage", stage=shown(stage))
        return None
    return stage_of(sheet)


# --- ZeRO ---------------------------------------------------------------------------------------


def _check_stage_keys(sheet: Sheet, stage: int) -> None:
    zero, robin = sheet.block(_ZERO), f"{_ZERO}.round_robin_gradients"
    if stage == 3:
        if sheet.on(robin):
            sheet.note("ds-round-robin", robin, "deepspeed.stage3-round-robin", DELETE)
        name, old = "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"
        if not (zero.get(name) or zero.get(name.removeprefix("stage3_")) or zero.get(old)):
            fix = Message("deepspeed.write-gather", name=name)
            sheet.note("ds-gather", f"{_ZERO}.{name}", "deepspeed.saves-shards", fix)
        return
    if stage == 0 and sheet.on(robin):
        sheet.note("ds-round-robin", robin, "deepspeed.stage0-round-robin", "deepspeed.delete-or-stage2")
    only3 = [*(f"stage3_{key}" for key in PREFIXED), "zero_quantized_weights", "zero_quantized_nontrainable_weights"]
    idle = [key for key in (*only3, "sub_group_size", "memory_efficient_linear") if zero.get(key) not in (None, False)]
    if idle:
        what = Message("deepspeed.stage3-only", key=idle[0], more=len(idle) - 1 or None, stage=stage)
        sheet.say("ds-stage3-keys", f"zero_optimization.{idle[0]}", what, Message("deepspeed.delete-or-stage3"))
    place = "zero_optimization.reduce_bucket_size"
    size = sheet.number(place)
    if stage in (1, 2) and size and size >= _LARGE_BUCKET and sheet.on("zero_optimization.overlap_comm"):
        what = Message("deepspeed.two-buckets", gib=2 * 2 * size / _GIB)
        sheet.say("ds-buckets", place, what, Message("deepspeed.write-smaller-bucket"))


# --- precision ----------------------------------------------------------------------------------


def _check_master_weights(sheet: Sheet, bf16: str, stage: int) -> None:
    offload = offload_of(sheet, "offload_optimizer")
    for name, key in ((bf16, "bf16_master_weights_and_grads"), ("fp16", "fp16_master_weights_and_grads")):
        place, states = f"{name}.{key}", f"{name}.bf16_optimizer_states"
        has_states = name != "fp16" and sheet.on(states)
        if not sheet.on(place):
            if has_states:
                fix = Message("deepspeed.add-true", key=key)
                sheet.note("ds-master-weights", states, "deepspeed.states-need-masters", fix)
        elif stage == 0 or (offload == "none" and not has_states):
            what = Message("deepspeed.masters-need-zero", key=key)
            sheet.say("ds-master-weights", place, what, Message("deepspeed.write-stage2-offload"))


# --- optimizer and scheduler --------------------------------------------------------------------


def _check_optimizer_kind(sheet: Sheet, kind: str, stage: int) -> None:
    name, place = kind.lower(), "optimizer.type"
    if name in _OLDER_OPTIMIZERS and release(sheet.target.deepspeed_version) < release(REMOVED_IN):
        return
    if name not in DEEPSPEED_OPTIMIZERS and kind not in TORCH_OPTIMIZERS:
        close = nearest(kind, ("AdamW", "Adam", *TORCH_OPTIMIZERS)) or "AdamW"
        what = Message("deepspeed.no-such-optimizer", version=sheet.target.deepspeed_version, kind=shown(kind))
        sheet.say("ds-optimizer", place, what, propose(close))
        return
    if stage and name not in _ZERO_KNOWS and not sheet.on("zero_allow_untested_optimizer"):
        sheet.note("ds-untested-optimizer", place, "deepspeed.untested", "deepspeed.allow-untested", kind=kind)
    offloaded = stage and offload_of(sheet, "offload_optimizer") != "none"
    if offloaded and (name not in _HAS_CPU_KERNEL or sheet.on("optimizer.params.torch_adam")):
        sheet.note("ds-slow-offload", place, "deepspeed.slow-offload", "deepspeed.write-adamw")
    if name == "adam" and sheet.get("optimizer.params.adam_w_mode") is None:
        sheet.note("ds-adam-is-adamw", place, "deepspeed.adam-is-adamw", "deepspeed.adamw-or-mode")


# --- batch and checkpointing --------------------------------------------------------------------

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _check_batch(sheet: Sheet) -> None:
    if sheet.get(_TOTAL) is None and sheet.get(_MICRO) is None:
        what = Message("deepspeed.no-batch", total=_TOTAL, micro=_MICRO)
        sheet.say("ds-no-batch", _MICRO, what, Message("deepspeed.add-micro-batch", micro=_MICRO))
        return
    total, micro, steps = sheet.number(_TOTAL), sheet.number(_MICRO), sheet.number(_STEPS)
    if not total or "auto" in (sheet.get(_TOTAL), sheet.get(_MICRO), sheet.get(_STEPS)):
        return
    world = sheet.world
    product = (micro or 1) * (steps or 1) * (world or 1)
    exact = world is not None and micro is not None and steps is not None
    factors = [f"{key} {value:g}" for key, value in ((_MICRO, micro), (_STEPS, steps)) if value]
    factors += [f"{world} GPUs"] if world else []
    if not factors or product == total or (not exact and product and total % product == 0):
        return
    said = "deepspeed.batch-differs" if exact else "deepspeed.batch-no-multiple"
    what = Message(said, total=total, words=" × ".join(factors), product=product)
    # what makes the product right: the nearest batch, or the same batch in other steps
    fix = Message("deepspeed.product-batch", product=product, total=_TOTAL)
    if not exact:
        fix = Message("deepspeed.nearest-batch", value=max(1, round(total / product)) * product, total=_TOTAL)
    for key, value in ((_MICRO, micro or 1), (_STEPS, steps or 1)) if exact else ():
        other = total * value / product
        if other >= 1 and other.is_integer():
            fix = Message("deepspeed.other-steps", product=product, key=key, other=other, total=total)
    sheet.say("ds-batch", _TOTAL, what, fix)
