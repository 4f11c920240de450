"""`tightfit estimate job.yaml`: what a job file says about the training, priced.

A job leaves open how it is computed, and `tightfit train` plans that. So where the machine is known and no engine is
named, it is the plan that is priced: anything else would be a verdict on a run that nobody starts. With an engine,
what the file pins is taken, and the rest has the values that `estimate` takes where nothing is said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from tightfit.desk.request import Request, RequestFile
from tightfit.desk.stages import stage_asked
from tightfit.formats.llamafactory.keys import KNOWN
from tightfit.job import Job
from tightfit.job.file import JobFile, hardware_of, job_from_flags, job_from_text, levers_of, model_of, names_in
from tightfit.job.training import MARKS, is_arguments
from tightfit.planner.plan import Plan, Way
from tightfit.planner.tiers import Tiered
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
    batch_said: tuple[str, ...]
    """How the sequences of a step are shared out, where no plan does it."""
    tier: str | None


def is_job(file: RequestFile) -> bool:
    """Whether it is a job file; what cannot be read at all is left to the other reader to say."""
    if isinstance(file.found, UserError) or file.is_llamafactory:
        return False
    tree = file.found.tree
    return is_arguments(tree) or bool(set(tree) & (TELLING - KNOWN))


def read_job_input(request: Request, file: RequestFile) -> JobInput:
    """The job of the file, with what the flags say over it."""
    read = job_from_text(file.read(), model=request.model)
    stage = stage_asked(request, read.job)
    job = job_from_flags(request.flags, read.job if stage is None else stage.job)
    num_gpus = read.num_gpus if request.world is None and "gpus" not in request.flags else None
    hardware = None if job.hardware.gpus is None else hardware_of(job, num_gpus)
    ids = job.hardware.gpu_ids
    world = hardware.world if hardware else num_gpus or (len(ids) if ids else 1)
    shape = model_of(job, trust_trace=request.trace)
    levers, said = _batched(job, levers_of(job, shape), world if request.world is None else request.world)
    return JobInput(
        shape=shape,
        levers=levers,
        hardware=hardware,
        world=world,
        explicit=read.explicit | (names_in(stage.fields) if stage else set()),
        said=_kept(read),
        batch_said=said,
        tier=job.tier,
    )


def planned_way(request: Request, file: RequestFile, job: JobInput) -> tuple[Way, tuple[str, ...]] | None:
    """The way that `tightfit train` would take, and the sentence about it; None: the job is to be taken as it stands.

    Where nothing fits, it is the way that needs least of a card.
    """
    from tightfit.desk.plan import answered

    named = "engine" in request.flags or request.deepspeed is not None or "levers.engine" in job.explicit
    if named or job.hardware is None or job.tier == "all":
        return None
    answer, _ = answered(request, advice=False)
    plan = answer.plan if isinstance(answer, Tiered) else answer
    if not isinstance(plan, Plan) or not (plan.chosen or plan.alternatives):
        return None
    name, tier = file.path.name, "" if job.tier is None else f" with the tier {job.tier}"
    if plan.chosen is not None:
        said = f"No engine is named in {name}: priced is what `tightfit train` would choose{tier}."
        return plan.chosen, (
            said,
            *job.said,
            *(f"It changes the training: {change}." for change in plan.chosen.changes),
        )
    least = max(plan.alternatives, key=lambda way: way.gpu_spare_bytes)
    said = f"No engine is named in {name}, and nothing fits{tier}: priced is the way that needs least."
    return least, (said, *job.said)


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
