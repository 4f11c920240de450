"""What a diagnosis is made from: data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tightfit.job.known import KnownConfig
from tightfit.messages import Said


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """One log. A file is read in pieces, never whole."""

    name: Said
    """What to call it in the evidence."""
    path: Path | None = None
    text: str | None = None
    """Instead of a file."""
    rank: int | None = None
    """Whose log it is, where it has one writer."""
    on_read: Callable[[int], None] | None = field(default=None, compare=False, repr=False)
    """Is told how many bytes of the file are behind, for somebody who waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one process ended."""

    rank: int | None
    """None: of the whole command."""
    code: int
    """Negative: the signal that ended it."""
    at: float
    """Seconds, to know which was first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known about one run."""

    logs: tuple[LogSource, ...]
    exits: tuple[RankExit, ...] = ()
    kernel: tuple[str, ...] = ()
    """Lines of the kernel's log from the time of the run."""
    vocabulary: int | None = None
    config: KnownConfig | None = None
