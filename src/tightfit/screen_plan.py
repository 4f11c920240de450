"""What `tightfit plan` draws: ways side by side, and under them why one was chosen.

The rows stand in the order of their pace, so that what was tempting and does not fit is above the chosen one.
The bar takes what the other columns leave of the line: a table that wraps cannot be compared by eye.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tightfit.inputs.flags import checkpointing_word, flags_from_levers, spelt
from tightfit.inputs.job_fields import COSTLY
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import steps_of
from tightfit.planner.tiers import Tiered
from tightfit.priced import GIB, amounts, billions, strategy_name
from tightfit.screen import TABLE, WIDEST, bar, draw_list, say
from tightfit.types import Hardware, Levers

MOST_FITTING = 5
MOST_TEMPTING = 3
MOST_HOPELESS = 6
"""Rows of each kind: the chosen one with the next best, those that were faster and do not fit, and, where
nothing fits, those that are nearest to it."""

CHOSEN, UNFIT = "→", "×"
FILL = ("█", "blue")
OVER = ("█", "red")
SHORTEST_BAR, TELLING_BAR, LONGEST_BAR = 6, 14, 40
"""Cells. The middle one is worth more than a second blank between the columns."""
MOST_OVER = 1.5
"""A bar ends at this multiple of the card; what needs more is told by its number."""

ENGINES = {"zero0": "unsharded", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}

Row = tuple[str, Way]
"""The mark before a way, and the way."""


def waiting(text: str) -> AbstractContextManager[object]:
    """A line that says so while a person waits; nothing in a pipe or a log."""
    if not sys.stderr.isatty():
        return nullcontext()
    return Console(stderr=True).status(text, spinner="line")


# --- the answers --------------------------------------------------------------------------------


def draw_plan(console: Console, plan: Plan, lead: Sequence[str] = ()) -> None:
    """The whole answer. `lead` stands first among the reasons."""
    _draw_head(console, plan)
    rows = _rows(plan)
    if rows:
        draw_ways(console, rows)
        _draw_legend(console, plan, rows)
    _draw_verdict(console, plan, "Nothing fits that keeps the training as it is.")
    draw_list(console, "Because:", [*lead, *_reasons(plan)])
    draw_list(console, "Never run by us:", plan.unproven)


def draw_tier(console: Console, tiered: Tiered) -> None:
    """A tier beside what the free search would do."""
    plan = tiered.plan
    assert plan is not None, "what a tier cannot run is an error before anything is drawn"
    _draw_head(console, plan)
    say(console, f"Tier {tiered.tier.name}: {tiered.tier.about}.")
    console.print()
    way = plan.chosen or next(iter(plan.alternatives), None)
    rows = [("tier", way)] if way else []
    if tiered.free is not None and tiered.free.chosen is not None:
        rows.append(("free", tiered.free.chosen))
    if rows:
        draw_ways(console, rows)
        _draw_legend(console, plan, rows)
    _draw_verdict(console, plan, f"{tiered.tier.name} does not fit.")
    draw_list(console, "The tier brings, where you said nothing:", [f"{cost}." for cost in tiered.costs])
    draw_list(console, "Because:", [*tiered.because, *_reasons(plan)])
    draw_list(console, "Never run by us:", plan.unproven)


def draw_tiers(console: Console, rows: Sequence[Tiered]) -> None:
    """Every tier, with what it costs."""
    console.width = max(console.width, TABLE)  # narrower, a row would lose its name
    plans = [tiered.plan for tiered in rows if tiered.plan is not None]
    for plan in plans[:1]:
        say(console, f"{_model_words(plan)}, on {_hardware_words(plan.hardware)}", style="bold")
        console.print()
    names = max(len(tiered.tier.name) for tiered in rows)
    before = names + len("  999.9  fits  tokens/s  ")
    console.print(Text(f"{'tier':<{names}}  {'GiB':>5}  fits  tokens/s  what it changes", style="bold"))
    console.print(Text("─" * console.width))
    for tiered in rows:
        way = None if tiered.plan is None else tiered.plan.chosen or next(iter(tiered.plan.alternatives), None)
        cells, changes = ("-", "-", "-"), tiered.problem or "no engine runs it"
        if way is not None:
            needs = f"{way.footprint.gpu.required_bytes / GIB:.1f}"
            cells = (needs, "yes" if way.fits else "no", f"{way.pace.tokens_per_s:,.0f}")
            changes = "; ".join(tiered.costs) or "nothing"
        first = f"{tiered.tier.name:<{names}}  {cells[0]:>5}  {cells[1]:>4}  {cells[2]:>8}  "
        say(console, changes, first=first, indent=" " * before, style="" if way and way.fits else "dim")
    for plan in plans[:1]:
        limit = f"{plan.hardware.gpu.memory_bytes / GIB:.1f}"
        say(console, f"GiB on one GPU, which has {limit}; tokens a second of all GPUs.", style="dim")
        draw_list(console, "Never run by us:", plan.unproven)


def draw_limit(console: Console, limit: Limit) -> None:
    """The most that fits, and the plan for it."""
    names = {"seq": "longest sequence", "micro-batch": "largest micro batch", "model": "largest preset"}
    units = {"seq": " tokens", "micro-batch": " sequences a GPU", "model": ""}
    if limit.value is None:
        said = f"No {limit.wanted} fits: this is how far the smallest is from it."
    else:
        said = f"The {names[limit.wanted]} that fits: {limit.value}{units[limit.wanted]}."
    say(console, said, style="bold green" if limit.value is not None else "bold red")
    console.print()
    draw_plan(console, limit.plan, limit.because)


def draw_files(console: Console, files: Sequence[Path], has_worker: bool) -> None:
    """What was written, and how to start it."""
    folder = files[0].parent
    console.print()
    say(console, f"Written to {folder}: {', '.join(path.name for path in files)}", indent="  ", first="")
    console.print(Text(f"Start it with: bash {shlex.quote(str(folder / 'launch.sh'))}"))
    if not has_worker and "tightfit.train" in (folder / "launch.sh").read_text(encoding="utf-8"):
        note = (
            "launch.sh starts tightfit's own worker, which this version does not have yet: use --launcher "
            "llamafactory, or start your own trainer with these files."
        )
        say(console, note)


# --- the table ----------------------------------------------------------------------------------


def _rows(plan: Plan) -> list[Row]:
    """The best few ways and the tempting ones that do not fit, the fastest first."""
    chosen, others = plan.chosen, plan.alternatives
    if chosen is None:
        return [(UNFIT, way) for way in sorted(others, key=_lacks)[:MOST_HOPELESS]]
    tempting = [way for way in others if not way.fits and way.pace.step_s < chosen.pace.step_s]
    tempting = sorted(tempting, key=_lacks)[:MOST_TEMPTING]
    if not tempting:  # slower and too large: still what people try first
        tempting = [way for way in others if not way.fits][:2]
    fitting = [way for way in others if way.fits][: MOST_FITTING - 1]
    ways = sorted((chosen, *tempting, *fitting), key=lambda way: way.pace.step_s)
    return [(CHOSEN if way is chosen else "" if way.fits else UNFIT, way) for way in ways]


def _lacks(way: Way) -> int:
    """How far a way is from fitting."""
    hardware, host = way.hardware, way.footprint.host
    lacking = max(0, way.footprint.gpu.required_bytes - way.gpu_limit_bytes)
    for need, have in (
        (host.peak_bytes_per_node, hardware.host_ram_bytes),
        (host.nvme_bytes_per_node, hardware.nvme_bytes),
    ):
        lacking += 0 if have is None else max(0, need - have)
    return lacking


def draw_ways(console: Console, rows: Sequence[Row]) -> None:
    """A line a way; its memory as a bar against the card."""
    console.width = max(console.width, TABLE)  # narrower, a row would lose its name
    several = len({way.world for _, way in rows}) > 1
    heads = ["", "engine", "offload", "checkpoint", "batch", *(["GPUs"] if several else [])]
    at = len(heads)
    heads += ["GPU", "GiB", "host", "tokens/s", "free"]
    lines = [[mark, *_cells(way, several)] for mark, way in rows]
    widths = [max(len(line[place]) for line in (heads, *lines)) for place in range(len(heads))]
    widths[at] = 0
    spare = min(console.width, WIDEST) - sum(widths) - len(widths) + 1
    gap = 2 if spare >= TELLING_BAR + len(widths) else 1
    widths[at] = max(SHORTEST_BAR, min(LONGEST_BAR, spare - (gap - 1) * (len(widths) - 2)))

    def line_of(cells: Sequence[str | Text], style: str = "") -> Text:
        line = Text()
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            text = cell if isinstance(cell, Text) else Text(f"{cell:<{width}}" if place <= at else f"{cell:>{width}}")
            line.append(" " * (0 if not place else 1 if place == 1 else gap))
            line.append_text(text)
        line.rstrip()
        line.stylize_before(style)
        return line

    console.print(line_of(heads, "bold"), soft_wrap=True)
    console.print(Text("─" * (sum(widths) + 1 + gap * (len(widths) - 2))), soft_wrap=True)
    card = rows[0][1].hardware.gpu.memory_bytes
    scale = min(max(card, *(way.footprint.gpu.required_bytes for _, way in rows)), round(MOST_OVER * card))
    for (mark, way), line in zip(rows, lines, strict=True):
        cells: list[str | Text] = [*line]
        cells[at] = _memory(way.footprint.gpu.required_bytes, card, scale, widths[at])
        style = {CHOSEN: "bold green", "tier": "bold"}.get(mark, "" if way.fits else "dim")
        console.print(line_of(cells, style), soft_wrap=True)


def _cells(way: Way, several: bool) -> list[str]:
    levers, host, ram = way.levers, way.footprint.host.peak_bytes_per_node, way.hardware.host_ram_bytes
    over = "!" if ram is not None and host > ram else ""
    return [
        ENGINES[levers.engine],
        _offload(levers),
        checkpointing_word(levers.checkpointing),
        f"{levers.micro_batch} × {levers.accumulation}",
        *([str(way.world)] if several else []),
        "",
        f"{way.footprint.gpu.required_bytes / GIB:.1f}",
        f"{host / GIB:.0f}{over}",
        f"{way.pace.tokens_per_s:,.0f}",
        f"{100 * way.gpu_spare_bytes / way.hardware.gpu.memory_bytes:.0f} %",
    ]


def _offload(levers: Levers) -> str:
    places = {"none": "", "cpu": "CPU", "nvme": "NVMe"}
    optimizer, weights = places[levers.offload_optimizer], places[levers.offload_param]
    if not optimizer and not weights:
        return "-"
    if optimizer == weights:
        return f"all {optimizer}"
    return f"opt {optimizer}" if not weights else f"w {weights}" if not optimizer else f"{optimizer}+{weights}"


def _memory(need: int, card: int, scale: int, room: int) -> Text:
    shown = min(need, scale)
    return bar([(FILL, min(shown, card)), (OVER, max(0, shown - card))], scale, room, card)


def _draw_legend(console: Console, plan: Plan, rows: Sequence[Row]) -> None:
    marks = [f"{CHOSEN} chosen"] if any(mark == CHOSEN for mark, _ in rows) else []
    marks += [f"{UNFIT} does not fit"] if any(mark == UNFIT for mark, _ in rows) else []
    nearest = [] if plan.chosen or len(rows) < 2 else ["the nearest first"]
    parts = [
        *marks,
        *nearest,
        f"│ the card's {plan.hardware.gpu.memory_bytes / GIB:.1f} GiB",
        "batch: micro × accumulation",
    ]
    offloads = {_offload(way.levers).partition(" ")[0] for _, way in rows}
    words = {
        "opt": "opt: the optimizer",
        "all": "all: optimizer and weights",
        "NVMe+CPU": "NVMe+CPU: optimizer+weights",
    }
    parts += [word for key, word in words.items() if key in offloads]
    parts.append("host: GiB of RAM a node")
    if any(cell.endswith("!") for _, way in rows for cell in _cells(way, False)):
        parts.append("!: more than it has")
    say(console, "; ".join(parts), style="dim")
    hidden = 1 + len(plan.alternatives) - len(rows) if plan.chosen else len(plan.alternatives) - len(rows)
    more = f"; {hidden} more in --json" if hidden > 0 and rows[0][0] in (CHOSEN, UNFIT, "") else ""
    say(console, f"{plan.considered:,} ways were priced{more}.", style="dim")


# --- the words ----------------------------------------------------------------------------------


def _draw_head(console: Console, plan: Plan) -> None:
    levers = plan.chosen.levers if plan.chosen else next((way.levers for way in plan.alternatives), None)
    sequence = levers.sequence if levers else plan.job.sequence
    batch = f"{plan.effective_batch} × {sequence} tokens a step"
    say(console, f"{_model_words(plan)}, on {_hardware_words(plan.hardware)}: {batch}", style="bold")
    for note in plan.shape.notes:
        say(console, note, style="italic")
    console.print()


def _model_words(plan: Plan) -> str:
    job = plan.job
    parts = [
        f"{plan.shape.name} ({billions(plan.shape.parameters)})",
        job.method if job.method == "full" else f"{job.method} rank {job.lora.rank}",
        job.precision if job.master_weights else f"pure {job.precision}",
        *([] if job.optimizer == "adamw" else [job.optimizer]),
    ]
    return ", ".join(parts)


def _hardware_words(hardware: Hardware) -> str:
    nodes = f"{hardware.nodes} nodes × " if hardware.nodes > 1 else ""
    return f"{nodes}{hardware.gpus_per_node} × {hardware.gpu.name}"


def _draw_verdict(console: Console, plan: Plan, otherwise: str) -> None:
    console.print()
    way = plan.chosen
    if way is None:
        say(console, otherwise, style="bold red")
        return
    needed, size = amounts(way.footprint.gpu.required_bytes, way.hardware.gpu.memory_bytes)
    said = f"{strategy_name(way.levers)}: {way.pace.tokens_per_s:,.0f} tokens/s in {needed} of {size} GiB"
    say(console, f"{said}{_duration(plan)}.", style="bold green")
    say(console, f"Levers: {lever_words(way.levers, costly=bool(way.changes))}", indent="        ", first="")
    draw_list(console, "IT CHANGES THE TRAINING:", [f"{change}." for change in way.changes])


def _duration(plan: Plan) -> str:
    steps = steps_of(plan.job, plan.effective_batch)
    if plan.hours is None or steps is None:
        return ""
    hours = plan.hours
    if hours < 1:
        time = f"{max(1, round(60 * hours))} minutes"
    else:
        time = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    return f", about {time} for {steps:,} steps"


def lever_words(levers: Levers, *, costly: bool = False) -> str:
    """The free levers as flags: what `estimate` takes to price the same way; with the costly ones, if asked."""
    now, usual = flags_from_levers(levers), flags_from_levers(Levers())
    always = ("engine", "micro_batch", "accum", "checkpointing")
    kept = {"deepspeed_version", "dataloader_workers", *always, *(() if costly else COSTLY)}
    names = [*always, *(name for name in now if name not in kept and now[name] != usual.get(name))]
    return " ".join(f"{spelt(name)} {now[name]}" for name in names)


def _reasons(plan: Plan) -> list[str]:
    """The sentences that say something which was not said above or will be said below."""
    said = set(plan.unproven)
    if plan.chosen is not None:
        said.add(f"Chosen: {strategy_name(plan.chosen.levers)}.")
        said |= {f"It changes the training: {change}." for change in plan.chosen.changes}
    return [sentence.removeprefix("Nothing free fits. ") for sentence in plan.because if sentence not in said]
