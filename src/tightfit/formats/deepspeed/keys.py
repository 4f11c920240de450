"""The keys of a DeepSpeed config, block by block, and what each takes. Tests hold both against the installed DeepSpeed:
they watch which keys it asks for, and read the fields of its own classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tightfit.inputs.spelling import read_tables
from tightfit.inputs.versions import Release, release
from tightfit.messages import Choice, Listing, Message
from tightfit.types import ConfigError

_TABLES = read_tables(Path(__file__).with_name("keys.txt"))
SCHEDULER_PARAMS = {name[10:]: _TABLES.pop(name) for name in list(_TABLES) if name.startswith("scheduler ")}
"""DeepSpeed's scheduler → the parameters that it takes; `!`: that it must have."""
_PREFIXED, _REFUSING = _TABLES.pop("stage3_"), _TABLES.pop("refusing")
FILLED, TEXTS, UNPRICED = (_TABLES.pop(name) for name in ("filled", "texts", "unpriced"))
ARRIVED, GONE, LEARNT_AFTER = (_TABLES.pop(name) for name in ("arrived", "gone", "not yet in"))
TORCH_OPTIMIZERS, TORCH_SCHEDULERS = (_TABLES.pop(f"torch {kind}") for kind in ("optimizers", "schedulers"))
PREFIXED = list(_PREFIXED)
"""Keys of zero_optimization that may be written with `stage3_` in front or without, but not both."""
_TABLES["zero_optimization"] |= _PREFIXED | {f"stage3_{key}": mark for key, mark in _PREFIXED.items()}
_TABLES["bfloat16"] = _TABLES["bf16"]
_TABLES["tensor_parallel.tensor_parallel"] = _TABLES["tensor_parallel.tp"]

KEYS: dict[str, frozenset[str]] = {
    **{path: frozenset(marks) for path, marks in _TABLES.items()},
    "scheduler.params": frozenset(key for takes in SCHEDULER_PARAMS.values() for key in takes),
}
"""Every key that DeepSpeed reads, by the path of its block. Blocks that are not listed take anything."""

LOUD = frozenset(_REFUSING).union(path for path in KEYS if path.startswith("zero_optimization"))
"""Blocks in which DeepSpeed itself refuses an unknown key. In the others it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTakes:
    """What a key takes."""

    kind: Literal["whole", "number", "switch", "words"]
    least: float | None = None
    most: float | None = None
    open_ends: bool = False  # the ends of the range are not in it
    words: tuple[str, ...] = ()
    nullable: bool = False

    @property
    def phrase(self) -> Message | Listing:
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


def _takes(block: str, name: str, mark: str) -> KeyTakes:
    """The blocks are pydantic's, which refuses null; the top level has no such reader."""
    if mark == "?":
        null = name in _NULLABLE or (not block and name != "wall_clock_breakdown")
        return KeyTakes(kind="switch", nullable=null)
    return KeyTakes(kind="whole", least=int(mark[1:]) if mark[1:] else None, nullable=not block)


