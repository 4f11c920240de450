"""The catalogue of symptoms: data in `symptoms/*.yaml`, checked when it is read.

A symptom says what a log looks like, why, and what helps; `docs/symptoms.md` shows them all, and tells a contributor
what each key means. `remedies.yaml` holds what many symptoms advise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from tightfit.diagnose.doing import Doing
from tightfit.diagnose.gate import Mark, alternatives, marks_of
from tightfit.diagnose.verdict import Confidence, Kind
from tightfit.inputs.spelling import listed, nearest
from tightfit.job.known import KnownConfig
from tightfit.messages import OPTIONAL, SYMPTOM, Message
from tightfit.messages.symptoms import LOADER, SHARED, one_line, read_files

_DIALECTS = tuple(sorted(path.parent.name for path in Path(__file__).parents[1].glob("formats/*/dialect.py")))
"""The programs whose keys a remedy may set."""

Role = Literal["fault", "state", "ending", "echo", "trailing", "note"]
"""fault: the process could not go on; state: it goes on and is worthless; ending: how a process ended, which says
little of the why; echo: a rank that noticed another's fall; trailing: said by those that sweep up; note: never the
cause."""
_TIERS: Mapping[Role, int] = {"fault": 0, "state": 0, "ending": 1, "echo": 2, "trailing": 3, "note": 4}
CATCH_ALL, CUT_OFF = "exception", "traceback-cut"
"""Symptoms that the engine itself names: an exception that no other knows, and one whose end the log does not have."""
OomShape = Literal["fragmented", "others", "contexts", "larger", "capped", "roomy", "logits"]
"""fragmented: enough is reserved, in pieces; others: another process holds what is missing; contexts: the other ranks'
contexts do; larger: one tensor as large as the card; capped: a limit below the card; roomy: more is free than was
asked; logits: what was asked is a number of rows of the vocabulary."""


class Expression:
    """A regular expression that is compiled when it is first used: a log needs a few of some hundreds."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_anchored = text.startswith("^")  # it asks for the beginning of a message

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.text, re.IGNORECASE)

    def search(self, text: str) -> re.Match[str] | None:
        return self.compiled.search(text)


class CatalogueError(Exception):
    """A file of symptoms is wrong: a contributor's mistake, told with its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of the configuration that must hold; a setting that is not known holds nowhere."""

    values: Mapping[str, tuple[object, ...]]

    def hold(self, config: KnownConfig) -> bool:
        return all(getattr(config, name) in wanted for name, wanted in self.values.items())

    def contradict(self, config: KnownConfig) -> bool:
        known = ((getattr(config, name), wanted) for name, wanted in self.values.items())
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
class Remedy:
    text: SymptomText
    command: str | None = None
    vendors: Mapping[str, str | None]
    """The command on another vendor's cards, where it is another; None: it does not help there."""
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
    remedies: tuple[Remedy, ...]
    role: Role = "fault"
    confidence: Confidence = "certain"
    lines: tuple[Expression, ...] = ()  # any of these, in one line
    marks: tuple[tuple[Mark, ...], ...] = ()  # of each of the lines
    anywhere: bool = False
    """In the middle of a line as well; otherwise the line must be an error message that begins so."""
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

    mark: Mark
    symptom: Symptom
    pattern: Expression

    def could_match(self, line: bytes) -> bool:
        """`line` in small letters."""
        if not all([run in line for run in self.mark.runs]):
            return False
        if self.mark.digits and not any(number in line for number in self.mark.digits):
            return False
        return self.pattern.is_anchored or self.pattern.search(line.decode("latin-1")) is not None


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
                    table.setdefault(mark.word.encode(), []).append(Row(mark, symptom, pattern))
        return {word: tuple(rows) for word, rows in table.items()}

    @cached_property
    def by_exit(self) -> Mapping[int, Symptom]:
        return {code: symptom for symptom in self.symptoms for code in symptom.exits if not symptom.refines}

    def refinements(self, base: Symptom) -> Iterator[Symptom]:
        return (symptom for symptom in self.symptoms if base.id in symptom.refines)


@cache
def catalogue() -> Catalogue:
    return _check(read_files())


