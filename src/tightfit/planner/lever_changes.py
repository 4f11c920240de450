"""What differs between two ways to compute one training, lever by lever, in words."""

from __future__ import annotations

from dataclasses import fields

from tightfit.inputs.flags import LEVERS, flags_from_levers
from tightfit.planner.plan import Way
from tightfit.priced import strategy_name
from tightfit.types import STRATEGY, Buckets

_SAVING = [flag for flag, lever in LEVERS.items() if lever.group == "what saves memory" and flag not in STRATEGY]


def lever_changes(before: Way, after: Way) -> tuple[str, ...]:
    """`ZeRO-2 → ZeRO-3`, `checkpointing none → full` …; what changes the result is not among them."""
    old, new = _words(before), _words(after)
    both = [name for name in new if name in old]
    return tuple(f"{name} {old[name]} → {new[name]}".strip() for name in both if old[name] != new[name])


def _words(way: Way) -> dict[str, str]:
    levers, said = way.levers, flags_from_levers(way.levers)
    has_buckets = levers.stage not in (None, 0)
    buckets = [each.name for each in fields(Buckets) if has_buckets or each.name == "pin_memory"]
    return {
        "": str(strategy_name(levers)),
        "GPUs": str(way.world),
        "micro batch × accumulation": f"{levers.micro_batch} × {levers.accumulation}",
        **{flag: str(said[flag]) for flag in _SAVING},
        **{name.replace("_", " "): _value(getattr(levers.buckets, name)) for name in buckets},
    }


def _value(value: int | bool | None) -> str:
    if value is None:
        return "DeepSpeed's choice"
    return ("on" if value else "off") if isinstance(value, bool) else f"{value:,}"
