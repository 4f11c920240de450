"""What `tightfit plan` answers: the fastest way that fits, what a tier would do, or the most that fits; and the files
of a plan: for which versions they are made, what starts them, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan_request import PlanInput, place_job, resolve_request
from tightfit.desk.request import Request
from tightfit.hardware.named import is_this
from tightfit.inputs.flags import meant, spelt
from tightfit.inputs.surroundings import is_installed
from tightfit.inputs.versions import LLAMAFACTORY_VERSION, find_installed, is_version
from tightfit.job import Job
from tightfit.messages import Listing, Message, Said
from tightfit.planner import Tiered, all_tiers, plan_tier, plan_within, question_of
from tightfit.planner.calibration import Calibration
from tightfit.planner.limits import Limit, largest_micro_batch, largest_model, longest_sequence
from tightfit.planner.plan import Bounds, Plan
from tightfit.planner.saving import is_open
from tightfit.planner.search import search, something_fits
from tightfit.planner.trainers import NAMES
from tightfit.priced import strategy_name
from tightfit.types import STAGES, Cluster, ConfigError

if TYPE_CHECKING:
    from tightfit.formats.llamafactory.read import Original
    from tightfit.formats.target import Target

DEEPSPEED = frozenset(STAGES)
STARTS_ANY = "torchrun"  # a launcher without bounds, to name where another one's are too narrow
FOR_US = "--for tightfit"  # likewise the trainer
ABOUT_FILES = ("write", "target", "launcher", "port", "hostfile", "transformers_version", "llamafactory_version")
"""What of a request needs the renderers, which a plan alone does without."""
_MOST_PORT = 65_535

Answer = Plan | Tiered | Limit | list[Tiered]


def answered(request: Request, *, advice: bool = True) -> tuple[Answer, list[Path] | None]:
    """The answer, and the files that were written for it; None: none were asked for.

    `advice`: see `Bounds`; a caller that asks again on each move of a slider does without at first.
    """
    target = target_of(request)
    settled = resolve_request(request, for_others=True)
    if target is not None:
        check_cluster(target, settled.job)
    pinned, launcher = settled.job.levers.get("engine"), target.launcher if target else None
    if pinned is not None and pinned not in STAGES and launcher in ("deepspeed", "llamafactory"):
        raise ConfigError(Message("desk.launcher-without-fsdp2", launcher=launcher, engine=pinned))
    bounds = replace(bounds_of(settled.job, target, calibration_of(request, settled.job)), advice=advice)
    try:
        answer = _answer(request, settled, bounds)
    except ConfigError as error:
        raise of_the_file(error, request) from None
    return write_plan(request, target and replace(target, original=original_for(request)), bounds, answer)


def original_for(request: Request) -> Original | None:
    """The LLaMA-Factory file that is to be written anew; None: there is none."""
    if request.file is None or not request.file.is_llamafactory:
        return None
    from tightfit.formats.llamafactory.read import original_of

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


def _answer(request: Request, settled: PlanInput, bounds: Bounds) -> Answer:
    job, shape, hardware = settled.job, settled.shape, settled.hardware
    said = (*settled.said, *left_out(job, bounds))
    bounds = replace(bounds, saving_is_open=is_open(settled.explicit, job))
    if request.max is not None:
        if request.max == "seq":
            limit = longest_sequence(job, shape, hardware, bounds)
        elif request.max == "micro-batch":
            limit = largest_micro_batch(job, shape, hardware, bounds)
        else:
            limit = largest_model(job, hardware, bounds=bounds)
        way_out = beyond(replace(bounds, every_gpu=True), limit.plan)
        return replace(limit, because=(*((way_out,) if way_out else ()), *said, *limit.because))
    if job.tier is None:
        found = plan_within(bounds, job, shape, hardware, said)
        way_out = beyond(bounds, found)
        return replace(found, because=(way_out, *found.because)) if way_out else found
    if job.tier == "all":
        if request.write is not None:
            raise ConfigError(Message("desk.write-one-tier"))
        return all_tiers(job, shape, hardware, settled.explicit, bounds.calibration)
    answer = plan_tier(job.tier, job, shape, hardware, settled.explicit, bounds.calibration)
    if answer.plan is None:
        raise ConfigError(answer.problem)
    others: tuple[Said, ...] = ()
    if not answer.plan.fits:
        every = all_tiers(job, shape, hardware, settled.explicit, bounds.calibration)
        fitting = [each.tier.name for each in every if each.plan is not None and each.plan.fits]
        names = [name for name in fitting if name != answer.tier.name]
        fit = Message("desk.other-tiers-fit", names=Listing(names), count=len(names))
        others = (fit if names else Message("desk.no-tier-fits"),)
    return replace(answer, because=(*settled.said, *answer.because, *others))


# --- what can be started ------------------------------------------------------------------------


def bounds_of(job: Job, target: Target | None, calibration: Calibration | None = None) -> Bounds:
    """What launcher and trainer can start: what is promised must be what they run."""
    is_deepspeeds = target is not None and target.launcher == "deepspeed" and job.trainer != "llamafactory"
    return Bounds(
        engines=DEEPSPEED if is_deepspeeds else None,
        llamafactory_version=target.llamafactory_version if target else LLAMAFACTORY_VERSION,
        has_liger=is_this(job.hardware.gpus) and is_installed("liger_kernel"),
        calibration=calibration,
    )


def left_out(job: Job, bounds: Bounds) -> tuple[Said, ...]:
    """What cannot be started; what the user has pinned needs no sentence."""
    said: list[Said] = []
    if "engine" not in job.levers and (bounds.engines or job.trainer == "llamafactory"):
        starter = "--launcher deepspeed" if bounds.engines else "llamafactory-cli"
        said.append(Message("desk.fsdp2-left-out", starter=starter))
    if job.trainer != "tightfit" and "checkpointing" not in job.levers:
        said.append(Message("desk.all-layers-or-none", trainer=NAMES[job.trainer]))
    return tuple(said)


def beyond(bounds: Bounds, answer: Plan) -> Message | None:
    """What our own worker, started by any launcher, would make fit, where launcher or trainer leave nothing, or nothing
    without a change."""
    chosen, trainer = answer.chosen, answer.job.trainer
    ours = trainer == "tightfit"
    if (ours and bounds.engines is None) or (chosen is not None and not chosen.changes):
        return None
    free = Bounds(every_gpu=bounds.every_gpu, calibration=bounds.calibration)
    question = question_of(replace(answer.job, trainer="tightfit"), answer.shape, answer.hardware).within(free)
    best = search(question, nearest=False).best if something_fits(question) else None
    if best is None:
        return None
    way = strategy_name(best.levers)
    if not ours:
        return Message("desk.fits-for-us", trainer=NAMES[trainer], flag=FOR_US, way=way)
    return Message("desk.fits-with-launcher", launcher="deepspeed", other=STARTS_ANY, way=way)


# --- the files ----------------------------------------------------------------------------------


def target_of(request: Request) -> Target | None:
    """What was said about the readers of the files; None: nothing. DeepSpeed's version is the job's."""
    if all(getattr(request, name) is None for name in ABOUT_FILES):
        return None
    from tightfit.formats.dialect import launchers
    from tightfit.formats.target import Target

    usual, launcher = Target(), request.launcher
    if launcher is not None and launcher not in launchers():
        hint = meant(launcher, launchers())
        raise ConfigError(Message("inputs.unknown-value", flag="--launcher", word=launcher, hint=hint))
    cluster: Cluster | None = next((each for each in get_args(Cluster) if each == request.target), None)
    if request.target is not None and cluster is None:
        hint = meant(request.target, get_args(Cluster))
        raise ConfigError(Message("inputs.unknown-value", flag="--target", word=request.target, hint=hint))
    port = usual.port if request.port is None else request.port
    if not 1 <= port <= _MOST_PORT:
        must = Message("inputs.from-to", least=1, most=_MOST_PORT)
        raise ConfigError(Message("inputs.flag-must-be", flag="--port", must=must, value=port))
    return Target(
        transformers_version=_version("transformers", request.transformers_version, usual.transformers_version),
        llamafactory_version=_version("llamafactory", request.llamafactory_version, usual.llamafactory_version),
        launcher=launcher,
        cluster=cluster,
        port=port,
        hostfile=None if request.hostfile is None else read_hostfile(request.hostfile),
    )


def check_cluster(target: Target, job: Job) -> None:
    """A ConfigError where the cluster cannot start the job, or starts it in another way than was said."""
    cluster = target.cluster
    if cluster is None:
        return
    flag = f"--target {cluster}"
    if job.trainer == "trainer" or (job.trainer != "tightfit" and cluster != "slurm"):
        trainer, other = NAMES[job.trainer], FOR_US
        raise ConfigError(Message("desk.target-for-us", flag=flag, trainer=trainer, other=other))
    if cluster == "slurm":
        return
    if target.hostfile is not None:
        raise ConfigError(Message("desk.target-places-ranks", flag=flag, other="--hostfile"))
    if job.hardware.gpu_ids is not None:
        raise ConfigError(Message("desk.target-places-ranks", flag=flag, other="--gpu-ids"))
    if cluster == "kubernetes" and target.launcher not in (None, STARTS_ANY):
        other = f"--launcher {target.launcher}"
        raise ConfigError(Message("desk.target-starts-with", flag=flag, program=STARTS_ANY, other=other))


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


def write_plan(
    request: Request, target: Target | None, bounds: Bounds, answer: Answer
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
        narrow = beyond(replace(bounds, every_gpu=isinstance(answer, Limit)), found) is not None
        other = FOR_US if found.job.trainer != "tightfit" else f"--launcher {STARTS_ANY}"
        way = Message("desk.would-fit-with", flag=other) if narrow else way_out(found, Message("desk.how-far"))
        raise ConfigError(Message("desk.not-written", way=way))
    answer = _each(answer, _explain)
    return answer, write(render_plan(plan_of(answer), target), Path(request.write), request.force)


def files_of(plan: Plan, target: Target | None = None, *, original: Original | None = None) -> dict[str, str]:
    """The files of a plan that fits, by name; without a target, for the versions that are installed here. `original`:
    the LLaMA-Factory file that it was made from."""
    target = target or target_of(Request(write=""))
    assert target is not None
    target = replace(target, original=original)
    return render_plan(_explain(plan), target)


def _explain(plan: Plan) -> Plan:
    """A plan for our own worker says on what it would train."""
    if plan.job.trainer != "tightfit":
        return plan
    from tightfit.formats.worker.write import untrained

    return replace(plan, because=(*plan.because, *untrained(plan.job)))


def render_plan(plan: Plan, target: Target, job: Job | None = None) -> dict[str, str]:
    """The files for these readers, with what the plan and the job say of them. `job`: where it is not the plan's."""
    from tightfit.formats.render import render

    assert plan.chosen is not None, "what does not fit has no files"
    job = job or plan.job
    ids, there = job.hardware.gpu_ids, None
    if ids is not None:  # all that a node has, also those that the job leaves to others
        from tightfit.job.file import hardware_of

        there = hardware_of(replace(job, hardware=replace(job.hardware, gpu_ids=None))).gpus_per_node
    version = plan.chosen.levers.deepspeed_version
    return render(plan, replace(target, deepspeed_version=version, gpu_ids=ids, gpus_of_node=there))


def plan_of(answer: Answer) -> Plan:
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
    levers = answer.chosen.levers if answer.chosen is not None else None
    if levers is None or "nvme" not in (levers.offload_optimizer, levers.offload_param):
        return answer
    if levers.streams:
        return replace(answer, because=(*answer.because, Message("desk.nvme-measured-once")))
    said = Message("plan.unproven-nvme")
    return replace(answer, unproven=(*answer.unproven, said), because=(*answer.because, said))
