"""How much memory a training takes, by phase and component: pure arithmetic on a shape and levers.

`estimate` is what everybody asks; `Scale` spares a search some of it. Each engine has a file that says
what that engine allocates when, with the name of the buffer in its source; `docs/footprint.md` walks through them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.memory import engines, host, overhead, stream, zero3, zero12
from tightfit.memory.engines import ENGINES
from tightfit.memory.feedforward import busiest_load
from tightfit.memory.job import Components, MemoryJob, combine, make_jobs, worst
from tightfit.memory.optimizers import EIGHT_BIT
from tightfit.memory.totals import Floor, Scale, Totals, fullest_of, required_bytes, totals_of
from tightfit.memory.weights import of_whole_model
from tightfit.messages import Message
from tightfit.types import Footprint, GpuFootprint, Hardware, HostFootprint, Levers, ModelShape, Moe, Phase, PhaseName

__all__ = ["Floor", "Scale", "Totals", "estimate", "fullest_of", "required_bytes", "totals_of"]

TRAINING: tuple[PhaseName, ...] = ("forward", "loss", "backward", "step")
DRAWN = "weights gathered_weights master_weights optimizer_states gradients buckets".split()
DRAWN += "activations recompute logits temporaries".split()
"""The order in which components are listed and drawn."""


def estimate(
    shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None = None, *, built_whole: bool = False
) -> Footprint:
    """What every GPU and the host will hold. Without hardware the card is assumed to be ample. `built_whole`: of a
    script that builds its model on the GPU by `from_config`, which holds more at the start."""
    gpu = hardware.gpu if hardware else None
    found: list[tuple[GpuFootprint, HostFootprint, MemoryJob]] = []
    for jobs in make_jobs(shape, levers, world, gpu, built_whole=built_whole):
        components = [_list_components(job) for job in jobs]
        phases = {name: _phase(name, worst(*[each[name] for each in components])) for name in components[0]}
        on_host = {name: Phase(name, parts) for name, parts in host.phases(jobs[0]).items()}
        nvme = host.nvme_bytes(jobs[0])
        found.append((*sum_up(phases, on_host, world, hardware, nvme, levers.groups), jobs[0]))
    on_gpu, _, job = max(found, key=lambda each: each[0].required_bytes)
    of_host = max([each[1] for each in found], key=lambda each: each.peak_bytes_per_node)
    says = zero12.reasons(job) if levers.engine in ("zero1", "zero2") else ()
    if job.row is not None:
        says = (Message("price.fullest-of-row", place=job.row.place + 1, gpus=levers.pipeline_parallel),)
    if levers.expert_parallel > 1:
        experts = max([block.mlp.experts for block in shape.blocks if isinstance(block.mlp, Moe)])
        more = busiest_load(experts, levers.expert_parallel) - 1
        says = (*says, Message("price.busiest-experts", ranks=levers.expert_parallel, more=more))
    usable = (overhead.usable(gpu.memory_bytes, on_gpu.overhead),) if gpu else ()
    return Footprint(
        gpu=on_gpu,
        host=of_host,
        trainable_parameters=of_whole_model(shape, levers).trainable_numel,
        pipeline_gpu=None if job.row is None else job.row.place,
        because=(*overhead.reasons(on_gpu.phases, on_gpu.peak_phase, says), *usable),
    )


def _phase(name: PhaseName, parts: Components) -> Phase:
    return Phase(name, {part: parts[part] for part in DRAWN if parts.get(part)})


def _list_components(job: MemoryJob) -> dict[PhaseName, Components]:
    """Of a GPU in every phase, its turns at one stage if it has several."""
    levers, stepping = job.levers, engines.step(job)
    components: dict[PhaseName, Components] = {"init": ENGINES[levers.engine].initialise(job)}
    components |= engines.passes(job) | {"step": stepping}
    # a forward pass that keeps nothing, then the logits
    passing: Components = {"recompute": job.acts.evaluation}
    logits: Components = {"logits": job.acts.head.eval_logits}
    if job.levers.stage == 3:
        whole = zero3.gather_for(job)
        passing["gathered_weights"] = whole.forward * job.weights.width
        logits["gathered_weights"] = whole.loss * job.weights.width
    if levers.streams:
        passing, logits = stream.evaluate(job)
    components["eval"] = combine(_resting(job, stepping), worst(passing, logits), {"temporaries": job.workspaces})
    # saving copies parts to the host in pieces; what is stored as it lies needs nothing more on the GPU
    rounded = levers.is_fsdp2 and levers.precision != "fp32" and levers.master_weights
    unpacking = overhead.SAVED_PIECE_BYTES // 2 if rounded else 0
    if levers.optimizer in EIGHT_BIT:
        unpacking = overhead.SAVED_PIECE_BYTES
    components["save"] = combine(_resting(job, stepping), {"temporaries": job.workspaces + unpacking})
    return components


def sum_up(
    gpu: Mapping[PhaseName, Phase],
    on_host: Mapping[PhaseName, Phase],
    world: int,
    hardware: Hardware | None,
    nvme_bytes: int,
    groups: int = 1,
) -> tuple[GpuFootprint, HostFootprint]:
    """What the phases of a rank come to, with its files on NVMe."""
    peak_phase = max(TRAINING, key=lambda name: gpu[name].total_bytes)
    peak, init = gpu[peak_phase].total_bytes, gpu["init"].total_bytes
    extra = overhead.beside(max(peak, init), world, hardware.gpu if hardware else None, groups)
    ranks = min(world, hardware.gpus_per_node if hardware else world)
    per_rank = max(phase.total_bytes for phase in on_host.values())
    return GpuFootprint(
        phases=gpu,
        peak_phase=peak_phase,
        peak_bytes=peak,
        init_peak_bytes=init,
        required_bytes=max(peak, init) + sum(extra.values()),
        overhead=extra,
    ), HostFootprint(
        phases=on_host,
        peak_bytes_per_rank=per_rank,
        peak_bytes_per_node=per_rank * ranks,
        nvme_bytes_per_node=nvme_bytes * ranks,
    )


def _resting(job: MemoryJob, step: Components) -> Components:
    """What stays between two steps. ZeRO-3's gradients have a buffer that is never given back, and so have those that
    leave for the host."""
    if job.levers.streams:
        step = stream.hold_always(job)
    stays = job.levers.stage == 3 or job.levers.streams
    gone = {"temporaries", "activations"} | (set() if stays else {"gradients"})
    return {name: size for name, size in step.items() if name not in gone}
