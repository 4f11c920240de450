"""A plan becomes files that other programs read: `render` makes the texts, `plan_folder.py` puts them on disk.

There are those that the plan's trainer and launcher read, and no others: what another trainer would hold in memory is
another plan. A file that cannot say what the plan says is an error.

PLAN.md is the plan for people: what was chosen and why, what else there was, and how to start it. It says nothing that
the plan does not hold, and no date or path of a machine: rendered twice it is the same file.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator

from tightfit.formats.dialect import dialects, launchers
from tightfit.formats.kubernetes.write import PLACEHOLDERS
from tightfit.formats.launch.environment import environment, launcher_of
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way, time_limit_s, untrained
from tightfit.inputs.flags import checkpointing_word
from tightfit.memory.overhead import name_component
from tightfit.messages import Listing, Message, Said, end_sentence, id_of, text
from tightfit.planner.costly import list_asked
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import is_cut_off, time_words
from tightfit.planner.tiers import TIERS
from tightfit.planner.trainers import NAMES
from tightfit.priced import GIB, amounts, billions, seconds_words, strategy_name, training_words


def render(plan: Plan, target: Target) -> dict[str, str]:
    """Every file of a plan, by name."""
    files: dict[str, str] = {}
    for dialect in dialects():
        if dialect.trainer not in (None, plan.job.trainer):  # whose bytes are others than the plan's
            continue
        for file in dialect.files:
            if (text := file.write(plan, target, files)) is not None:
                files[file.name] = text
    files["PLAN.md"] = plan_md(plan, target, files)
    return files


def plan_md(plan: Plan, target: Target, files: Collection[str]) -> str:
    """The reasons of a plan."""
    changes, asked, job = require_way(plan).changes, list_asked(plan), plan.job
    said = Message("planfile.changes-allowed")
    if job.tier is not None:
        said = Message("planfile.changes-by-both" if job.limits.allow else "planfile.changes-by-tier", tier=job.tier)
    beside = "planfile.changes-asked" if changes else "planfile.changes-asked-alone"
    unset, not_set = text("planfile.unset"), text("planfile.not-set")
    variables = [text("planfile.variables-head"), "|---|---|---|"]
    for variable in environment(plan, target):
        value = unset if variable.unset else not_set if variable.value is None else f"`{variable.value}`"
        variables.append(f"| `{variable.name}` | {value} | {_cell(variable.reason)} |")
    # what is said nowhere else on the page
    elsewhere = {*_assumptions(plan), *plan.unproven, *untrained(plan.job)}
    why = [why for why in plan.because if why not in elsewhere and id_of(why) != "plan.changes-training"]
    paragraphs = (
        *_title(plan, target),
        # costly changes stand alone and first: they change what comes out
        text("planfile.changes-title" if changes or asked else "planfile.changes-nothing"),
        *((str(said), _stressed(changes)) if changes else ()),
        *((text(beside), _stressed(asked)) if asked else ()),
        *_bullets(text("planfile.why"), why),
        *_alternatives(plan),
        *_start(plan, target, files),
        *_files(plan, target, files),
        text("planfile.variables"),
        "\n".join(variables),
        *_bullets(text("planfile.assumed"), _assumptions(plan)),
        *_bullets(text("planfile.never-run"), plan.unproven),
    )
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _title(plan: Plan, target: Target) -> tuple[str, str]:
    way = require_way(plan)
    gpu, levers = way.hardware.gpu, way.levers
    needed, size, spare = amounts(way.footprint.gpu.required_bytes, gpu.memory_bytes, abs(way.gpu_spare_bytes))
    held = way.footprint.gpu.phases[way.footprint.gpu.peak_phase].components
    largest = Listing(map(name_component, sorted(held, key=lambda name: -held[name])[:2]), "and")
    host, nvme_bytes = _gib(way.footprint.host.peak_bytes_per_node), way.footprint.host.nvme_bytes_per_node
    on_nvme = nvme_bytes and text("planfile.host-nvme", ram=host, nvme=_gib(nvme_bytes))
    training, parameters = _cell(training_words(levers)), billions(way.shape.parameters)
    lines = [
        text("planfile.training", training=training, size=parameters, batch=way.effective_batch),
        text("planfile.gpu", needed=needed, size=size, spare=spare, share=way.gpu_spare_bytes / gpu.memory_bytes),
        text("planfile.limit", limit=_gib(way.gpu_limit_bytes)),
        text("planfile.peak", phase=way.footprint.gpu.peak_phase, largest=largest),
        on_nvme or text("planfile.host", ram=host),
    ]
    if way.is_paced:
        lines.append(text("planfile.pace", **seconds_words(way.pace), rate=_rate(way)))
    if plan.job.tier in TIERS:
        lines.insert(0, text("planfile.tier", tier=plan.job.tier, about=TIERS[plan.job.tier].about))
    if plan.hours is not None:
        lines.append(text("planfile.time", time=time_words(plan.hours)))
        limit = time_limit_s(plan.job)
        if limit is not None and is_cut_off(plan) and launcher_of(plan, target) == "llamafactory":
            lines.append(text("planfile.time-limit-not-kept", limit=plan.job.timeout))
        elif limit is not None and is_cut_off(plan):
            done = limit / (plan.hours * 3600)
            some = Message("planfile.about-share", share=done) if done >= 0.01 else Message("planfile.less-than-1")
            lines.append(text("planfile.time-limit-cuts", limit=plan.job.timeout, done=some))
    names = {"model": way.shape.name, "world": way.world, "gpu": gpu.name, "strategy": strategy_name(levers)}
    return text("planfile.title", **names), "\n".join(lines)


def _alternatives(plan: Plan) -> Iterator[str]:
    ways = (require_way(plan), *plan.alternatives)
    yield text("planfile.alternatives")
    yield text("planfile.priced", count=plan.considered)
    rows = [text("planfile.alternatives-head"), "|---|---|---|---|---|---|---|---|---|---|"]
    for way in ways:
        levers = way.levers
        cells = (
            text("planfile.chosen") if way is plan.chosen else text("planfile.as-fast") if way.is_as_fast else "",
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
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    yield "\n".join(rows)
    reasons = [
        text("planfile.about-strategy", strategy=_cell(strategy_name(way.levers)), why=_sentence(why))
        for way in ways[1:]
        for why in way.because
    ]
    yield "\n".join(dict.fromkeys(reasons))


def _start(plan: Plan, target: Target, files: Collection[str]) -> Iterator[str]:
    job, launcher = plan.job, launcher_of(plan, target)
    yield text("planfile.start")
    yield text(
        "planfile.start-script",
        script=" train.py" if job.trainer == "trainer" else "",
        trainer=NAMES["llamafactory" if launcher == "llamafactory" else job.trainer],
        program=launchers()[launcher].program,
        port=target.port + 1,
    )
    if "worker.json" in files and launcher != "llamafactory":
        yield text("planfile.start-train")
    if "slurm.sbatch" in files:
        yield text("planfile.start-slurm")
    if "kubernetes-job.yaml" in files:
        yield text("planfile.start-kubernetes", **PLACEHOLDERS)
    if "ray_train.py" in files:
        yield text("planfile.start-ray")
    if "hostfile" in files and target.hostfile is None:
        yield text("planfile.start-hostfile" if target.gpu_ids is None else "planfile.start-hostfile-both")
    if job.trainer == "tightfit":
        yield from (f"**{said}**" for said in untrained(job))
    if job.data.path is not None:
        yield text("planfile.data", data=shlex.quote(job.data.path), output=shlex.quote(job.saving.folder))


def _files(plan: Plan, target: Target, files: Collection[str]) -> Iterator[str]:
    written = [file for dialect in dialects() for file in dialect.files if file.name in files]
    rows = [text("planfile.files-head"), "|---|---|", *(f"| `{file.name}` | {file.what} |" for file in written)]
    yield text("planfile.files")
    yield "\n".join([*rows, text("planfile.this-page")])
    if plan.job.trainer == "tightfit":
        yield text("planfile.for-another-trainer")
    for file in written:
        if notes := file.notes(plan, target):
            yield text("planfile.about-file", name=file.name)
            yield "\n".join(f"- {_sentence(note)}" for note in notes)
    # Each file has its readers; one environment may not hold them all.
    versions = [(file.name, file.version(plan, target)) for file in written]
    lines = [text("planfile.version", name=name, version=version) for name, version in versions if version]
    if lines:
        yield text("planfile.versions")
        yield "\n".join(lines)


def _assumptions(plan: Plan) -> Iterable[Said]:
    """What was taken to be so: the model, the machine, what the runtime keeps of the card, the rates."""
    way = require_way(plan)
    memory = [said for said in way.footprint.because if id_of(said) != "price.peak-phase"]
    said = (*way.shape.notes, *plan.hardware.because, *way.hardware.because)
    return dict.fromkeys((*said, *memory, *way.assumed))


def _bullets(title: str, sentences: Iterable[Said]) -> tuple[str, ...]:
    points = "\n".join(f"- {_sentence(sentence)}" for sentence in sentences)
    return (f"## {title}", points) if points else ()


def _stressed(sentences: Iterable[Said]) -> str:
    return "\n".join(f"- **{_sentence(sentence)}**" for sentence in sentences)


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
    return f"{way.pace.tokens_per_s:,.0f}" if way.is_paced else "-"
