"""What the verbs draw on a terminal.

Everything here must read as well in a pipe, in a log file and for someone who sees no colours: a
component has a fill of its own besides its colour, and the width is the terminal's (80 columns where
there is none). Sizes are bytes until the last moment and GiB on screen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightfit.hardware.catalogue import CatalogueCard
from tightfit.memory.overhead import name_component
from tightfit.messages import Listing, Message, Said, text
from tightfit.messages.wide import count_cells, pad, wrap
from tightfit.priced import (
    GIB,
    Priced,
    Share,
    amounts,
    billions,
    describe_training,
    machine_words,
    spell_component,
    strategy_line,
    training_line,
    training_words,
    verdict,
)
from tightfit.runs.lines import MIB, size_words
from tightfit.types import ModelShape, Phase

WIDEST = 120  # longer bars show nothing more

FILLS: Mapping[str, tuple[str, str]] = {
    "weights": ("█", "blue"),
    "gathered weights": ("▓", "cyan"),
    "gradients": ("▒", "yellow"),
    "buckets": ("=", "bright_yellow"),
    "master weights": ("▚", "magenta"),
    "optimizer states": ("░", "bright_magenta"),
    "activations": ("▞", "green"),
    "recompute": ("+", "bright_green"),
    "logits": ("#", "red"),
    "temporaries": ("~", "white"),
}
"""Component → its fill and colour. The same everywhere, so that two pictures can be compared."""

SPARE_FILLS = "%oxvz@&"  # for components without a fill of their own, in the order in which they turn up

OVERHEAD = (":", "bright_black")

PHASES = {
    "screen.init",
    "screen.forward",
    "screen.loss",
    "screen.backward",
    "screen.step",
    "screen.eval",
    "screen.save",
}
"""The phases of a training step."""

SHORT = 34  # a reason up to this length stands in the table's own row


def phase_words(name: str) -> str:
    """A phase of a step as people read it."""
    return text(f"screen.{name}") if f"screen.{name}" in PHASES else name


class Comparison(NamedTuple):
    """What was predicted and measured; None: not known."""

    key: str  # its name for programs
    name: str
    unit: Literal["bytes", "seconds", "tokens"]
    predicted: float | None
    measured: float | None


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main`: rich would end the process with an error."""
        raise BrokenPipeError


TABLE = 80  # columns that a table needs
NARROWEST = 40  # a terminal that says it is narrower, or has no width at all, is taken to have this one


def open_console() -> Console:
    """The terminal, or the pipe, that the verb prints to."""
    console = _Terminal(highlight=False, emoji=False, markup=False)
    if console.width < NARROWEST:
        console.width = NARROWEST
    return console


def open_errors() -> Console:
    """Standard error, for what failed."""
    return Console(stderr=True, highlight=False, emoji=False, markup=False)


