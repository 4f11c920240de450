"""What `tightfit watch` shows: one row a GPU, the run, three lights, and what is about to go wrong.

A picture is a list of lines, so that a terminal, a pipe and a test see the same. Every line is cut to the width and
the least of them are left out where the height does not suffice; nothing relies on colours alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tightfit.hardware.probes.card import CardProcess
from tightfit.messages import Listing, Message, id_of, text
from tightfit.messages.wide import pad, pad_left
from tightfit.priced import GIB
from tightfit.runs.health import BRIM, FULL, Light
from tightfit.runs.lines import MIB, Lines, duration, loss_words
from tightfit.runs.machine_eye import Host
from tightfit.runs.rank_memory import Rank
from tightfit.runs.watching import Look, RunEye, Watcher
from tightfit.screen.train import failure_words, process_words

MARKS = {"green": "✓", "yellow": "!", "red": "✗", "unknown": "?"}
STYLES = {"green": "green", "yellow": "bold yellow", "red": "bold red", "unknown": "dim"}
LEVELS, PLAIN_LEVELS = "▁▂▃▄▅▆▇█", "_.,:-=+#"
LABEL, BAR = 7, 12  # columns of a row's name, and the fewest of its bar
WIDEST_BAR = 60
SPARK = 60
LATEST = 6  # events that are shown at most
OLD_S = 3.0  # figures of cards that are older say so
LIGHT_S = 60.0  # in a pipe, a light that changes is worth a line so often, and one that turns red always
MACHINE_EVERY_S = 60.0  # in a pipe, a machine without a run is worth a line so often

# A column: its head, its width, and from which width of the terminal on it is shown.
_COLUMNS = {
    "now": (Message("screen.now"), 7, 0),
    "peak": (Message("screen.peak"), 7, 50),
    "plan": (Message("screen.plan"), 7, 56),
    "total": (Message("screen.total"), 7, 0),
    "use": (Message("screen.use"), 7, 62),
    "temp": (Message("screen.temp"), 7, 70),
    "power": (Message("screen.power"), 7, 77),
    "processes": (Message("screen.processes-head"), 22, 100),
}


def picture(look: Look, width: int, height: int | None = None, *, plain_letters: bool = False) -> list[Text]:
    """A whole look. `height`: lines that there is room for; None: as many as there are."""
    run = look.run
    lines: list[Text] = []
    if run is not None:
        inside = run.folder.is_relative_to(Path.cwd())
        words = [str(run.folder.relative_to(Path.cwd()) if inside else run.folder)]
        if run.worker is not None:
            worker = run.worker
            what = f"{worker.model}, {worker.method}, {worker.engine}"
            words.append(text("screen.on-ranks", what=what, n=worker.ranks))
        if len(run.attempts) > 1:
            words.append(text("screen.attempt", number=run.attempts[-1].number))
        if run.ended is not None:
            words.append(str(run.ended))
        elif run.record is not None and run.record.started is not None:
            words.append(text("screen.for-time", time=duration(look.at - run.record.started.timestamp())))
        lines.append(Text(str(Listing(words, ";")), style="bold" if run.well else "bold red"))
        lines += [*_progress(run, width, plain_letters=plain_letters), Text()]
    lines += [*_table(look, width), Text()]
    lines += [Text(light_words(light), style=STYLES[light.colour]) for light in look.health.lights]
    lines += [Text(f"! {warning}", style="bold yellow") for warning in look.health.warnings]
    more: list[Text] = []  # where there is room
    if run is not None:
        failed = []
        for record in [each for each in run.attempts if each.state == "failed"][-3:]:
            at, cause = failure_words(record)
            following = "" if record.next is None else f" → {record.next.action}"
            failed.append(Text(f"  {Listing((str(record.number), record.plan, at))}{cause}{following}"))
        more += _with_title(text("screen.failed-attempts"), failed)
        events = [Text(f"  {line}", style=style) for line, style in run.lines[-LATEST:]]
        more += _with_title(text("screen.events"), events)
    processes = []
    for card in look.cards:
        for process in card.card.processes or ():
            held = "?" if process.held_bytes is None else f"{process.held_bytes / MIB:,.0f}"
            who = process_words(process.pid, process.user, process.command)
            processes.append(Text(f"  GPU {card.card.index}  {held:>8} MiB  {who}"))
    more += _with_title(text("screen.processes"), processes)
    if run is None:
        others = [text("screen.run-process", folder=entry.folder, pid=entry.pid) for entry in look.others]
        more += _with_title(text("screen.runs"), [Text(f"  {line}") for line in others])
    more += [Text(f"! {problem}", style="yellow") for problem in look.problems]
    lines += more if height is None else more[: max(0, height - len(lines))]
    for line in lines:
        if cell_len(line.plain) > width:
            line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def one_line(look: Look) -> str:
    """The machine in one line, for where every line stays."""
    parts = []
    for each in look.cards:
        use = each.card.use_percent
        used, total = _amount(each.card.used_bytes), _amount(each.card.total_bytes)
        busy = "" if use is None else Message("screen.gpu-busy", percent=use)
        parts.append(text("screen.gpu-part", number=each.card.index, used=used, total=total, busy=busy))
    used, total = _amount(look.host.used_bytes), _amount(look.host.total_bytes)
    parts.append(text("screen.host-part", used=used, total=total))
    cpu = _cpu(look.host)
    return str(Listing((*parts, f"CPU {cpu}") if cpu else parts, ";"))


def _cpu(host: Host) -> str:
    """`87 % of 16 cores busy, load 14.2`; empty: the system does not say."""
    found = []
    if host.cpu_percent is not None:
        cores = "" if host.cores is None else Message("screen.of-cores", n=host.cores)
        found.append(Message("screen.cpu-busy", percent=host.cpu_percent, cores=cores))
    if host.load is not None:
        found.append(Message("screen.load", load=host.load))
    return str(Listing(found))


def light_words(light: Light) -> str:
    """`✓ loss falling: 2.4101 → 2.3000 in 200 steps`"""
    return f"{MARKS[light.colour]} {light.title}" + (f": {light.text}" if light.text else "")


def _progress(run: RunEye, width: int, *, plain_letters: bool) -> list[Text]:
    step = run.step
    if step is None or run.doing is not None:
        doing = run.doing
        if run.ended is not None:
            return []
        share = ""
        if doing is not None and doing.total and doing.done is not None and doing.total > 1:
            share = f": {100 * min(1.0, doing.done / doing.total):.0f} %"
        return [Text(f"{text('screen.starting') if doing is None else doing.what}{share} …")]
    parts = [
        text("screen.step-part", step=f"{step.step:,}" + ("" if step.steps is None else f"/{step.steps:,}")),
        text("screen.loss-part", loss=loss_words(step.loss)),
    ]
    if step.tokens_per_s is not None:
        parts.append(f"{step.tokens_per_s:,.0f} tokens/s")
    if step.seconds_left is not None and run.ended is None:
        parts.append(text("screen.time-left", time=duration(step.seconds_left)))
    if step.loss_scale is not None:
        parts.append(text("screen.scale", scale=step.loss_scale))
    lines = [Text("  ".join(parts))]
    if len(run.losses) > 1:
        room = max(8, min(SPARK, width - 24))
        ends = f"{loss_words(run.losses[0])} ", f" {loss_words(run.losses[-1])}"
        drawn = sparkline(tuple(run.losses), room, PLAIN_LEVELS if plain_letters else LEVELS)
        lines.append(Text.assemble(f"{text('screen.loss')} ", ends[0], (drawn, "cyan"), ends[1]))
    return lines


def sparkline(values: Sequence[float], room: int, levels: str = LEVELS) -> str:
    """Means of as many parts as there is room for, each as high as it is among them."""
    count = min(room, len(values))
    cuts = [round(len(values) * part / count) for part in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(levels[min(len(levels) - 1, int((mean - low) / span * len(levels)))] for mean in means)


class _RowSizes(NamedTuple):
    """Of one row, in bytes; None: not known."""

    now: int | None
    peak: int | None
    planned: int | None
    total: int | None


def _table(look: Look, width: int) -> list[Text]:
    columns = {name: size for name, (_, size, least) in _COLUMNS.items() if width >= least}
    room = min(WIDEST_BAR, max(BAR, width - LABEL - sum(columns.values())))
    old = look.cards and look.cards_age_s > OLD_S
    title = text("screen.gib-ago", seconds=look.cards_age_s) if old else text("screen.memory-gib")

    def in_columns(cells: Mapping[str, str]) -> str:
        placed = [
            pad_left(cells.get(name, ""), size) if name != "processes" else f"  {cells.get(name, '')}"
            for name, size in columns.items()
        ]
        return "".join(placed)

    def row(name: str, sizes: _RowSizes, **cells: str) -> Text:
        peak, plan = ("" if size is None else _amount(size) for size in (sizes.peak, sizes.planned))
        cells |= {"now": _amount(sizes.now), "peak": peak, "plan": plan, "total": _amount(sizes.total)}
        return Text.assemble(pad(name, LABEL), _bar(sizes, room - 1), " ", in_columns(cells))

    heads = {name: str(head) for name, (head, _, _) in _COLUMNS.items()}
    lines = [Text(f"{'':{LABEL}}{pad(title, room)}{in_columns(heads)}", style="dim")]
    for each in look.cards:
        card = each.card
        lines.append(
            row(
                f"GPU {card.index}",
                _RowSizes(card.used_bytes, each.peak_bytes, each.planned_bytes, card.total_bytes),
                use=_unit(card.use_percent, " %"),
                temp=_unit(card.temperature_c, " °C"),
                power=_unit(card.power_w, " W"),
                processes=_who(card.processes),
            )
        )
    lines += [row(name, sizes, processes=who) for name, sizes, who in _rank_rows(look)]
    lines.append(row(text("screen.host"), _RowSizes(look.host.used_bytes, None, None, look.host.total_bytes)))
    if cpu := _cpu(look.host):
        lines.append(Text(f"{'CPU':<{LABEL}}{cpu}"))
    return lines


def _rank_rows(look: Look) -> list[tuple[str, _RowSizes, str]]:
    """Ranks on the CPU: what a card's memory would be is their own RAM."""
    run = look.run
    if run is None or run.ended is not None or (run.worker is not None and run.worker.vendor != "cpu"):
        return []
    planned, total = None if run.worker is None else run.worker.ram_bytes_per_rank, look.host.total_bytes
    share = None if total is None else total // max(1, sum(rank.host is None for rank in run.ranks))
    if run.ranks:
        return [
            (rank.name.replace("-", " "), _RowSizes(rank.now_bytes, rank.peak_bytes, planned, share), _where(rank))
            for rank in run.ranks
        ]
    if run.step is None or run.step.host_bytes is None:
        return []
    # on another machine, or another user's
    return [("rank 0", _RowSizes(run.step.host_bytes, None, planned, share), "")]


