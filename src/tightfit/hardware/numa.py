"""Which processors and which cards share a part of the machine's memory: a NUMA node each.

A host's optimizer is as fast as memory lets it be, and memory of another node is slower. So each rank gets processors
of a node, or of several where there are more nodes than ranks: that of its card first, as long as ranks are spread
evenly. All of them on the node that has all cards would leave half of the machine's memory idle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tightfit.hardware.machine import read_text
from tightfit.inputs.surroundings import processors

ROOT = Path("/")


def find_nodes(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """The processors of each node that this process may use; nodes of which it may use none are left out."""
    allowed, nodes = processors(), {}
    for place in root.glob("sys/devices/system/node/node[0-9]*"):
        ranges = re.findall(r"([0-9]+)(?:-([0-9]+))?", read_text(place / "cpulist"))
        own = {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)} & allowed
        if own:
            nodes[int(place.name.removeprefix("node"))] = frozenset(own)
    return dict(sorted(nodes.items()))


def find_node_of(pci: str, root: Path = ROOT) -> int | None:
    """That of a card, by its address; None: the system does not tell, as on machines with one node."""
    text = read_text(root / "sys/bus/pci/devices" / pci / "numa_node").strip()
    return int(text) if re.fullmatch("[0-9]{1,4}", text) else None


def share_nodes(nodes: Sequence[int], near: Sequence[int | None]) -> list[list[int]]:
    """The nodes of each rank; `near`: that of its card, where it is known."""
    most = max(1, -(-len(near) // len(nodes)))  # ranks on a node
    taken: list[list[int]] = [[] for _ in near]
    on = Counter[int]()
    for mine, node in zip(taken, near, strict=True):
        if node is not None and node in nodes and on[node] < most:
            mine.append(node)
            on[node] += 1
    for mine in taken:
        if not mine:
            mine.append(min(nodes, key=lambda node: (on[node], node)))
            on[mine[0]] += 1
    for node in nodes:
        if not on[node]:
            min(taken, key=len).append(node)
    return taken
