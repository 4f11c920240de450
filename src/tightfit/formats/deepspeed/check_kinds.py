"""Rules for a DeepSpeed JSON: is each value one that its key takes?

The blocks that pydantic reads are strict about ranges and lenient about spelling: "yes" is true and "12" is a number
there, -1 and "maybe" are refused. The top level has no such reader. Its values are used as they are, so that a wrong
one fails in an addition somewhere, or never. The table says what each key takes; a test holds it against the fields
of the installed DeepSpeed's own classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tightfit.formats.deepspeed.keys import LOUD, PREFIXED
from tightfit.formats.deepspeed.versions import PYDANTIC_BF16, WARMUP_CHECKED_SINCE
from tightfit.formats.sheet import Sheet
from tightfit.inputs.spelling import as_number, nearest, shown
from tightfit.inputs.versions import release
from tightfit.messages import Choice, Message

_ZERO, _PARAM, _OPTIMIZER = (
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
)
_ZENFLOW = "zero_optimization.zenflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """What a key takes."""

    kind: Literal["whole", "number", "switch", "words"]
    least: float | None = None
    most: float | None = None
    open_ends: bool = False
    """The ends of the range are not in it."""
    words: tuple[str, ...] = ()
    nullable: bool = False

    @property
    def phrase(self) -> Message | Choice:
        """To stand after `must be` and after `write`."""
        if self.kind == "switch":
            return Message("deepspeed.true-or-false")
        if self.kind == "words":
            return Choice(f'"{word}"' for word in self.words)
        noun = Message("deepspeed.whole-number" if self.kind == "whole" else "deepspeed.number")
        if self.least is None:
            return noun
        if self.most is None:
            return Message("deepspeed.at-least", noun=noun, least=self.least)
        if self.open_ends:
            return Message("deepspeed.between", noun=noun, least=self.least, most=self.most)
        return Message("deepspeed.from-to", noun=noun, least=self.least, most=self.most)


_SWITCHES = {
    _ZERO: """contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
        compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload_param cpu_offload_use_pin_memory
        cpu_offload stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
        round_robin_gradients parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
        stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential""",
    _PARAM: "pin_memory",
    _OPTIMIZER: "pin_memory pipeline_read pipeline_write fast_init super_offload",
    _ZENFLOW: "overlap_step offload",
    "fp16": "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "comms_logger": "enabled prof_all verbose debug",
    "tensorboard": "enabled",
    "csv_monitor": "enabled",
    "wandb": "enabled",
    "comet": "enabled online",
    "timers.throughput": "enabled synchronized",
    "compile": """deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory
        offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce
        sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors""",
    "hybrid_engine": "enabled release_inference_cache pin_parameters enable_cuda_graph",
    "": """prescale_gradients disable_allgather dump_state disable_python_gc wall_clock_breakdown memory_breakdown
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last""",
}
_WHOLE: dict[str, dict[str, int | None]] = {
    _ZERO: {
        "reduce_bucket_size": 1,
        "allgather_bucket_size": 0,
        "sub_group_size": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_model_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_module_granularity_threshold": None,
        "zero_hpz_partition_size": 0,
    },
    _PARAM: {"buffer_count": 0, "buffer_size": 0, "max_in_cpu": 0},
    _OPTIMIZER: {"buffer_count": 0},
    _ZENFLOW: {"full_warm_up_rounds": None},
    "fp16": {"initial_scale_power": None, "loss_scale_window": None, "hysteresis": None, "min_loss_scale": None},
    "hybrid_engine": {"max_out_tokens": 1, "inference_tp_size": None, "tp_gather_partition_size": None},
    "comet": {"samples_log_interval": None},
    "compile": {"free_activation_threshold": None},
    "": {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
}
_SHARE = Takes(kind="number", least=0, most=1)
_OTHER: dict[str, Takes] = {
    f"{_PARAM}.device": Takes(kind="words", words=("none", "cpu", "nvme")),
    f"{_OPTIMIZER}.device": Takes(kind="words", words=("none", "cpu", "nvme")),
    f"{_OPTIMIZER}.ratio": _SHARE,
    f"{_OPTIMIZER}.cpuadam_cores_perc": _SHARE,
    f"{_ZENFLOW}.auto_ratio": _SHARE,
    f"{_ZENFLOW}.pt_reserved_cores_perc": _SHARE,
    f"{_ZENFLOW}.topk_ratio": Takes(kind="number", least=0, most=1, open_ends=True),
    "fp16.loss_scale": Takes(kind="number", least=0),
    "gradient_clipping": Takes(kind="number", least=0, nullable=True),
    "communication_data_type": Takes(kind="words", words=("fp16", "bf16", "fp32"), nullable=True),
    "seq_parallel_communication_data_type": Takes(kind="words", words=("fp16", "bf16", "fp32"), nullable=True),
    "gradient_allreduce_op": Takes(kind="words", words=("mean", "sum")),
    "checkpoint.tag_validation": Takes(kind="words", words=("Ignore", "Warn", "Fail")),
}
_NULLABLE = ("overlap_comm", "online", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
_TRUE, _FALSE = ("1", "on", "t", "true", "y", "yes"), ("0", "off", "f", "false", "n", "no")
"""Text that pydantic takes for a switch, in any case of letters."""


def _table() -> Iterator[tuple[str, Takes]]:
    for block, names in _SWITCHES.items():
        for name in names.split():
            nullable = name in _NULLABLE or (not block and name != "wall_clock_breakdown")
            yield f"{block}.{name}" if block else name, Takes(kind="switch", nullable=nullable)
    for block, least in _WHOLE.items():
        for name, bound in least.items():
            takes = Takes(kind="whole", least=bound, nullable=not block)
            yield f"{block}.{name}" if block else name, takes
    yield from _OTHER.items()


TAKES: dict[str, Takes] = dict(_table())
"""Dotted key → what it takes. Of two spellings, with `stage3_` and without, both are here."""
TAKES |= {f"{_ZERO}.{name}": TAKES[f"{_ZERO}.stage3_{name}"] for name in PREFIXED}
TAKES |= {key.replace("bf16.", "bfloat16.", 1): takes for key, takes in TAKES.items() if key.startswith("bf16.")}


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
        what = Message("deepspeed.grad-norm-stage")
        sheet.say("ds-value", f"{_ZERO}.compute_grad_norm", what, Message("lint.delete"))
    kind = sheet.get("optimizer.type")
    if sheet.has("optimizer.type") and kind is not None and not isinstance(kind, str):
        what = Message("deepspeed.optimizer-is-name", kind=shown(kind))
        sheet.say("ds-value", "optimizer.type", what, Message("lint.write", what='"AdamW"'))
    _check_scheduler(sheet)


def _is_taken(place: str, value: Any, takes: Takes) -> bool:
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
    if _is_pydantics(block, sheet.target.deepspeed_version):
        if meant is None:
            _refuse(sheet, place, value, TAKES[place])
        else:
            what = Message("deepspeed.switch-as-text", meant=meant, value=shown(value))
            sheet.say("ds-quoted", place, what, Message("lint.write-unquoted", what=meant))
    elif word not in ("true", "false"):
        what = Message("deepspeed.text-is-true", value=shown(value))
        sheet.say(
            "ds-text-switch",
            place,
            what,
            Message("lint.write-unquoted", what=meant or Message("deepspeed.true-or-false")),
        )


def _is_pydantics(block: str, version: str) -> bool:
    return block in LOUD and (block not in ("fp16", "bf16", "bfloat16") or release(version) >= release(PYDANTIC_BF16))


def _refuse(sheet: Sheet, place: str, value: Any, takes: Takes) -> None:
    key, fix = place.rpartition(".")[2], Message("lint.write", what=takes.phrase)
    what = Message("deepspeed.must-be", key=key, phrase=takes.phrase, value=shown(value))
    if isinstance(value, bool) and takes.kind != "words" and place != "fp16.loss_scale":
        what = Message("deepspeed.taken-for", key=key, phrase=takes.phrase, value=shown(value), number=int(value))
    elif place == "gradient_clipping":
        what = Message("deepspeed.clips-nothing", key=key, phrase=takes.phrase, value=shown(value))
        fix = Message("deepspeed.write-clipping")
    elif "." not in place and isinstance(value, float) and value > 0:
        what = Message("deepspeed.counts-wrong", key=key, phrase=takes.phrase, value=value)
        fix = Message("lint.write", what=max(1, round(value)))
    elif takes.kind == "words" and isinstance(value, str) and (close := nearest(value, takes.words, cutoff=0.7)):
        fix = Message("lint.write", what=f'"{close}"')
    elif place.endswith(".device"):
        fix = Message("deepspeed.write-device", block=place.split(".")[-2])
    elif value is None:
        fix = Message("deepspeed.delete-for-default", phrase=takes.phrase)
    sheet.say("ds-value", place, what, fix)


# --- the scheduler ------------------------------------------------------------------------------

_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
SCHEDULER_PARAMS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "LRRangeTest": (
        (),
        frozenset(
            """lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase
            last_batch_iteration""".split()
        ),
    ),
    "OneCycle": (
        ("cycle_min_lr", "cycle_max_lr"),
        frozenset(
            """cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size
            cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom
            decay_mom_rate last_batch_iteration""".split()
        ),
    ),
    "WarmupLR": ((), frozenset(_WARMUP.split())),
    "WarmupDecayLR": (("total_num_steps",), frozenset(f"total_num_steps {_WARMUP}".split())),
    "WarmupCosineLR": (
        ("total_num_steps",),
        frozenset(
            "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration".split()
        ),
    ),
}
"""DeepSpeed's scheduler → the parameters that it must have, and all that it takes."""

