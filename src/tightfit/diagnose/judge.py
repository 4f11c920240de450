"""Evidence in, diagnosis out: the first cause, and not what followed from it.

When one rank falls, the others fall after it, and say so at greater length. What a symptom's entry calls a *fault*
counts before how processes *ended*, and that before the *echoes* of ranks that lost a neighbour; among equals the first
counts, by the clock where the logs have one. A fault after which the training went on was none.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tightfit.diagnose.cases import KERNEL, Case, cases_of, exit_cases, in_order, signal_of
from tightfit.diagnose.catalogue import Symptom, catalogue
from tightfit.diagnose.doing import merged
from tightfit.diagnose.masks import masked
from tightfit.diagnose.oom import describe_numbers, size_words
from tightfit.diagnose.scan import LogFinding, scan
from tightfit.diagnose.tracebacks import PLACES
from tightfit.diagnose.verdict import Diagnosis, Evidence, Fix, Line, LogSource, Verdict
from tightfit.job.known import KnownConfig
from tightfit.messages import Message, Said

MOST_BESIDE = 5
_MOST_LETTERS = 600
_NAME = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
_PLACE = re.compile(r"^(?:File |Cell In|│ /|/\S+:\d+ in |│ \S+:\d+)")


def known_symptom(name: str, config: KnownConfig) -> Verdict:
    """What the catalogue says of a symptom that is known without a log."""
    return verdict_of(Case(symptom=catalogue().by_id[name], source=None, order=0), (), config)


def judge(evidence: Evidence) -> Diagnosis:
    """What went wrong first; a diagnosis without a verdict: nothing did."""
    entries = catalogue()
    kernel = (LogSource(name=KERNEL, text="\n".join(evidence.kernel)),) if evidence.kernel else ()
    logs = (*evidence.logs, *kernel)
    scans = [scan(source, index, entries) for index, source in enumerate(logs)]
    config = merged(evidence.config, [each.config for each in scans])
    if evidence.vocabulary is not None:
        config = replace(config, vocabulary=evidence.vocabulary)
    cases = [
        case
        for source, each in zip(logs, scans, strict=True)
        for case in cases_of(each, config, entries, is_kernels=source in kernel)
    ]
    cases += exit_cases(evidence.exits, scans, [source.rank for source in logs], config, entries)
    ended_well = bool(evidence.exits) and all(gone.code == 0 for gone in evidence.exits)
    first, beside = in_order(cases, evidence.exits, ended_well=ended_well)
    return Diagnosis(
        verdict=verdict_of(first, logs, config) if first else None,
        also=tuple(verdict_of(case, logs, config) for case in beside[:MOST_BESIDE]),
    )


# --- in words -----------------------------------------------------------------------------------


def verdict_of(case: Case, logs: Sequence[LogSource], config: KnownConfig) -> Verdict:
    """Put a case into words."""
    words = _find_words(case, config)
    inside = {name: value.rstrip(".") if isinstance(value, str) else value for name, value in words.items()}
    said = case.symptom.cause.fill(inside)
    numbers = None if case.oom is None else describe_numbers(case.oom.numbers)
    cause = Message("diagnose.cause", cause=said)
    if numbers is not None:
        cause = Message("diagnose.cause-with-numbers", cause=said, numbers=numbers)
    evidence: list[Line] = []
    for finding in (*case.chain, case.finding):
        if finding is not None:
            evidence += _show_lines(finding, case.symptom, logs[finding.source].name)
    if case.exit is not None:
        number = signal_of(case.exit.code)
        name: Said | None = None
        if number:
            known = number in set(signal.Signals)
            name = signal.Signals(number).name if known else Message("diagnose.signal", number=number)
        text = Message("diagnose.exit", rank=case.exit.rank, code=case.exit.code, signal=name)
        evidence.append(Line(source=Message("diagnose.exit-code"), number=None, text=text))
    return Verdict(
        id=case.symptom.id,
        kind=case.symptom.kind,
        cause=cause,
        confidence=case.symptom.confidence,
        evidence=tuple(evidence),
        fixes=tuple(fixes_of(case.symptom, config, words)),
        rank=case.rank,
        phase=case.phase,
        oom=None if case.oom is None else case.oom.numbers,
    )


def fixes_of(symptom: Symptom, config: KnownConfig, words: Mapping[str, object]) -> Iterator[Fix]:
    """Those that are open to this configuration, what costs nothing of the training first."""
    for remedy in sorted(symptom.remedies, key=lambda each: each.is_costly):
        if remedy.where is not None and remedy.where.contradict(config):
            continue
        if remedy.unless is not None and remedy.unless.hold(config):
            continue
        if config.vendor is not None and remedy.vendors.get(config.vendor, "") is None:
            continue
        # What this user's file wants, or what can be typed; without a known trainer, Hugging Face's flags and
        # DeepSpeed's keys are the nearest thing to a common tongue. Trainers that run DeepSpeed take its keys in a file
        # of its own.
        if config.trainer is not None and config.trainer in remedy.sets:
            command: str | None = remedy.sets[config.trainer]
        elif config.vendor is not None and config.vendor in remedy.vendors:
            command = remedy.vendors[config.vendor]
        elif remedy.command is not None:
            command = remedy.command
        elif config.trainer is None and "huggingface" in remedy.sets:
            command = remedy.sets["huggingface"]
        else:
            command = remedy.sets.get("deepspeed") if config.trainer != "job" else None
        if command is not None:
            # What is not known: `{name|OTHER}` is what stands behind the bar, and `{name}` is three dots.
            command = _NAME.sub(lambda found: str(words.get(found[1], found[2] or "…")), command)
        yield Fix(text=remedy.text.fill(words), command=command, is_costly=remedy.is_costly)


def _find_words(case: Case, config: KnownConfig) -> dict[str, object]:
    words: dict[str, object] = {name: masked(text) for name, text in case.names.items() if text}
    if case.phase is not None:
        words["where"] = PLACES[case.phase]
    for name in KnownConfig.__dataclass_fields__:
        value = getattr(config, name)
        if value is not None:
            words.setdefault(name, str(value))
    if case.rank is not None:
        words.setdefault("rank", str(case.rank))
    if case.finding is not None and case.finding.steps is not None:
        words.setdefault("steps", str(case.finding.steps))
    if case.oom is not None:
        for name in ("asked", "total", "free", "allocated", "reserved_unused", "others"):
            size = getattr(case.oom.numbers, name)
            if size is not None:
                words[name] = size_words(size)
        if case.oom.tokens:
            words["tokens"] = f"{case.oom.tokens:,}"
    return words


def _show_lines(finding: LogFinding, symptom: Symptom, name: Said) -> Iterator[Line]:
    """The place in the traceback that tells, and the line itself."""
    if finding.traceback is not None:
        frames = finding.traceback.frames
        places = [at for at, (_, text) in enumerate(frames) if _PLACE.match(text)]
        told = [at for at, (_, text) in enumerate(frames) if symptom.frames is not None and symptom.frames.search(text)]
        at = told[-1] if told else places[-1] if places else None
        if at is not None:
            near = [place for place in places if place <= at]
            for shown in dict.fromkeys([*(near[-1:]), at, *([at + 1] if not told and at + 1 < len(frames) else [])]):
                yield _line(name, *frames[shown])
    message = finding.message
    yield _line(name, message.number, message.whole.strip())
    if symptom.follows is not None and not symptom.follows.search(message.whole):
        told_by = next((text for text in finding.after if symptom.follows.search(text)), None)
        if told_by is not None:
            yield _line(name, None, told_by.strip())


def _line(name: Said, number: int | None, text: str) -> Line:
    text = masked(text)
    return Line(source=name, number=number, text=text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…")
