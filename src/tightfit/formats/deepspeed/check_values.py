"""Rules for a DeepSpeed JSON, second half: do the values go together, and do they do what they seem to say?"""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.formats.deepspeed.keys import PREFIXED, REMOVED_IN, SCHEDULERS
from tightfit.formats.sheet import Sheet
from tightfit.inputs.spelling import nearest, shown
from tightfit.inputs.versions import release
from tightfit.messages import Message

DEEPSPEED_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
TORCH_OPTIMIZERS = tuple(
    """Adadelta Adafactor Adagrad Adam AdamW SparseAdam Adamax ASGD LBFGS Muon NAdam RAdam RMSprop Rprop SGD""".split()
)
_OLDER_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
"""Gone with `REMOVED_IN`."""
_ZERO_KNOWS = ("adagrad", "adam", "adamw", "lion", "muon", "muadam", "muadamw")
_HAS_CPU_KERNEL = ("adam", "adamw", "adagrad", "lion", "muon")

TORCH_SCHEDULERS = tuple(
    """LambdaLR MultiplicativeLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR SequentialLR CosineAnnealingLR
    ChainedScheduler ReduceLROnPlateau CyclicLR CosineAnnealingWarmRestarts OneCycleLR PolynomialLR""".split()
)

_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "consecutive_hysteresis")
_LARGE_BUCKET = 1_000_000_000
_GIB = 1024**3


def check_values(sheet: Sheet) -> None:
    """Every rule about what the values mean together."""
    stage = _check_stage(sheet)
    if stage is not None:
        _check_offload(sheet, stage)
        _check_stage_keys(sheet, stage)
    _check_precision(sheet, stage or 0)
    _check_optimizer(sheet, stage or 0)
    _check_batch(sheet)
    _check_checkpointing(sheet)


def stage_of(sheet: Sheet) -> int:
    """The ZeRO stage that DeepSpeed would take."""
    stage = sheet.number("zero_optimization.stage")
    return int(stage) if stage in (0, 1, 2, 3) else 0


def offload_of(sheet: Sheet, kind: str) -> str:
    """Where `offload_optimizer` or `offload_param` put things: none, cpu or nvme."""
    device = sheet.get(f"zero_optimization.{kind}.device")
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[kind]
    if sheet.get(f"zero_optimization.{old}") is True:
        return "cpu"
    return device if device in ("cpu", "nvme") else "none"


def _check_stage(sheet: Sheet) -> int | None:
    place = "zero_optimization.stage"
    stage = sheet.get(place)
    if stage == "auto" and not sheet.paired:
        what = Message("deepspeed.stage-unfilled")
        sheet.say("ds-stage", place, what, Message("deepspeed.write-sharding-stage"))
        return None
    if sheet.has(place) and stage != "auto" and sheet.number(place) not in (0, 1, 2, 3):
        sheet.say(
            "ds-stage",
            place,
            Message("deepspeed.refuses-stage", stage=shown(stage)),
            Message("deepspeed.write-any-stage"),
        )
        return None
    return stage_of(sheet)


# --- ZeRO ---------------------------------------------------------------------------------------


def _check_offload(sheet: Sheet, stage: int) -> None:
    for kind in ("offload_param", "offload_optimizer"):
        device = offload_of(sheet, kind)
        place = f"zero_optimization.{kind}"
        if device == "none":
            continue
        if kind == "offload_param" and stage < 3:
            what = Message("deepspeed.weights-stay", stage=stage)
            sheet.say("ds-offload-param-stage", place, what, Message("deepspeed.stage3-or-no-param"))
        elif stage == 0:
            what = Message("deepspeed.stage0-offload")
            sheet.say("ds-offload-stage0", place, what, Message("deepspeed.stage-or-no-optimizer"))
        elif device == "nvme" and stage < 3:
            what = Message("deepspeed.nvme-becomes-ram", stage=stage)
            sheet.say("ds-nvme-stage", f"{place}.device", what, Message("deepspeed.cpu-or-stage3"))
        elif device == "nvme" and not sheet.get(f"{place}.nvme_path"):
            what = Message("deepspeed.nvme-without-path")
            sheet.say("ds-nvme-path", f"{place}.device", what, Message("deepspeed.add-nvme-path"))
    _check_partial(sheet, stage)


