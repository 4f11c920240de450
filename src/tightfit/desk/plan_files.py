"""The files of a plan: for which versions they are made, what starts them, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.desk.request import Request
from tightfit.inputs.flags import meant, spelt
from tightfit.inputs.versions import LLAMAFACTORY_VERSION, choose_deepspeed, find_installed, is_version
from tightfit.job import Job
from tightfit.messages import Message, Said
from tightfit.planner import plan_within, question_of
from tightfit.planner.calibration import Calibration
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.search import search, something_fits
from tightfit.planner.tiers import Tiered
from tightfit.planner.trainers import NAMES, STARTS
from tightfit.priced import amounts, strategy_name
from tightfit.types import FSDP2, STAGES, ConfigError, Trainer

if TYPE_CHECKING:
    from tightfit.formats.target import Original, Target

DEEPSPEED = frozenset(STAGES)
STARTS_ANY = "torchrun"
"""A launcher without bounds, to name where another one's are too narrow."""
FOR_US = "--for tightfit"
"""Likewise the trainer."""
ABOUT_FILES = ("write", "launcher", "port", "hostfile", "transformers_version", "llamafactory_version")
"""What of a request needs the renderers, which a plan alone does without."""

_MOST_PORT = 65_535

Answer = Plan | Tiered | Limit | list[Tiered]


@dataclass(frozen=True, slots=True, kw_only=True)
class Startable:
    """What a launcher can start: the bounds of the search."""

    launcher: str | None
    engines: frozenset[str] | None = None
    """See `Bounds`; so `llamafactory_version`."""
    llamafactory_version: str = LLAMAFACTORY_VERSION
    said: tuple[Said, ...] = ()
    calibration: Calibration | None = None
    """What earlier runs have taught; None: predictions are taken as they are."""
    advice: bool = True
    """See `Bounds`."""

    def bounds(self, *, every_gpu: bool = False) -> Bounds:
        return Bounds(
            engines=self.engines,
            llamafactory_version=self.llamafactory_version,
            every_gpu=every_gpu,
            calibration=self.calibration,
            advice=self.advice,
        )


def target_of(request: Request) -> Target | None:
    """What was said about the readers of the files; None: nothing. DeepSpeed's version is the job's."""
    if all(getattr(request, name) is None for name in ABOUT_FILES):
        return None
    from tightfit.formats.registry import launchers
    from tightfit.formats.target import Target

    usual, launcher = Target(), request.launcher
    if launcher is not None and launcher not in launchers():
        hint = meant(launcher, launchers())
        raise ConfigError(Message("inputs.unknown-value", flag="--launcher", word=launcher, hint=hint))
    port = usual.port if request.port is None else request.port
    if not 1 <= port <= _MOST_PORT:
        must = Message("inputs.from-to", least=1, most=_MOST_PORT)
        raise ConfigError(Message("inputs.flag-must-be", flag="--port", must=must, value=port))
    return Target(
        transformers_version=_version("transformers", request.transformers_version, usual.transformers_version),
        llamafactory_version=_version("llamafactory", request.llamafactory_version, usual.llamafactory_version),
        launcher=launcher,
        port=port,
        hostfile=None if request.hostfile is None else read_hostfile(request.hostfile),
    )


def _version(package: str, said: str | None, usual: str) -> str:
    if said is None:
        return find_installed(package) or usual
    if not is_version(said):
        form = Message("inputs.a-version", version=usual)
        raise ConfigError(Message("inputs.flag-takes", flag=f"{spelt(package)}-version", form=form, word=said))
    return said


def read_hostfile(path: str) -> str:
    """The text of a hostfile, in which nothing is wrong."""
    from tightfit.formats.launch.hostfile import parse_hostfile
    from tightfit.inputs.spelling import read_text

    text = read_text(Path(path), Message("desk.a-hostfile"))
    parse_hostfile(text)
    return text


