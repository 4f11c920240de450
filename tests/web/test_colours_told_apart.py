"""The colours of bars, map and curves, as the colour-blind see them.

What stands in one drawing differs in its pattern or, where the pattern is the same, in its colour: by a distance that
is seen at a glance, whichever cones are missing. Words and figures stand beside all of it.
"""

from __future__ import annotations

import re
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_colours import DARK, LIGHT, contrast, rgb

from tightfit.desk.svg_bars import LOOKS

PLAN = (Path(__file__).parents[2] / "src/tightfit/web/static/plan.css").read_text(encoding="utf-8")
EYES = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""Without the red, the green or the blue cones: Machado, Oliveira and Fernandes 2009, for linear light."""
AT_A_GLANCE = 15.0
"""In CIELAB, where about 2 can just be told apart side by side."""
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)

every_eye = pytest.mark.parametrize("eye", EYES)


def through(matrix: tuple[tuple[float, ...], ...], colour: list[float]) -> list[float]:
    return [sum(weight * part for weight, part in zip(row, colour, strict=True)) for row in matrix]


def lab(colour: str, eye: str) -> tuple[float, float, float]:
    seen = [min(1.0, max(0.0, part)) for part in through(EYES[eye], rgb(colour))]
    x, y, z = (
        share ** (1 / 3) if share > 216 / 24389 else (24389 / 27 * share + 16) / 116
        for share in (part / white for part, white in zip(through(XYZ, seen), WHITE, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: str, other: str, eye: str) -> float:
    pairs = zip(lab(one, eye), lab(other, eye), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def test_the_distance_is_the_usual_one() -> None:
    assert distance("#ffffff", "#000000", "all") == pytest.approx(100, abs=0.1)
    assert distance("#ff0000", "#00ff00", "all") == pytest.approx(170.6, abs=0.5)
    assert distance("#d55e00", "#7a7a00", "deutan") < distance("#d55e00", "#7a7a00", "all")


@every_eye
def test_any_two_parts_of_a_bar_are_told_apart(eye: str) -> None:
    """Any two may be neighbours: what is nothing is not drawn."""
    for one, other in combinations(LOOKS, 2):
        if LOOKS[one].pattern == LOOKS[other].pattern:
            assert distance(LOOKS[one].colour, LOOKS[other].colour, eye) >= AT_A_GLANCE, (one, other)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@every_eye
@pytest.mark.parametrize(
    "chart",
    [
        ("--c1", "--c6"),  # loss: the curve on the band from its lowest to its highest
        ("--c3", "--c2"),  # pace: what was made and what was planned
        ("--c1", "--c2"),  # memory now and planned, in the bars of the run
    ],
)
def test_curves_of_one_chart_are_told_apart(chart: tuple[str, ...], eye: str, colours: dict[str, str]) -> None:
    for one, other in combinations(chart, 2):
        assert distance(colours[one], colours[other], eye) >= AT_A_GLANCE, (one, other)


@every_eye
def test_the_map_deepens_for_everybody(eye: str) -> None:
    """One colour from light to dark, so that nobody needs its hue."""
    shades = [lab(colour, eye)[0] for colour in re.findall(r"\.shade\d+ \{ background: (#\w{6});", PLAN)]
    assert len(shades) == 11
    assert all(one - other > 2 for one, other in pairwise(shades))


def test_the_figures_in_the_map_can_be_read() -> None:
    found = re.findall(r"\.shade\d+ \{ background: (#\w{6}); color: (#\w{3});", PLAN)
    assert len(found) == 11
    for paper, ink in found:
        assert contrast(paper, "#" + "".join(2 * each for each in ink[1:])) >= 4.5, paper
    for name in ("over", "otherwise"):
        line = next(each for each in PLAN.splitlines() if each.startswith(f".{name} "))
        one, other, ink = re.findall(r"#\w{6}", line)
        assert min(contrast(one, ink), contrast(other, ink)) >= 4.5


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_the_edges_of_fields_and_the_focus_can_be_seen(colours: dict[str, str]) -> None:
    for paper in ("--paper", "--panel"):
        assert contrast(colours["--edge"], colours[paper]) >= 3
        assert contrast(colours["--accent"], colours[paper]) >= 3
