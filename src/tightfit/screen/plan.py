"""What `tightfit plan` draws: ways side by side, and under them why one was chosen.

The rows stand in the order of their pace, so that what was tempting and does not fit is above the chosen one. Where
nothing fits they stand in the order of how far they are from it, and say what they lack.
The bar takes what the other columns leave of the line: a table that wraps cannot be compared by eye. On a terminal
too narrow for all columns, those go first that are told elsewhere.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.text import Text

from tightfit.hardware.catalogue import native_bf16
from tightfit.hardware.named import is_this, read_hardware
from tightfit.inputs.flags import checkpointing_word, flags_from_levers, spelt
from tightfit.job.file import levers_of
from tightfit.messages import Choice, Listing, Message, Said, end_sentence, id_of, text
from tightfit.messages.wide import count_cells, pad, pad_left
from tightfit.planner import Tiered
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import further, is_cut_off, lacking_bytes, missing, steps_of, time_words, worth_showing
from tightfit.priced import ENGINES, GIB, amounts, billions, strategy_name
from tightfit.screen import NARROWEST, TABLE, WIDEST, bar, draw_list, say
from tightfit.types import Checkpointing, Hardware, Levers, Lora, UserError

CHOSEN, EQUAL, UNFIT = "→", "≈", "×"
FILL = ("█", "blue")
OVER = ("█", "red")
SHORTEST_BAR, TELLING_BAR, LONGEST_BAR = 6, 14, 40
"""Cells. The middle one is worth more than a second blank between the columns."""
MOST_OVER = 1.5  # a bar ends at this multiple of the card; what needs more is told by its number
LEFT_OUT = ("GPU", "free", "batch", "host", "checkpoint", "lacks", "offload")
"""The columns that a narrow terminal does without, the first one first."""
TEXT = ("", "engine", "offload", "checkpoint", "batch", "GPUs", "GPU", "lacks")  # the columns that stand to the left
UNBROKEN = "\N{NO-BREAK SPACE}"
ALWAYS = ("engine", "micro_batch", "accum", "checkpointing")  # the levers that say most, printed whatever they are

LIMITS = {
    "seq": ("screen.no-sequence-fits", "screen.longest-sequence"),
    "micro-batch": ("screen.no-micro-batch-fits", "screen.largest-micro-batch"),
    "model": ("screen.no-preset-fits", "screen.largest-preset"),
}
"""What is said where none fits, and where one does."""
HEADS = frozenset(
    (
        "screen.engine",
        "screen.offload",
        "screen.checkpoint",
        "screen.batch",
        "screen.host",
        "screen.free",
        "screen.lacks",
    )
)
"""The columns whose heads are words."""

Row = tuple[str, Way]  # the mark before a way, and the way


def waiting(said: str, *, quiet: bool = False) -> AbstractContextManager[object]:
    """A line that says so while a person waits; nothing in a pipe or a log."""
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    return Console(stderr=True).status(said, spinner="line")


# --- the answers --------------------------------------------------------------------------------


def draw_plan(console: Console, plan: Plan, lead: Sequence[Said] = (), *, with_model: bool = False) -> None:
    """The whole answer. `lead` stands first among the reasons; `with_model`: the plan found the model as well."""
    _draw_head(console, plan)
    # Each way that is worth a line, with its mark.
    rows = [(_mark(plan, way), way) for way in worth_showing(plan)]
    if rows:
        columns = draw_ways(console, rows)
        nearest = [text("screen.nearest-first")] if plan.chosen is None and len(rows) > 1 else []
        _draw_legend(console, plan, rows, columns, nearest)
        hidden = len(plan.alternatives) + (plan.chosen is not None) - len(rows)
        more = Message("screen.more-in-json", n=hidden) if hidden > 0 else ""
        say(console, text("screen.ways-priced", n=plan.considered, more=more), style="dim")
    unfit = text("screen.nothing-fits-allowed" if plan.job.limits.allow else "screen.nothing-fits")
    _draw_verdict(console, plan, unfit, with_model=with_model)
    draw_list(console, text("screen.because"), [*lead, *reason_lines(plan)])
    draw_list(console, text("screen.never-run"), plan.unproven)


def draw_answer(console: Console, answer: Plan | Tiered | Limit) -> None:
    if isinstance(answer, Tiered):
        draw_tier(console, answer)
    elif isinstance(answer, Limit):
        draw_limit(console, answer)
    else:
        draw_plan(console, answer)


def draw_shortages(console: Console, plan: Plan) -> None:
    """Where nothing fits: how much every way of the table lacks, and of what."""
    lacking = [
        text("screen.lacking", way=strategy_name(way.levers), missing=missing(way)) for way in worth_showing(plan)
    ]
    draw_list(console, text("screen.what-each-lacks"), lacking)


def draw_tier(console: Console, tiered: Tiered) -> None:
    """A tier beside what the free search would do."""
    plan = tiered.plan
    assert plan is not None, "what a tier cannot run is an error before anything is drawn"
    _draw_head(console, plan)
    way = plan.chosen or next(iter(worth_showing(plan)), None)
    say(console, text("screen.tier-about", name=tiered.tier.name, about=tiered.tier.about))
    if way is None:
        say(console, text("screen.tier-fixes"))
    else:
        say(console, text("screen.tier-holds", size=amounts(way.footprint.gpu.required_bytes)[0]))
    console.print()
    rows = [("tier", way)] if way else []
    if tiered.free is not None and tiered.free.chosen is not None:
        rows.append(("free", tiered.free.chosen))
    if rows:
        columns = draw_ways(console, rows)
        free = [text("screen.free-search")] if len(rows) > 1 else []
        _draw_legend(console, plan, rows, columns, free)
    unfit = Message("screen.tier-unfit", name=tiered.tier.name)
    if way is not None:
        unfit = Message("screen.tier-lacks", name=tiered.tier.name, missing=missing(way))
    _draw_verdict(console, plan, str(unfit))
    if plan.chosen is None:  # otherwise the verdict has said it
        draw_list(console, text("screen.tier-brings"), [end_sentence(cost) for cost in tiered.costs])
    lines = [*tiered.because, *reason_lines(plan)]
    draw_list(console, text("screen.because"), [line for line in lines if id_of(line) != "plan.nearest-way"])
    draw_list(console, text("screen.never-run"), plan.unproven)


def draw_tiers(console: Console, rows: Sequence[Tiered]) -> None:
    """Every tier, with what it costs."""
    plans = [tiered.plan for tiered in rows if tiered.plan is not None]
    for plan in plans[:1]:
        said = text("screen.trained-on", what=model_words(plan), hardware=hardware_words(plan.hardware))
        say(console, said, style="bold")
        console.print()
    names = max(len(tiered.tier.name) for tiered in rows)
    fits, pace = text("screen.fits"), "tokens/s"
    before = names + len("  999.9  ") + count_cells(fits) + len("  tokens/s  ")
    beside = console.width >= TABLE
    what = f"  {text('screen.what-it-changes')}" if beside else ""
    console.print(Text(f"{pad(text('screen.tier'), names)}  {'GiB':>5}  {fits}  {pace}{what}", style="bold"))
    console.print(Text("─" * (console.width if beside else before - 2)))
    for tiered in rows:
        way = None if tiered.plan is None else tiered.plan.chosen or next(iter(worth_showing(tiered.plan)), None)
        cells, changes = ("-", "-", "-"), tiered.problem or text("screen.no-engine")
        if way is not None:
            needs = f"{way.footprint.gpu.required_bytes / GIB:.1f}"
            cells = (needs, text("screen.yes" if way.fits else "screen.no"), _rate(way))
            changes = str(Listing(tiered.costs, ";")) or text("screen.nothing")
        first = f"{tiered.tier.name:<{names}}  {cells[0]:>5}  {pad_left(cells[1], count_cells(fits))}  {cells[2]:>8}"
        style = "" if way and way.fits else "dim"
        if beside:
            say(console, changes, first=f"{first}  ", indent=" " * before, style=style)
        else:
            console.print(Text(first, style=style), soft_wrap=True)
            say(console, changes, indent="    ", style=style)
    for plan in plans[:1]:
        limit = f"{plan.hardware.gpu.memory_bytes / GIB:.1f}"
        say(console, text("screen.tiers-note", size=limit), style="dim")
        draw_list(console, text("screen.never-run"), plan.unproven)


def draw_limit(console: Console, limit: Limit) -> None:
    """The most that fits, and the plan for it."""
    none, most = LIMITS[limit.wanted]
    said = text(none) if limit.value is None else text(most, n=limit.value)
    say(console, said, style="bold green" if limit.value is not None else "bold red")
    console.print()
    draw_plan(console, limit.plan, limit.because, with_model=limit.wanted == "model")


def draw_files(console: Console, files: Sequence[Path]) -> None:
    """What was written, and how to start it."""
    folder, names = files[0].parent, [path.name for path in files]
    console.print()
    say(console, text("screen.written-to", folder=folder, names=", ".join(names)), indent="  ", first="")
    ours = "tightfit.train" in (folder / "launch.sh").read_text(encoding="utf-8")
    start = f"bash {shlex.quote(str(folder / 'launch.sh'))}"
    if "ray_train.py" in names:
        start = f"ray job submit -- python {shlex.quote(str((folder / 'ray_train.py').absolute()))}"
    elif "kubernetes-job.yaml" in names:
        start = f"kubectl apply -f {shlex.quote(str(folder / 'kubernetes-job.yaml'))}"
    elif ours:
        start = str(Choice((f"tightfit train --plan {shlex.quote(str(folder))},", start)))
    console.print(Text(text("screen.start-with", command=start)), soft_wrap=True)
    if "ray_train.py" in names:
        say(console, text("screen.ray-folder"))
    elif "kubernetes-job.yaml" in names:
        from tightfit.formats.kubernetes.write import PLACEHOLDERS

        say(console, text("screen.kubernetes-placeholders", **PLACEHOLDERS))
    elif "slurm.sbatch" in names:
        command = f"cd {shlex.quote(str(folder))} && sbatch slurm.sbatch"
        console.print(Text(text("screen.start-under-slurm", command=command)), soft_wrap=True)


# --- the table ----------------------------------------------------------------------------------


def draw_ways(console: Console, rows: Sequence[Row]) -> list[str]:
    """A line a way; its memory as a bar against the card. Gives back the columns that there was room for."""
    lines = [_cells(mark, way) for mark, way in rows]
    columns = [*lines[0]]
    if len({way.world for _, way in rows}) == 1:
        columns.remove("GPUs")
    columns.remove("free" if not any(way.fits for _, way in rows) else "lacks")
    heads = {name: text(f"screen.{name}") if f"screen.{name}" in HEADS else name for name in columns}
    widths = {
        name: max(count_cells(each) for each in (heads[name], *(line[name] for line in lines))) for name in columns
    }
    room = min(console.width, WIDEST)
    widths["GPU"] = SHORTEST_BAR
    for name in LEFT_OUT if room < TABLE else ():
        if name in columns and sum(widths.values()) + len(widths) - 1 > room:
            columns.remove(name)
            del widths[name]
    gap = 1
    if "GPU" in widths:  # the bar gets what the columns leave
        spare = room - (sum(widths.values()) - SHORTEST_BAR) - len(widths) + 1
        gap = 2 if spare >= TELLING_BAR + len(widths) else 1
        widths["GPU"] = max(SHORTEST_BAR, min(LONGEST_BAR, spare - (gap - 1) * (len(widths) - 2)))

    def draw_line(cells: Mapping[str, str | Text], style: str) -> None:
        line = Text()
        for place, name in enumerate(columns):
            cell, align = cells[name], pad if name in TEXT else pad_left
            line.append(" " * (0 if not place else 1 if place == 1 else gap))
            line.append_text(cell if isinstance(cell, Text) else Text(align(cell, widths[name])))
        line.rstrip()
        line.stylize_before(style)
        console.print(line, soft_wrap=True)

    draw_line(heads, "bold")
    console.print(Text("─" * (sum(widths.values()) + 1 + gap * (len(widths) - 2))), soft_wrap=True)
    card = rows[0][1].hardware.gpu.memory_bytes
    scale = min(max(card, *(way.footprint.gpu.required_bytes for _, way in rows)), round(MOST_OVER * card))
    for (mark, way), line in zip(rows, lines, strict=True):
        cells: dict[str, str | Text] = {**line}
        if "GPU" in columns:
            need = min(way.footprint.gpu.required_bytes, scale)
            cells["GPU"] = bar([(FILL, min(need, card)), (OVER, max(0, need - card))], scale, widths["GPU"], card)
        style = {CHOSEN: "bold green", "tier": "bold"}.get(mark, "" if way.fits else "dim")
        draw_line(cells, style)
    return columns


def _mark(plan: Plan, way: Way) -> str:
    if way is plan.chosen:
        return CHOSEN
    return UNFIT if not way.fits else EQUAL if way.is_as_fast else ""


def _depth(checkpointing: Checkpointing) -> str:
    """In how many layers; which parts of them is said with the levers."""
    if checkpointing.select and checkpointing.layers != 0:
        return "select" if checkpointing.layers is None else f"select:{checkpointing.layers}"
    return checkpointing_word(checkpointing)


def _cells(mark: str, way: Way) -> dict[str, str]:
    levers, host, ram = way.levers, way.footprint.host.peak_bytes_per_node, way.hardware.host_ram_bytes
    over = "!" if ram is not None and host > ram else ""
    part = f"/{levers.sequence_parallel}" if levers.sequence_parallel > 1 else ""  # of each sequence, that a GPU has
    return {
        "": mark,
        "engine": f"{ENGINES[levers.engine]}{_layout(levers)}",
        "offload": _offload(levers),
        "checkpoint": _depth(levers.checkpointing),
        "batch": f"{levers.micro_batch}{part} × {levers.accumulation}",
        "GPUs": str(way.world),
        "GPU": "",
        "GiB": f"{way.footprint.gpu.required_bytes / GIB:.1f}",
        "host": f"{host / GIB:.0f}{over}",
        "tokens/s": _rate(way),
        "free": f"{100 * way.gpu_spare_bytes / way.hardware.gpu.memory_bytes:.0f} %",
        "lacks": "+".join(lacking_bytes(way)),
    }


def _layout(levers: Levers) -> str:
    """Groups with a copy of the weights each, GPUs that share layers or experts, and pipelines, by their size; whether
    the host updates ahead of the norm."""
    stages = f"×{levers.stages_per_gpu}" if levers.stages_per_gpu > 1 else ""
    sizes = {
        "÷": levers.shard_within,
        "TP": levers.tensor_parallel if levers.tensor_parallel > 1 else 0,
        "EP": levers.expert_parallel if levers.expert_parallel > 1 else 0,
        "»": levers.pipeline_parallel if levers.pipeline_parallel > 1 else 0,
    }
    ahead = f" {text('screen.updated-ahead')}" if levers.update == "ahead" else ""
    return "".join(f" {sign}{size}" for sign, size in sizes.items() if size) + stages + ahead


def _rate(way: Way) -> str:
    return f"{way.pace.tokens_per_s:,.0f}" if way.is_paced else "-"


def _offload(levers: Levers) -> str:
    places = {"none": "", "cpu": "CPU", "nvme": "NVMe"}
    optimizer, weights = places[levers.offload_optimizer], places[levers.offload_param]
    if not optimizer and not weights:
        return "-"
    if optimizer == weights:
        return f"all {optimizer}"
    return f"opt {optimizer}" if not weights else f"w {weights}" if not optimizer else f"{optimizer}+{weights}"


def _draw_legend(
    console: Console, plan: Plan, rows: Sequence[Row], columns: Collection[str], more: Sequence[str]
) -> None:
    """What the marks and columns mean, those that are there."""
    size, ram = f"{plan.hardware.gpu.memory_bytes / GIB:.1f} GiB", plan.hardware.host_ram_bytes
    marks = {mark for mark, _ in rows}
    words = {CHOSEN: "screen.chosen", EQUAL: "screen.equally-fast", UNFIT: "screen.does-not-fit"}
    parts = [f"{mark} {text(word)}" for mark, word in words.items() if mark in marks]
    parts += [*more, text("screen.card-line" if "GPU" in columns else "screen.card-gib", size=size)]
    if "batch" in columns:
        parts.append(text("screen.batch-note"))
    if any(way.levers.pipeline_parallel > 1 for _, way in rows):
        parts.append(text("screen.row-note"))
    if any(way.levers.stages_per_gpu > 1 for _, way in rows):
        parts.append(text("screen.stages-note"))
    if any(way.levers.expert_parallel > 1 for _, way in rows):
        parts.append(text("screen.experts-note"))
    places = {"opt": "screen.opt-note", "all": "screen.all-note", "NVMe+CPU": "screen.both-note"}
    offloads = {_offload(way.levers).partition(" ")[0] for _, way in rows if "offload" in columns}
    parts += [text(word) for key, word in places.items() if key in offloads]
    if any(way.levers.tensor_parallel > 1 for _, way in rows):
        parts.append(text("screen.tensor-note"))
    if "host" in columns:
        parts.append(text("screen.host-note"))
        if ram is not None and any(way.footprint.host.peak_bytes_per_node > ram for _, way in rows):
            parts.append(text("screen.over-note", size=amounts(ram)[0]))
    say(console, str(Listing(parts, ";")), style="dim")


# --- the words ----------------------------------------------------------------------------------


def _draw_head(console: Console, plan: Plan) -> None:
    way = plan.chosen or next(iter(worth_showing(plan)), None)
    tokens = way.levers.sequence if way else plan.job.sequence
    say(console, head_words(plan, plan.hardware, tokens), style="bold")
    for note in (way.shape if way else plan.shape).notes:
        say(console, note, style="italic")
    console.print()


def _draw_verdict(console: Console, plan: Plan, otherwise: str, *, with_model: bool = False) -> None:
    console.print()
    way = plan.chosen
    if way is None:
        say(console, otherwise, style="bold red")
        return
    draw_chosen(console, plan, way, lever_flags(plan, way, with_model=with_model))


def draw_chosen(console: Console, plan: Plan, way: Way, flags: Sequence[str]) -> None:
    """How it runs and what that changes. No line ends between a flag and its value: people copy this."""
    say(console, verdict_words(plan, way), style="bold green")
    title = text("screen.levers")
    width = max(console.width, NARROWEST) - count_cells(title) + len(title)
    wrapped = textwrap.fill(
        " ".join(flag.replace(" ", UNBROKEN) for flag in flags),
        width,
        initial_indent=title,
        subsequent_indent=" " * count_cells(title),
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print(Text(wrapped.replace(UNBROKEN, " ")), soft_wrap=True)
    draw_list(console, text("screen.it-changes"), [end_sentence(change) for change in way.changes])


def model_words(plan: Plan) -> str:
    """What is trained, and how: as it was chosen, where that differs from what was asked."""
    shown = plan.chosen or next(iter(worth_showing(plan)), None)
    shape = shown.shape if shown else plan.shape
    levers = shown.levers if shown else levers_of(plan.job, plan.shape)
    parts = [
        f"{shape.name} ({billions(shape.parameters)})",
        levers.method if levers.lora is None else text("screen.rank", method=levers.method, rank=levers.lora.rank),
        levers.precision if levers.master_weights else text("screen.pure", precision=levers.precision),
        *([] if levers.optimizer == "adamw" else [levers.optimizer]),
    ]
    return ", ".join(parts)


def hardware_words(hardware: Hardware) -> str:
    """`2 nodes × 8 × A100`, `6 × 24GB cards`."""
    name = hardware.gpu.name
    many = "s" if hardware.gpus_per_node > 1 and name.endswith(" card") else ""
    if hardware.nodes == 1:
        return f"{hardware.gpus_per_node} × {name}{many}"
    return text("screen.nodes", nodes=hardware.nodes, per_node=hardware.gpus_per_node, name=f"{name}{many}")


def head_words(plan: Plan, hardware: Hardware, tokens: int) -> Message:
    """What is trained on what, and how much of it in a step."""
    what, where = model_words(plan), hardware_words(hardware)
    return Message("screen.head", what=what, hardware=where, batch=plan.effective_batch, tokens=tokens)


def verdict_words(plan: Plan, way: Way) -> Message:
    """How fast it is, in what, and how long it takes where the steps are known."""
    needed, size = amounts(way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes)
    steps = steps_of(plan.job, plan.effective_batch)
    duration: Message | str = ""
    if plan.hours is not None and steps is not None:
        late = Message("screen.late", timeout=plan.job.timeout) if is_cut_off(plan) else ""
        duration = Message("screen.duration", time=time_words(plan.hours), steps=steps, late=late)
    if not way.is_paced:
        return Message("screen.verdict-without-pace", way=strategy_name(way.levers), needed=needed, size=size)
    about = {"way": strategy_name(way.levers), "pace": way.pace.tokens_per_s}
    return Message("screen.verdict", **about, needed=needed, size=size, duration=duration)


def lever_flags(plan: Plan, way: Way, *, with_model: bool = False) -> list[str]:
    """The way as flags of `estimate`, each with its value. `with_model`: no command named the model.

    A promise: after `tightfit estimate` with the same model and machine they price the very way that was chosen. So
    there is every flag that `estimate` would set otherwise by itself, and every one that the user's own command set
    otherwise, since people put them behind that.
    """
    now, method = flags_from_levers(way.levers), way.levers.method
    # What `estimate` takes where nothing is said.
    plain = Levers(method=method, lora=None if method == "full" else Lora())
    usual = flags_from_levers(plain) | {"method": Levers().method}
    if native_bf16(way.hardware.gpu.arch) is False:
        usual["precision"] = ""  # chosen by the card: what was chosen is said
    try:  # what the user's own command or file says
        said = flags_from_levers(levers_of(plan.job, plan.shape))
    except UserError:
        said = {}
    names = [*ALWAYS, *(name for name in now if name not in ALWAYS)]
    told = [
        name
        for name in names
        if name in ALWAYS or name not in usual or now[name] != usual[name] or now[name] != said.get(name, now[name])
    ]
    flags = [f"--model {way.shape.name}"] if with_model or way.shape.name != plan.shape.name else []
    flags += [f"{spelt(name)} {now[name]}" for name in told if name != "master_weights"]
    if not way.levers.master_weights:
        flags.append("--no-master-weights")
    # `estimate` prices by itself all GPUs that --gpus names, or one.
    word = plan.job.hardware.gpus
    usual_world = 1 if is_this(word) else read_hardware(word).world
    if way.world != usual_world:
        flags.append(f"--world {way.world}")
    return flags


def reason_lines(plan: Plan) -> list[Said]:
    """What was not said above and will not be said below: that nothing fits, the verdict has said already."""
    return [
        cast(Message, said.fields["nearest"]) if isinstance(said, Message) and said.id == "plan.nothing-free" else said
        for said in further(plan)
    ]