def check_launcher(job: Job, target: Target | None) -> None:
    """A launcher that cannot start the engine which was pinned."""
    if target is not None and job.levers.get("engine") == FSDP2 and target.launcher in ("deepspeed", "llamafactory"):
        raise ConfigError(Message("desk.launcher-without-fsdp2", launcher=target.launcher))


def startable_of(job: Job, target: Target | None, calibration: Calibration | None = None) -> Startable:
    """What is promised must be what launcher and trainer run; what the user has pinned needs no sentence."""
    launcher = target.launcher if target else None
    said: list[Said] = []
    engines = DEEPSPEED if launcher == "deepspeed" and job.trainer != "llamafactory" else None
    if "engine" not in job.levers and (engines or job.trainer == "llamafactory"):
        starter = "--launcher deepspeed" if engines else "llamafactory-cli"
        said.append(Message("desk.fsdp2-left-out", starter=starter))
    if job.trainer != "tightfit" and "checkpointing" not in job.levers:
        said.append(Message("desk.all-layers-or-none", trainer=NAMES[job.trainer]))
    return Startable(
        launcher=launcher,
        engines=engines,
        llamafactory_version=target.llamafactory_version if target else LLAMAFACTORY_VERSION,
        said=tuple(said),
        calibration=calibration,
    )


def beyond(startable: Startable, answer: Plan, *, every_gpu: bool = False) -> Message | None:
    """What our own worker, started by any launcher, would make fit, where launcher or trainer leave nothing, or nothing
    without a change."""
    chosen, trainer = answer.chosen, answer.job.trainer
    ours = trainer == "tightfit"
    if (ours and startable.engines is None) or (chosen is not None and not chosen.changes):
        return None
    free = Bounds(every_gpu=every_gpu, calibration=startable.calibration)
    question = question_of(replace(answer.job, trainer="tightfit"), answer.shape, answer.hardware).within(free)
    best = search(question, nearest=False).best if something_fits(question) else None
    if best is None:
        return None
    if not ours:
        return Message("desk.fits-for-us", trainer=NAMES[trainer], flag=FOR_US, way=strategy_name(best.levers))
    return Message(
        "desk.fits-with-launcher", launcher=startable.launcher, other=STARTS_ANY, way=strategy_name(best.levers)
    )


def write_plan(
    request: Request, target: Target | None, startable: Startable, answer: Answer
) -> tuple[Answer, list[Path] | None]:
    """The answer with what was never run by us, and the files that were written for it, if that was asked."""
    answer = _each(answer, _note_unproven)
    if target is None or request.write is None:
        return answer, None
    from tightfit.formats.plan_folder import write

    found = plan_of(answer)
    if found.chosen is None:
        if isinstance(answer, Tiered) and answer.without_it is not None:
            raise ConfigError(Message("desk.tier-not-written", tier=answer.tier.name, way=answer.without_it))
        every_gpu = isinstance(answer, Limit)
        narrow = beyond(startable, found, every_gpu=every_gpu) is not None
        other = FOR_US if found.job.trainer != "tightfit" else f"--launcher {STARTS_ANY}"
        way = Message("desk.would-fit-with", flag=other) if narrow else way_out(found, Message("desk.how-far"))
        raise ConfigError(Message("desk.not-written", way=way))
    answer = _each(answer, lambda plan: _with_other_trainers(_with_what_it_trains(plan, target), target))
    return answer, write(_render(plan_of(answer), target), Path(request.write), request.force)


def files_of(plan: Plan, target: Target | None = None, *, original: Original | None = None) -> dict[str, str]:
    """The files of a plan that fits, by name; without a target, for the versions that are installed here. `original`:
    the LLaMA-Factory file that it was made from."""
    target = target or target_of(Request(write=""))
    assert target is not None
    target = replace(target, original=original)
    return _render(_with_other_trainers(_with_what_it_trains(plan, target), target), target)


def _with_other_trainers(plan: Plan, target: Target) -> Plan:
    """A plan for our own worker says so where another trainer cannot run it, and what a plan for that would be."""
    if plan.job.trainer != "tightfit":
        return plan
    said = [sentence for trainer in STARTS if (sentence := _instead(plan, trainer, target))]
    return replace(plan, because=(*plan.because, *said))


