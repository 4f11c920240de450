"""Each rank of a machine keeps to NUMA nodes of its own (hardware/numa.py), with its threads and what they touch first.

Who was given processors by whoever started it (`numactl`, `srun --cpu-bind`) keeps those.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import torch

from tightfit.hardware.numa import ROOT, find_node_of, find_nodes, share_nodes
from tightfit.inputs.surroundings import cores
from tightfit.train.place import Place, words


def bind_to_nodes(place: Place, root: Path = ROOT) -> int:
    """Every rank calls it. How many processors this one may take, of those that it shares with others."""
    if place.is_alone:
        return max(1, cores() // place.world)
    nodes = find_nodes(root)
    mine = [sorted(set().union(*nodes.values())), find_node(place, root)]
    everyones, near = zip(*map(json.loads, words(place, json.dumps(mine))), strict=True)
    if len(nodes) < 2 or any(each != mine[0] for each in everyones):
        return max(1, cores() // everyones.count(mine[0]))
    shared = share_nodes(list(nodes), near)
    processors = frozenset[int]().union(*(nodes[node] for node in shared[place.rank]))
    for task in Path("/proc/self/task").iterdir():  # all threads: who starts one hands down its processors
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(task.name), processors)
    return max(1, len(processors) // shared.count(shared[place.rank]))


def find_node(place: Place, root: Path) -> int | None:
    """That of this rank's card."""
    if not place.on_gpu:
        return None
    card = torch.cuda.get_device_properties(place.device)
    numbers = [getattr(card, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:  # an older torch does not tell
        return None
    domain, bus, device = numbers
    return find_node_of(f"{domain:04x}:{bus:02x}:{device:02x}.0", root)
