"""Evidence in, diagnosis out: the first cause, and not what followed from it.

Findings become cases: each gets the name that it has in the catalogue, if all that its entry asks for is there. Then:
which of them came first, and which followed from it. When one rank falls, the others fall after it, and say so at
greater length. What a symptom's entry calls a *fault* counts before how processes *ended*, and that before the *echoes*
of ranks that lost a neighbour; among equals the first counts, by the clock where the logs have one. A fault after which
the training went on was none.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from tightfit.diagnose.catalogue import CATCH_ALL, CUT_OFF, Catalogue, OomShape, Symptom, catalogue
from tightfit.diagnose.doing import Doing
from tightfit.diagnose.gate import WORDS
from tightfit.diagnose.lines import Level, is_raised, message_of
from tightfit.diagnose.masks import masked
from tightfit.diagnose.oom import OomMessage, describe_numbers, read_oom, size_words
from tightfit.diagnose.scan import LogFinding, LogScan
from tightfit.diagnose.tracebacks import HEADER, PLACES, phase_of
from tightfit.diagnose.verdict import Diagnosis, Evidence, Fix, Kind, Line, LogSource, RankExit, Verdict
from tightfit.job.known import KnownConfig, completed
from tightfit.messages import Message, Said
from tightfit.types import PhaseName

KERNEL = Message("diagnose.kernel-log")
_THREADS = 3
_LOW: tuple[Level, ...] = ("debug", "info", "warning")
_WARNING = re.compile(r"\b[A-Z]\w*Warning: ")
_SAID_IN_PASSING: tuple[Kind, ...] = ("environment", "config")  # what programs warn of, and then do without
_FOLLOWING: tuple[Kind, ...] = ("communication", "hang", "preempted", "hardware", "unknown")  # may follow a remark
_MOST_OF_ERROR = 160
_LINES_ON = 3
_LINES_BROKEN = 4  # lines on which the message of an exception may go on
_NEAR_AFTER, _NEAR_BEFORE = 12, 12  # lines around a finding that may name what it is about
_MEMORY = ("device-oom", "fragmentation", "other-process")
_LOCAL = re.compile(r"\blocal_rank: (\d{1,6})\b")
_LISTED = re.compile(r"^\s*rank\s*: (\d{1,6}) ")
_NEAR, _IN_SUMMARY = 2, 80  # lines back in which torchrun's summary names the rank
_SHELL = 128  # shells add this to a signal's number; Python's launchers negate it, and 8 bits wrap that
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
    scans = [LogScan(source, index, entries, is_only=len(logs) == 1) for index, source in enumerate(logs)]
    config = evidence.config or KnownConfig()
    if config.vendor == "unknown":  # cards that are known by their size alone
        config = replace(config, vendor=None)
    for each in scans:
        config = completed(config, each.config)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something that was found, under the name that it has in the catalogue."""

    symptom: Symptom
    source: int | None  # which of the logs; None: an exit code
    order: int  # position in its log
    rank: int | None = None
    at: float | None = None
    finding: LogFinding | None = None
    chain: tuple[LogFinding, ...] = ()  # the exceptions before it that led to it
    phase: PhaseName | None = None
    oom: OomMessage | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # what the line says by name: the expression's groups
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
        return later.losses >= 2 if self.symptom.role == "state" else later.went_on  # losses are numbers again


# --- does a symptom fit? ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What is known around a finding, or around an end without a word."""

    config: KnownConfig
    doing: Doing | None
    steps: int | None
    shapes: frozenset[OomShape] = frozenset()
    text: str = ""  # the line itself, and what follows of its message
    after: str = ""
    before: str
    frames: str = ""


def fits(symptom: Symptom, known: Around) -> bool:
    told = f"{known.text}\n{known.after}"
    asked = (
        (symptom.frames, known.frames),
        (symptom.follows, told),
        (symptom.precedes, known.before),
        (symptom.around, f"{known.before}\n{told}"),
    )
    steps = known.steps or 0
    return (
        all(pattern is None or pattern.search(text) for pattern, text in asked)
        and (not symptom.doing or known.doing in symptom.doing)
        and (not symptom.oom or not known.shapes.isdisjoint(symptom.oom))
        and (symptom.settings is None or symptom.settings.hold(known.config))
        and (symptom.least_steps is None or steps >= symptom.least_steps)
        and (symptom.most_steps is None or steps <= symptom.most_steps)
    )


