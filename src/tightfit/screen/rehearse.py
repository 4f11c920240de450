"""What `tightfit rehearse` shows at its end: predicted beside measured, and whether it passed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from tightfit.messages import Message, Said, bare, text
from tightfit.priced import GIB
from tightfit.runs.run import Failure
from tightfit.screen import MIB, draw_list, say, table_of

Unit = Literal["bytes", "seconds", "tokens"]
Verdict = Literal["passed", "out of memory", "over the cap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One figure, predicted and measured; None: not known."""

    key: str
    """Its name for programs."""
    name: str
    unit: Unit
    predicted: float | None
    measured: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """How a rehearsal went."""

    model: str
    engine: str
    ranks: int
    device: str
    """What it ran on."""
    cap_bytes: int
    tensor_bytes: int | None
    """What of the cap is left for tensors; None: there is no GPU."""
    verdict: Verdict
    phase: str | None
    """Where memory ran out, for programs."""
    where: Said | None
    """The same for people."""
    error: str | None
    """What the worker said."""
    steps: int
    rows: tuple[FigureRow, ...]
    notes: tuple[str, ...]
    folder: str | None
    """Where it was kept; None: it was not."""

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


def draw_rehearsal(console: Console, found: Rehearsal) -> None:
    """The table, the verdict, and what has to be known about the figures."""
    console.print()
    table = table_of("", text("screen.predicted"), text("screen.measured"), text("screen.difference"))
    for row in found.rows:
        difference = ""
        if row.predicted is not None and row.measured is not None and row.predicted > 0:
            difference = f"{100 * (row.measured / row.predicted - 1):+.1f} %"
        table.add_row(row.name, _value(row.predicted, row.unit), _value(row.measured, row.unit), difference)
    console.print(table)
    console.print()
    say(console, verdict_words(found), style="bold green" if found.passed else "bold red")
    if found.error is not None:
        say(console, found.error, style="dim")
    draw_list(console, text("screen.about-figures"), found.notes)
    if found.folder is not None:
        console.print()
        say(console, text("screen.kept", folder=found.folder), indent="  ", first="")


def verdict_words(found: Rehearsal) -> str:
    who = Message("screen.only-rank") if found.ranks == 1 else Message("screen.rank-0", ranks=found.ranks)
    card = _value(found.cap_bytes, "bytes")
    if found.verdict == "out of memory":
        return text("screen.ran-out", who=who, where=found.where or "", card=card)
    peak = next((row.measured for row in found.rows if row.key == ("peak" if found.tensor_bytes else "host")), None)
    held = "" if peak is None else Message("screen.its-peak", size=_value(peak, "bytes"))
    if found.verdict == "over the cap":
        return text("screen.over-cap", who=who, card=card, held=held)
    room: Message | str = ""
    if found.tensor_bytes is not None and peak is not None:
        room = Message("screen.left-for-tensors", size=_value(found.tensor_bytes, "bytes"))
    return text("screen.passed", who=who, steps=found.steps, card=card, held=held, room=room)


def draw_failure(console: Console, failure: Failure, folder: str | None) -> None:
    """A rehearsal that failed for another reason than memory."""
    console.print(
        Text(f"tightfit: {text('screen.rehearsal-failed', why=bare(failure.sentence))}", style="bold"), soft_wrap=True
    )
    if failure.tail:
        log = failure.log if folder is not None else Message("screen.its-log")
        console.print(Text(text("screen.last-lines", log=log)), soft_wrap=True)
    for line in failure.tail:
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)


def _value(value: float | None, unit: Unit) -> str:
    if value is None:
        return "-"
    if unit == "seconds":
        return f"{value:.3g} s"
    if unit == "tokens":
        return f"{value:,.0f}"
    return f"{value / GIB:.2f} GiB" if value >= GIB // 2 else f"{value / MIB:.1f} MiB"
