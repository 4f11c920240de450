"""The colours of the stylesheet can be read, in light and in dark, and are those that everybody can tell apart."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

SHEET = (Path(__file__).parents[2] / "src/tightfit/web/static/app.css").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", SHEET.partition("@media (prefers-color-scheme: dark)")[0]))
DARK = LIGHT | dict(
    re.findall(
        r"(--[\w-]+): (#[0-9a-f]{6});", SHEET.partition("@media (prefers-color-scheme: dark)")[2].partition("}")[0]
    )
)

schemes = pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])


def rgb(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    """As WCAG counts it."""
    light = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), rgb(each), strict=True)) for each in (one, other)
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


@schemes
@pytest.mark.parametrize("ink", ["--ink", "--quiet", "--accent", "--good", "--warn", "--bad"])
@pytest.mark.parametrize("paper", ["--paper", "--panel"])
def test_text_can_be_read(ink: str, paper: str, colours: dict[str, str]) -> None:
    assert contrast(colours[ink], colours[paper]) >= 4.5


@schemes
def test_text_on_colours_can_be_read(colours: dict[str, str]) -> None:
    assert contrast(colours["--accent-ink"], colours["--accent"]) >= 4.5
    for paper in ("--good-paper", "--warn-paper", "--bad-paper"):
        assert contrast(colours["--ink"], colours[paper]) >= 4.5


def seen_without(kind: str, colour: str) -> list[float]:
    """As somebody sees it without red or without green cones (Viénot 1999, in linear light)."""
    red, green, blue = rgb(colour)
    first = 0.11238 * red + 0.88762 * green if kind == "protan" else 0.29275 * red + 0.70725 * green
    last = 0.00401 * (red - green) + blue if kind == "protan" else -0.02234 * (red - green) + blue
    return [first, first, last]


@schemes
@pytest.mark.parametrize("kind", ["protan", "deutan"])
def test_the_curves_can_be_told_apart(kind: str, colours: dict[str, str]) -> None:
    """The four that stand in one chart; beside that they differ in their dashes."""
    for one, other in combinations(("--c1", "--c2", "--c3", "--c4"), 2):
        pair = zip(seen_without(kind, colours[one]), seen_without(kind, colours[other]), strict=True)
        assert max(abs(a ** (1 / 2.2) - b ** (1 / 2.2)) for a, b in ((max(0, a), max(0, b)) for a, b in pair)) > 0.08
