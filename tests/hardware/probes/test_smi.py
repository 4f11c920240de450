"""hy-smi and rocm-smi in all the shapes that they answer in."""

from __future__ import annotations

import json

import pytest
import recorded

from tightfit.hardware.probes.card import Card, CardProcess
from tightfit.hardware.probes.readings import GIB, MIB
from tightfit.hardware.probes.rocm_smi import parse_cards, parse_processes


def hygon(text: str) -> tuple[Card, ...]:
    return parse_cards(text, "hygon")


def test_hy_smi_in_json() -> None:
    first, second = hygon(recorded.HY_JSON)
    assert (first.index, first.vendor, first.name, first.pci) == (0, "hygon", "K100_AI", "0000:01:00.0")
    assert (first.total_bytes, first.used_bytes, first.free_bytes) == (65520 * MIB, 2 * MIB, 65518 * MIB)
    assert (first.use_percent, first.temperature_c, first.power_w) == (0.0, 37.0, 77.0)
    assert (second.used_bytes, second.use_percent) == (1002 * MIB, 10.0)
    assert first.processes is None


def test_commas_that_are_missing_are_put_back() -> None:
    first, second = hygon(recorded.HY_NO_COMMAS)
    assert (first.total_bytes, first.used_bytes, first.power_w, first.use_percent) == (
        65520 * MIB,
        1166 * MIB,
        81.5,
        12,
    )
    assert (second.use_percent, second.total_bytes, second.used_bytes) == (7, 65520 * MIB, None)


def test_an_older_hy_smi_in_bytes_with_a_card_that_says_little() -> None:
    first, second = hygon(recorded.HY_OLDER)
    assert (first.total_bytes, first.free_bytes, first.use_percent) == (32 * GIB, 24 * GIB, 92)
    assert (second.use_percent, second.total_bytes, second.used_bytes, second.free_bytes) == (0, None, None, None)


def test_numbers_that_are_numbers() -> None:
    (card,) = hygon(recorded.HY_NUMBERS)
    assert (card.index, card.use_percent, card.total_bytes, card.used_bytes) == (1, 7, 68702699520, 512)
    assert card.temperature_c == 50
    (card,) = hygon('{"card0": {"Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "44.0"}}')
    assert card.temperature_c == 44


def test_lines() -> None:
    third, fifth = hygon(recorded.HY_TEXT)
    assert (third.index, third.name, third.pci) == (3, "K100_AI", "0000:09:00.0")
    assert (third.use_percent, third.used_bytes, third.total_bytes) == (15.0, 12058 * MIB, 65520 * MIB)
    assert (fifth.index, fifth.use_percent, fifth.total_bytes) == (5, None, None)


def test_older_lines_know_a_share_and_no_size() -> None:
    first, second = hygon(recorded.HY_TEXT_OLD)
    assert (first.use_percent, first.memory_percent, first.total_bytes, first.used_bytes) == (75, 60, None, None)
    assert second.use_percent is None


def test_csv_behind_a_banner() -> None:
    first, second, third = hygon(recorded.HY_CSV)
    assert (first.total_bytes, first.used_bytes, first.temperature_c) == (65520 * MIB, GIB, 41.0)
    assert (second.name, second.used_bytes, second.free_bytes) == ("K100_AI, second", None, None)
    assert (third.index, third.total_bytes) == (2, None), "a row that is too short is not guessed at"


def test_the_old_table_has_shares_and_no_total() -> None:
    first, second = hygon(recorded.HY_TABLE)
    assert (first.memory_percent, first.use_percent, first.temperature_c, first.power_w) == (20, 84, 46.0, 32.0)
    assert first.total_bytes is None
    assert (second.memory_percent, second.use_percent, second.power_w) == (None, 0, None)


def test_what_is_free_may_be_told_instead_of_what_is_used() -> None:
    (card,) = hygon(recorded.HY_FREE)
    assert (card.free_bytes, card.used_bytes, card.memory_percent) == (45027 * MIB, (65520 - 45027) * MIB, 31)


def test_a_dcu_behind_the_compatible_name_is_still_hygon() -> None:
    assert parse_cards(recorded.HY_OLDER, "amd")[0].vendor == "hygon"


def test_rocm_smi_in_json() -> None:
    (card,) = parse_cards(recorded.ROCM_JSON, "amd")
    assert (card.vendor, card.name, card.arch, card.pci) == ("amd", "Radeon RX 7900 XT", "gfx1100", "0000:03:00.0")
    assert (card.total_bytes, card.used_bytes, card.power_w) == (21458059264, 27856896, 25.0)


def test_rocm_smi_in_lines_and_csv() -> None:
    (card,) = parse_cards(recorded.ROCM_TEXT, "amd")
    assert (card.total_bytes, card.used_bytes) == (34342961152, 7028736)
    (card,) = parse_cards(recorded.ROCM_CSV, "amd")
    assert (card.name, card.total_bytes) == ("AMD Instinct MI100", 34342961152)


def test_a_table_with_cells_of_several_words() -> None:
    (card,) = parse_cards(recorded.ROCM_TABLE, "amd")
    assert (card.memory_percent, card.use_percent) == (3, 95)
    assert (card.temperature_c, card.power_w, card.total_bytes) == (None, None, None), "the columns cannot be counted"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (recorded.ROCM_JSON, [CardProcess(pid=4711, held_bytes=GIB)]),
        (recorded.ROCM_PIDS, [CardProcess(pid=4711, held_bytes=GIB), CardProcess(pid=4712, held_bytes=0)]),
        (recorded.HY_PIDS, [CardProcess(pid=4711, held_bytes=12058 * MIB), CardProcess(pid=4712, held_bytes=7 * MIB)]),
        ("No KFD PIDs currently running\n", []),
    ],
)
def test_processes(text: str, held: list[CardProcess]) -> None:
    assert [process for process, _ in parse_processes(text)] == held


def test_hygon_says_on_which_card_a_process_is() -> None:
    assert [buses for _, buses in parse_processes(recorded.HY_PIDS)] == [("0000:01:00.0",), ("0000:02:00.0",)]
    both = "PID: 7\n\tPCI BUS: ['0000:01:00.0', '0000:02:00.0']\n\tVRAM USED(MiB): 9\n"
    assert [buses for _, buses in parse_processes(both)] == [("0000:01:00.0", "0000:02:00.0")]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", '{"a": 1}', '{"card0": 5}', "ERROR: GPU[0] : Unable to get GPU memory use.\n", "\x00\xff"],
)
def test_garbage_has_no_cards(text: str) -> None:
    assert hygon(text) == ()
    assert parse_processes(text) == ()


@pytest.mark.parametrize(
    "word", ["N/A", "", "-1", "nan", "inf", "1e400", "[Not Supported]", "65520 MiB extra", "0x10", True]
)
def test_a_total_that_is_no_number_is_unknown(word: object) -> None:
    (card,) = hygon(json.dumps({"card0": {"vram Total Memory (MiB)": word, "vram Total Used Memory (MiB)": "5"}}))
    assert (card.total_bytes, card.free_bytes) == (None, None)


def test_more_used_than_there_is_is_unknown() -> None:
    (card,) = hygon('{"card0": {"vram Total Memory (MiB)": "100", "vram Total Used Memory (MiB)": "101"}}')
    assert (card.total_bytes, card.used_bytes, card.free_bytes) == (100 * MIB, None, None)
