"""What the ranks of a run hold of the RAM of their machines: of those here from their processes, and of those on other
nodes from a file in the run's folder, which the desk of node 0 keeps up to date with what the others tell it."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tightfit.inputs.records import find_record, record_text
from tightfit.owned import remove_file, replace_file
from tightfit.runs.processes import PROC

RANKS = "ranks.json"
STALE_S = 30.0  # a file that is older than this tells of a desk that is gone
_SIZES = re.compile(r"^(VmRSS|VmHWM):\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    name: str  # `rank-3`
    pid: int
    now_bytes: int
    peak_bytes: int
    host: str | None = None  # the machine that it runs on; None: this one


def name_rank(rank: Rank) -> str:
    """`rank 3`, or `rank 3 (beta)`."""
    name = rank.name.replace("-", " ")
    return name if rank.host is None else f"{name} ({rank.host})"


def read_rank(name: str, pid: int, host: str | None = None) -> Rank | None:
    """None: it has ended, or cannot be looked at."""
    with suppress(OSError):
        text = (PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace")
        sizes = {name: int(size) * 1024 for name, size in _SIZES.findall(text)}
        if now := sizes.get("VmRSS"):  # none: it has ended, and nobody has taken notice yet
            return Rank(name=name, pid=pid, now_bytes=now, peak_bytes=sizes.get("VmHWM", 0), host=host)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRecord:
    """`ranks.json` in the folder of a run on several nodes, while it runs."""

    ranks: tuple[Rank, ...]

    def write(self, run: Path) -> None:
        with suppress(OSError):  # whoever watches sees less then
            replace_file(run / RANKS, record_text(self).encode())

    @staticmethod
    def remove(run: Path) -> None:
        with suppress(OSError):
            remove_file(run / RANKS)


def find_ranks(run: Path) -> tuple[Rank, ...]:
    """Of all nodes, as node 0 last wrote them down."""
    with suppress(OSError):
        if time.time() - (run / RANKS).stat().st_mtime < STALE_S:
            record = find_record(run / RANKS, RanksRecord)
            return () if record is None else record.ranks
    return ()
