"""An estimate as JSON: the contract with programs. The keys here are promised, further ones may come."""

from __future__ import annotations

from typing import Any

from tightfit.desk.estimate import Outcome
from tightfit.inputs.flags import flags_from_levers
from tightfit.priced import Priced
from tightfit.types import Phase


def report(priced: Priced) -> dict[str, Any]:
    """One estimate."""
    gpu, host = priced.footprint.gpu, priced.footprint.host
    return {
        "model": {
            "name": priced.shape.name,
            "parameters": priced.shape.parameters,
            "trainable_parameters": priced.footprint.trainable_parameters,
        },
        "levers": flags_from_levers(priced.levers) | {"world": priced.world},
        "card": (
            {
                "name": priced.hardware.gpu.name,
                "memory_bytes": priced.hardware.gpu.memory_bytes,
                "nodes": priced.hardware.nodes,
                "gpus_per_node": priced.hardware.gpus_per_node,
                "host_ram_bytes": priced.hardware.host_ram_bytes,
                "nvme_bytes": priced.hardware.nvme_bytes,
            }
        )
        if priced.hardware
        else None,
        "gpu": {
            "peak_bytes": gpu.peak_bytes,
            "peak_phase": gpu.peak_phase,
            "init_peak_bytes": gpu.init_peak_bytes,
            "required_bytes": gpu.required_bytes,
            "overhead": dict(gpu.overhead),
            "phases": {name: _phase_report(phase) for name, phase in gpu.phases.items()},
        },
        "host": {
            "peak_bytes_per_rank": host.peak_bytes_per_rank,
            "peak_bytes_per_node": host.peak_bytes_per_node,
            "nvme_bytes_per_node": host.nvme_bytes_per_node,
            "phases": {name: _phase_report(phase) for name, phase in host.phases.items()},
        },
        "fits": priced.fits,
        "because": [str(said) for said in (*priced.shape.notes, *priced.because)],
    }


def _phase_report(phase: Phase) -> dict[str, Any]:
    return {"total_bytes": phase.total_bytes, "components": dict(phase.components)}


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