def _where(rank: Rank) -> str:
    return str(rank.pid) if rank.host is None else text("screen.pid-on-host", pid=rank.pid, host=rank.host)


def _bar(sizes: _RowSizes, room: int) -> Text:
    if not sizes.total or sizes.now is None:
        return Text("?".ljust(room))
    per = sizes.total / room
    now, peak = (min(room, round((size or 0) / per)) for size in (sizes.now, sizes.peak))
    marks = ["█" if place < now else "▒" if place < peak else "·" for place in range(room)]
    if sizes.planned is not None:
        marks[min(room - 1, int(sizes.planned / per))] = "│"
    share = sizes.now / sizes.total
    colour = "green" if share < FULL else "yellow" if share < BRIM else "red"
    return Text("".join(marks), style=colour)


def _amount(size_bytes: int | None) -> str:
    """GiB, with as many digits as say something."""
    if size_bytes is None:
        return "?"
    return f"{size_bytes / GIB:.2f}" if size_bytes < GIB else f"{size_bytes / GIB:.1f}"


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.0f}{unit}"


def _who(processes: Sequence[CardProcess] | None) -> str:
    if processes is None:
        return "?"
    if not processes:
        return text("screen.none")
    first = processes[0]
    more = f" +{len(processes) - 1}" if len(processes) > 1 else ""
    return f"{first.pid}{f' {first.user}' if first.user else ''}{more}"[:20]


