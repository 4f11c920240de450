"""Damaged answers: no parser may fail, and none may say a number that the tool did not.

Three kinds of damage. A text that breaks off, and one with letters struck out, keep their digits, so that every number
read from them must be one of the whole text's, at its own card and in its own field. Of any other damage a parser
cannot know, so there only what no card can be is looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache

import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st

from tightfit.hardware.probes.amd_smi import parse_cards as parse_amd
from tightfit.hardware.probes.card import Card
from tightfit.hardware.probes.libraries import parse_library
from tightfit.hardware.probes.nvidia import parse_apps, parse_cards, parse_links, parse_runtime
from tightfit.hardware.probes.rocm_smi import parse_cards as parse_smi
from tightfit.hardware.probes.rocm_smi import parse_processes

pytestmark = pytest.mark.thorough

Parser = Callable[[str], tuple[Card, ...]]


def _hygon(text: str) -> tuple[Card, ...]:
    return parse_smi(text, "hygon")


def _nvidia(text: str) -> tuple[Card, ...]:
    return parse_cards(text)[0]


def _amd_named(text: str) -> tuple[Card, ...]:
    return parse_amd(recorded.AMD_LIST, text)


SHAPES: dict[str, tuple[Parser, str]] = {
    **{
        name: (_hygon, getattr(recorded, name))
        for name in dir(recorded)
        if name.startswith("HY_") and name != "HY_PIDS"
    },
    **{name: (_hygon, getattr(recorded, name)) for name in ("ROCM_JSON", "ROCM_TEXT", "ROCM_CSV", "ROCM_TABLE")},
    **{name: (parse_amd, getattr(recorded, name)) for name in ("AMD_WRAPPED", "AMD_LIST", "AMD_ONE", "AMD_TEXT")},
    "AMD_STATIC": (_amd_named, recorded.AMD_STATIC),
    "AMD_PROCESS": (_amd_named, recorded.AMD_PROCESS),
    "NVIDIA_ROWS": (_nvidia, recorded.NVIDIA_ROWS),
    "NVML": (lambda text: parse_library(text).cards, recorded.NVML),
    "TORCH": (lambda text: parse_library(text).cards, recorded.TORCH),
    "TORCH_DTK": (lambda text: parse_library(text).cards, recorded.TORCH_DTK),
}
NUMBERS = [
    field.name
    for field in fields(Card)
    if field.name.endswith(("_bytes", "_percent", "_c", "_w")) or field.name == "pci"
]
every_shape = pytest.mark.parametrize("name", SHAPES)


@cache
def whole(name: str) -> tuple[Card, ...]:
    parse, text = SHAPES[name]
    return parse(text)


def check_same(found: tuple[Card, ...], whole: tuple[Card, ...]) -> None:
    known = {card.index: card for card in whole}
    for card in found:
        assert card.index in known
        for field in NUMBERS:
            value = getattr(card, field)
            assert value is None or value == getattr(known[card.index], field), field
        pids = {(each.pid, each.held_bytes) for each in known[card.index].processes or ()}
        for each in card.processes or ():
            assert each.held_bytes is None or (each.pid, each.held_bytes) in pids


def check_possible(cards: tuple[Card, ...]) -> None:
    for card in cards:
        for part in (card.used_bytes, card.free_bytes):
            assert part is None or card.total_bytes is None or 0 <= part <= card.total_bytes
        assert card.total_bytes is None or 0 < card.total_bytes < 2**44
        for share in (card.use_percent, card.memory_percent):
            assert share is None or 0 <= share <= 100
        assert all(process.pid > 0 for process in card.processes or ())


@every_shape
def test_a_text_that_breaks_off(name: str) -> None:
    parse, text = SHAPES[name]
    assert whole(name)
    for end in range(len(text)):
        check_same(parse(text[:end]), whole(name))


@every_shape
@given(data=st.data())
def test_letters_that_are_struck_out(name: str, data: st.DataObject) -> None:
    parse, text = SHAPES[name]
    soft = [place for place, letter in enumerate(text) if not letter.isdigit()]
    struck = data.draw(st.lists(st.sampled_from(soft), max_size=8))
    damaged = list(text)
    for place in struck:
        damaged[place] = "~"
    check_same(parse("".join(damaged)), whole(name))


@every_shape
@given(data=st.data())
def test_any_other_damage(name: str, data: st.DataObject) -> None:
    parse, text = SHAPES[name]
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    between = data.draw(st.one_of(st.just(""), st.text(max_size=40), st.just(text[:end])))
    check_possible(parse(text[:begin] + between + text[end:]))


@given(text=st.text(max_size=300))
def test_garbage(text: str) -> None:
    for parse, _ in SHAPES.values():
        check_possible(parse(text))
    parse_processes(text)
    parse_apps(text)
    parse_links(text)
    parse_runtime(text)


@pytest.mark.parametrize("text", [recorded.HY_PIDS, recorded.ROCM_PIDS, recorded.ROCM_JSON, recorded.NVIDIA_APPS])
def test_lists_of_processes_that_break_off(text: str) -> None:
    def read(part: str) -> set[tuple[int, int | None]]:
        smi = {(process.pid, process.held_bytes) for process, _ in parse_processes(part)}
        return smi | {(process.pid, process.held_bytes) for _, process in parse_apps(part)}

    whole = read(text)
    assert whole
    for end in range(len(text)):
        assert {pair for pair in read(text[:end]) if pair[1] is not None} <= whole
        assert {pid for pid, _ in read(text[:end])} <= {pid for pid, _ in whole}


def test_links_that_break_off() -> None:
    whole = set(parse_links(recorded.NVIDIA_TOPO))
    for end in range(len(recorded.NVIDIA_TOPO)):
        assert set(parse_links(recorded.NVIDIA_TOPO[:end])) <= whole
