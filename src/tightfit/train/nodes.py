"""Which ranks of a run see the same folder, and so whether a checkpoint is one folder or a part on each node's disk.

Nobody is asked: the first rank of each folder leaves a file with a random name in it, and all look whose files they
see. A network disk that shows them too late does no harm: parts that lie in one folder are a checkpoint as well.

A range of elements that one rank alone holds is written by that rank. One that several hold is written once where all
see one folder. On disks of their own it is written by two nodes, where two hold it, so that the loss of a disk costs no
checkpoint; more than two would cost time with every node that is added, and gain little. Whose turn it is goes round
with the number of the range, so that all nodes write about as much.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from tightfit.owned import open_new
from tightfit.runs.heartbeat import HEARTBEATS
from tightfit.train.place import Place, meet, words

LOOK_S = 3.0  # until files that others have left are taken to lie elsewhere
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Turn = Literal["first", "again"] | None
"""Whether a rank writes a range: as its only writer or the first of two, as the second, or not."""


@dataclass(frozen=True, kw_only=True)
class NodeDisks:
    """The disks of a run, from 0 on; a node is whoever sees one of them."""

    rank: int
    of_rank: tuple[int, ...]  # the node of each rank
    hosts: tuple[str, ...]  # the name of a machine of each node

    @classmethod
    def together(cls, place: Place) -> NodeDisks:
        """One folder for all."""
        return cls(rank=place.rank, of_rank=(0,) * place.world, hosts=(platform.node(),))

    @property
    def are_apart(self) -> bool:
        return len(self.hosts) > 1

    @property
    def here(self) -> int:
        return self.of_rank[self.rank]

    @cached_property
    def ranks_here(self) -> list[int]:
        return self.ranks_of(self.here)

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one of its node."""
        return self.rank == self.ranks_here[0]

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, its in enumerate(self.of_rank) if its == node]

    def turn(self, number: int, holders: Sequence[int]) -> Turn:
        """Whether this rank writes the range of that number, which the `holders` hold."""
        nodes = sorted({self.of_rank[rank] for rank in holders})
        turns: tuple[Turn, ...] = ("first", "again") if self.are_apart else ("first",)
        for later, turn in enumerate(turns[: len(nodes)]):
            node = nodes[(number + later) % len(nodes)]
            there = [rank for rank in holders if self.of_rank[rank] == node]
            if there[number % len(there)] == self.rank:
                return turn
        return None


def find_nodes(run: Path, place: Place) -> NodeDisks:
    """The same on every rank."""
    if place.is_alone:
        return NodeDisks.together(place)
    with suppress(OSError):  # whoever has to write there will say so
        run.mkdir(parents=True, exist_ok=True)
    folders = [line.split("|") for line in words(place, f"{platform.node()}|{secrets.token_hex(8)}|{_identify(run)}")]
    first: dict[str, int] = {}
    for rank, (_, _, folder) in enumerate(folders):
        first.setdefault(folder, rank)
    firsts = sorted(first.values())
    if len(firsts) == 1:
        return NodeDisks.together(place)
    hidden = run / HEARTBEATS
    marks = {hidden / f"node-{folders[rank][1]}": rank for rank in firsts}
    own = next((path for path, rank in marks.items() if rank == place.rank), None)
    if own is not None:
        with suppress(OSError):
            hidden.mkdir(exist_ok=True)
            os.close(open_new(own))
    meet(place)
    seen: list[int] = []
    deadline = time.monotonic() + LOOK_S
    while own is not None and len(seen) < len(marks):
        with suppress(OSError):
            names = set(os.listdir(hidden))  # a network disk looks again
            seen = [rank for path, rank in marks.items() if path.name in names]
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    told = words(place, ",".join(map(str, seen)))
    if own is not None:
        with suppress(OSError):
            own.unlink(missing_ok=True)
            hidden.rmdir()  # unless ranks give signs of life there
    together = {rank: rank for rank in firsts}  # a folder → the first rank of all that see it
    for rank in firsts:
        for other in map(int, filter(None, told[rank].split(","))):
            low, high = sorted((together[rank], together[other]))
            together = {each: low if its == high else its for each, its in together.items()}
    numbers = {rank: number for number, rank in enumerate(sorted(set(together.values())))}
    of_rank = tuple(numbers[together[first[folder]]] for _, _, folder in folders)
    return NodeDisks(rank=place.rank, of_rank=of_rank, hosts=tuple(folders[rank][0] for rank in numbers))


def _identify(folder: Path) -> str:
    """The same for two processes of one machine that mean the same folder."""
    try:
        seen = folder.stat()
        boot = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
        return f"{platform.node()} {boot} {seen.st_dev} {seen.st_ino}"
    except OSError:
        return secrets.token_hex(16)