_NULLABLE = ("overlap_comm", "online", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
_ZERO, _OPTIMIZER, _ZENFLOW = (f"zero_optimization{block}" for block in ("", ".offload_optimizer", ".zenflow"))
_SHARE = KeyTakes(kind="number", least=0, most=1)
_DEVICE = KeyTakes(kind="words", words=("none", "cpu", "nvme"))
_DTYPE = KeyTakes(kind="words", words=("fp16", "bf16", "fp32"), nullable=True)
TAKES: dict[str, KeyTakes] = {
    **{
        f"{block}.{name}" if block else name: _takes(block, name, mark)
        for block, marks in _TABLES.items()
        for name, mark in marks.items()
        if mark
    },
    f"{_ZERO}.offload_param.device": _DEVICE,
    f"{_OPTIMIZER}.device": _DEVICE,
    f"{_OPTIMIZER}.ratio": _SHARE,
    f"{_OPTIMIZER}.cpuadam_cores_perc": _SHARE,
    f"{_ZENFLOW}.auto_ratio": _SHARE,
    f"{_ZENFLOW}.pt_reserved_cores_perc": _SHARE,
    f"{_ZENFLOW}.topk_ratio": KeyTakes(kind="number", least=0, most=1, open_ends=True),
    "fp16.loss_scale": KeyTakes(kind="number", least=0),
    "gradient_clipping": KeyTakes(kind="number", least=0, nullable=True),
    "communication_data_type": _DTYPE,
    "seq_parallel_communication_data_type": _DTYPE,
    "gradient_allreduce_op": KeyTakes(kind="words", words=("mean", "sum")),
    "checkpoint.tag_validation": KeyTakes(kind="words", words=("Ignore", "Warn", "Fail")),
}
"""Dotted key → what it takes. Of two spellings, with `stage3_` and without, both are here."""


# --------------------------------------------------------------------------------------------------
# What changed in DeepSpeed's config between 0.14.0 and 0.19.8: tables, and the questions to ask of them.
#
# Read from the sources of all 47 releases in that range (`runtime/zero/config.py`, `zero/offload_config.py`,
# `precision_config.py`, `config.py`, `constants.py`, `swap_tensor/constants.py` of each sdist): a key stands in
# `ARRIVED`, `GONE` or `MOVED` if it appeared, disappeared, or took another default on the way. One that does not is
# known to every release, with one and the same default.
#
# Why it matters: `zero_optimization` and its offload blocks refuse a key that they do not know, so one key too many
# stops a training at its start; a key that is left out takes whatever default that release has. A release between two
# of these is read as the nearest lower one, and one that is newer than all of them as the newest.

OLDEST, NEWEST = "0.14.0", "0.19.8"  # the range whose sources were read
ARRIVED |= {f"{_ZERO}.stage3_{key}": ARRIVED[f"{_ZERO}.{key}"] for key in PREFIXED if f"{_ZERO}.{key}" in ARRIVED}

REMOVED_IN = "0.19.8"
REMOVED = frozenset(key for key in GONE if "." not in key)
"""Top-level keys of older DeepSpeeds that `REMOVED_IN` refuses."""

MOVED: dict[str, tuple[tuple[str, object], ...]] = {
    "gradient_clipping": ((OLDEST, 0.0), ("0.19.3", 1.0)),
    "bf16.check_grad_overflow": (("0.17.1", False), ("0.19.3", True)),
    f"{_OPTIMIZER}.pin_memory": ((OLDEST, False), ("0.19.5", True)),
    f"{_ZERO}.offload_param.pin_memory": ((OLDEST, False), ("0.19.5", True)),
    "bf16.immediate_grad_update": ((OLDEST, False), ("0.16.5", True), ("0.17.1", False)),
    "steps_per_print": ((OLDEST, 10), ("0.15.2", None)),
}
"""DeepSpeed's key, and from which release on its default is what."""
MOVED_DEFAULTS = tuple((path, since, before, now) for path, ((_, before), (since, now)) in list(MOVED.items())[:4])
"""The first four, of which a training feels it: the key, the release since which its default is another, both."""

PYDANTIC_BF16 = "0.17.1"
"""From here on DeepSpeed reads fp16 and bf16 with pydantic; before, it took any key there, and any text for true."""

WARMUP_CHECKED_SINCE = "0.19.6"
"""From here on DeepSpeed refuses a warmup_num_steps that is no whole number above 0; before, it took 2 at least."""

DEFAULTS: dict[str, object] = {
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
    f"{_ZERO}.contiguous_gradients": True,
    f"{_ZERO}.reduce_bucket_size": 500_000_000,
    f"{_ZERO}.allgather_bucket_size": 500_000_000,
    f"{_ZERO}.sub_group_size": 1_000_000_000,
    f"{_ZERO}.stage3_prefetch_bucket_size": 50_000_000,
    f"{_ZERO}.stage3_param_persistence_threshold": 100_000,
    f"{_ZERO}.stage3_max_live_parameters": 1_000_000_000,
    f"{_ZERO}.stage3_max_reuse_distance": 1_000_000_000,
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": False,
    f"{_OPTIMIZER}.buffer_count": 4,
    f"{_ZERO}.offload_param.buffer_count": 5,
}
"""Of the keys that a plan may set: what every release takes where the file says nothing."""


def check_version(version: str) -> Release:
    """The release, or the sentence that says why nothing can be written for it."""
    asked = release(version)
    if asked < release(OLDEST):
        raise ConfigError(Message("deepspeed.version-too-old", version=version, oldest=OLDEST))
    if asked[0] > release(NEWEST)[0]:
        raise ConfigError(Message("deepspeed.version-unknown", version=version, newest=NEWEST))
    return asked


def knows(version: str, path: str) -> bool:
    """Whether this release takes the key at `path`."""
    asked = release(version)
    return release(ARRIVED.get(path, OLDEST)) <= asked and (path not in GONE or asked < release(GONE[path]))


def without_defaults(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The same without what every release takes anyway, and without blocks that say nothing then."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            if inside := without_defaults(value, where):
                kept[name] = inside
        elif where not in DEFAULTS or DEFAULTS[where] != value:
            kept[name] = value
    return kept


def newer_than_known(version: str) -> Message | None:
    """The sentence for a release whose source we have not read; None: we have."""
    if release(version) <= release(NEWEST):
        return None
    return Message("deepspeed.newer-than-known", version=version, newest=NEWEST)