_EXAMPLES = {"total_num_steps": "10000", "cycle_min_lr": "1e-5", "cycle_max_lr": "1e-4"}


def _check_scheduler(sheet: Sheet) -> None:
    kind, place = sheet.get("scheduler.type"), "scheduler.params"
    if not isinstance(kind, str) or kind not in SCHEDULER_PARAMS:
        return
    needed, takes = SCHEDULER_PARAMS[kind]
    params = sheet.get(place)
    missing = [key for key in needed if sheet.get(f"{place}.{key}") is None]
    if missing:
        value = '"auto"' if sheet.paired and missing == ["total_num_steps"] else _EXAMPLES[missing[0]]
        what = Message("deepspeed.scheduler-misses", kind=kind, missing=" and ".join(missing))
        sheet.say("ds-scheduler-params", place, what, Message("deepspeed.add-param", missing=missing[0], value=value))
    elif not isinstance(params, Mapping):
        what = Message("deepspeed.scheduler-needs-params", kind=kind)
        sheet.say("ds-scheduler-params", place, what, Message("deepspeed.add-empty-params"))
    every = {key for _, keys in SCHEDULER_PARAMS.values() for key in keys}
    for key in sheet.block(place):
        if key in every - takes:
            what = Message("deepspeed.scheduler-has-not", kind=kind, key=key)
            close = {"warmup_min_lr": Message("deepspeed.warmup-min-ratio")}.get(key)
            sheet.say(
                "ds-scheduler-params",
                f"{place}.{key}",
                what,
                Message("lint.write", what=close) if close else Message("lint.delete"),
            )
    _check_warmup(sheet, f"{place}.warmup_num_steps")


def _check_warmup(sheet: Sheet, place: str) -> None:
    steps = sheet.get(place)
    if steps in (None, "auto") or release(sheet.target.deepspeed_version) < release(WARMUP_CHECKED_SINCE):
        return
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        what = Message("deepspeed.warmup-steps", steps=shown(steps))
        number = sheet.number(place)
        sheet.say("ds-scheduler-params", place, what, Message("lint.write", what=max(1, round(number or 1))))
