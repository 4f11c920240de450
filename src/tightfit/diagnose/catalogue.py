"""The catalogue of symptoms: data in `symptoms/*.yaml`, which `tests/diagnose/test_catalogue.py` checks.

A symptom says what a log looks like, why, and what helps; `docs/symptoms.md` shows them all, and tells a contributor
what each key means. `remedies.yaml` holds what many symptoms advise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from tightfit.diagnose.doing import Doing
from tightfit.diagnose.gate import ZEROS, Expression, Mark, alternatives, marks_of
from tightfit.diagnose.verdict import Confidence, Kind
from tightfit.job.known import KnownConfig
from tightfit.messages import OPTIONAL, SYMPTOM, Message
from tightfit.messages.symptoms import SHARED, one_line, read_files

Role = Literal["fault", "state", "ending", "echo", "trailing", "note"]
"""fault: the process could not go on; state: it goes on and is worthless; ending: how a process ended, which says
little of the why; echo: a rank that noticed another's fall; trailing: said by those that sweep up; note: never the
cause."""
_TIERS: Mapping[Role, int] = {"fault": 0, "state": 0, "ending": 1, "echo": 2, "trailing": 3, "note": 4}
CATCH_ALL, CUT_OFF = "exception", "traceback-cut"  # an exception that no other symptom knows, and one without its end
OomShape = Literal["fragmented", "others", "contexts", "larger", "capped", "roomy", "logits"]
"""fragmented: enough is reserved, in pieces; others: another process holds what is missing; contexts: the other ranks'
contexts do; larger: one tensor as large as the card; capped: a limit below the card; roomy: more is free than was
asked; logits: what was asked is a number of rows of the vocabulary."""


class Settings(dict[str, tuple[object, ...]]):
    """Values of the configuration that must hold; a setting that is not known holds nowhere."""

    def hold(self, config: KnownConfig) -> bool:
        return all(getattr(config, name) in wanted for name, wanted in self.items())

    def contradict(self, config: KnownConfig) -> bool:
        known = ((getattr(config, name), wanted) for name, wanted in self.items())
        return any(value is not None and value not in wanted for value, wanted in known)


class SymptomText(NamedTuple):
    """A text of the catalogue: which message it is, and what a log has to fill in."""

    id: str
    names: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # what may be left out where the log does not tell it

    def fill(self, words: Mapping[str, object]) -> Message:
        """What is not known and cannot be left out is three dots."""
        known = {name: words.get(name, "…") for name in self.names}
        return Message(self.id, **known, **{name: words[name] for name in self.optional if name in words})

    def fill_any(self, mark: str = "{{{}}}") -> Message:
        """Without what only some logs tell; the others' names stand in the text."""
        return Message(self.id, **{name: mark.format(name) for name in self.names})


@dataclass(frozen=True, slots=True, kw_only=True)
class SymptomRemedy:
    text: SymptomText
    command: str | None = None
    vendors: Mapping[str, str | None]  # another vendor's command, where it is another; None: it does not help there
    sets: Mapping[str, str]  # what to write into whose file
    is_costly: bool = False
    where: Settings | None = None  # only where this is not known to be otherwise
    unless: Settings | None = None  # not where this is known to hold already


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Symptom:
    id: str
    kind: Kind
    title: Message
    cause: SymptomText
    remedies: tuple[SymptomRemedy, ...]
    role: Role = "fault"
    confidence: Confidence = "certain"
    lines: tuple[Expression, ...] = ()  # any of these, in one line
    marks: tuple[tuple[Mark, ...], ...] = ()  # of each of the lines
    anywhere: bool = False  # in the middle of a line too; else the line must be an error message that begins so
    without: Expression | None = None  # not where the line has this
    follows: Expression | None = None  # in the lines after it
    precedes: Expression | None = None  # in the lines before it
    around: Expression | None = None  # in the lines before or after it
    frames: Expression | None = None  # in the traceback
    names: tuple[Expression, ...] = ()  # not asked for: what they find around the line is filled in
    refines: tuple[str, ...] = ()  # symptoms of which this is a special case
    doing: tuple[Doing, ...] = ()  # what the log last said that it was doing
    least_steps: int | None = None
    most_steps: int | None = None  # training steps before it
    oom: tuple[OomShape, ...] = ()
    settings: Settings | None = None
    exits: tuple[int, ...] = ()  # exit codes that mean this where no text says more
    repeats: int = 1  # so many lines at least
    bare: bool = False  # only in a line that ends no traceback
    vague: bool = False  # only where nothing was found that says more
    catches: bool = False  # every exception that no other symptom knows
    weight: int = 0  # among symptoms that fit one line, the heaviest counts
    sources: tuple[str, ...] = ()

    @property
    def tier(self) -> int:
        """What counts before what: faults, then ends, then echoes, then those who sweep up."""
        return _TIERS[self.role]

    @property
    def is_generic(self) -> bool:
        return self.catches or (self.vague and CATCH_ALL in self.refines)


class Row(NamedTuple):
    """One expression, and what a line must contain before it is worth trying."""

    symptom: Symptom
    pattern: Expression
    runs: tuple[bytes, ...]  # as in a Mark
    digits: tuple[bytes, ...] | None
    kinds: tuple[bytes, ...]  # the runs with zeros for digits


