"""Which of the things that were found came first, and which followed from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tightfit.diagnose.catalogue import Symptom
from tightfit.diagnose.evidence import RankExit
from tightfit.diagnose.lines import Level, is_raised
from tightfit.diagnose.oom import OomMessage
from tightfit.diagnose.scan import LogFinding
from tightfit.diagnose.verdict import Kind
from tightfit.messages import Message
from tightfit.types import PhaseName

KERNEL = Message("diagnose.kernel-log")
_THREADS = 3
_LOW: tuple[Level, ...] = ("debug", "info", "warning")
_WARNING = re.compile(r"\b[A-Z]\w*Warning: ")
_SAID_IN_PASSING: tuple[Kind, ...] = ("environment", "config")
"""What programs warn of at their start, and then do without."""
_FOLLOWING: tuple[Kind, ...] = ("communication", "hang", "preempted", "hardware", "unknown")
"""What may well have followed from a remark that was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something that was found, under the name that it has in the catalogue."""

    symptom: Symptom
    source: int | None
    """Which of the logs; None: an exit code."""
    order: int
    """Position in its log."""
    rank: int | None = None
    at: float | None = None
    finding: LogFinding | None = None
    chain: tuple[LogFinding, ...] = ()
    """The exceptions before it that led to it."""
    phase: PhaseName | None = None
    oom: OomMessage | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """What the line says by name: the expression's groups."""
    exit: RankExit | None = None
    is_kernels: bool = False

    @property
    def tier(self) -> int:
        """A thread's end says little of its program."""
        in_thread = self.finding is not None and self.finding.traceback is not None and self.finding.traceback.in_thread
        return max(self.symptom.tier, _THREADS if in_thread else 0)

    @property
    def is_remark(self) -> bool:
        """A line in passing, and not the exception that ended the program: it may be the cause, and need not be."""
        if self.finding is None or self.finding.traceback is not None or self.symptom.role != "fault":
            return False
        message = self.finding.message
        if _WARNING.search(message.whole):
            return True
        return message.level in _LOW if message.level is not None else self.symptom.kind in _SAID_IN_PASSING

    @property
    def was_survived(self) -> bool:
        if self.finding is None or self.symptom.role == "note":
            return False
        later = self.finding.later
        if self.is_remark and (later.losses or later.steps - {b"0"}):
            return True
        return later.recovered if self.symptom.role == "state" else later.went_on


@dataclass(frozen=True, slots=True)
class Ordered:
    first: Case | None
    beside: tuple[Case, ...]


def in_order(cases: Iterable[Case], exits: Sequence[RankExit], *, ended_well: bool) -> Ordered:
    """The first cause, and what else is worth saying."""
    living = [case for case in cases if not case.was_survived]
    living = [case for case in living if _often_enough(case, living)]
    if ended_well:
        living = [case for case in living if case.symptom.role in ("state", "note")]
    serious = [case for case in living if case.symptom.role != "note"]
    if not serious:
        return Ordered(None, tuple(_distinct(living, None)))
    ended = {gone.rank: gone.at for gone in exits if gone.code and gone.rank is not None}
    in_turn = sorted(serious, key=lambda case: _key(case, serious, ended))
    first = _first(in_turn)
    rest = [case for case in in_turn if case.symptom.role != "trailing"]
    notes = [case for case in living if case.symptom.role == "note"]
    return Ordered(first, tuple(_distinct([*rest, *notes], first)))


def _often_enough(case: Case, living: Sequence[Case]) -> bool:
    if case.symptom.repeats <= 1:
        return True
    return sum(other.symptom.id == case.symptom.id for other in living) >= case.symptom.repeats


def _first(serious: Sequence[Case]) -> Case:
    """`serious` is in order. Numbers that are none say more than an exception that nobody knows, or than being told to
    leave, whichever is said first."""
    tier = serious[0].tier
    leading = [case for case in serious if case.tier == tier]
    faults = [case for case in leading if case.symptom.role == "fault"]
    states = [case for case in leading if case.symptom.role == "state"]
    if faults and states:
        says_little = faults[0].symptom.is_generic or faults[0].symptom.kind == "preempted"
        return states[0] if says_little else faults[0]
    return leading[0]


def _key(case: Case, cases: Sequence[Case], ended: Mapping[int, float]) -> tuple[float, ...]:
    """Tier first; then the time of the end where every rank has one, then the clock, then the place in the log."""
    tier = case.tier
    peers = [other for other in cases if other.tier == tier]
    sources = {other.source for other in peers}
    outranked = any(_outranks(other, case) for other in peers)
    clock = 0.0
    if len(sources) > 1:
        if case.rank is not None and all(other.rank in ended for other in peers):
            clock = ended[case.rank]
        elif all(other.at is not None for other in peers):
            clock = case.at or 0.0
    last_resort = case.is_kernels and not any(other.symptom.role == "ending" for other in cases)
    weight = -float(case.symptom.weight) if case.symptom.role == "trailing" else 0.0
    by_chance = len(sources) > 1 and clock == 0.0
    return (
        tier,
        outranked,
        last_resort,
        weight,
        clock,
        case.symptom.is_generic and by_chance,
        case.source or 0,
        case.order,
    )


def _outranks(other: Case, case: Case) -> bool:
    """Whether it says more than one that is vague; or is an exception that says why the program ended, and has nothing
    to do with what was only a remark."""
    if other.finding is None or other.symptom.is_generic or other.symptom.vague:
        return False
    if case.symptom.vague and not case.symptom.is_generic:
        return True
    if not case.is_remark or other.symptom.kind in (*_FOLLOWING, case.symptom.kind):
        return False
    is_alike = case.finding is not None and is_raised(case.finding.message)
    return other.finding.traceback is not None or (is_raised(other.finding.message) and not is_alike)


def _distinct(cases: Iterable[Case], first: Case | None) -> Iterable[Case]:
    """One of each symptom, without the first and its kin."""
    seen = set() if first is None else {first.symptom.id, *first.symptom.refines}
    for case in cases:
        kin = {case.symptom.id, *case.symptom.refines}
        if not kin & seen:
            seen |= kin
            yield case
