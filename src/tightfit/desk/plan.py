"""What `tightfit plan` answers: the fastest way that fits, what a tier would do, or the most that fits."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tightfit.desk.calibrated import calibration_of
from tightfit.desk.plan_files import (
    Answer,
    Startable,
    beyond,
    check_launcher,
    startable_of,
    target_of,
    write_plan,
)
from tightfit.desk.plan_request import Request, place_job, request_of
from tightfit.inputs.flags import meant, spelt
from tightfit.inputs.spelling import as_number
from tightfit.planner import plan_within
from tightfit.planner.limits import Limit, Wanted, largest_micro_batch, largest_model, longest_sequence
from tightfit.planner.tiers import all_tiers, tiered
from tightfit.types import ConfigError

if TYPE_CHECKING:
    from tightfit.formats.target import Original

MOST_MARGIN = 90
"""Percent: what is below this may be meant as a percentage."""


def answered(args: argparse.Namespace, *, advice: bool = True) -> tuple[Answer, list[Path] | None]:
    """The answer, and the files that were written for it; None: none were asked for.

    `advice`: see `Bounds`; a caller that asks again on each move of a slider does without at first.
    """
    target = target_of(args)
    request = request_of(args, for_others=True)
    check_launcher(request.job, target)
    startable = replace(startable_of(request.job, target, calibration_of(args, request.job)), advice=advice)
    try:
        answer = _answer(args, request, startable)
    except ConfigError as error:
        raise of_the_file(error, args) from None
    return write_plan(args, target and replace(target, original=original_for(args)), startable, answer)


def original_for(args: argparse.Namespace) -> Original | None:
    """The LLaMA-Factory file that is to be written anew; None: there is none."""
    if not hasattr(args, "file"):
        return None
    from tightfit.formats.llamafactory.job import is_llamafactory, original_of

    path = Path(args.file)
    return original_of(path, lambda job: place_job(job, path)) if is_llamafactory(path) else None


def of_the_file(error: ConfigError, args: argparse.Namespace) -> ConfigError:
    """A batch that no flag gave is named by the file that did."""
    said, flag = str(error), "--effective-batch "
    if not said.startswith(flag) or hasattr(args, "effective_batch") or not hasattr(args, "file"):
        return error
    batch, _, rest = said.removeprefix(flag).partition(" ")
    rest = rest.replace(": use ", f": use {flag}")
    return ConfigError(f"The {batch} sequences a step of {Path(args.file).name} {rest}")


def check_flags(args: argparse.Namespace) -> None:
    """Flags that contradict each other."""
    given = vars(args)
    if "force" in given and "write" not in given:
        raise ConfigError("--force needs --write: it replaces files that --write would leave alone")
    if "num_gpus" in given and "world" in given:
        raise ConfigError("--num-gpus and --world say the same: leave one out")
    for name in ("num_gpus", "world"):
        if given.get(name, 1) < 1:
            raise ConfigError(f"{spelt(name)} must be at least 1, not {given[name]}")
    margin = as_number(given["margin"]) if "margin" in given else None
    if margin is not None and 1 <= margin < MOST_MARGIN:
        raise ConfigError(f"--margin is a share of the card: write {margin:g}% or {margin / 100:g}, not {margin:g}")
    wanted = given.get("max")
    if wanted is None:
        return
    wanted = args.max = wanted.lower().replace("_", "-")
    if wanted not in get_args(Wanted):
        raise ConfigError(f"--max knows no {wanted!r}{meant(wanted, get_args(Wanted))}")
    asked = {"seq": ("seq",), "micro-batch": ("micro_batch", "effective_batch"), "model": ("model",)}[wanted]
    for name in (*asked, "tier", "allow"):
        if name in given:
            raise ConfigError(f"--max {wanted} and {spelt(name)} contradict each other: leave one out")


def _answer(args: argparse.Namespace, request: Request, startable: Startable) -> Answer:
    job, shape, hardware = request.job, request.shape, request.hardware
    if hasattr(args, "max"):
        return _most(args.max, request, startable)
    if job.tier is not None:
        if job.tier == "all":
            if hasattr(args, "write"):
                raise ConfigError("--tier all is a comparison: name one tier to --write its files")
            return all_tiers(job, shape, hardware, request.explicit, startable.calibration)
        answer = tiered(job.tier, job, shape, hardware, request.explicit, startable.calibration)
        if answer.plan is None:
            raise ConfigError(answer.problem)
        others = () if answer.plan.fits else _fitting_tiers(answer.tier.name, request, startable)
        return replace(answer, because=(*request.said, *answer.because, *others))
    said = (*request.said, *startable.said)
    found = plan_within(startable.bounds(), job, shape, hardware, said)
    way_out = beyond(startable, found)
    return replace(found, because=(way_out, *found.because)) if way_out else found


def _fitting_tiers(name: str, request: Request, startable: Startable) -> tuple[str, ...]:
    """Where a tier does not fit: those that do."""
    every = all_tiers(request.job, request.shape, request.hardware, request.explicit, startable.calibration)
    names = [each.tier.name for each in every if each.plan is not None and each.plan.fits and each.tier.name != name]
    if not names:
        return ("None of the other tiers fits either.",)
    fit = "fits" if len(names) == 1 else "fit"
    return (f"Of the other tiers {', '.join(names)} {fit}: --tier all sets them side by side.",)


def _most(wanted: Wanted, request: Request, startable: Startable) -> Limit:
    job, shape, hardware = request.job, request.shape, request.hardware
    bounds = startable.bounds()
    if wanted == "seq":
        limit = longest_sequence(job, shape, hardware, bounds)
    elif wanted == "micro-batch":
        limit = largest_micro_batch(job, shape, hardware, bounds)
    else:
        limit = largest_model(job, hardware, bounds=bounds)
    way_out = beyond(startable, limit.plan, every_gpu=True)
    said = (*((way_out,) if way_out else ()), *request.said, *startable.said)
    return replace(limit, because=(*said, *limit.because))