def read_catalogue(texts: Mapping[str, str]) -> Catalogue:
    """The catalogue in the texts of its files, by file name."""
    trees = {}
    for name, text in texts.items():
        try:
            trees[name] = LOADER(text).get_single_data()
        except yaml.YAMLError as error:
            raise CatalogueError(f"{name} is no YAML: {error}") from None
    return _check(trees)


def _check(trees: Mapping[str, Any]) -> Catalogue:
    shared = {
        key: _Entry(SHARED, key, entry).remedy(entry, {}, f"fix.{key}")
        for key, entry in (trees.get(SHARED) or {}).items()
    }
    found: dict[str, Symptom] = {}
    for name, tree in trees.items():
        if name == SHARED:
            continue
        if not isinstance(tree, list):
            raise CatalogueError(f"{name} is no list of symptoms")
        for entry in tree:
            where = entry.get("id", "?") if isinstance(entry, dict) else "?"
            symptom = _Entry(name, str(where), entry).symptom(shared)
            if symptom.id in found:
                raise CatalogueError(f"{name}: there are two symptoms {symptom.id!r}")
            found[symptom.id] = symptom
    for symptom in found.values():
        for base in symptom.refines:
            if base not in found:
                raise CatalogueError(f"{symptom.id} refines {base!r}, which there is not")
    return Catalogue(tuple(found.values()))


# --- one entry ----------------------------------------------------------------------------------

_TEXTS = ("id", "kind", "title", "title_zh", "cause", "cause_zh", "role", "confidence")
_PATTERNS = ("without", "follows", "precedes", "around", "frames")
_NUMBERS = ("least_steps", "most_steps", "repeats", "weight")
_SWITCHES = ("anywhere", "catches", "bare", "vague")
_KEYS = {*_TEXTS, *_PATTERNS, *_NUMBERS, *_SWITCHES, "lines", "names", "refines", "doing", "oom", "settings", "exits",
         "fixes", "sources"}  # fmt: skip
_VENDORS = {"hip": ("amd", "hygon"), "hygon": ("hygon",), "ascend": ("ascend",)}
"""Keys of a remedy, and whose cards each is for; the later ones count."""
_REMEDY_KEYS = {"text", "text_zh", "command", "sets", "costly", "where", "unless", *_VENDORS}
_SETTINGS = {field.name for field in fields(KnownConfig)} - {"file"}
_ALWAYS = ("steps", "tokens", "error")  # names that the engine fills in
_NAMES = re.compile(r"\{(\w+)\}")


