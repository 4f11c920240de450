"""Exit codes: what they say where a process left no words."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tightfit.diagnose.catalogue import Catalogue
from tightfit.diagnose.evidence import RankExit
from tightfit.diagnose.fitting import Around, refine
from tightfit.diagnose.ordering import Case
from tightfit.diagnose.scan import LogScan
from tightfit.job.known import KnownConfig
from tightfit.messages import Message, Said

_SHELL = 128
"""Shells and containers add this to a signal's number; Python's launchers negate it, and an 8-bit code wraps that."""


def signal_of(code: int) -> int | None:
    """The signal behind an exit code; None: there is none."""
    number = -code if code < 0 else code - _SHELL if _SHELL < code < _SHELL + 65 else 256 - code if code > 240 else 0
    return number if 0 < number < 65 else None


def describe_exit(gone: RankExit) -> Message:
    number = signal_of(gone.code)
    name: Said | None
    try:
        name = signal.Signals(number).name if number else None
    except ValueError:
        name = Message("diagnose.signal", number=number)
    return Message("diagnose.exit", rank=gone.rank, code=gone.code, signal=name)


def exit_cases(
    exits: Sequence[RankExit],
    scans: Sequence[LogScan],
    ranks: Sequence[int | None],
    config: KnownConfig,
    known: Catalogue,
) -> list[Case]:
    """The first end that was not as it should be. Ranks that were told to leave come after those that fell."""
    bad = [gone for gone in exits if gone.code != 0]
    if not bad:
        return []
    told = signal.SIGTERM
    first = min(bad, key=lambda gone: (signal_of(gone.code) == told, gone.at))
    number = signal_of(first.code)
    symptom = known.by_exit.get(-number if number else first.code) or known.by_exit[1]
    own = [scan for scan, rank in zip(scans, ranks, strict=True) if first.rank is None or rank in (first.rank, None)]
    last = max(own, key=lambda scan: scan.lines, default=None)
    around = Around(
        config=config,
        doing=last.doing if last else None,
        steps=last.steps if last else None,
        shapes=frozenset(),
        text="",
        after="",
        before="\n".join(last.last_lines) if last else "",
        frames="",
    )
    symptom = refine(symptom, around, known)
    return [Case(symptom=symptom, source=None, order=0, rank=first.rank, exit=first)]
