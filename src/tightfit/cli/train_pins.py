"""What `tightfit train` fixes before it plans: a DeepSpeed file's values, the scan that can run, paths, the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.desk.plan_request import PlanInput
from tightfit.formats.worker.write import seeded
from tightfit.inputs.flags import LEVERS, flags_from_levers
from tightfit.inputs.surroundings import is_installed
from tightfit.job import Job
from tightfit.messages import Message, Said, text
from tightfit.model.presets import PRESETS, checkpoint_of
from tightfit.types import Buckets, Levers, Mamba1, Mamba2, ModelError


def pin_deepspeed(settled: PlanInput, path: str) -> PlanInput:
    """The settled with what a DeepSpeed file says, wherever neither flag nor job file says it."""
    from tightfit.formats.deepspeed.read import read_deepspeed

    version = str(settled.job.levers.get("deepspeed_version"))
    settings = read_deepspeed(path, hidden_size=settled.shape.hidden_size, version=version)
    levers: dict[str, Any] = {
        "engine": settings.engine,
        "offload_optimizer": settings.offload_optimizer,
        "offload_param": settings.offload_param,
        "micro_batch": settings.micro_batch,
        "accum": settings.accumulation,
    }
    in_words = flags_from_levers(Levers(buckets=settings.buckets))
    levers |= {flag: value for flag, value in in_words.items() if LEVERS[flag].block == "buckets"}
    if settings.offload_param == "nvme":  # where it must be 0, whatever the file says
        del levers["max_reuse_distance"]
    named = {name: value for name, value in levers.items() if value is not None}
    values: dict[str, Any] = {
        "precision": settings.precision,
        "optimizer": settings.optimizer,
        "master_weights": None if settings.master_weights else False,
        "effective_batch": settings.train_batch,
        "clip": settings.gradient_clipping,
    }
    job = _fill(settled.job, values, settled.explicit)
    job = replace(job, levers={**named, **settled.job.levers})
    kept = text(
        "cli.says-kept",
        file=settings.file,
        items=", ".join((f"{name} {value}" for name, value in list(named.items())[:3])),
    )
    said: tuple[Said, ...] = (kept, *settings.because, *_name_defaults(settings.buckets, settings.file))
    return replace(settled, job=job, said=(*settled.said, *said))


def _fill(job: Job, values: Mapping[str, Any], explicit: frozenset[str]) -> Job:
    changes = {name: value for name, value in values.items() if value is not None and name not in explicit}
    return replace(job, **changes)


def _name_defaults(buckets: Buckets, file: str) -> tuple[str, ...]:
    """What a plan has no lever for."""
    usual = Buckets()
    for name in ("sub_group_size", "contiguous_gradients"):
        if getattr(buckets, name) != getattr(usual, name):
            return (text("cli.left-at-deepspeed", name=name, file=file, usual=getattr(usual, name)),)
    return ()


def with_a_scan_that_runs(settled: PlanInput, *, on_gpu: bool) -> PlanInput:
    """Mamba's scan is a lever like others, but not every one can run here."""
    kinds = {type(block.mixer) for block in settled.shape.blocks}
    if not kinds & {Mamba1, Mamba2}:
        return settled
    if settled.job.levers.get("scan") is not None:
        return settled
    if Mamba1 in kinds or not on_gpu:
        scan, said = "tightfit", text("cli.selective-scan-our")
    elif is_installed("mamba_ssm"):
        scan, said = "official", text("cli.selective-scan-mamba")
    else:
        scan, said = "torch", text("cli.selective-scan-transformers")
    job = replace(settled.job, levers={**settled.job.levers, "scan": scan})
    return replace(settled, job=job, said=(*settled.said, said))


def check_weights(job: Job) -> tuple[Said, ...]:
    """A preset is a shape without weights: adapters need more than that."""
    if not isinstance(job.model, str) or job.model.strip().lower() not in PRESETS:
        return ()
    name = job.model.strip().lower()
    public = checkpoint_of(name)
    if job.method == "full":
        return seeded(job)
    if public is not None:
        raise ModelError(Message("cli.shape-without-weights", name=name, method=job.method, public=public))
    return (text("cli.public-weights-adapters", name=name),)


def with_whole_folder(job: Job) -> Job:
    """The run's folder made absolute, as the ranks start in another one."""
    folder = Path(job.saving.folder).expanduser().absolute()
    return replace(job, saving=replace(job.saving, folder=str(folder)))
