"""`tightfit estimate job.yaml`: what a job file says about the training, priced.

A job leaves open how it is computed, and `tightfit train` plans that. So where the machine is known and no engine is
named, it is the plan that is priced: anything else would be a verdict on a run that nobody starts. With an engine,
what the file pins is taken, and the rest has the values that `estimate` takes where nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tightfit.desk.request import Request, RequestFile
from tightfit.desk.stages import pick_stage
from tightfit.formats.llamafactory.keys import KNOWN
from tightfit.job import Job
from tightfit.job.file import hardware_of, job_from_flags, job_from_text, levers_of, model_of, names_in
from tightfit.job.training import MARKS, is_arguments
from tightfit.messages import Message, Said, id_of
from tightfit.planner.plan import Plan, Way
from tightfit.planner.tiers import Tiered
from tightfit.types import Hardware, Levers, ModelShape, UserError

TELLING = {field.name for field in fields(Job)} | {*MARKS}
"""The keys of a job file, in either of its forms."""
_ABOUT_PLANS = ("job.gpus-of-this-machine", "job.batch-kept", "job.batch-is")
"""What the reader of job files says of what a plan does with the file."""


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
    said: tuple[Said, ...]
    batch_said: tuple[Said, ...]
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
    stage = pick_stage(request, read.job)
    job = job_from_flags(request.flags, read.job if stage is None else stage.job)
    num_gpus = read.num_gpus if request.world is None and "gpus" not in request.flags else None
    hardware = None if job.hardware.gpus is None else hardware_of(job, num_gpus)
    ids = job.hardware.gpu_ids
    world = hardware.world if hardware else num_gpus or (len(ids) if ids else 1)
    shape = model_of(job, trust_trace=request.trace)
    levers, batch_said = _split_batch(job, levers_of(job, shape), world if request.world is None else request.world)
    return JobInput(
        shape=shape,
        levers=levers,
        hardware=hardware,
        world=world,
        explicit=read.explicit | (names_in(stage.fields) if stage else set()),
        said=tuple(said for said in read.said if id_of(said) not in _ABOUT_PLANS),
        batch_said=batch_said,
        tier=job.tier,
    )


def find_planned_way(request: Request, file: RequestFile, job: JobInput) -> tuple[Way, tuple[Said, ...]] | None:
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
    if plan.chosen is not None:
        changes = [Message("desk.changes-training", change=change) for change in plan.chosen.changes]
        return plan.chosen, (Message("desk.priced-plan", file=file.path.name, tier=job.tier), *job.said, *changes)
    least = max(plan.alternatives, key=lambda way: way.gpu_spare_bytes)
    return least, (Message("desk.priced-least", file=file.path.name, tier=job.tier), *job.said)


def _split_batch(job: Job, levers: Levers, world: int) -> tuple[Levers, tuple[Said, ...]]:
    """The sequences of a step as forward passes of the micro batch that is pinned, or of one."""
    if job.effective_batch is None or "accum" in job.levers or world < 1:
        return levers, ()
    share, rest = divmod(job.effective_batch, world * levers.micro_batch)
    if rest:
        return levers, (Message("desk.batch-not-shared", batch=job.effective_batch, gpus=world),)
    micro = levers.micro_batch
    said = Message("desk.batch-priced", batch=job.effective_batch, gpus=world, micro=micro, accum=share)
    return replace(levers, accumulation=share), (said,)