def _with_title(title: str, lines: list[Text]) -> list[Text]:
    return [Text(), Text(title, style="dim"), *lines] if lines else []


@contextmanager
def show_in_place(console: Console) -> Iterator[Callable[[Look], None]]:
    """The picture, drawn anew with each look. What was last seen stays on the screen."""
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def show(look: Look) -> None:
        lines = picture(look, console.width, console.height - 1, plain_letters=console.options.ascii_only)
        live.update(Text("\n").join(lines), refresh=True)

    live.start()
    try:
        yield show
    finally:
        with suppress(OSError):  # a terminal that was closed
            live.stop()


@contextmanager
def show_lines(watcher: Watcher, put: Callable[[str], object]) -> Iterator[Callable[[Look], None]]:
    """Lines that stay, for a pipe or a log: `put` writes one."""
    lines: Lines | None = None
    said: dict[str, tuple[str, float]] = {}  # each light's colour, and when it was said
    warned: Collection[str] = ()
    machine_at = -math.inf

    def say(line: str, style: str = "") -> None:
        del style  # where every line stays there are no colours
        put(f"{datetime.now():%H:%M:%S}  {line}")

    def show(look: Look) -> None:
        nonlocal lines, warned, machine_at
        now, run = time.monotonic(), look.run
        if lines is None:
            lines = Lines(say, 0 if run is None or run.worker is None else run.worker.peak_bytes)
            if run is not None:
                where = text("cli.at-step", step=run.step.step) if run.step else text("cli.before-its-first-step")
                say(text("cli.watching-run", folder=run.folder, at=where))
        elif watcher.run is not None:
            for event in watcher.run.fresh:
                lines.show(event)
        if run is None and now - machine_at >= MACHINE_EVERY_S:
            machine_at = now
            say(one_line(look))
        for light in look.health.lights:
            colour, at = said.get(light.name, ("unknown", -math.inf))
            if light.colour not in ("unknown", colour) and (light.colour == "red" or now - at >= LIGHT_S):
                said[light.name] = light.colour, now
                say(light_words(light))
        # A warning is said once as long as it holds: its figures change all the time.
        kinds = {id_of(warning) or str(warning): warning for warning in look.health.warnings}
        for kind in kinds.keys() - set(warned):
            say(f"! {kinds[kind]}")
        warned = kinds.keys()

    try:
        yield show
    except OSError:
        lines = None  # nobody hears any more
        raise
    finally:
        if lines is not None:
            lines.end()