def _instead(plan: Plan, trainer: Trainer, target: Target) -> Message | None:
    """What `--for` would give; None: the trainer's own file does, or it cannot train this at all."""
    from tightfit.formats.under import runs_under

    if runs_under(trainer, plan, target):
        return None
    job = replace(plan.job, trainer=trainer, effective_batch=plan.effective_batch, tier=None)
    free = {"engine", "offload_optimizer", "offload_param", "checkpointing", "loss", "scan", "deepspeed_version"}
    version, _ = choose_deepspeed(plan.hardware, trainer, target.llamafactory_version)
    pins = {name: value for name, value in job.levers.items() if name not in free}
    job = replace(job, levers={**pins, "deepspeed_version": version})
    bounds = Bounds(llamafactory_version=target.llamafactory_version, advice=False)
    try:
        found = plan_within(bounds, job, plan.shape, plan.hardware).chosen
    except ConfigError:
        return None
    name, ours = NAMES[trainer], NAMES["tightfit"]
    if found is None:
        return Message("desk.nothing-for-other", ours=ours, other=name, trainer=trainer)
    need, there = amounts(found.footprint.gpu.required_bytes, found.hardware.gpu.memory_bytes)
    return Message(
        "desk.way-for-other",
        ours=ours,
        other=name,
        trainer=trainer,
        way=strategy_name(found.levers),
        need=need,
        there=there,
        pace=found.pace.tokens_per_s,
    )


def _render(plan: Plan, target: Target) -> dict[str, str]:
    from tightfit.formats.render import render

    return render(plan, target_for(plan, plan.job, target))


def target_for(plan: Plan, job: Job, target: Target) -> Target:
    """The readers of a plan's files, with what the plan and the job say of them."""
    assert plan.chosen is not None, "what does not fit has no files"
    ids, there = job.hardware.gpu_ids, None
    if ids is not None:  # all that a node has, also those that the job leaves to others
        from tightfit.job.file import hardware_of

        there = hardware_of(replace(job, hardware=replace(job.hardware, gpu_ids=None))).gpus_per_node
    version = plan.chosen.levers.deepspeed_version
    return replace(target, deepspeed_version=version, gpu_ids=ids, gpus_of_node=there)


def _with_what_it_trains(plan: Plan, target: Target) -> Plan:
    """Whoever starts the files has to know on what they would train."""
    if plan.job.trainer != "tightfit":
        return plan
    from tightfit.formats.worker.write import untrained

    return replace(plan, because=(*plan.because, *untrained(plan.job)))


def plan_of(answer: Answer) -> Plan:
    """The plan that an answer comes down to."""
    found = answer if isinstance(answer, Plan) else None if isinstance(answer, list) else answer.plan
    assert found is not None, "a comparison of tiers has no plan of its own"
    return found


def way_out(answer: Plan, otherwise: Said) -> Said:
    """What would make a plan fit that does not; `otherwise`: where nothing is known to."""
    if answer.remedies:
        first = answer.remedies[0]
        return Message("desk.allow-would-fit", allow=first.allowance, cost=first.cost, effect=first.effect)
    if answer.gpus_needed is not None:
        return Message("desk.gpus-would-do", gpus=answer.gpus_needed)
    return otherwise


def _each(answer: Answer, change: Callable[[Plan], Plan]) -> Answer:
    """The answer with its plan changed; a comparison of tiers has none."""
    if isinstance(answer, list):
        return answer
    if isinstance(answer, Plan):
        return change(answer)
    return replace(answer, plan=change(plan_of(answer)))


def _note_unproven(answer: Plan) -> Plan:
    """The plan with what was never run by us."""
    levers = answer.chosen.levers if answer.chosen is not None else None
    if levers is None or "nvme" not in (levers.offload_optimizer, levers.offload_param):
        return answer
    said = Message("plan.unproven-nvme")
    return replace(answer, unproven=(*answer.unproven, said), because=(*answer.because, said))
