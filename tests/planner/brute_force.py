"""The slow twin of the search: every candidate priced in full, on every number of GPUs, and the best of them taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

from tightfit.inputs.flags import BARE
from tightfit.memory import estimate
from tightfit.memory.units import layer_bytes, units_of
from tightfit.pace import pace
from tightfit.planner.candidates import FILLED, complexity, corners, strategies
from tightfit.planner.ladder import OFFLOADED
from tightfit.planner.question import Question, excess_bytes
from tightfit.planner.search import is_measured, leaves_room
from tightfit.planner.stream import WORTH
from tightfit.types import Footprint, Hardware, Levers

Chosen = tuple[tuple[float, tuple[int, ...]], Levers, int]
"""Rank, levers and number of GPUs."""


def best(question: Question) -> Chosen | None:
    """What `search(question).best` must be."""
    found: Chosen | None = None
    for asked, ways in strategies_of(question):
        hardware = asked.hardware

        def rank(levers: Levers, asked: Question = asked) -> tuple[float, tuple[int, ...]]:
            step_s = pace(asked.shape, levers, asked.hardware).step_s
            return round(step_s, 9), complexity(levers, asked.hardware.world)

        own: Chosen | None = None
        for levers in ways:
            others = [each for each in (found, own) if each is not None]
            if others and rank(levers) >= min(each[0] for each in others):
                continue  # nobody asks whether the slower one would fit
            if fits(asked, levers):
                own = (rank(levers), levers, hardware.world)
        if own is not None:
            levers = own[1]
            most_s = min(own[0][0] * (1 + WORTH), inf if found is None else found[0][0])
            for count in residents(asked, levers):
                fewer = replace(levers, resident=count)
                frees = count < levers.resident and held(asked, fewer) < held(asked, levers)
                if frees and levers.method != "full":  # they are not to fill the host instead
                    frees = share_of_ram(asked, estimate(asked.shape, fewer, hardware.world, hardware)) <= FILLED
                if frees and rank(fewer)[0] <= most_s and fits(asked, fewer):
                    own = (rank(fewer), fewer, hardware.world)
                    break
            found = own if found is None or own[0] < found[0] else found
    return found


def fits(question: Question, levers: Levers) -> bool:
    hardware = question.hardware
    footprint = estimate(question.shape, levers, hardware.world, hardware)
    if excess_bytes(question, footprint):
        return False
    sends = levers.checkpointing.offload and levers.checkpointing.select
    return not sends or share_of_ram(question, footprint) <= FILLED


def share_of_ram(question: Question, footprint: Footprint) -> float:
    ram = question.hardware.host_ram_bytes
    return 0.0 if ram is None else footprint.host.peak_bytes_per_node / ram


def held(question: Question, levers: Levers) -> int:
    """By layers, on the GPU."""
    return layer_bytes(units_of(question.shape, levers).layers, levers.resident)


def candidates(question: Question) -> Iterator[tuple[Question, Levers]]:
    for asked, ways in strategies_of(question):
        for levers in ways:
            yield asked, levers


def strategies_of(question: Question) -> Iterator[tuple[Question, Iterator[Levers]]]:
    for hardware in parts(question.hardware):
        if question.effective_batch % hardware.world:
            continue
        asked = replace(question, hardware=hardware)
        for base in strategies(asked.base, asked.pinned, hardware):
            if is_measured(asked, base) and leaves_room(asked, base):
                yield asked, ways_of(asked, base)


def ways_of(question: Question, base: Levers) -> Iterator[Levers]:
    for corner in corners(question.shape, base, question.pinned, question.hardware, question.effective_batch):
        depths = [corner.levers.checkpointing]
        if corner.searched:
            some, deepest = corner.depths(question.shape.n_layers)[1:-1], corner.rest.checkpointing
            depths = [BARE, *(replace(deepest, layers=count) for count in some), deepest]
            if corner.is_whole:
                depths.append(OFFLOADED)
        for depth, resident in product(depths, residents(question, base)):
            yield replace(corner.levers, checkpointing=depth, resident=resident)


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