def draw_estimate(console: Console, priced: Priced, advice: Sequence[str], fitting: Sequence[str] = ()) -> None:
    """The whole answer: bars, components, verdict, and what would shrink the largest parts."""
    console.print(Text(text("screen.about", name=priced.shape.name, what=describe_training(priced)), style="bold"))
    say(console, strategy_line(priced))
    say(console, training_line(priced))
    for note in priced.shape.notes:
        say(console, note, style="italic")
    console.print()
    gpu, host = priced.footprint.gpu, priced.footprint.host
    fills = component_fills([*gpu.phases.values()])
    # A bar for each phase, and what is needed in all.
    card = priced.hardware.gpu.memory_bytes if priced.hardware else None
    scale = max(gpu.required_bytes, card or 0, *(phase.total_bytes for phase in gpu.phases.values()))
    bar_unit, bar_word = _unit(scale)
    label, number = 9, 10
    room = max(8, min(console.width, WIDEST) - label - number - 2)

    def draw_bar(name: str, phase: Phase, total_bytes: int, mark: str = "") -> None:
        parts = [(fills[part], size) for part, size in phase.components.items()]
        parts.append((OVERHEAD, max(0, total_bytes - phase.total_bytes)))
        figure = f"{total_bytes / bar_unit:>{number - 2}.2f}{mark}"
        console.print(Text(pad(name, label)), bar(parts, scale, room, card), Text(figure), sep="")

    for phase in gpu.phases.values():
        draw_bar(phase_words(phase.name), phase, phase.total_bytes, " ←" if phase.name == gpu.peak_phase else "")
    # What decides whether it fits: it may be the start, or an evaluation, and not a step of training.
    worst = max(gpu.phases.values(), key=lambda phase: (phase.total_bytes, phase.name == gpu.peak_phase))
    draw_bar(text("screen.needs"), worst, gpu.required_bytes)
    about = Message("screen.bars-note", unit=bar_word)
    if priced.hardware is not None and card is not None:
        about = Message("screen.bars-note-card", note=about, size=card / bar_unit, name=priced.hardware.gpu.name)
    say(console, about, indent=" " * label, style="dim")
    console.print()
    # The components at the peak.
    unit, word = _unit(gpu.required_bytes)
    console.print(Text(text("screen.held-at-peak", phase=phase_words(gpu.peak_phase), unit=word)))

    def draw_size(fill: str | tuple[str, str], name: Said, size: int, more: str = "", style: str = "") -> None:
        line = f" {pad(str(name), 26)}{size / unit:>9.2f}{more}"
        console.print(Text.assemble("  ", fill, line, style=style))

    for part, size in gpu.phases[gpu.peak_phase].components.items():
        if size:
            draw_size(fills[part], name_component(part), size, f"  {100 * size / max(1, gpu.peak_bytes):4.0f} %")
    draw_size(" ", text("screen.peak"), gpu.peak_bytes, style="bold")
    if worst.name != gpu.peak_phase:
        draw_size(" ", text("screen.but-in", phase=phase_words(worst.name)), worst.total_bytes, style="bold")
    for part, size in gpu.overhead.items():
        if size:
            draw_size(OVERHEAD, name_component(part), size)
    draw_size(" ", text("screen.needs"), gpu.required_bytes, style="bold")
    console.print()
    style = {True: "bold green", False: "bold red", None: "bold"}[priced.fits]
    say(console, verdict(priced), style=style)
    start, _ = amounts(gpu.init_peak_bytes, gpu.peak_bytes)
    most = gpu.init_peak_bytes > gpu.peak_bytes
    say(console, Message("screen.start-up-most" if most else "screen.start-up", size=start))
    node, rank = amounts(host.peak_bytes_per_node, host.peak_bytes_per_rank)
    ram = priced.hardware.host_ram_bytes if priced.hardware else None
    have = "" if ram is None else Message("screen.of-ram", size=amounts(ram)[0])
    alone = host.peak_bytes_per_node == host.peak_bytes_per_rank
    each = "" if alone else Message("screen.each-process", size=rank)
    say(console, Message("screen.host-ram", node=node, have=have, each=each))
    if host.nvme_bytes_per_node:
        disk = priced.hardware.nvme_bytes if priced.hardware else None
        have = "" if disk is None else Message("screen.of-ram", size=amounts(disk)[0])
        say(console, Message("screen.nvme", node=amounts(host.nvme_bytes_per_node)[0], have=have))
    draw_list(console, text("screen.would-fit-as"), fitting)
    draw_list(console, text("screen.largest-parts"), advice)
    draw_list(console, text("screen.because"), priced.because)


def component_fills(phases: Sequence[Phase]) -> dict[str, tuple[str, str]]:
    """The fill and colour of every component that occurs, in the order of drawing."""
    names = list(dict.fromkeys(name for phase in phases for name in phase.components))
    spare = iter(SPARE_FILLS * (1 + len(names)))
    return {name: FILLS.get(spell_component(name)) or (next(spare), "white") for name in names}


def bar(parts: Sequence[tuple[tuple[str, str], int]], scale: int, room: int, limit: int | None) -> Text:
    """One stacked bar of `room` cells. Ends are rounded, not lengths, so that nothing adds up wrongly."""
    cells = Text()
    width = room if limit is None else room - 1
    held = drawn = 0
    for (fill, style), size in parts:
        held += size
        end = round(held * width / scale) if scale else 0
        cells.append(fill * (end - drawn), style=style)
        drawn = end
    cells.append(" " * (width - drawn))
    if limit is None:
        return cells
    at = round(limit * width / scale) if scale else width
    return Text.assemble(cells[:at], ("│", "bold"), cells[at:])


def draw_list(console: Console, title: str, sentences: Sequence[Said]) -> None:
    """A title and a sentence a line; nothing, where there is none."""
    if not sentences:
        return
    console.print()
    console.print(title)
    for sentence in sentences:
        say(console, sentence, first="  - ", indent="    ")


def say(console: Console, sentence: Said, *, first: str | None = None, indent: str = "", style: str = "") -> None:
    """Prose, wrapped here and not by the console, which leaves blanks at the ends of lines."""
    width = max(console.width, NARROWEST)
    wrapped = wrap(str(sentence), width, indent if first is None else first, indent, break_on_hyphens=False)
    console.print(Text(wrapped, style=style))


def _unit(largest_bytes: int) -> tuple[int, str]:
    """GiB, except for models so small that every number would be nought."""
    return (GIB, "GiB") if largest_bytes >= GIB // 2 else (MIB, "MiB")


