"""The slow twin of the search: every candidate priced in full, on every number of GPUs, and the best of them taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tightfit.inputs.flags import BARE
from tightfit.memory import estimate
from tightfit.pace import pace
from tightfit.planner.candidates import complexity, corners, strategies
from tightfit.planner.ladder import OFFLOADED
from tightfit.planner.question import Question, excess_bytes
from tightfit.planner.search import is_measured, leaves_room
from tightfit.types import Hardware, Levers

Chosen = tuple[tuple[float, tuple[int, ...]], Levers, int]
"""Rank, levers and number of GPUs."""


def best(question: Question) -> Chosen | None:
    """What `search(question).best` must be."""
    found: Chosen | None = None
    for asked, levers in candidates(question):
        hardware = asked.hardware
        step_s = pace(asked.shape, levers, hardware).step_s
        rank = (round(step_s, 9), complexity(levers, hardware.world))
        if found is not None and rank >= found[0]:
            continue  # nobody asks whether the slower one would fit
        if not excess_bytes(asked, estimate(asked.shape, levers, hardware.world, hardware)):
            found = (rank, levers, hardware.world)
    return found


def candidates(question: Question) -> Iterator[tuple[Question, Levers]]:
    for hardware in parts(question.hardware):
        if question.effective_batch % hardware.world:
            continue
        asked = replace(question, hardware=hardware)
        for base in strategies(asked.base, asked.pinned, hardware):
            if not (is_measured(asked, base) and leaves_room(asked, base)):
                continue
            for corner in corners(asked.shape, base, asked.pinned, hardware, asked.effective_batch):
                depths = [corner.levers.checkpointing]
                if corner.searched:
                    some, deepest = corner.depths(asked.shape.n_layers)[1:-1], corner.rest.checkpointing
                    depths = [BARE, *(replace(deepest, layers=count) for count in some), deepest]
                    if corner.is_whole:
                        depths.append(OFFLOADED)
                for depth, resident in product(depths, residents(asked, base)):
                    yield asked, replace(corner.levers, checkpointing=depth, resident=resident)


def residents(question: Question, levers: Levers) -> list[int]:
    """How many layers may stay on the GPU; most engines do not ask."""
    if not levers.streams or "resident" in question.pinned:
        return [levers.resident]
    return [*range(question.shape.n_layers + 1)]


def parts(hardware: Hardware) -> Iterator[Hardware]:
    """All of it; fewer whole nodes; fewer GPUs of one node."""
    yield hardware
    for nodes in range(hardware.nodes - 1, 1, -1):
        yield replace(hardware, nodes=nodes)
    most = hardware.gpus_per_node - (hardware.nodes == 1)
    for gpus in range(most, 0, -1):
        yield replace(hardware, nodes=1, gpus_per_node=gpus)
