"""amd-smi in all the wrappings that it answers in."""

from __future__ import annotations

import pytest
import recorded

from tightfit.hardware.probes.amd_smi import parse_cards
from tightfit.hardware.probes.card import CardProcess
from tightfit.hardware.probes.readings import MIB


@pytest.mark.parametrize(
    ("text", "index"),
    [(recorded.AMD_WRAPPED, 0), (recorded.AMD_LIST, 0), (recorded.AMD_ONE, 3), (recorded.AMD_TEXT, 0)],
)
def test_the_wrappings_say_the_same(text: str, index: int) -> None:
    card = parse_cards(text)[0]
    assert (card.index, card.vendor, card.use_percent, card.power_w) == (index, "amd", 94, 612)
    assert (card.total_bytes, card.used_bytes) == (196592 * MIB, 17153 * MIB)
    assert card.free_bytes == (196592 - 17153) * MIB


def test_what_is_not_applicable_is_unknown() -> None:
    second = parse_cards(recorded.AMD_LIST)[1]
    assert (second.total_bytes, second.used_bytes, second.use_percent) == (196592 * MIB, None, None)
    assert parse_cards(recorded.AMD_TEXT)[1].use_percent is None


def test_names_and_addresses_come_from_another_question() -> None:
    (card,) = parse_cards(recorded.AMD_WRAPPED, recorded.AMD_STATIC)
    assert (card.name, card.arch, card.pci) == ("AMD Instinct MI300X", "gfx942", "0000:c5:00.0")
    assert card.temperature_c == 71


def test_processes() -> None:
    first, second = parse_cards(recorded.AMD_LIST, recorded.AMD_PROCESS)
    assert first.processes == (CardProcess(pid=4711, held_bytes=5),)
    assert second.processes == ()
    assert parse_cards(recorded.AMD_LIST, "nonsense") == parse_cards(recorded.AMD_LIST), "silence changes nothing"


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"gpu": true}', '{"gpu": -1}', '{"gpu_data": {"gpu": 0}}', "GPU: x\n"]
)
def test_garbage_has_no_cards(text: str) -> None:
    assert parse_cards(text) == ()
