"""A plan as JSON: the contract with programs. The keys here are promised, further ones may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tightfit.desk.estimate_report import report as estimate_report
from tightfit.desk.plan_files import Answer
from tightfit.planner.calibration import COMPONENT
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Plan, Way
from tightfit.planner.tiers import Tiered
from tightfit.priced import Priced, strategy_name
from tightfit.types import Phase, PhaseName


def report(answer: Answer, files: Sequence[Path] | None) -> dict[str, Any]:
    """The whole answer. `files`: what was written; None: nothing was to be."""
    if isinstance(answer, list):
        return {"tiers": [_tier_report(each) for each in answer]}
    if isinstance(answer, Tiered):
        plain = _tier_report(answer)
        plain["free"] = None if answer.free is None else plan_report(answer.free)
    elif isinstance(answer, Limit):
        plain = plan_report(answer.plan)
        plain["max"] = {"what": answer.wanted, "value": answer.value}
        plain["because"] = [*map(str, answer.because), *plain["because"]]
    else:
        plain = plan_report(answer)
    if files is not None:
        plain["files"] = [str(path) for path in files]
    return plain


def plan_report(plan: Plan) -> dict[str, Any]:
    """One plan."""
    hardware = plan.hardware
    return {
        "fits": plan.fits,
        "trainer": plan.job.trainer,
        "chosen": None if plan.chosen is None else way_report(plan.chosen),
        "alternatives": [way_report(way) for way in plan.alternatives],
        "considered": plan.considered,
        "search_s": plan.search_s,
        "effective_batch": plan.effective_batch,
        "hours": plan.hours,
        "because": list(map(str, plan.because)),
        "remedies": [
            (
                {"allow": remedy.allowance, "cost": str(remedy.cost), "effect": str(remedy.effect)}
                | way_report(remedy.way)
            )
            for remedy in plan.remedies
        ],
        "gpus_needed": plan.gpus_needed,
        "unproven": list(map(str, plan.unproven)),
        "model": {
            "name": plan.shape.name,
            "parameters": plan.shape.parameters,
            "notes": list(map(str, plan.shape.notes)),
        },
        "hardware": {
            "name": hardware.gpu.name,
            "vendor": hardware.gpu.vendor,
            "memory_bytes": hardware.gpu.memory_bytes,
            "nodes": hardware.nodes,
            "gpus_per_node": hardware.gpus_per_node,
            "host_ram_bytes": hardware.host_ram_bytes,
            "nvme_bytes": hardware.nvme_bytes,
        },
    }


def way_report(way: Way) -> dict[str, Any]:
    """One way: levers in the words of `estimate`, and both prices; the bytes are those of `estimate --json`."""
    priced = Priced(shape=way.shape, levers=way.levers, world=way.world, hardware=way.hardware, footprint=way.footprint)
    plain = estimate_report(priced)
    return {
        "strategy": str(strategy_name(way.levers)),
        "model": way.shape.name,
        "fits": way.fits,
        "levers": plain["levers"],
        "footprint": {"gpu": plain["gpu"], "host": plain["host"]},
        "gpu_limit_bytes": way.gpu_limit_bytes,
        "gpu_spare_bytes": way.gpu_spare_bytes,
        "pace": {
            "step_s": way.pace.step_s,
            "tokens_per_s": way.pace.tokens_per_s,
            "causes": dict(way.pace.causes),
            "because": list(map(str, way.pace.because)),
        },
        "because": list(map(str, way.because)),
        "changes": list(map(str, way.changes)),
        "calibration": _calibration_report(way),
    }


def _calibration_report(way: Way) -> dict[str, Any] | None:
    """What earlier runs have added to the predicted bytes of this way, and which; null: nothing."""
    gpu, host = _errors(way.footprint.gpu.phases), _errors(way.footprint.host.phases)
    if way.correction is None or not (gpu or host):
        return None
    entry = way.correction.entry
    return {
        "day": entry.day,
        "same_way": way.correction.same_way,
        "gpu_bytes": gpu,
        "host_bytes_per_rank": host,
        "measured": [asdict(each) for each in entry.measured],
    }


def _errors(phases: Mapping[PhaseName, Phase]) -> dict[str, int]:
    found = {name: phase.components.get(COMPONENT, 0) for name, phase in phases.items()}
    return {name: size for name, size in found.items() if size}


def _tier_report(tiered: Tiered) -> dict[str, Any]:
    plain: dict[str, Any] = {"fits": False, "chosen": None, "alternatives": []}
    if tiered.plan is not None:
        plain = plan_report(tiered.plan)
        plain["because"] = [*plain["because"], *map(str, tiered.because)]
    return plain | {
        "tier": tiered.tier.name,
        "about": str(tiered.tier.about),
        "costs": list(map(str, tiered.costs)),
        "problem": tiered.problem or None,
    }
