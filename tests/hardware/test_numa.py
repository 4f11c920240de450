"""Who computes on which part of the machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tightfit.hardware.numa import find_node_of, find_nodes, share_nodes


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write_nodes(root: Path, **processors: str) -> Path:
    for name, told in processors.items():
        place = root / "sys/devices/system/node" / name
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{told}\n")
    return root


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"node0": "0-3", "node1": "4-7"}, {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}),
        ({"node0": "0,2,4-5", "node10": "1,3", "node2": "6-7"}, {0: {0, 2, 4, 5}, 2: {6, 7}, 10: {1, 3}}),
        ({"node0": "0-15", "node1": "16-31"}, {0: set(range(8))}),  # a container with half of the machine
        ({"node0": "0-7", "node1": ""}, {0: set(range(8))}),  # memory alone
        ({}, {}),
    ],
    ids=["two sockets", "mixed", "not all may be used", "without processors", "not told"],
)
def test_nodes_have_the_processors_that_may_be_used(
    tmp_path: Path, told: dict[str, str], found: dict[int, set[int]]
) -> None:
    assert find_nodes(write_nodes(tmp_path, **told)) == found


@pytest.mark.parametrize(("told", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_a_cards_node(tmp_path: Path, told: str | None, node: int | None) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:41:00.0"
    card.mkdir(parents=True)
    if told is not None:
        (card / "numa_node").write_text(told)
    assert find_node_of("0000:41:00.0", tmp_path) == node


@pytest.mark.parametrize(
    ("nodes", "near", "shared"),
    [
        ([0, 1], [0, 0, 1, 1], [[0], [0], [1], [1]]),
        ([0, 1], [1, 1, 0, 0], [[1], [1], [0], [0]]),
        ([0, 1], [0, 0, 0, 0], [[0], [0], [1], [1]]),  # all cards at one socket: the other's memory is used too
        ([0, 1], [None] * 4, [[0], [1], [0], [1]]),
        ([0, 1], [1, None, 1], [[1], [0], [1]]),
        ([0, 1, 2, 3], [2, 2], [[2, 1], [0, 3]]),  # more nodes than ranks: none is left over
        ([0, 1, 2, 3], [3, 0, 1], [[3, 2], [0], [1]]),
        ([0, 4], [4, 0], [[4], [0]]),
        ([0, 1], [7, 1], [[0], [1]]),  # a node of which no processor may be used
    ],
)
def test_ranks_are_spread_evenly_and_near_their_cards(
    nodes: list[int], near: list[int | None], shared: list[list[int]]
) -> None:
    assert share_nodes(nodes, near) == shared
