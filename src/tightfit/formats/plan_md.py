"""PLAN.md: the plan for people. What was chosen and why, what else there was, and how to start it.

It says nothing that the plan does not hold, and no date or path of a machine: rendered twice it is the same file.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping

from tightfit.formats.launch.environment import environment, launcher_of
from tightfit.formats.registry import dialects, launchers
from tightfit.formats.target import Target
from tightfit.formats.worker.write import chosen_way, time_limit_s, untrained
from tightfit.inputs.flags import checkpointing_word
from tightfit.messages import Said, id_of
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import is_cut_off, time_words
from tightfit.planner.tiers import TIERS
from tightfit.planner.trainers import NAMES
from tightfit.priced import GIB, amounts, billions, shown, strategy_name, training_words


def plan_md(plan: Plan, target: Target, files: Collection[str], left_out: Mapping[str, str] | None = None) -> str:
    """The reasons of a plan. `left_out` says for each file that could not be written why not."""
    chosen_way(plan)
    sections = (
        _title(plan, target),
        _changes(plan),
        _bullets("Why this one", _reasons(plan)),
        _alternatives(plan),
        _start(plan, target, files),
        _files(plan, target, files, left_out or {}),
        _environment(plan, target),
        _bullets("What was assumed", _assumed(plan)),
        _bullets("What we never ran", plan.unproven),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def _title(plan: Plan, target: Target) -> Iterator[str]:
    way = chosen_way(plan)
    gpu = way.hardware.gpu
    needed, size, spare = amounts(way.footprint.gpu.required_bytes, gpu.memory_bytes, abs(way.gpu_spare_bytes))
    share = way.gpu_spare_bytes / gpu.memory_bytes
    yield f"# {way.shape.name} on {way.world} × {gpu.name}: {strategy_name(way.levers)}"
    yield ""
    words = _cell(training_words(way.levers))
    if plan.job.tier in TIERS:
        yield f"- Tier: {plan.job.tier} ({TIERS[plan.job.tier].about})"
    yield f"- Training: {words}, {billions(way.shape.parameters)} parameters, {way.effective_batch} sequences a step"
    yield f"- GPU: {needed} of {size} GiB on each, {spare} GiB ({share:.0%}) to spare"
    yield f"- Limit: {_gib(way.gpu_limit_bytes)} GiB of each GPU, the margin taken off"
    yield f"- Peak: in the {way.footprint.gpu.peak_phase} phase, mostly {_largest(way)}"
    yield f"- Host: {_gib(way.footprint.host.peak_bytes_per_node)} GiB of RAM on each node{_nvme(way)}"
    yield f"- Pace: {_seconds(way.pace.step_s)} a step, {_rate(way)} tokens a second in all"
    if plan.hours is not None:
        yield f"- Time to finish: about {time_words(plan.hours)}"
        yield from _cut_off(plan, target, plan.hours)


def _cut_off(plan: Plan, target: Target, hours: float) -> Iterator[str]:
    limit = time_limit_s(plan.job)
    if limit is None or not is_cut_off(plan):
        return
    if launcher_of(plan, target) == "llamafactory":
        yield f"- **Time limit: {plan.job.timeout}, which is shorter; LLaMA-Factory does not keep it**"
        return
    share = limit / (hours * 3600)
    done = f"about {share:.0%}" if share >= 0.01 else "less than 1%"
    yield f"- **Time limit: {plan.job.timeout}, which cuts the training off at {done} of its steps: raise it**"


def _changes(plan: Plan) -> list[str]:
    """Costly changes stand alone and first: they change what comes out."""
    changes, job = chosen_way(plan).changes, plan.job
    if not changes:
        return ["Nothing of this changes the result of the training: only how it is computed was chosen."]
    said = "You allowed these, and without them nothing fits:"
    if job.tier is not None:
        also = ", or you allowed them and without them nothing fits" if job.limits.allow else ""
        said = f"The tier {job.tier} brings these where you said nothing{also}:"
    return [
        "## It changes the result of the training",
        "",
        said,
        "",
        *(f"- **{_sentence(change)}**" for change in changes),
    ]


def _alternatives(plan: Plan) -> Iterator[str]:
    ways = (chosen_way(plan), *plan.alternatives)
    yield "## What else there was"
    yield ""
    yield f"{plan.considered:,} ways were priced. The best of each kind:"
    yield ""
    yield "| | strategy | checkpointing | loss | micro × accumulation | GPUs | GPU GiB | host GiB | tokens/s | fits |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for way in ways:
        levers = way.levers
        cells = (
            "**chosen**" if way is plan.chosen else "",
            strategy_name(levers),
            checkpointing_word(levers.checkpointing),
            levers.loss,
            f"{levers.micro_batch} × {levers.accumulation}",
            str(way.world),
            _gib(way.footprint.gpu.required_bytes),
            _gib(way.footprint.host.peak_bytes_per_node),
            _rate(way),
            "yes" if way.fits else "no",
        )
        yield f"| {' | '.join(map(_cell, cells))} |"
    reasons = [f"- {_cell(strategy_name(way.levers))}: {_sentence(why)}" for way in ways[1:] for why in way.because]
    if reasons:
        yield ""
        yield from dict.fromkeys(reasons)


def _start(plan: Plan, target: Target, files: Collection[str]) -> Iterator[str]:
    launcher = launcher_of(plan, target)
    program = launchers()[launcher].program
    trainer = NAMES["llamafactory" if launcher == "llamafactory" else plan.job.trainer]
    script = " train.py" if plan.job.trainer == "trainer" else ""
    yield "## How to start it"
    yield ""
    yield f"`./launch.sh{script}` starts {trainer} with `{program}`, in the environment that is active."
    yield "What you add to the line goes to the trainer. Relative paths count from this folder. A second run on the"
    yield f"same machine needs a port of its own: `MASTER_PORT={target.port + 1} ./launch.sh`."
    if "worker.json" in files and launcher != "llamafactory":
        yield ""
        yield "`tightfit train --plan` with this folder starts the same on one machine, and follows it."
    if "slurm.sbatch" in files:
        yield ""
        yield "Under SLURM, from this folder: `sbatch slurm.sbatch`."
    if "hostfile" in files and target.hostfile is None:
        yield ""
        both = " and into `launch.sh`" if target.gpu_ids is not None else ""
        yield f"The names in `hostfile` are placeholders: put your machines there{both}."
    job = plan.job
    for sentence in untrained(job) if job.trainer == "tightfit" else ():
        yield ""
        yield f"**{sentence}**"
    if job.data.path is not None:
        yield ""
        yield f"Data: `{shlex.quote(job.data.path)}`; output: `{shlex.quote(job.saving.folder)}`."


def _files(plan: Plan, target: Target, files: Collection[str], left_out: Mapping[str, str]) -> Iterator[str]:
    yield "## The files"
    yield ""
    yield "| file | what it is |"
    yield "|---|---|"
    known = [file for dialect in dialects() for file in dialect.files]
    for file in known:
        if file.name in files:
            yield f"| `{file.name}` | {file.what} |"
        elif file.name in left_out:
            yield f"| ~~`{file.name}`~~ | left out: {_cell(left_out[file.name])} |"
    yield "| `PLAN.md` | this page |"
    written = [file for file in known if file.name in files]
    for file in written:
        if notes := file.notes(plan, target):
            yield ""
            yield f"About `{file.name}`:"
            yield ""
            yield from (f"- {_sentence(note)}" for note in notes)
    yield ""
    yield "Which versions they are for:"
    yield ""
    # Each file has its readers; one environment may not hold them all.
    yield from (f"- `{file.name}`: {version}." for file in written if (version := file.version(plan, target)))


def _environment(plan: Plan, target: Target) -> Iterator[str]:
    yield "## Environment variables"
    yield ""
    yield "| variable | value | why |"
    yield "|---|---|---|"
    for variable in environment(plan, target):
        value = "*unset*" if variable.unset else "*left out*" if variable.value is None else f"`{variable.value}`"
        yield f"| `{variable.name}` | {value} | {_cell(variable.reason)} |"


def _reasons(plan: Plan) -> list[Said]:
    """What is said nowhere else on the page."""
    elsewhere = {*_assumed(plan), *plan.unproven, *untrained(plan.job)}
    return [said for said in plan.because if said not in elsewhere and id_of(said) != "plan.changes-training"]


def _assumed(plan: Plan) -> Iterable[Said]:
    """What was taken to be so: the model, the machine, what the runtime keeps of the card, the rates."""
    way = chosen_way(plan)
    memory = [said for said in way.footprint.because if id_of(said) != "price.peak-phase"]
    said = (*way.shape.notes, *plan.hardware.because, *way.hardware.because)
    return dict.fromkeys((*said, *memory, *way.pace.because))


def _largest(way: Way) -> str:
    held = way.footprint.gpu.phases[way.footprint.gpu.peak_phase].components
    return " and ".join(shown(name) for name in sorted(held, key=lambda name: -held[name])[:2])


def _bullets(title: str, sentences: Iterable[Said]) -> list[str]:
    points = [f"- {_sentence(sentence)}" for sentence in sentences]
    return [f"## {title}", "", *points] if points else []


def _cell(text: Said) -> str:
    """Text that cannot end a cell or a line."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _sentence(text: Said) -> str:
    """As prose: a capital, unless it begins with a name, and a full stop."""
    plain = " ".join(str(text).split())
    first = plain.partition(" ")[0]
    capital = plain[:1].upper() + plain[1:] if first.isalpha() and first.islower() else plain
    return capital if capital.endswith((".", "!", "?")) else capital + "."


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"


def _nvme(way: Way) -> str:
    disk = way.footprint.host.nvme_bytes_per_node
    return f", {_gib(disk)} GiB of NVMe" if disk else ""


def _rate(way: Way) -> str:
    return f"{way.pace.tokens_per_s:,.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
