"""Findings as cases: each gets the name that it has in the catalogue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from tightfit.diagnose.catalogue import CATCH_ALL, CUT_OFF, Catalogue, Symptom
from tightfit.diagnose.fitting import around, best, refine
from tightfit.diagnose.gate import WORDS
from tightfit.diagnose.lines import is_raised, message_of
from tightfit.diagnose.oom import OomMessage, read_oom
from tightfit.diagnose.ordering import Case
from tightfit.diagnose.phases import phase_of
from tightfit.diagnose.scan import LogFinding, LogScan
from tightfit.diagnose.tracebacks import HEADER
from tightfit.job.known import KnownConfig

_MOST_LETTERS = 160
_LINES_ON = 3
_LINES_BROKEN = 4
"""Lines on which the message of an exception may go on."""
_NEAR_AFTER, _NEAR_BEFORE = 12, 12
"""Lines around a finding that may name what it is about."""
_MEMORY = ("device-oom", "fragmentation", "other-process")


def cases_of(found: LogScan, config: KnownConfig, entries: Catalogue, *, is_kernels: bool = False) -> list[Case]:
    """The findings of one log; chained exceptions are one case."""
    cases: list[Case] = []
    for finding in found.findings:
        case = _case(finding, config, entries)
        if case is None:
            continue
        if finding.traceback is not None and finding.traceback.follows and cases and cases[-1].finding is not None:
            cases[-1] = _chain(cases[-1], case)
        elif cases and (before := cases[-1].finding) is not None and _goes_on(cases[-1], finding):
            cases[-1] = replace(case, order=cases[-1].order, chain=(*cases[-1].chain, before))
        else:
            cases.append(replace(case, is_kernels=is_kernels))
    return cases


def _goes_on(first: Case, then: LogFinding) -> bool:
    """An exception whose first line names only its type says what it has to say in the next ones."""
    if first.finding is None or first.finding.traceback is None or then.traceback is not None:
        return False
    told = first.finding.message
    near = 0 < then.message.number - told.number <= _LINES_ON
    return near and first.symptom.is_generic and told.head.endswith(":")


def _case(finding: LogFinding, config: KnownConfig, entries: Catalogue) -> Case | None:
    likely = list(finding.symptoms)
    memory = any(symptom.kind in _MEMORY for symptom in likely)
    oom = _oom(finding, config) if memory else None
    known = around(finding, config, oom.shapes if oom else frozenset())
    symptom = best(likely, known)
    if symptom is None or symptom.is_generic or symptom.role == "trailing":
        joined = _join_lines(finding, entries)
        if joined is not None:
            return _case(joined, config, entries)
    if symptom is None and finding.traceback is not None:
        symptom = entries.by_id[CUT_OFF if finding.traceback.exception is None else CATCH_ALL]
    if symptom is None:
        return None
    names = _names(symptom, finding)
    special = refine(symptom, known, entries)
    names |= _names(special, finding)
    frames = [text for _, text in finding.traceback.frames] if finding.traceback else []
    return Case(
        symptom=special,
        source=finding.source,
        order=finding.order,
        rank=_rank(finding, names),
        at=finding.at,
        finding=finding,
        phase=phase_of(frames),
        oom=oom if special.kind in _MEMORY else None,
        names=names,
    )


def _join_lines(finding: LogFinding, entries: Catalogue) -> LogFinding | None:
    """An exception whose message a terminal has broken into lines, with its lines put together again; None: nothing in
    the catalogue goes over their ends."""
    if not is_raised(finding.message):
        return None
    lines = [finding.message.head]
    for line in finding.after[:_LINES_BROKEN]:
        then = message_of(line, finding.message.number)
        if not then.head or then.level is not None or is_raised(then) or HEADER.search(then.text):
            break
        lines.append(then.head)
    for between in (" ", ""):
        text = between.join(lines)
        ends = list(accumulate(len(line) + len(between) for line in lines[:-1]))
        flat = text.lower().encode()
        rows = [row for word in sorted({*flat.translate(WORDS).split()}) for row in entries.by_word.get(word, ())]
        fitting = {
            row.symptom: None
            for row in rows
            if not (row.symptom.bare and finding.traceback is not None)
            and not (row.symptom.without and row.symptom.without.search(text))
            and (found := row.pattern.search(text))
            and any(found.start() < end - len(between) and end < found.end() for end in ends)
        }
        if fitting:
            message = replace(finding.message, text=text, whole=text)
            symptoms = [*finding.symptoms, *fitting]
            return replace(finding, message=message, symptoms=symptoms, after=finding.after[len(lines) - 1 :])
    return None


def _oom(finding: LogFinding, config: KnownConfig) -> OomMessage:
    rows = config.micro_batch * config.sequence if config.micro_batch and config.sequence else None
    text = " ".join([finding.message.whole, *(line.strip() for line in finding.after[:6])])
    return read_oom(text, config.vocabulary, rows)


def _names(symptom: Symptom, finding: LogFinding) -> dict[str, str]:
    """What the expressions call by name."""
    text = finding.message.whole
    names: dict[str, str] = {}
    for pattern in (*symptom.lines, symptom.follows, symptom.frames):
        alone = pattern in symptom.lines and not symptom.refines
        where = text if alone else "\n".join([text, *finding.after])
        if pattern is symptom.frames and finding.traceback is not None:
            where = finding.traceback.place
        found = pattern.search(where) if pattern is not None else None
        if found is not None:
            names |= {name: value for name, value in found.groupdict().items() if value}
    near = [text, *finding.after[:_NEAR_AFTER], *reversed(finding.before[-_NEAR_BEFORE:])]
    if finding.traceback is not None:
        near[1:1] = [line for _, line in reversed(finding.traceback.frames)]
    for pattern in symptom.names:
        told_by = next((found for line in near if (found := pattern.search(line))), None)
        if told_by is not None:
            names = {name: value for name, value in told_by.groupdict().items() if value} | names
    if finding.traceback is not None or is_raised(finding.message):
        told = re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", finding.message.head.rstrip(". "), count=1)
        if told.endswith(":"):
            told += " " + next((line.strip() for line in finding.after[:3] if line.strip()), "")
        names.setdefault("error", told if len(told) <= _MOST_LETTERS else f"{told[:_MOST_LETTERS]} …")
    return names


_LOCAL = re.compile(r"\blocal_rank: (\d{1,6})\b")
_LISTED = re.compile(r"^\s*rank\s*: (\d{1,6}) ")
_NEAR, _IN_SUMMARY = 2, 80
"""Lines back in which torchrun's summary names the rank."""


def _rank(finding: LogFinding, names: Mapping[str, str]) -> int | None:
    """Whose end a launcher reports: on its own line, or on the one before in torchrun's summary."""
    if names.get("rank", "").isdigit():
        return int(names["rank"][:6])
    summed_up = finding.traceback is not None and finding.traceback.is_summed_up
    near = finding.before[-_IN_SUMMARY if summed_up else -_NEAR :]
    told = _LOCAL.search(finding.message.text) or next(
        (found for line in reversed(near) if (found := _LISTED.match(line))), None
    )
    return finding.rank if told is None else int(told[1])


def _chain(first: Case, second: Case) -> Case:
    """One exception led to another: the one that says more counts, and where both say as much, the last."""
    assert first.finding is not None
    assert second.finding is not None
    told = min((second, first), key=lambda case: _vagueness(case.symptom))
    told_by = first.finding if told is first else second.finding
    told_by.later = second.finding.later
    led = (*first.chain, first.finding) if told is second else first.chain
    return replace(told, order=first.order, chain=led)


def _vagueness(symptom: Symptom) -> tuple[object, ...]:
    sure = ("certain", "likely", "possible")
    return symptom.is_generic, symptom.tier, symptom.catches, sure.index(symptom.confidence)