def _check_partial(sheet: Sheet, stage: int) -> None:
    place = "zero_optimization.offload_optimizer"
    ratio = sheet.number(f"{place}.ratio")
    if ratio is not None and ratio < 1 and stage < 3:
        what = Message("deepspeed.ratio-needs-stage3", ratio=ratio, stage=stage)
        sheet.say("ds-ratio-stage", f"{place}.ratio", what, Message("deepspeed.stage3-or-no-ratio"))
    if sheet.on(f"{place}.super_offload") and stage < 3:
        what = Message("deepspeed.super-offload-ignored", stage=stage)
        sheet.say("ds-super-offload-stage", f"{place}.super_offload", what, Message("deepspeed.stage3-or-delete"))


def _check_stage_keys(sheet: Sheet, stage: int) -> None:
    zero = sheet.block("zero_optimization")
    if stage == 3:
        if sheet.on("zero_optimization.round_robin_gradients"):
            what = Message("deepspeed.stage3-round-robin")
            sheet.say("ds-round-robin", "zero_optimization.round_robin_gradients", what, Message("lint.delete"))
        names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
        old = "stage3_gather_fp16_weights_on_model_save"
        if not any(zero.get(name) for name in (*names, old)):
            what = Message("deepspeed.saves-shards")
            fix = Message("deepspeed.write-gather", name=names[0])
            sheet.say("ds-gather", f"zero_optimization.{names[0]}", what, fix)
        return
    if stage == 0 and sheet.on("zero_optimization.round_robin_gradients"):
        what = Message("deepspeed.stage0-round-robin")
        sheet.say(
            "ds-round-robin", "zero_optimization.round_robin_gradients", what, Message("deepspeed.delete-or-stage2")
        )
    only3 = [*(f"stage3_{key}" for key in PREFIXED), "zero_quantized_weights", "zero_quantized_nontrainable_weights"]
    idle = [key for key in (*only3, "sub_group_size", "memory_efficient_linear") if zero.get(key) not in (None, False)]
    if idle:
        what = Message("deepspeed.stage3-only", key=idle[0], more=len(idle) - 1 or None, stage=stage)
        sheet.say("ds-stage3-keys", f"zero_optimization.{idle[0]}", what, Message("deepspeed.delete-or-stage3"))
    _check_buckets(sheet, stage)


def _check_buckets(sheet: Sheet, stage: int) -> None:
    place = "zero_optimization.reduce_bucket_size"
    size = sheet.number(place)
    if stage in (1, 2) and size and size >= _LARGE_BUCKET and sheet.on("zero_optimization.overlap_comm"):
        what = Message("deepspeed.two-buckets", gib=2 * 2 * size / _GIB)
        sheet.say("ds-buckets", place, what, Message("deepspeed.write-smaller-bucket"))


# --- precision ----------------------------------------------------------------------------------


def _check_precision(sheet: Sheet, stage: int) -> None:
    bf16 = "bf16" if sheet.has("bf16") else "bfloat16"
    if sheet.on("fp16.enabled") and sheet.on(f"{bf16}.enabled"):
        what = Message("deepspeed.refuses-both-precisions")
        sheet.say("ds-two-precisions", "fp16.enabled", what, Message("deepspeed.enable-one"))
    auto = "auto" in (sheet.get("fp16.enabled"), sheet.get(f"{bf16}.enabled"))
    chosen = auto or any(sheet.on(f"{name}.enabled") for name in ("fp16", bf16, "torch_autocast"))
    meant = any(sheet.get(f"{name}.enabled") is False for name in ("fp16", bf16))
    if not chosen and not meant and not sheet.paired:
        what = Message("deepspeed.trains-in-fp32")
        sheet.say("ds-no-precision", "bf16.enabled", what, Message("deepspeed.write-bf16"))
    if sheet.on("fp16.enabled"):
        _check_scale(sheet)
    _check_master_weights(sheet, bf16, stage)


def _check_scale(sheet: Sheet) -> None:
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


def _check_master_weights(sheet: Sheet, bf16: str, stage: int) -> None:
    offload = offload_of(sheet, "offload_optimizer")
    for name, key in ((bf16, "bf16_master_weights_and_grads"), ("fp16", "fp16_master_weights_and_grads")):
        place = f"{name}.{key}"
        if not sheet.on(place):
            if name != "fp16" and sheet.on(f"{name}.bf16_optimizer_states"):
                what = Message("deepspeed.states-need-masters")
                sheet.say(
                    "ds-master-weights", f"{name}.bf16_optimizer_states", what, Message("deepspeed.add-true", key=key)
                )
            continue
        states = name != "fp16" and sheet.on(f"{name}.bf16_optimizer_states")
        if stage == 0 or (offload == "none" and not states):
            what = Message("deepspeed.masters-need-zero", key=key)
            sheet.say("ds-master-weights", place, what, Message("deepspeed.write-stage2-offload"))


# --- optimizer and scheduler --------------------------------------------------------------------


