"""`tightfit estimate job.yaml`: what a job file says about the training, priced as it stands there.

A job leaves open how it is computed, which `tightfit plan` chooses. Here nothing is chosen: what the file pins is
taken, and the rest has the values that `estimate` takes where nothing is said.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tightfit.desk.plan_request import fields_of
from tightfit.inputs.job_file import JOB_FLAGS, JobFile, hardware_of, job_from_flags, levers_of, model_of, read_job
from tightfit.inputs.job_text import read_tree
from tightfit.inputs.job_training import MARKS
from tightfit.inputs.llamafactory_file import KNOWN
from tightfit.job import Job
from tightfit.types import Hardware, Levers, ModelShape, UserError

TELLING = {field.name for field in fields(Job)} | {*MARKS}
"""The keys of a job file, in either of its forms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """What a job file gives to an estimate."""

    shape: ModelShape
    levers: Levers
    hardware: Hardware | None
    """None: neither file nor flags name a machine."""
    world: int
    """The GPUs that the file or the machine has; a flag may name fewer."""
    explicit: frozenset[str]
    """The fields that the file sets."""
    said: tuple[str, ...]


def is_job(path: Path) -> bool:
    """Whether it is a job file; what cannot be read at all is left to the other reader to say."""
    try:
        keys = set(read_tree(path))
    except UserError:
        return False
    return bool(keys & (TELLING - KNOWN)) and "model_name_or_path" not in keys


def read_job_input(args: argparse.Namespace) -> JobInput:
    """The job of the file, with what the flags say over it."""
    path = Path(args.file)
    read = read_job(path, model=getattr(args, "model", None))
    job = job_from_flags({name: value for name, value in vars(args).items() if name in JOB_FLAGS}, read.job)
    counted = {"gpus", "world"} & set(vars(args))
    num_gpus = None if counted else read.num_gpus
    hardware = None if job.hardware.gpus is None else hardware_of(job, num_gpus)
    ids = job.hardware.gpu_ids
    world = hardware.world if hardware else num_gpus or (len(ids) if ids else 1)
    shape = model_of(job, trust_trace=getattr(args, "trace", False))
    levers, said = _batched(job, levers_of(job, shape), getattr(args, "world", world))
    return JobInput(
        shape=shape,
        levers=levers,
        hardware=hardware,
        world=world,
        explicit=fields_of(path),
        said=(*_kept(read), *said, *_of_tier(job)),
    )


def _batched(job: Job, levers: Levers, world: int) -> tuple[Levers, tuple[str, ...]]:
    """The sequences of a step as forward passes of the micro batch that is pinned, or of one."""
    if job.effective_batch is None or "accum" in job.levers or world < 1:
        return levers, ()
    share, rest = divmod(job.effective_batch, world * levers.micro_batch)
    if rest:
        return levers, (f"An effective batch of {job.effective_batch} cannot be shared by {world} GPUs: not priced.",)
    gpus = f"{world} GPUs" if world > 1 else "one GPU"
    said = f"An effective batch of {job.effective_batch} on {gpus}: priced as {levers.micro_batch} × {share} on each."
    return replace(levers, accumulation=share), (said,)


def _kept(read: JobFile) -> tuple[str, ...]:
    """The reader's sentences, without those about what a plan does with the file."""
    return tuple(each for each in read.said if not re.search(r"^num_gpus |\bthe plan (may|keeps)\b", each))


def _of_tier(job: Job) -> tuple[str, ...]:
    return () if job.tier is None else (f"The tier {job.tier} is not priced here: `tightfit plan` knows tiers.",)