def likely_rows(rows: Iterable[Row], line: bytes) -> list[Row]:
    """Those that could match a line, which is in small letters."""
    found, text = [], None
    for row in rows:  # a hundred thousand lines ask: `all` and a function for each row take twice as long
        for run in row.runs:
            if run not in line:
                break
        else:
            if row.digits and not any([number in line for number in row.digits]):
                continue
            if not row.pattern.is_anchored:
                text = line.decode("latin-1") if text is None else text
                if not row.pattern.may_match(text):
                    continue
            found.append(row)
    return found


@dataclass(frozen=True)
class Catalogue:
    symptoms: tuple[Symptom, ...]

    @cached_property
    def by_id(self) -> Mapping[str, Symptom]:
        return {symptom.id: symptom for symptom in self.symptoms}

    @cached_property
    def by_word(self) -> Mapping[bytes, tuple[Row, ...]]:
        """Word of the sieve → what else to look for, and where it leads."""
        table: dict[bytes, list[Row]] = {}
        for symptom in self.symptoms:
            if symptom.refines:
                continue
            for pattern, marks in zip(symptom.lines, symptom.marks, strict=True):
                for mark in marks:
                    row = Row(
                        symptom, pattern, mark.runs, mark.digits, tuple(run.translate(ZEROS) for run in mark.runs)
                    )
                    table.setdefault(mark.word.encode(), []).append(row)
        return {word: tuple(rows) for word, rows in table.items()}

    @cached_property
    def by_exit(self) -> Mapping[int, Symptom]:
        return {code: symptom for symptom in self.symptoms for code in symptom.exits if not symptom.refines}


@cache
def catalogue() -> Catalogue:
    return read_catalogue(read_files())


def read_catalogue(trees: Mapping[str, Any]) -> Catalogue:
    """What stands in the files, by their names."""
    shared = {key: _read_remedy(entry, {}, f"fix.{key}") for key, entry in trees.get(SHARED, {}).items()}
    entries = (entry for name, tree in trees.items() if name != SHARED for entry in tree)
    return Catalogue(tuple(_read_symptom(entry, shared) for entry in entries))


PLAIN = ("id", "kind", "role", "confidence", "least_steps", "most_steps", "repeats", "weight", "anywhere", "catches",
         "bare", "vague")  # fmt: skip
PATTERNS = ("without", "follows", "precedes", "around", "frames")
SEVERAL = ("refines", "doing", "oom", "exits", "sources")
VENDORS = {"hip": ("amd", "hygon"), "hygon": ("hygon",), "ascend": ("ascend",)}  # whose cards a key is for
_NAMES = re.compile(r"\{(\w+)\}")


def _read_symptom(values: Mapping[str, Any], shared: Mapping[str, SymptomRemedy]) -> Symptom:
    name, lists = values["id"], {key: each if isinstance(each, list) else [each] for key, each in values.items()}
    lines = tuple(Expression(part) for text in lists.get("lines", ()) for part in alternatives(str(text)))
    more = {key: values[key] for key in PLAIN if key in values}
    more |= {key: tuple(lists[key]) for key in SEVERAL if key in lists}
    more |= {key: Expression("|".join(map(str, lists[key]))) for key in PATTERNS if lists.get(key)}
    fixes = enumerate(lists["fixes"], 1)
    return Symptom(
        title=read_text(values, "title", f"{name}.title").fill({}),
        cause=read_text(values, "cause", f"{name}.cause"),
        remedies=tuple(_read_remedy(fix, shared, f"{name}.fix-{number}") for number, fix in fixes),
        lines=lines,
        marks=tuple(marks_of(pattern.text) for pattern in lines),
        names=tuple(Expression(str(text)) for text in lists.get("names", ())),
        settings=_read_settings(values.get("settings")),
        **more,
    )


def _read_remedy(values: Any, shared: Mapping[str, SymptomRemedy], name: str) -> SymptomRemedy:
    if isinstance(values, str):
        return shared[values]
    commands = {vendor: values[key] for key, vendors in VENDORS.items() if key in values for vendor in vendors}
    return SymptomRemedy(
        text=read_text(values, "text", name),
        command=values.get("command"),
        vendors={vendor: str(command) if command else None for vendor, command in commands.items()},
        sets={trainer: str(text) for trainer, text in (values.get("sets") or {}).items()},
        is_costly=bool(values.get("costly", False)),
        where=_read_settings(values.get("where")),
        unless=_read_settings(values.get("unless")),
    )


def read_text(values: Mapping[str, Any], key: str, name: str) -> SymptomText:
    text = one_line(values[key])
    parts = OPTIONAL.sub("", text), " ".join(OPTIONAL.findall(text))
    return SymptomText(f"{SYMPTOM}.{name}", *(tuple(sorted({*_NAMES.findall(part)})) for part in parts))


def _read_settings(values: Mapping[str, Any] | None) -> Settings | None:
    if values is None:
        return None
    return Settings({key: tuple(v) if isinstance(v, list) else (v,) for key, v in values.items()})
