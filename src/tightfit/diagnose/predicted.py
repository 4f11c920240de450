"""What the memory model says about a run that failed, beside what its log says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tightfit.diagnose.phases import PLACES
from tightfit.diagnose.verdict import Verdict
from tightfit.inputs.flags import Flags, levers_from_flags
from tightfit.inputs.models import shape_from_config
from tightfit.memory import estimate
from tightfit.priced import GIB
from tightfit.types import Footprint, Phase, PhaseName, UserError

_MEMORY = ("device-oom", "fragmentation", "other-process")
_MOST = 3
"""Components that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction for the phase in which a run failed."""

    phase: PhaseName
    bytes: int
    components: tuple[tuple[str, int], ...]
    """The largest first."""
    sentence: str


def predicted(plan: Path, verdict: Verdict) -> Predicted | None:
    """What the plan of a run says about the phase that failed; None: it is no matter of memory, or has no plan."""
    if verdict.kind not in (*_MEMORY, "host-oom"):
        return None
    try:
        footprint = _footprint(json.loads((plan / "worker.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError):
        return None
    if verdict.kind == "host-oom":
        return _of_host(footprint)
    name = verdict.phase or footprint.gpu.peak_phase
    return _of_phase(footprint.gpu.phases[name], verdict)


def _footprint(tree: Mapping[str, Any]) -> Footprint:
    shape = shape_from_config(tree["model"]["config"], str(tree["model"]["name"]))
    known = {field.name for field in fields(Flags)}
    flags = Flags(**{name: value for name, value in tree["levers"].items() if name in known and value is not None})
    return estimate(shape, levers_from_flags(flags, shape), int(tree["world"]["ranks"]))


def _of_phase(phase: Phase, verdict: Verdict) -> Predicted:
    parts = sorted(phase.components.items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts[:_MOST])
    sentence = f"Predicted {PLACES[phase.name]}: {phase.total_bytes / GIB:.2f} GiB, most of it {named}."
    held = None if verdict.oom is None else verdict.oom.allocated
    if held is not None and verdict.oom is not None:
        wanted = held + (verdict.oom.asked or 0)
        sentence += f" The log says {wanted / GIB:.2f} GiB, with what was asked for."
        if wanted > phase.total_bytes * 1.1:
            sentence += " That is more than the model knows of: something holds memory that no plan has."
    return Predicted(phase=phase.name, bytes=phase.total_bytes, components=tuple(parts), sentence=sentence)


def _of_host(footprint: Footprint) -> Predicted:
    worst = max(footprint.host.phases.values(), key=lambda phase: phase.total_bytes)
    parts = sorted(worst.components.items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts[:_MOST])
    node = footprint.host.peak_bytes_per_node / GIB
    sentence = f"Predicted for the host: {node:.2f} GiB a node; a rank's share is mostly {named}."
    return Predicted(
        phase=worst.name, bytes=footprint.host.peak_bytes_per_node, components=tuple(parts), sentence=sentence
    )
