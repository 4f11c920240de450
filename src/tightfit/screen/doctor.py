"""What `tightfit doctor` shows: a line a check, its light as a word and a colour, the fix below it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from tightfit.hardware.doctor.row import Light, Row, worst
from tightfit.screen import NARROWEST, say

_INDENT = " " * 8
_WORDS: dict[Light, str] = {
    "green": "Nothing is in the way of a training here.",
    "yellow": "A training can run here; the yellow lines may bite.",
    "red": "The red lines are in the way of a training.",
}

_LACKING = "Plans can be made here; a training needs what is not installed."


def draw_checkup(console: Console, rows: Sequence[Row], seconds: float) -> None:
    """All rows by group, and the verdict."""
    for number, (group, members) in enumerate(groupby(rows, key=lambda row: row.group)):
        if number:
            console.print()
        console.print(Text(group, style="bold"))
        for row in members:
            _draw_row(console, row)
    console.print()
    verdict = worst(rows)
    lacking = verdict == "yellow" and any(row.id == "packages" and row.light == "yellow" for row in rows)
    say(console, f"{_LACKING if lacking else _WORDS[verdict]} Looked at in {seconds:.1f} s.", style=f"bold {verdict}")


def _draw_row(console: Console, row: Row) -> None:
    import textwrap

    width = max(console.width, NARROWEST)
    lines = textwrap.wrap(f"{_capital(row.what)}.", width - len(_INDENT), break_on_hyphens=False)
    console.print(Text.assemble((f"{row.light:<8}", row.light), lines[0]), soft_wrap=True)
    for line in lines[1:]:
        console.print(Text(f"{_INDENT}{line}"), soft_wrap=True)
    if row.fix is not None:
        say(console, f"→ {_capital(row.fix)}.", first=_INDENT, indent=f"{_INDENT}  ")
    for command in row.commands:
        console.print(Text(f"{_INDENT}  {command}", style="cyan"), soft_wrap=True)


def _capital(sentence: str) -> str:
    """A capital, unless the first word is a name that is written small."""
    first = sentence.split(maxsplit=1)[0]
    is_name = not first.rstrip(",:").isalpha() or first in ("torch", "nvcc", "peft", "c++", "nvidia-smi")
    return sentence if is_name else sentence[:1].upper() + sentence[1:]