def draw_comparison(console: Console, rows: Sequence[tuple[str, Priced | str]]) -> None:
    """The strategies side by side, as people keep such tables by hand."""
    widen(console)
    for priced in [outcome for _, outcome in rows if isinstance(outcome, Priced)][:1]:
        console.print(Text(text("screen.about", name=priced.shape.name, what=describe_training(priced)), style="bold"))
        say(console, f"{machine_words(priced)} · {training_line(priced)}")
        console.print()
    heads = (
        "screen.strategy",
        "screen.peak",
        "screen.start-up-head",
        "screen.needs",
        "screen.host-node",
        "screen.fits",
    )
    table, problems = table_of(*heads), []
    for name, outcome in rows:
        if isinstance(outcome, str):
            line = text("screen.about", name=name, what=outcome)
            short = count_cells(line) < SHORT + len(": ")
            table.add_row(line if short else name, *"-----")
            problems += [] if short else [line]
            continue
        gpu, host = outcome.footprint.gpu, outcome.footprint.host
        sizes = (gpu.peak_bytes, gpu.init_peak_bytes, gpu.required_bytes, host.peak_bytes_per_node)
        table.add_row(name, *(f"{size / GIB:.2f}" for size in sizes), _yes_no(outcome.fits))
    console.print(table)
    say(console, text("screen.comparison-note"), style="dim")
    draw_list(console, text("screen.without-numbers"), problems)


def draw_models(console: Console, shapes: Sequence[ModelShape]) -> None:
    """The presets with their true sizes."""
    widen(console)
    numbers = ("screen.parameters", "", "screen.layers", "screen.hidden", "screen.vocabulary")
    table = table_of("screen.model", *numbers)
    for shape in shapes:
        counts = (f"{shape.parameters:,}", billions(shape.parameters), str(shape.n_layers))
        table.add_row(shape.name, *counts, str(shape.hidden_size), str(shape.vocab_size))
    console.print(table)
    noted = [shape for shape in shapes if shape.notes]
    notes = [text("screen.about", name=shape.name, what=Listing(shape.notes, ";")) for shape in noted]
    draw_list(console, text("screen.notes"), notes)


def draw_shares(console: Console, shares: Sequence[Share]) -> None:
    """What each preset would hold on one GPU."""
    widen(console)
    for share in shares[:1]:
        say(console, strategy_line(share.priced))
        say(console, training_words(share.priced.levers))
        console.print()
    held = ("part.weights", "screen.grads", "screen.optim", "screen.activ")
    table = table_of("screen.model", "screen.params", *held, "screen.needs", "screen.fits")
    for share in shares:
        parts = (share.weights_bytes, share.gradients_bytes, share.optimizer_bytes, share.activations_bytes)
        shape, needs = share.priced.shape, share.priced.footprint.gpu.required_bytes
        numbers = [f"{size / GIB:.2f}" for size in (*parts, needs)]
        table.add_row(shape.name, billions(shape.parameters), *numbers, _yes_no(share.priced.fits))
    console.print(table)
    say(console, text("screen.shares-note"), style="dim")


def draw_gpus(console: Console, cards: Sequence[CatalogueCard]) -> None:
    """The catalogue."""
    widen(console)
    table = table_of("screen.card", "screen.box", "screen.usable", "bf16", "fp16", "GB/s", "screen.link", "GB/s")

    def rate(value: float | None, unit: float) -> str:
        return "?" if value is None else f"{value / unit:.0f}"

    for card in cards:
        gpu = card.gpu
        name = gpu.name if card.devices == 1 else text("screen.each-of", name=gpu.name, devices=card.devices)
        rates = (rate(gpu.bf16_flops, 1e12), rate(gpu.fp16_flops, 1e12), rate(gpu.memory_bytes_per_s, 1e9))
        sizes = (str(card.size_gib), f"{gpu.memory_bytes / GIB:.1f}")
        table.add_row(name, *sizes, *rates, gpu.link or "?", rate(gpu.link_bytes_per_s, 1e9))
    console.print(table)
    say(console, text("screen.gpus-note"), style="dim")


def widen(console: Console) -> None:
    """For a table that would lose the names of its rows: a narrower terminal breaks its lines itself."""
    console.width = max(console.width, TABLE)


def table_of(*heads: str) -> Table:
    """A table without edges: the first column is text, the others are numbers. Heads are messages by their ids."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for position, head in enumerate(heads):
        shown = text(head) if "." in head else head
        table.add_column(shown, justify="right" if position else "left", overflow="fold", no_wrap=position > 0)
    return table


def draw_comparisons(
    console: Console, rows: Sequence[Comparison], head: str, compare: Callable[[float, float], str]
) -> None:
    """Predicted beside measured, and under `head` what `compare` says of the two where both are known."""
    table = table_of("", "screen.predicted", "screen.measured", head)
    for row in rows:
        values = (row.predicted, row.measured)
        known = row.predicted is not None and row.measured is not None and row.predicted > 0
        compared = compare(row.predicted or 0, row.measured or 0) if known else ""
        table.add_row(row.name, *(_figure_words(value, row.unit) for value in values), compared)
    console.print(table)


def _figure_words(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return {"bytes": size_words(int(value)), "seconds": f"{value:.3g} s", "tokens": f"{value:,.0f}"}[unit]


def _yes_no(fits: bool | None) -> Text:
    return (
        Text("?", "dim")
        if fits is None
        else Text(text("screen.yes"), "green")
        if fits
        else Text(text("screen.no"), "red")
    )
