"""What a diagnosis is made from, and what it says: data only, shared by `tightfit diagnose` and by the supervisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tightfit.job.known import KnownConfig
from tightfit.messages import Said
from tightfit.types import PhaseName

Kind = Literal[
    "device-oom",  # a GPU has too little memory
    "fragmentation",  # it has enough, but in pieces
    "other-process",  # somebody else holds the GPU's memory
    "host-oom",  # the kernel or a limit of the host ended a process
    "pinned-memory",  # no more locked memory, or the driver refuses it
    "shared-memory",  # /dev/shm is full
    "communication",  # NCCL, RCCL or gloo failed, or waited too long
    "hang",  # a rank gave no sign of life
    "not-finite",  # NaN or infinity in loss or gradients
    "loss-scale",  # fp16's loss scale fell to its floor
    "disk-full",
    "data",  # an example, a file or a field of the data
    "code",  # a bug: the same again each time
    "config",  # the user's settings contradict each other, or the trainer does not know them
    "environment",  # versions, compilers, drivers, missing packages
    "preempted",  # asked to leave by a scheduler or a person
    "hardware",  # Xid, ECC, a GPU that fell off the bus
    "unknown",
]
RETRYABLE: frozenset[Kind] = frozenset(
    {"device-oom", "fragmentation", "other-process", "host-oom", "pinned-memory", "shared-memory", "communication",
     "hang", "not-finite", "loss-scale", "disk-full", "preempted", "hardware", "unknown"}
)  # fmt: skip
"""The others fail in the same way each time."""
Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """One log. A file is read in pieces, never whole."""

    name: Said  # what to call it in the evidence
    path: Path | None = None
    text: str | bytes | None = None  # instead of a file
    rank: int | None = None  # whose log it is, where it has one writer
    on_read: Callable[[int], None] | None = field(default=None, compare=False, repr=False)  # told how far it is read


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    rank: int | None  # None: of the whole command
    code: int  # negative: the signal that ended it
    at: float  # seconds, to know which was first


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    logs: tuple[LogSource, ...]
    exits: tuple[RankExit, ...] = ()
    kernel: tuple[str, ...] = ()  # lines of the kernel's log from the time of the run
    vocabulary: int | None = None
    config: KnownConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    source: Said  # a file's name, `exit code`, `kernel log`
    number: int | None  # of the line in the file, from 1
    text: Said  # without colour codes; secrets masked


@dataclass(frozen=True, slots=True, kw_only=True)
class OomNumbers:
    """What an out-of-memory message says, in bytes; None: it does not say."""

    asked: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None  # by PyTorch's tensors, in this process
    reserved_unused: int | None = None  # reserved by PyTorch's allocator and not in use
    others: int | None = None  # by other processes on this device
    allowed: int | None = None  # to this process's tensors, where that is less than the card has

    @property
    def left(self) -> int | None:
        """What could still be allocated: the card's free memory, or the rest of what the process may use."""
        if self.free is None or self.allowed is None:
            return self.free
        return min(self.free, max(0, self.allowed - (self.allocated or 0) - (self.reserved_unused or 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One remedy, for this user's configuration where it is known."""

    text: Said  # one sentence
    command: str | None = None
    is_costly: bool = False  # it changes what is trained, and not only how


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first cause."""

    id: str  # of the symptom, for `tightfit explain`
    kind: Kind
    cause: Said  # one sentence
    confidence: Confidence
    evidence: tuple[Line, ...]
    fixes: tuple[Fix, ...]  # the cheapest first
    rank: int | None = None  # the one that fell first
    phase: PhaseName | None = None
    step: int | None = None  # the one that was being made, from 1; None: none was, or nobody can tell
    oom: OomNumbers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    verdict: Verdict | None  # None: nothing is wrong
    also: tuple[Verdict, ...] = ()  # what else is worth mending, and what followed from the first cause
