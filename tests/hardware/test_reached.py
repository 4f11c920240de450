"""What is expected of a machine that nobody measured: every card has figures, and they make sense beside each other."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tightfit.hardware import reached as module
from tightfit.hardware.catalogue import CARDS
from tightfit.hardware.reached import Figure, Reached, reached
from tightfit.hardware.words import connect, parse_hardware
from tightfit.types import Hardware

TABLE = Path(module.__file__).with_name("reached.txt").read_text(encoding="utf-8")


def figures(found: Reached) -> dict[str, Figure]:
    every = {field.name: getattr(found, field.name) for field in fields(found)}
    return {name: figure for name, figure in every.items() if isinstance(figure, Figure)}


def test_every_card_gets_every_figure_with_its_range_and_source() -> None:
    for gpu in [card.gpu for card in CARDS] + [parse_hardware("32GB").gpu]:
        for gpus in (1, 2, 4, 8, 16):
            for name, figure in figures(reached(Hardware(gpu=gpu, gpus_per_node=gpus))).items():
                assert 0 < figure.low <= figure.value <= figure.high, (gpu.name, name)
                assert figure.source, (gpu.name, name)
                assert 0 <= figure.spread < 1, (gpu.name, name)


def test_no_share_is_beyond_reason() -> None:
    for card in CARDS:
        found = reached(Hardware(gpu=card.gpu, gpus_per_node=8))
        assert 0.1 <= found.products.value <= 1.2
        assert 0.7 <= found.memory.value <= 0.95
        assert found.link.value < (card.gpu.link_bytes_per_s or 32e9)
        assert 0.1 <= found.host_memory_share.value < 1
        assert found.gpus_per_root.high <= 8


def test_every_row_is_found_by_some_card() -> None:
    """A misspelt name would never be looked up."""
    names = {
        *(name for card in CARDS for name in (f"{card.family} {card.form}", card.family, card.kind, card.gpu.arch)),
        *(f"{card.kind} {card.gpu.arch}" for card in CARDS),
        *("*", "nvlink", "bridge", "xgmi", "pcie peer", "pcie host"),
    }
    for rows in module._table().values():
        for row in rows:
            assert re.sub(" (few|a GPU)$", "", row) in names, row


def test_every_mark_of_a_source_is_explained() -> None:
    explained = set(re.findall(r"^# \[(\w+)\] ", TABLE, re.MULTILINE))
    rows = "\n".join(line for line in TABLE.splitlines() if line and line[0] not in "#[")
    assert set(re.findall(r"\[(\w+)\]", rows)) == explained


@pytest.mark.parametrize(
    ("word", "name", "low", "high"),
    [
        ("8xH100", "network", 400e9, 400e9),
        ("2xH100", "network", 100e9, 100e9),
        ("8xA100-80GB", "network", 200e9, 200e9),
        ("8xMI300X", "network", 400e9, 400e9),
        ("8xL40S", "network", 12.5e9, 12.5e9),
        ("4xRTX4090", "network", 1e9, 4e9),
        ("8xH100", "link", 340e9, 380e9),
        ("8xA100-80GB", "link", 225e9, 245e9),
        ("8xMI300X", "link", 300e9, 325e9),
        ("2xMI300X", "link", 40e9, 50e9),
        ("8xRTX4090", "link", 5e9, 20e9),
        ("8xH200", "host_link", 50e9, 57e9),
        ("8xA100-80GB", "host_link", 25e9, 29e9),
        ("2xV100-16GB", "host_link", 12e9, 15e9),
    ],
)
def test_figures_that_were_published(word: str, name: str, low: float, high: float) -> None:
    assert low <= figures(reached(parse_hardware(word)))[name].value <= high


def test_what_the_user_says_wins() -> None:
    said = connect(parse_hardware("2x8xRTX4090"), "8x100Gb", "pcie3")
    found, usual = reached(said), reached(replace(said, network_bytes_per_s=None))
    assert (found.network.value, found.network.spread) == (100e9, 0)
    assert usual.network.value < found.network.value
    assert found.link.value < reached(parse_hardware("8xRTX4090")).link.value
    assert found.host_link.value < 16e9
    bridged = connect(parse_hardware("2xRTX3090"), None, "nvlink")
    assert 30e9 < reached(bridged).link.value < 56e9


def test_power_and_peer_access_tell_cards_apart() -> None:
    def share(word: str) -> float:
        return reached(parse_hardware(word)).products.value

    assert share("L4") < share("L40S") < share("A100-80GB") < share("RTX 4090") < share("RTX 5090")
    assert reached(parse_hardware("8xA40")).link.value > reached(parse_hardware("8xRTX4090")).link.value
