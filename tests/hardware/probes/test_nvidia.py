"""NVIDIA's two ways to ask, torch's own, and how the answers of several tools become one list."""

from __future__ import annotations

from dataclasses import replace

import recorded

from tightfit.hardware.probes.card import Card, CardProcess, Cards, complete_sizes, together
from tightfit.hardware.probes.libraries import parse_library
from tightfit.hardware.probes.nvidia import FIELDS, parse_apps, parse_cards, parse_links, parse_runtime
from tightfit.hardware.probes.readings import GIB, MIB, pci_address
from tightfit.hardware.probes.rocm_smi import parse_cards as parse_smi


def test_the_rows_of_nvidia_smi() -> None:
    (first, second, odd), driver = parse_cards(recorded.NVIDIA_ROWS)
    assert driver == "570.124.06"
    assert (first.pci, first.arch, first.name) == ("0000:1b:00.0", "sm_90", "NVIDIA H200")
    assert (first.total_bytes, first.used_bytes, first.free_bytes) == (143771 * MIB, 4 * MIB, 143155 * MIB)
    assert (second.use_percent, second.temperature_c, second.power_w) == (99, 64, 612.75)
    assert odd.name == "Odd, card"
    unknown = (
        odd.total_bytes,
        odd.used_bytes,
        odd.free_bytes,
        odd.use_percent,
        odd.temperature_c,
        odd.power_w,
        odd.arch,
    )
    assert unknown == (None,) * 7


def test_a_row_without_its_last_field_is_no_card() -> None:
    line = recorded.NVIDIA_ROWS.splitlines()[0]
    assert parse_cards(line.rpartition(",")[0]) == ((), None)
    (card,), _ = parse_cards("0, not a bus, " + ", ".join(FIELDS))
    assert card == Card(index=0, vendor="nvidia"), "a torn row is a card of which nothing is known"


def test_processes_of_nvidia_smi() -> None:
    found = parse_apps(recorded.NVIDIA_APPS)
    assert found[0] == (f"{recorded.UUID}1", CardProcess(pid=4711, held_bytes=119500 * MIB))
    assert found[1][1] == CardProcess(pid=4000000, held_bytes=None)
    assert len(found) == 3
    assert parse_apps(f"{recorded.UUID}1, 4711, 1195")[0][1].held_bytes is None, "it may be half a number"


def test_the_newest_cuda_of_the_driver() -> None:
    assert parse_runtime(recorded.NVIDIA_HEAD) == "12.8"
    assert parse_runtime("CUDA Version: N/A") is None


def test_links() -> None:
    assert parse_links(recorded.NVIDIA_TOPO) == (
        ("GPU0", "GPU1", "NV18"),
        ("GPU0", "GPU2", "SYS"),
        ("GPU1", "GPU2", "NODE"),
    )
    assert parse_links("       GPU0         GPU1\nGPU0   0            XGMI\nGPU1   XGMI         0\n") == (
        ("GPU0", "GPU1", "XGMI"),
    )
    assert parse_links("") == ()


def test_nvml() -> None:
    answer = parse_library(recorded.NVML)
    (card,) = answer.cards
    assert (card.pci, card.arch, card.power_w) == ("0000:1b:00.0", "sm_90", 76.2)
    assert card.processes == (CardProcess(pid=4711, held_bytes=5), CardProcess(pid=4712, held_bytes=None))
    assert answer.driver is not None
    assert (answer.driver.version, answer.driver.runtime) == ("570.124.06", "12.8")
    assert parse_library("Traceback").cards == ()


def test_torch_as_the_last_resort() -> None:
    (card,) = parse_library(recorded.TORCH).cards
    assert (card.vendor, card.total_bytes, card.free_bytes) == ("nvidia", 150754820096, 4096)
    (card,) = parse_library(recorded.TORCH_DTK).cards
    assert (card.vendor, card.arch, card.free_bytes, card.used_bytes) == ("hygon", "gfx928", None, None)
    assert parse_library('{"cards": [{"index": true}]}').cards == ()


# --- one list -----------------------------------------------------------------------------------


def test_two_tools_show_the_same_cards_once() -> None:
    rows, _ = parse_cards(recorded.NVIDIA_ROWS)
    found = together([replace(parse_library(recorded.NVML), tools=("NVML",)), Cards(tools=("nvidia-smi",), cards=rows)])
    assert [card.pci for card in found.cards] == ["0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"]
    assert found.cards[0].used_bytes == 4194304, "NVML was asked first"
    assert found.tools == ("NVML", "nvidia-smi")


def test_hy_smi_and_rocm_smi_list_the_same_cards() -> None:
    hygon = parse_smi(recorded.HY_JSON, "hygon")
    twice = together([Cards(cards=hygon), Cards(cards=hygon)])
    assert twice.cards == hygon
    nameless = parse_smi(recorded.HY_OLDER, "hygon")
    assert together([Cards(cards=nameless), Cards(cards=hygon)]).cards == nameless


def test_cards_of_two_makers_stand_beside_each_other() -> None:
    nvidia, _ = parse_cards(recorded.NVIDIA_ROWS)
    amd = parse_smi(recorded.ROCM_JSON, "amd")
    assert len(together([Cards(cards=nvidia), Cards(cards=amd)]).cards) == 4


def test_a_later_tool_fills_in_what_an_earlier_one_left_open() -> None:
    first = Card(index=0, vendor="amd", pci="0000:01:00.0", use_percent=5)
    second = Card(index=7, vendor="amd", pci="0000:01:00.0", use_percent=9, total_bytes=GIB, used_bytes=MIB)
    (card,) = together([Cards(cards=(first,)), Cards(cards=(complete_sizes(second),))]).cards
    assert (card.index, card.use_percent, card.total_bytes, card.free_bytes) == (0, 5, GIB, GIB - MIB)


def test_processes_without_a_card_are_listed_once() -> None:
    loose, placed = CardProcess(pid=5), CardProcess(pid=6)
    card = Card(index=0, vendor="amd", processes=(placed,))
    found = together([Cards(cards=(card,), unplaced=(loose, placed)), Cards(problems=("b failed.",))])
    assert found.unplaced == (loose,)
    assert found.problems == ("b failed.",)


def test_addresses() -> None:
    assert {pci_address(text) for text in ("00000000:09:00.0", "0000:09:00.0", "09:00.0", " 0000:09:00.0\n")} == {
        "0000:09:00.0"
    }
    assert pci_address("00010000:C5:00.0") == "10000:c5:00.0"
    assert [pci_address(text) for text in ("", "9:0.0", "N/A", 5, "0000:zz:00.0")] == [None] * 5