def best(symptoms: list[Symptom], known: Around) -> Symptom | None:
    """A fault before an echo; then the heaviest that fits; among equals the one that asks for more."""
    asked = ("frames", "follows", "precedes", "around", "settings", "least_steps", "most_steps", "doing", "oom")

    def weigh(symptom: Symptom) -> tuple[int, ...]:
        return -symptom.tier, symptom.weight, sum(getattr(symptom, name) not in (None, ()) for name in asked)

    return max((symptom for symptom in symptoms if fits(symptom, known)), key=weigh, default=None)


def refine(symptom: Symptom, known: Around, entries: Catalogue) -> Symptom:
    """The most special case of a symptom that fits."""
    special = [
        each
        for each in entries.symptoms
        if symptom.id in each.refines
        if not each.lines or any(pattern.search(f"{known.text}\n{known.after}") for pattern in each.lines)
    ]
    found = best(special, known)
    return symptom if found is None else refine(found, known, entries)


# --- what was found -----------------------------------------------------------------------------


def cases_of(found: LogScan, config: KnownConfig, entries: Catalogue, *, is_kernels: bool = False) -> list[Case]:
    """The findings of one log; chained exceptions are one case."""

    def goes_on(first: Case, told: LogFinding, then: LogFinding) -> bool:
        """An exception whose first line names only its type says what it has to say in the next ones."""
        near = 0 < then.message.number - told.message.number <= _LINES_ON
        is_one = told.traceback is not None and then.traceback is None
        return is_one and near and first.symptom.is_generic and told.message.head.endswith(":")

    def vagueness(case: Case) -> tuple[object, ...]:
        symptom, sure = case.symptom, ("certain", "likely", "possible")
        return symptom.is_generic, symptom.tier, symptom.catches, sure.index(symptom.confidence)

    cases: list[Case] = []
    for finding in found.findings:
        case = _name_case(finding, config, entries)
        if case is None:
            continue
        if finding.traceback is not None and finding.traceback.follows and cases and cases[-1].finding is not None:
            # One exception led to another: the one that says more counts, and where both say as much, the last.
            first, led_by = cases[-1], cases[-1].finding
            told = min((case, first), key=vagueness)
            if told is first:
                led_by.later = finding.later
            led = (*first.chain, led_by) if told is case else first.chain
            cases[-1] = replace(told, order=first.order, chain=led)
        elif cases and (before := cases[-1].finding) is not None and goes_on(cases[-1], before, finding):
            cases[-1] = replace(case, order=cases[-1].order, chain=(*cases[-1].chain, before))
        else:
            cases.append(replace(case, is_kernels=is_kernels))
    return cases