def _check_optimizer(sheet: Sheet, stage: int) -> None:
    kind = sheet.get("optimizer.type")
    if isinstance(kind, str):
        _check_optimizer_kind(sheet, kind, stage)
    scheduler = sheet.get("scheduler.type")
    if isinstance(scheduler, str) and scheduler not in (*SCHEDULERS, *TORCH_SCHEDULERS):
        close = nearest(scheduler, SCHEDULERS) or "WarmupDecayLR"
        what = Message("deepspeed.no-such-scheduler", scheduler=shown(scheduler))
        sheet.say("ds-scheduler", "scheduler.type", what, Message("deepspeed.write-own-scheduler", close=close))


def _check_optimizer_kind(sheet: Sheet, kind: str, stage: int) -> None:
    name, place = kind.lower(), "optimizer.type"
    old = name in _OLDER_OPTIMIZERS and release(sheet.target.deepspeed_version) < release(REMOVED_IN)
    if old:
        return
    if name not in DEEPSPEED_OPTIMIZERS and kind not in TORCH_OPTIMIZERS:
        close = nearest(kind, ("AdamW", "Adam", *TORCH_OPTIMIZERS)) or "AdamW"
        what = Message("deepspeed.no-such-optimizer", version=sheet.target.deepspeed_version, kind=shown(kind))
        sheet.say("ds-optimizer", place, what, Message("lint.write", what=close))
        return
    if stage and name not in _ZERO_KNOWS and not sheet.on("zero_allow_untested_optimizer"):
        what = Message("deepspeed.untested", kind=kind)
        sheet.say("ds-untested-optimizer", place, what, Message("deepspeed.allow-untested"))
    offloaded = stage and offload_of(sheet, "offload_optimizer") != "none"
    if offloaded and (name not in _HAS_CPU_KERNEL or sheet.on("optimizer.params.torch_adam")):
        what = Message("deepspeed.slow-offload")
        sheet.say("ds-slow-offload", place, what, Message("deepspeed.write-adamw"))
    if name == "adam" and sheet.get("optimizer.params.adam_w_mode") is None:
        what = Message("deepspeed.adam-is-adamw")
        sheet.say("ds-adam-is-adamw", place, what, Message("deepspeed.adamw-or-mode"))


# --- batch and checkpointing --------------------------------------------------------------------

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _check_batch(sheet: Sheet) -> None:
    if sheet.get(_TOTAL) is None and sheet.get(_MICRO) is None:
        what = Message("deepspeed.no-batch", total=_TOTAL, micro=_MICRO)
        fix = Message("deepspeed.add-micro-batch", micro=_MICRO)
        sheet.say("ds-no-batch", _MICRO, what, fix)
        return
    total, micro, steps = sheet.number(_TOTAL), sheet.number(_MICRO), sheet.number(_STEPS)
    if not total or "auto" in (sheet.get(_TOTAL), sheet.get(_MICRO), sheet.get(_STEPS)):
        return
    given = [(key, value) for key, value in ((_MICRO, micro), (_STEPS, steps)) if value]
    world = sheet.world
    product = (micro or 1) * (steps or 1) * (world or 1)
    exact = world is not None and micro is not None and steps is not None
    if product == total or (not exact and product and total % product == 0):
        return
    words = " × ".join([f"{key} {value:g}" for key, value in given] + ([f"{world} GPUs"] if world else []))
    if not words:
        return
    what = Message(
        "deepspeed.batch-differs" if exact else "deepspeed.batch-no-multiple", total=total, words=words, product=product
    )
    sheet.say("ds-batch", _TOTAL, what, _fitting(sheet, total, product, exact=exact))


def _fitting(sheet: Sheet, total: float, product: float, *, exact: bool) -> Message:
    """What makes the product right: the nearest batch, or the same batch in other steps."""
    if not exact:
        return Message("deepspeed.nearest-batch", value=max(1, round(total / product)) * product, total=_TOTAL)
    for key in (_STEPS, _MICRO):
        value = sheet.number(key) or 1
        other = total * value / product
        if other >= 1 and other.is_integer():
            return Message("deepspeed.other-steps", product=product, key=key, other=other, total=total)
    return Message("deepspeed.product-batch", product=product, total=_TOTAL)


def _check_checkpointing(sheet: Sheet) -> None:
    block = sheet.get("activation_checkpointing")
    if isinstance(block, Mapping) and any(block.values()):
        sheet.say(
            "ds-activation-checkpointing",
            "activation_checkpointing",
            Message("deepspeed.checkpointing-block"),
            Message("deepspeed.use-trainers-checkpointing"),
        )
