"""What `tightfit plan` answers: the fastest way that fits, what a tier would do, or the most that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan_files import (
    Answer,
    Startable,
    beyond,
    check_launcher,
    startable_of,
    target_of,
    write_plan,
)
from tightfit.desk.plan_request import PlanInput, place_job, resolve_request
from tightfit.desk.request import Request
from tightfit.messages import Listing, Message, Said
from tightfit.planner import plan_within
from tightfit.planner.limits import largest_micro_batch, largest_model, longest_sequence
from tightfit.planner.tiers import all_tiers, plan_tier
from tightfit.types import ConfigError

if TYPE_CHECKING:
    from tightfit.formats.target import Original


def answered(request: Request, *, advice: bool = True) -> tuple[Answer, list[Path] | None]:
    """The answer, and the files that were written for it; None: none were asked for.

    `advice`: see `Bounds`; a caller that asks again on each move of a slider does without at first.
    """
    target = target_of(request)
    settled = resolve_request(request, for_others=True)
    check_launcher(settled.job, target)
    startable = replace(startable_of(settled.job, target, calibration_of(request, settled.job)), advice=advice)
    try:
        answer = _answer(request, settled, startable)
    except ConfigError as error:
        raise of_the_file(error, request) from None
    return write_plan(request, target and replace(target, original=original_for(request)), startable, answer)


def original_for(request: Request) -> Original | None:
    """The LLaMA-Factory file that is to be written anew; None: there is none."""
    if request.file is None or not request.file.is_llamafactory:
        return None
    from tightfit.formats.llamafactory.job import original_of

    path = request.file.path
    return original_of(request.file.read(), lambda job: place_job(job, path))


def of_the_file(error: ConfigError, request: Request) -> ConfigError:
    """A batch that no flag gave is named by the file that did."""
    said = error.said
    if isinstance(said, str) or said.id != "plan.uneven-batch":
        return error
    if "effective_batch" in request.flags or request.file is None:
        return error
    return ConfigError(Message("desk.file-batch-uneven", file=request.file.path.name, **said.fields))


def _answer(request: Request, settled: PlanInput, startable: Startable) -> Answer:
    job, shape, hardware = settled.job, settled.shape, settled.hardware
    said = (*settled.said, *startable.said)
    if request.max is not None:
        bounds = startable.bounds()
        if request.max == "seq":
            limit = longest_sequence(job, shape, hardware, bounds)
        elif request.max == "micro-batch":
            limit = largest_micro_batch(job, shape, hardware, bounds)
        else:
            limit = largest_model(job, hardware, bounds=bounds)
        way_out = beyond(startable, limit.plan, every_gpu=True)
        return replace(limit, because=(*((way_out,) if way_out else ()), *said, *limit.because))
    if job.tier is None:
        found = plan_within(startable.bounds(), job, shape, hardware, said)
        way_out = beyond(startable, found)
        return replace(found, because=(way_out, *found.because)) if way_out else found
    if job.tier == "all":
        if request.write is not None:
            raise ConfigError(Message("desk.write-one-tier"))
        return all_tiers(job, shape, hardware, settled.explicit, startable.calibration)
    answer = plan_tier(job.tier, job, shape, hardware, settled.explicit, startable.calibration)
    if answer.plan is None:
        raise ConfigError(answer.problem)
    others: tuple[Said, ...] = ()
    if not answer.plan.fits:
        every = all_tiers(job, shape, hardware, settled.explicit, startable.calibration)
        fitting = [each.tier.name for each in every if each.plan is not None and each.plan.fits]
        names = [name for name in fitting if name != answer.tier.name]
        others = (Message("desk.no-tier-fits"),)
        if names:
            others = (Message("desk.other-tiers-fit", names=Listing(names), count=len(names)),)
    return replace(answer, because=(*settled.said, *answer.because, *others))