class _Entry:
    """Reads one symptom; every complaint names its file and its id."""

    def __init__(self, file: str, where: str, values: Any) -> None:
        self.place = f"{file}: {where}"
        if not isinstance(values, dict):
            raise CatalogueError(f"{self.place} is no block of keys")
        self.values = values

    def symptom(self, shared: Mapping[str, Remedy]) -> Symptom:
        values = self.values
        self._check_keys(values, _KEYS)
        for key in ("id", "kind", "title", "title_zh", "cause", "cause_zh", "fixes"):
            if not values.get(key):
                raise CatalogueError(f"{self.place} has no {key}")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", values["id"]):
            raise CatalogueError(f"{self.place}: an id is small letters and digits, with hyphens between")
        lines = tuple(Expression(part) for text in self._list("lines") for part in alternatives(str(text)))
        try:
            marks = tuple(marks_of(pattern.text) for pattern in lines)
        except (ValueError, IndexError) as error:
            raise CatalogueError(f"{self.place}: {error}") from None
        more: dict[str, Any] = {key: bool(values.get(key, False)) for key in _SWITCHES}
        more |= {key: self._any(key) for key in _PATTERNS}
        more |= {key: values[key] for key in _NUMBERS if key in values}
        more |= {key: tuple(self._list(key)) for key in ("refines", "exits", "sources")}
        symptom = Symptom(
            id=values["id"],
            kind=self._choice("kind", values["kind"], get_args(Kind)),
            title=self._sentence(values, "title", f"{values['id']}.title").fill({}),
            cause=self._sentence(values, "cause", f"{values['id']}.cause"),
            role=self._choice("role", values.get("role", "fault"), get_args(Role)),
            confidence=self._choice("confidence", values.get("confidence", "certain"), get_args(Confidence)),
            lines=lines,
            marks=marks,
            doing=tuple(self._choice("doing", word, get_args(Doing)) for word in self._list("doing")),
            oom=tuple(self._choice("oom", word, get_args(OomShape)) for word in self._list("oom")),
            settings=self._settings(values.get("settings")),
            remedies=tuple(
                self.remedy(fix, shared, f"{values['id']}.fix-{number}")
                for number, fix in enumerate(self._list("fixes"), 1)
            ),
            names=tuple(Expression(str(text)) for text in self._list("names")),
            **more,
        )
        # What the cause has in braces must be known whenever the symptom is found, but for what may be left out.
        always = {*_ALWAYS, *(_SETTINGS if symptom.settings or symptom.oom else ())}
        if symptom.cause.names and lines:
            always |= set.intersection(*(set(pattern.compiled.groupindex) for pattern in lines))
        for name in symptom.cause.names:
            if name not in always:
                raise CatalogueError(f"{self.place}: not every line of it tells the {{{name}}} of its cause")
        if not (symptom.lines or symptom.exits or symptom.refines or symptom.catches):
            raise CatalogueError(f"{self.place} has neither lines, nor exits, nor refines: nothing would ever find it")
        return symptom

    def remedy(self, values: Any, shared: Mapping[str, Remedy], name: str) -> Remedy:
        if isinstance(values, str):
            if values not in shared:
                close = nearest(values, shared)
                raise CatalogueError(f"{self.place}: there is no remedy {values!r}{f': {close}?' if close else ''}")
            return shared[values]
        if not isinstance(values, dict) or not values.get("text") or not values.get("text_zh"):
            raise CatalogueError(f"{self.place}: a fix is the name of a remedy, or a block with a text and a text_zh")
        self._check_keys(values, _REMEDY_KEYS)
        sets = values.get("sets") or {}
        for trainer in sets:
            self._choice("sets", trainer, (*_DIALECTS, "axolotl"))
        return Remedy(
            text=self._sentence(values, "text", name),
            command=values.get("command"),
            vendors={
                vendor: str(values[key]) if values[key] else None
                for key, vendors in _VENDORS.items()
                if key in values
                for vendor in vendors
            },
            sets={trainer: str(text) for trainer, text in sets.items()},
            is_costly=bool(values.get("costly", False)),
            where=self._settings(values.get("where")),
            unless=self._settings(values.get("unless")),
        )

    def _check_keys(self, values: Mapping[Any, Any], known: set[str]) -> None:
        for key in values:
            if key not in known:
                close = nearest(str(key), known)
                raise CatalogueError(f"{self.place} has an unknown key {key!r}{f': {close}?' if close else ''}")

    def _list(self, key: str) -> list[Any]:
        value = self.values.get(key, [])
        return value if isinstance(value, list) else [value]

    def _sentence(self, values: Mapping[str, Any], key: str, name: str) -> SymptomText:
        """One of the texts, which has the same names in braces in each language."""
        found = []
        for text in (one_line(values[key]), one_line(values[f"{key}_zh"])):
            needed, optional = OPTIONAL.sub("", text), " ".join(OPTIONAL.findall(text))
            found.append([tuple(sorted({*_NAMES.findall(part)})) for part in (needed, optional)])
        if found[0] != found[1]:
            raise CatalogueError(f"{self.place}: {key} and {key}_zh name different things in braces")
        return SymptomText(f"{SYMPTOM}.{name}", *found[0])

    def _choice(self, key: str, word: Any, known: tuple[Any, ...]) -> Any:
        if word not in known:
            raise CatalogueError(f"{self.place}: {key} is {word!r}, and knows {listed(known)}")
        return word

    def _any(self, key: str) -> Expression | None:
        texts = self._list(key)
        return Expression("|".join(str(text) for text in texts)) if texts else None

    def _settings(self, values: Any) -> Settings | None:
        if values is None:
            return None
        if not isinstance(values, dict):
            raise CatalogueError(f"{self.place}: settings are a block of keys")
        self._check_keys(values, _SETTINGS)
        return Settings(values={key: tuple(v) if isinstance(v, list) else (v,) for key, v in values.items()})
