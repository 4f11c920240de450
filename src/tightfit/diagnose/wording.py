"""A case as the verdict that a person reads: the cause in one sentence, the lines that prove it, the fixes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tightfit.diagnose.catalogue import Remedy, Symptom
from tightfit.diagnose.evidence import LogSource
from tightfit.diagnose.exits import describe_exit
from tightfit.diagnose.masks import masked
from tightfit.diagnose.oom import describe_numbers, size_words
from tightfit.diagnose.ordering import Case
from tightfit.diagnose.phases import PLACES
from tightfit.diagnose.scan import LogFinding
from tightfit.diagnose.verdict import Fix, Line, Verdict
from tightfit.job.known import KnownConfig
from tightfit.messages import Message, Said

_MOST_LETTERS = 600
_NAME = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
_PLACE = re.compile(r"^(?:File |Cell In|│ /|/\S+:\d+ in |│ \S+:\d+)")


def verdict_of(case: Case, logs: Sequence[LogSource], config: KnownConfig) -> Verdict:
    """Put a case into words."""
    words = _words(case, config)
    return Verdict(
        id=case.symptom.id,
        kind=case.symptom.kind,
        cause=_cause(case, words),
        confidence=case.symptom.confidence,
        evidence=tuple(_evidence(case, logs)),
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
        command = _command(remedy, config)
        yield Fix(
            text=remedy.text.fill(words),
            command=None if command is None else _fill_command(command, words),
            is_costly=remedy.is_costly,
        )


def _command(remedy: Remedy, config: KnownConfig) -> str | None:
    """What this user's file wants, or what can be typed; without a known trainer, Hugging Face's flags and DeepSpeed's
    keys are the nearest thing to a common tongue. Trainers that run DeepSpeed take its keys in a file of its own."""
    if config.trainer is not None and config.trainer in remedy.sets:
        return remedy.sets[config.trainer]
    if config.vendor is not None and config.vendor in remedy.vendors:
        return remedy.vendors[config.vendor]
    if remedy.command is not None:
        return remedy.command
    if config.trainer is None and "huggingface" in remedy.sets:
        return remedy.sets["huggingface"]
    return remedy.sets.get("deepspeed") if config.trainer != "job" else None


def _fill_command(command: str, words: Mapping[str, object]) -> str:
    """With its names in braces replaced. What is not known: `{name|OTHER}` is what stands behind the bar, and `{name}`
    is three dots."""
    return _NAME.sub(lambda found: str(words[found[1]]) if found[1] in words else found[2] or "…", command)


def _words(case: Case, config: KnownConfig) -> dict[str, object]:
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
        numbers = case.oom.numbers
        for name in ("asked", "total", "free", "allocated", "reserved_unused", "others"):
            size = getattr(numbers, name)
            if size is not None:
                words[name] = size_words(size)
        if case.oom.tokens:
            words["tokens"] = f"{case.oom.tokens:,}"
    return words


def _cause(case: Case, words: Mapping[str, object]) -> Message:
    inside = {name: value.rstrip(".") if isinstance(value, str) else value for name, value in words.items()}
    cause = case.symptom.cause.fill(inside)
    numbers = None if case.oom is None else describe_numbers(case.oom.numbers)
    if numbers is None:
        return Message("diagnose.cause", cause=cause)
    return Message("diagnose.cause-with-numbers", cause=cause, numbers=numbers)


def _evidence(case: Case, logs: Sequence[LogSource]) -> Iterator[Line]:
    for finding in (*case.chain, case.finding):
        if finding is not None:
            yield from _lines(finding, case.symptom, logs[finding.source].name)
    if case.exit is not None:
        yield Line(source=Message("diagnose.exit-code"), number=None, text=describe_exit(case.exit))


def _lines(finding: LogFinding, symptom: Symptom, name: Said) -> Iterator[Line]:
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
