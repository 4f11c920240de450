"""The bars stand alone: nothing but an XML reader is needed to see that they say what they are given."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tightfit.desk.svg_bars import LOOKS, Bar, BarLine, BarPart, bars_svg, phase_bars, plan_bars, scale_of
from tightfit.hardware.words import parse_hardware
from tightfit.job import Job, Machine
from tightfit.memory import estimate
from tightfit.model.load import load_model
from tightfit.planner import plan
from tightfit.priced import GIB, Priced
from tightfit.types import Levers

SVG = "{http://www.w3.org/2000/svg}"
PARTS = (
    BarPart(kind="weights", label="weights", size_bytes=8 * GIB),
    BarPart(kind="activations", label="act<i>vations & more", size_bytes=12 * GIB),
    BarPart(kind="never_heard_of", label="new", size_bytes=4 * GIB),
)
CARD = BarLine(at_bytes=32 * GIB, label="32.0 GiB card")


def read(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 (it was made a moment ago)


def drawn(*bars: Bar) -> ElementTree.Element:
    return read(bars_svg(bars, title="a <title>", ids="x"))


def test_widths_are_shares_of_the_scale() -> None:
    root = drawn(Bar(parts=PARTS, lines=(CARD,)))
    parts = [each for each in root.iter(f"{SVG}svg") if each.get("class", "").startswith("part ")]
    assert [each.get("width") for each in parts] == ["25.000%", "37.500%", "12.500%"]
    assert [each.get("x") for each in parts] == ["0.000%", "25.000%", "62.500%"]
    assert {line.get("x1") for line in root.iter(f"{SVG}line")} == {"100.000%"}
    assert [title.text for title in root.iter(f"{SVG}title")][1:] == [
        "weights 8.0 GiB",
        "act<i>vations & more 12.0 GiB",
        "new 4.0 GiB",
    ]


def test_it_can_be_read_aloud_and_stands_alone() -> None:
    text = bars_svg([Bar(parts=PARTS, lines=(CARD,), name="ZeRO-3", note="6,000 tokens/s")], title="bars", ids="x")
    root = read(text)
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == "x-title x-desc"
    desc = root.find(f"{SVG}desc")
    assert desc is not None
    assert desc.text == "ZeRO-3: weights 8.0 GiB, act<i>vations & more 12.0 GiB, new 4.0 GiB, 32.0 GiB card"
    assert "style" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    used = set(re.findall(r"url\(#([\w-]+)\)", text))
    assert used == {each.get("id") for each in root.iter(f"{SVG}pattern")}


def test_what_is_far_too_long_is_cut_and_marked() -> None:
    huge = Bar(parts=(BarPart(kind="weights", label="weights", size_bytes=500 * GIB),), lines=(CARD,))
    assert scale_of([huge]) == 48 * GIB
    assert "▸" in bars_svg([huge], title="bars", ids="x")
    assert "▸" not in bars_svg([Bar(parts=PARTS, lines=(CARD,))], title="bars", ids="x")


@pytest.mark.parametrize("bars", [[], [Bar(parts=())]])
def test_nothing_can_be_drawn_too(bars: list[Bar]) -> None:
    root = read(bars_svg(bars, title="bars", ids="x"))
    assert not [each for each in root.iter(f"{SVG}svg") if each.get("class", "").startswith("part ")]


def test_no_two_kinds_look_alike() -> None:
    looks = [(look.colour, look.pattern) for look in LOOKS.values()]
    assert len(set(looks)) == len(looks)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("kind", LOOKS)
def test_words_on_a_part_can_be_read(kind: str) -> None:
    light, dark = sorted((luminance(LOOKS[kind].colour), luminance(LOOKS[kind].ink)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.thorough
def test_a_plan_and_an_estimate_are_drawn_for_notebooks() -> None:
    answer = plan(Job(model="tiny_mamba", hardware=Machine(gpus="2x24GB", host_ram="64GB")))
    html = plan_bars(answer)
    root = read(html)
    assert "24.0 GiB card" in html
    assert "tokens/s" in html
    assert "style" not in html
    assert len(list(root.iter(f"{SVG}pattern"))) > 3
    shape, levers, machine = load_model("tiny_mamba"), Levers(), parse_hardware("1x24GB")
    footprint = estimate(shape, levers, 1, machine)
    phases = phase_bars(Priced(shape=shape, levers=levers, world=1, hardware=machine, footprint=footprint))
    read(phases)
    assert all(f">{name}</text>" in phases for name in footprint.gpu.phases)
