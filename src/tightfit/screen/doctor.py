"""What `tightfit doctor` shows: a line a check, its light as a word and a colour, the fix below it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from tightfit.hardware.doctor.row import GROUPS, LIGHTS, Check, worst
from tightfit.messages import Message, end_sentence, text
from tightfit.messages.wide import pad, wrap
from tightfit.screen import NARROWEST, say

_INDENT = " " * 8
_VERDICTS = dict(zip(LIGHTS, ("screen.all-green", "screen.some-yellow", "screen.some-red"), strict=True))
_LIGHTS = dict(zip(LIGHTS, ("screen.green", "screen.yellow", "screen.red"), strict=True))
_GROUPS = dict(
    zip(
        GROUPS,
        (
            *("screen.gpus", "screen.links", "screen.host-group", "screen.disk", "screen.software"),
            *("screen.building", "screen.environment", "screen.job"),
        ),
        strict=True,
    )
)


def draw_checkup(console: Console, rows: Sequence[Check], seconds: float) -> None:
    """All rows by group, and the verdict."""
    for number, (group, members) in enumerate(groupby(rows, key=lambda row: row.group)):
        if number:
            console.print()
        console.print(Text(text(_GROUPS[group]), style="bold"))
        for row in members:
            width = max(console.width, NARROWEST) - len(_INDENT)
            lines = wrap(end_sentence(_capital(str(row.what))), width, break_on_hyphens=False).split("\n")
            console.print(
                Text.assemble((pad(text(_LIGHTS[row.light]), len(_INDENT)), row.light), lines[0]), soft_wrap=True
            )
            for line in lines[1:]:
                console.print(Text(f"{_INDENT}{line}"), soft_wrap=True)
            if row.fix is not None:
                say(console, f"→ {end_sentence(_capital(str(row.fix)))}", first=_INDENT, indent=f"{_INDENT}  ")
            for command in row.commands:
                console.print(Text(f"{_INDENT}  {command}", style="cyan"), soft_wrap=True)
    console.print()
    verdict = worst(rows)
    lacking = verdict == "yellow" and any(row.id == "packages" and row.light == "yellow" for row in rows)
    words = Message("screen.not-installed") if lacking else Message(_VERDICTS[verdict])
    say(console, text("screen.looked-at", verdict=words, seconds=seconds), style=f"bold {verdict}")


def _capital(sentence: str) -> str:
    """A capital, unless the first word is a name that is written small."""
    first = sentence.split(maxsplit=1)[0]
    is_name = not first.rstrip(",:").isalpha() or first in ("torch", "nvcc", "peft", "c++", "nvidia-smi")
    return sentence if is_name else sentence[:1].upper() + sentence[1:]
