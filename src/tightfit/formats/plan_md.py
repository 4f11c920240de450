"""PLAN.md: the plan for people. What was chosen and why, what else there was, and how to start it.

It says nothing that the plan does not hold, and no date or path of a machine: rendered twice it is the same file.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping

from tightfit.formats.launch.environment import environment, launcher_of
from tightfit.formats.registry import dialects, launchers
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way, time_limit_s, untrained
from tightfit.inputs.flags import checkpointing_word
from tightfit.memory.overhead import name_component
from tightfit.messages import Listing, Message, Said, end_sentence, id_of, text
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import is_cut_off, time_words
from tightfit.planner.tiers import TIERS
from tightfit.planner.trainers import NAMES
from tightfit.priced import GIB, amounts, billions, strategy_name, training_words


def plan_md(plan: Plan, target: Target, files: Collection[str], left_out: Mapping[str, Said] | None = None) -> str:
    """The reasons of a plan. `left_out` says for each file that could not be written why not."""
    changes, job = require_way(plan).changes, plan.job
    said = Message("planfile.changes-allowed")
    if job.tier is not None:
        said = Message("planfile.changes-by-both" if job.limits.allow else "planfile.changes-by-tier", tier=job.tier)
    points = [f"- **{_sentence(change)}**" for change in changes]
    unset, not_set = text("planfile.unset"), text("planfile.not-set")
    variables = [text("planfile.variables"), "", text("planfile.variables-head"), "|---|---|---|"]
    for variable in environment(plan, target):
        value = unset if variable.unset else not_set if variable.value is None else f"`{variable.value}`"
        variables.append(f"| `{variable.name}` | {value} | {_cell(variable.reason)} |")
    # what is said nowhere else on the page
    elsewhere = {*_assumptions(plan), *plan.unproven, *untrained(plan.job)}
    sections = (
        _title(plan, target),
        # costly changes stand alone and first: they change what comes out
        [text("planfile.changes-title"), "", str(said), "", *points] if changes else [text("planfile.changes-nothing")],
        _bullets(
            text("planfile.why"),
            [why for why in plan.because if why not in elsewhere and id_of(why) != "plan.changes-training"],
        ),
        _alternatives(plan),
        _start(plan, target, files),
        _files(plan, target, files, left_out or {}),
        variables,
        _bullets(text("planfile.assumed"), _assumptions(plan)),
        _bullets(text("planfile.never-run"), plan.unproven),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def _title(plan: Plan, target: Target) -> Iterator[str]:
    way = require_way(plan)
    gpu = way.hardware.gpu
    needed, size, spare = amounts(way.footprint.gpu.required_bytes, gpu.memory_bytes, abs(way.gpu_spare_bytes))
    yield text(
        "planfile.title", model=way.shape.name, world=way.world, gpu=gpu.name, strategy=strategy_name(way.levers)
    )
    yield ""
    if plan.job.tier in TIERS:
        yield text("planfile.tier", tier=plan.job.tier, about=TIERS[plan.job.tier].about)
    yield text(
        "planfile.training",
        training=_cell(training_words(way.levers)),
        size=billions(way.shape.parameters),
        batch=way.effective_batch,
    )
    share = way.gpu_spare_bytes / gpu.memory_bytes
    yield text("planfile.gpu", needed=needed, size=size, spare=spare, share=share)
    yield text("planfile.limit", limit=_gib(way.gpu_limit_bytes))
    held = way.footprint.gpu.phases[way.footprint.gpu.peak_phase].components
    largest = Listing(map(name_component, sorted(held, key=lambda name: -held[name])[:2]), "and")
    yield text("planfile.peak", phase=way.footprint.gpu.peak_phase, largest=largest)
    host, nvme_bytes = _gib(way.footprint.host.peak_bytes_per_node), way.footprint.host.nvme_bytes_per_node
    if nvme_bytes:
        yield text("planfile.host-nvme", ram=host, nvme=_gib(nvme_bytes))
    else:
        yield text("planfile.host", ram=host)
    step_s = way.pace.step_s
    yield text("planfile.pace", step=f"{step_s:.1f} s" if step_s >= 1 else f"{step_s * 1000:.0f} ms", rate=_rate(way))
    if plan.hours is not None:
        yield text("planfile.time", time=time_words(plan.hours))
        limit = time_limit_s(plan.job)
        if limit is not None and is_cut_off(plan):
            if launcher_of(plan, target) == "llamafactory":
                yield text("planfile.time-limit-not-kept", limit=plan.job.timeout)
            else:
                done = limit / (plan.hours * 3600)
                some = Message("planfile.about-share", share=done) if done >= 0.01 else Message("planfile.less-than-1")
                yield text("planfile.time-limit-cuts", limit=plan.job.timeout, done=some)


def _alternatives(plan: Plan) -> Iterator[str]:
    ways = (require_way(plan), *plan.alternatives)
    yield text("planfile.alternatives")
    yield ""
    yield text("planfile.priced", count=plan.considered)
    yield ""
    yield text("planfile.alternatives-head")
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for way in ways:
        levers = way.levers
        cells = (
            text("planfile.chosen") if way is plan.chosen else "",
            strategy_name(levers),
            checkpointing_word(levers.checkpointing),
            levers.loss,
            f"{levers.micro_batch} × {levers.accumulation}",
            str(way.world),
            _gib(way.footprint.gpu.required_bytes),
            _gib(way.footprint.host.peak_bytes_per_node),
            _rate(way),
            text("planfile.fits" if way.fits else "planfile.fits-not"),
        )
        yield f"| {' | '.join(map(_cell, cells))} |"
    reasons = [
        text("planfile.about-strategy", strategy=_cell(strategy_name(way.levers)), why=_sentence(why))
        for way in ways[1:]
        for why in way.because
    ]
    if reasons:
        yield ""
        yield from dict.fromkeys(reasons)


def _start(plan: Plan, target: Target, files: Collection[str]) -> Iterator[str]:
    job, launcher = plan.job, launcher_of(plan, target)
    yield text("planfile.start")
    yield ""
    yield text(
        "planfile.start-script",
        script=" train.py" if job.trainer == "trainer" else "",
        trainer=NAMES["llamafactory" if launcher == "llamafactory" else job.trainer],
        program=launchers()[launcher].program,
        port=target.port + 1,
    )
    if "worker.json" in files and launcher != "llamafactory":
        yield ""
        yield text("planfile.start-train")
    if "slurm.sbatch" in files:
        yield ""
        yield text("planfile.start-slurm")
    if "hostfile" in files and target.hostfile is None:
        yield ""
        yield text("planfile.start-hostfile" if target.gpu_ids is None else "planfile.start-hostfile-both")
    for said in untrained(job) if job.trainer == "tightfit" else ():
        yield ""
        yield f"**{said}**"
    if job.data.path is not None:
        yield ""
        yield text("planfile.data", data=shlex.quote(job.data.path), output=shlex.quote(job.saving.folder))


def _files(plan: Plan, target: Target, files: Collection[str], left_out: Mapping[str, Said]) -> Iterator[str]:
    yield text("planfile.files")
    yield ""
    yield text("planfile.files-head")
    yield "|---|---|"
    known = [file for dialect in dialects() for file in dialect.files]
    for file in known:
        if file.name in files:
            yield f"| `{file.name}` | {file.what} |"
        elif file.name in left_out:
            yield text("planfile.left-out", name=file.name, why=_cell(left_out[file.name]))
    yield text("planfile.this-page")
    written = [file for file in known if file.name in files]
    for file in written:
        if notes := file.notes(plan, target):
            yield ""
            yield text("planfile.about-file", name=file.name)
            yield ""
            yield from (f"- {_sentence(note)}" for note in notes)
    yield ""
    yield text("planfile.versions")
    yield ""
    # Each file has its readers; one environment may not hold them all.
    for file in written:
        if version := file.version(plan, target):
            yield text("planfile.version", name=file.name, version=version)


def _assumptions(plan: Plan) -> Iterable[Said]:
    """What was taken to be so: the model, the machine, what the runtime keeps of the card, the rates."""
    way = require_way(plan)
    memory = [said for said in way.footprint.because if id_of(said) != "price.peak-phase"]
    said = (*way.shape.notes, *plan.hardware.because, *way.hardware.because)
    return dict.fromkeys((*said, *memory, *way.pace.because))


def _bullets(title: str, sentences: Iterable[Said]) -> list[str]:
    points = [f"- {_sentence(sentence)}" for sentence in sentences]
    return [f"## {title}", "", *points] if points else []


def _cell(said: Said) -> str:
    """Text that cannot end a cell or a line."""
    return " ".join(str(said).split()).replace("|", "\\|")


def _sentence(said: Said) -> str:
    """As prose: a capital, unless it begins with a name, and a full stop."""
    plain = " ".join(end_sentence(said).split())
    first = plain.partition(" ")[0].rstrip(".")
    return plain[:1].upper() + plain[1:] if first.isalpha() and first.islower() else plain


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"


def _rate(way: Way) -> str:
    return f"{way.pace.tokens_per_s:,.0f}"