def _name_case(finding: LogFinding, config: KnownConfig, entries: Catalogue) -> Case | None:
    oom = None
    if any(symptom.kind in _MEMORY for symptom in finding.symptoms):
        rows = config.micro_batch * config.sequence if config.micro_batch and config.sequence else None
        text = " ".join([finding.message.whole, *(line.strip() for line in finding.after[:6])])
        oom = read_oom(text, config.vocabulary, rows)
    known = Around(
        config=config,
        doing=finding.doing,
        steps=finding.steps,
        shapes=oom.shapes if oom else frozenset(),
        text=finding.message.whole,
        after="\n".join(finding.after),
        before="\n".join(finding.before),
        frames="" if finding.traceback is None else finding.traceback.place,
    )
    symptom = best(finding.symptoms, known)
    if symptom is None or symptom.is_generic or symptom.role == "trailing":
        joined = _join_lines(finding, entries)
        if joined is not None:
            return _name_case(joined, config, entries)
    if symptom is None and finding.traceback is not None:
        symptom = entries.by_id[CUT_OFF if finding.traceback.exception is None else CATCH_ALL]
    if symptom is None:
        return None
    names = _names(symptom, finding)
    special = refine(symptom, known, entries)
    names |= _names(special, finding)
    frames = [text for _, text in finding.traceback.frames] if finding.traceback else []
    if names.get("rank", "").isdigit():
        rank: int | None = int(names["rank"][:6])
    else:  # whose end a launcher reports: on its own line, or on the one before in torchrun's summary
        summed_up = finding.traceback is not None and finding.traceback.opened.head.startswith("traceback :")
        near = reversed(finding.before[-_IN_SUMMARY if summed_up else -_NEAR :])
        told = _LOCAL.search(finding.message.text) or next(filter(None, map(_LISTED.match, near)), None)
        rank = finding.rank if told is None else int(told[1])
    return Case(
        symptom=special,
        source=finding.source,
        order=finding.order,
        rank=rank,
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
            message = finding.message._replace(text=text, whole=text)
            symptoms = [*finding.symptoms, *fitting]
            return replace(finding, message=message, symptoms=symptoms, after=finding.after[len(lines) - 1 :])
    return None


def _names(symptom: Symptom, finding: LogFinding) -> dict[str, str]:
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
        names.setdefault("error", told if len(told) <= _MOST_OF_ERROR else f"{told[:_MOST_OF_ERROR]} …")
    return names


def signal_of(code: int) -> int | None:
    """The signal behind an exit code; None: there is none."""
    number = -code if code < 0 else code - _SHELL if _SHELL < code < _SHELL + 65 else 256 - code if code > 240 else 0
    return number if 0 < number < 65 else None


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
    first = min(bad, key=lambda gone: (signal_of(gone.code) == signal.SIGTERM, gone.at))
    number = signal_of(first.code)
    symptom = known.by_exit.get(-number if number else first.code) or known.by_exit[1]
    own = [scan for scan, rank in zip(scans, ranks, strict=True) if first.rank is None or rank in (first.rank, None)]
    last = max(own, key=lambda scan: scan.lines, default=None)
    around = Around(
        config=config,
        doing=last.doing if last else None,
        steps=last.steps if last else None,
        before="\n".join(last.last_lines) if last else "",
    )
    return [Case(symptom=refine(symptom, around, known), source=None, order=0, rank=first.rank, exit=first)]


# --- what came first ----------------------------------------------------------------------------


def in_order(
    cases: Iterable[Case], exits: Sequence[RankExit], *, ended_well: bool
) -> tuple[Case | None, tuple[Case, ...]]:
    """The first cause, and what else is worth saying."""
    living = [case for case in cases if not case.was_survived]
    times = Counter(case.symptom.id for case in living)
    living = [case for case in living if times[case.symptom.id] >= case.symptom.repeats]
    if ended_well:
        living = [case for case in living if case.symptom.role in ("state", "note")]
    serious = [case for case in living if case.symptom.role != "note"]
    if not serious:
        return None, tuple(_distinct(living, None))
    ended = {gone.rank: gone.at for gone in exits if gone.code and gone.rank is not None}
    in_turn = sorted(serious, key=lambda case: _rank_case(case, serious, ended))
    leading = [case for case in in_turn if case.tier == in_turn[0].tier]
    faults = [case for case in leading if case.symptom.role == "fault"]
    states = [case for case in leading if case.symptom.role == "state"]
    first = leading[0]
    if faults and states:
        # Numbers that are none say more than an exception that nobody knows, or than being told to leave, whichever is
        # said first.
        says_little = faults[0].symptom.is_generic or faults[0].symptom.kind == "preempted"
        first = states[0] if says_little else faults[0]
    rest = [case for case in in_turn if case.symptom.role != "trailing"]
    notes = [case for case in living if case.symptom.role == "note"]
    return first, tuple(_distinct([*rest, *notes], first))


def _rank_case(case: Case, cases: Sequence[Case], ended: Mapping[int, float]) -> tuple[float, ...]:
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
    is_vague = case.symptom.is_generic and by_chance
    return (tier, outranked, last_resort, weight, clock, is_vague, case.source or 0, case.order)


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


# --- in words -----------------------------------------------------------------------------------


def verdict_of(case: Case, logs: Sequence[LogSource], config: KnownConfig) -> Verdict:
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
        wanted = [remedy.sets.get(config.trainer or ""), remedy.vendors.get(config.vendor or ""), remedy.command]
        wanted += [remedy.sets.get("huggingface")] if config.trainer is None else []
        wanted += [remedy.sets.get("deepspeed")] if config.trainer != "job" else []
        command = next((each for each in wanted if each is not None), None)
        if command is not None:
            # What is not known: `{name|OTHER}` is what stands behind the bar, and `{name}` is three dots.
            command = _NAME.sub(lambda found: str(words.get(found[1], found[2] or "…")), command)
        yield Fix(text=remedy.text.fill(words), command=command, is_costly=remedy.is_costly)


def _find_words(case: Case, config: KnownConfig) -> dict[str, object]:
    """What is known by name; what the log says itself counts before the settings, and sizes count before it."""
    known = {each.name: getattr(config, each.name) for each in fields(config)}
    known |= {"rank": case.rank, "steps": case.finding and case.finding.steps}
    words: dict[str, object] = {name: str(value) for name, value in known.items() if value is not None}
    words |= {name: masked(text) for name, text in case.names.items() if text}
    if case.phase is not None:
        words["where"] = PLACES[case.phase]
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
