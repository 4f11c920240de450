"""One line of a check-up: a light, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from tightfit.messages import Said

Light = Literal["green", "yellow", "red"]
LIGHTS: tuple[Light, ...] = ("green", "yellow", "red")
Group = Literal["GPUs", "links", "host", "disk", "software", "building", "environment", "job"]
GROUPS: tuple[Group, ...] = get_args(Group)  # in the order of a report


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, and how it stands. Green: nothing to do; yellow: it may bite; red: a training fails."""

    id: str
    group: Group
    light: Light
    what: Said  # what was found, in a sentence without its full stop
    fix: Said | None = None
    commands: tuple[str, ...] = ()  # to be typed by the user: nothing is ever run for them


def worst(rows: Iterable[Check]) -> Light:
    """The light of all rows together."""
    return max((row.light for row in rows), key=LIGHTS.index, default="green")


def gib(size_bytes: int) -> str:
    """`65.5 GiB`, and in smaller units what would be nought in these."""
    for unit, word in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        amount = size_bytes / unit
        if amount >= 1:
            return f"{amount:.1f} {word}" if amount < 100 and word == "GiB" else f"{amount:,.0f} {word}"
    return f"{size_bytes} bytes"
