"""A plan for our own worker, as another trainer would run the file that lies beside it: what it then needs."""

from __future__ import annotations

from dataclasses import replace

from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way
from tightfit.job.file import adapter_dtype_of
from tightfit.memory import estimate
from tightfit.messages import Message
from tightfit.planner.plan import Plan
from tightfit.planner.trainers import NAMES, Abilities
from tightfit.priced import amounts
from tightfit.types import Checkpointing, ConfigError, Levers, Trainer


def levers_under(trainer: Trainer, plan: Plan, target: Target) -> Levers:
    """What its file makes the trainer do, which has not all that our worker has."""
    way, job = require_way(plan), replace(plan.job, trainer=trainer)
    levers, able = way.levers, Abilities(trainer=trainer, llamafactory_version=target.llamafactory_version)
    offloads = levers.checkpointing.offload and able.offloads_inputs(levers.engine)
    return replace(
        levers,
        trainer=trainer,
        padded=not job.data.packing,
        checkpointing=Checkpointing(layers=0 if levers.checkpointing.layers == 0 else None, offload=offloads),
        loss=levers.loss if able.fuses(way.shape) else "plain",
        mlp="plain",
        scan="official" if way.shape.scans and levers.scan == "tightfit" else levers.scan,
        lora=levers.lora and replace(levers.lora, dtype=adapter_dtype_of(job)),
    )


def runs_under(trainer: Trainer, plan: Plan, target: Target) -> bool:
    """Whether the trainer has what the plan needs, and room for it."""
    levers = require_way(plan).levers
    if levers.streams or (trainer == "llamafactory" and levers.is_fsdp2):
        return False
    try:
        check_fits_under(trainer, plan, target)
    except ConfigError:
        return False
    return True


def check_fits_under(trainer: Trainer, plan: Plan, target: Target) -> None:
    """A ConfigError where the trainer would run out of what our worker has enough of."""
    if plan.job.trainer == trainer:
        return
    way = require_way(plan)
    found = estimate(way.shape, levers_under(trainer, plan, target), way.world, way.hardware)
    ram, planned, gpu = way.hardware.host_ram_bytes, way.footprint, way.hardware.gpu.memory_bytes
    said, need, there = "planfile.trainer-needs-gpu", found.gpu.required_bytes, gpu
    if need <= max(way.gpu_limit_bytes, planned.gpu.required_bytes):
        if ram is None or found.host.peak_bytes_per_node <= max(ram, planned.host.peak_bytes_per_node):
            return
        said, need, there = "planfile.trainer-needs-ram", found.host.peak_bytes_per_node, ram
    needed, held = amounts(need, there)
    raise ConfigError(Message(said, trainer=NAMES[trainer], need=needed, there=held, word=trainer))
