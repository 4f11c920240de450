"""Answers as JSON: the contract with programs. The keys here are promised, further ones may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.inputs.flags import flags_from_levers
from tightfit.priced import Priced, strategy_name, why_no_pace
from tightfit.types import Hardware, Pace, Phase, PhaseName

if TYPE_CHECKING:  # an estimate does without the planner
    from tightfit.desk.estimate import Outcome
    from tightfit.desk.plan import Answer
    from tightfit.planner import Tiered
    from tightfit.planner.plan import Checkpoints, Plan, Way


def estimate_report(priced: Priced) -> dict[str, Any]:
    plain, hardware = _bytes_report(priced), priced.hardware
    why = None if hardware is None else why_no_pace(priced.shape, hardware)
    return {**plain, "because": [*plain["because"], *([] if why is None else [str(why)])], "pace": _pace_of(priced)}


def _bytes_report(priced: Priced) -> dict[str, Any]:
    gpu, host, of_row = priced.footprint.gpu, priced.footprint.host, priced.footprint.pipeline_gpu
    return {
        "model": {
            "name": priced.shape.name,
            "parameters": priced.shape.parameters,
            "trainable_parameters": priced.footprint.trainable_parameters,
        },
        "levers": flags_from_levers(priced.levers) | {"world": priced.world},
        "card": _report_hardware(priced.hardware) if priced.hardware else None,
        "gpu": {
            "peak_bytes": gpu.peak_bytes,
            "peak_phase": gpu.peak_phase,
            "init_peak_bytes": gpu.init_peak_bytes,
            "required_bytes": gpu.required_bytes,
            "overhead": dict(gpu.overhead),
            **({} if of_row is None else {"pipeline_gpu": of_row}),  # the first is 0
            "phases": _report_phases(gpu.phases),
        },
        "host": {
            "peak_bytes_per_rank": host.peak_bytes_per_rank,
            "peak_bytes_per_node": host.peak_bytes_per_node,
            "nvme_bytes_per_node": host.nvme_bytes_per_node,
            "phases": _report_phases(host.phases),
        },
        "fits": priced.fits,
        "because": [str(said) for said in (*priced.shape.notes, *priced.because)],
    }


def pace_report(pace: Pace) -> dict[str, Any]:
    """How long a step takes, between which seconds, by which causes, and where each rate that it hangs on is from."""
    return {
        **{name: getattr(pace, name) for name in ("step_s", "low_s", "high_s", "tokens_per_s", "warm_up_s")},
        "causes": dict(pace.causes),
        "rates": {name: asdict(rate) for name, rate in pace.rates.items()},
        "because": list(map(str, pace.because)),
    }


def _pace_of(priced: Priced) -> dict[str, Any] | None:
    """None: no card was named, none is claimed of it, or the ranks are not the GPUs of whole nodes."""
    hardware, world = priced.hardware, priced.world
    if hardware is None or why_no_pace(priced.shape, hardware) is not None:
        return None
    if world > hardware.gpus_per_node and world % hardware.gpus_per_node:
        return None
    from tightfit.pace import pace

    each = min(world, hardware.gpus_per_node)
    used = replace(hardware, nodes=world // each, gpus_per_node=each)
    return pace_report(pace(priced.shape, priced.levers, used))


def _report_phases(phases: Mapping[PhaseName, Phase]) -> dict[PhaseName, Any]:
    return {
        name: {"total_bytes": phase.total_bytes, "components": dict(phase.components)} for name, phase in phases.items()
    }


def _report_hardware(hardware: Hardware, **more: str) -> dict[str, Any]:
    names = ("nodes", "gpus_per_node", "host_ram_bytes", "nvme_bytes", "network_bytes_per_s")
    card = {"name": hardware.gpu.name, **more, "memory_bytes": hardware.gpu.memory_bytes}
    links = {"link": hardware.gpu.link, "link_bytes_per_s": hardware.gpu.link_bytes_per_s}
    return card | {name: getattr(hardware, name) for name in names} | links


def strategy_report(name: str, outcome: Outcome) -> dict[str, Any]:
    """One row of a comparison."""
    if isinstance(outcome, str):
        return {"strategy": name, "fits": None, "problem": outcome}
    gpu, host = outcome.footprint.gpu, outcome.footprint.host
    return {
        "strategy": name,
        "engine": outcome.levers.engine,
        "offload_optimizer": outcome.levers.offload_optimizer,
        "offload_param": outcome.levers.offload_param,
        "peak_bytes": gpu.peak_bytes,
        "init_peak_bytes": gpu.init_peak_bytes,
        "required_bytes": gpu.required_bytes,
        "host_bytes_per_node": host.peak_bytes_per_node,
        "fits": outcome.fits,
    }


def answer_report(answer: Answer, files: Sequence[Path] | None) -> dict[str, Any]:
    """The whole answer of `plan`. `files`: what was written; None: nothing was to be."""
    from tightfit.planner import Tiered
    from tightfit.planner.limits import Limit

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
    return {
        "fits": plan.fits,
        "trainer": plan.job.trainer,
        "chosen": None if plan.chosen is None else way_report(plan.chosen),
        "alternatives": [way_report(way) for way in plan.alternatives],
        "chosen_for": str(plan.chosen_for) or None,
        "considered": plan.considered,
        "search_s": plan.search_s,
        "effective_batch": plan.effective_batch,
        "hours": plan.hours,
        "because": list(map(str, plan.because)),
        "remedies": [
            {"allow": each.allowance, "cost": str(each.cost), "effect": str(each.effect)} | way_report(each.way)
            for each in plan.remedies
        ],
        "gpus_needed": plan.gpus_needed,
        "unproven": list(map(str, plan.unproven)),
        "checkpoints": None if plan.checkpoints is None else _checkpoints_report(plan.checkpoints),
        "model": {
            "name": plan.shape.name,
            "parameters": plan.shape.parameters,
            "notes": list(map(str, plan.shape.notes)),
        },
        "hardware": _report_hardware(plan.hardware, vendor=plan.hardware.gpu.vendor),
    }


def _checkpoints_report(found: Checkpoints) -> dict[str, Any]:
    """What failures at the published rate cost, as checkpoints will be written and as they are best written."""
    return {
        "bytes": found.bytes,
        "in_background": found.in_background,
        **asdict(found.costs),
        "every_s": found.every_s,
        "lost_share": found.lost_share,
        "recommended_steps": found.best_steps,
        "recommended_lost_share": found.best_lost_share,
        "because": str(found.because),
    }


def way_report(way: Way) -> dict[str, Any]:
    """One way: levers in the words of `estimate`, and both prices; the bytes are those of `estimate --json`."""
    priced = Priced(shape=way.shape, levers=way.levers, world=way.world, hardware=way.hardware, footprint=way.footprint)
    plain = _bytes_report(priced)
    return {
        "strategy": str(strategy_name(way.levers)),
        "model": way.shape.name,
        "fits": way.fits,
        "levers": plain["levers"],
        "footprint": {"gpu": plain["gpu"], "host": plain["host"]},
        "gpu_limit_bytes": way.gpu_limit_bytes,
        "gpu_spare_bytes": way.gpu_spare_bytes,
        "pace": pace_report(way.pace) if way.is_paced else None,
        "as_fast_as_chosen": way.is_as_fast,
        "because": list(map(str, way.because)),
        "changes": list(map(str, way.changes)),
        "calibration": _calibration_report(way),
    }


def _calibration_report(way: Way) -> dict[str, Any] | None:
    """What earlier runs have added to the predicted bytes of this way, and which; null: nothing."""
    from tightfit.planner.calibration import COMPONENT

    gpu, host = (
        {name: size for name, phase in phases.items() if (size := phase.components.get(COMPONENT, 0))}
        for phases in (way.footprint.gpu.phases, way.footprint.host.phases)
    )
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
