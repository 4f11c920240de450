"""Dialogues between two people, as records with named fields.

Three layouts are read: the set that ships (one file), RealPersonaChat's (a folder with `dialogues/*.json` and
`interlocutors.json`), and a JSON or JSONL file of one's own, whose fields are what it calls them. The first two give
these fields:

    profile   sentences about the one who answers; never about the other
    traits    their traits as words, where the source has numbers (high or low: against the median of all people)
    scene     where and why they talk, where the source says so
    history   what the one who answers said in dialogues before this one
    context   the turns of this dialogue before the answer
    reply     the answer

A talk's records are made together, so that a shuffled field can come from the nearest earlier talk of other people
(the first talks take it from the first later one). Nothing is drawn at random: the same files give the same records.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from tightfit.inputs.records import parse_json
from tightfit.inputs.spelling import open_regular, shown
from tightfit.messages import Message, Said
from tightfit.train.data.sources import SHIPPED, SHIPPED_WORDS, SourceFile, not_utf8, one_file, trees_in
from tightfit.types import ConfigError

NOTICE = Message("data.persona-licence")

FIELDS = ("profile", "traits", "scene", "history", "context")
LOOK_BACK = 64
"""Talks among which one by other people is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRecord:
    """One answer with all that could stand before it."""

    name: str
    fields: Mapping[str, Any]
    """Text, or a list of lines of which the last matter most."""
    target: str
    speaker: str
    partner: str
    groups: tuple[int, int] = (-1, -1)

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fields": dict(self.fields),
            "target": self.target,
            "speaker": self.speaker,
            "partner": self.partner,
            "groups": list(self.groups),
        }


Talk = tuple[frozenset[str], tuple[AnswerRecord, ...]]
"""The people, and the answers that they give."""


class _CorpusReader(Protocol):
    def talks(self) -> Iterator[Talk]: ...


@dataclass(frozen=True, kw_only=True)
class Talks:
    """A source of dialogues."""

    name: str
    files: tuple[Path, ...]
    """Everything that is read, to be hashed."""
    fields: tuple[str, ...]
    reader: _CorpusReader
    said: tuple[Message, ...] = ()

    def records(self, shuffled: frozenset[str] = frozenset()) -> Iterator[dict[str, Any]]:
        """Every record in order; `shuffled` fields are those of other people's."""
        talks = self.reader.talks() if not shuffled else _shuffle(self.reader.talks(), shuffled, self.name)
        for _, records in talks:
            for record in records:
                yield record.plain()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    answers: Literal["first", "second", "both"]
    context_turns: int
    history_turns: int


def open_talks(
    path: str,
    *,
    target: str,
    answers: Literal["first", "second", "both"],
    context_turns: int,
    history_turns: int,
    speaker: str | None,
) -> Talks:
    """The dialogues that a recipe's source names."""
    choice = _Choice(answers=answers, context_turns=context_turns, history_turns=history_turns)
    if path == "shipped:dialogues":
        file = SHIPPED / SHIPPED_WORDS[path]
        _check_target(target, path)
        return Talks(name=path, files=(file,), fields=FIELDS, reader=_Shipped(file=file, choice=choice))
    here = Path(path).expanduser()
    if here.is_dir():
        _check_target(target, path)
        return _real_persona_chat(here, choice)
    if not here.is_file():
        raise ConfigError(Message("data.no-source", path=path))
    reader = _Own(file=one_file(here, "auto"), target=target, speaker=speaker)
    first = next(reader.talks(), None)
    if first is None:
        raise ConfigError(Message("data.empty", path=here))
    return Talks(name=str(here), files=(here,), fields=tuple(first[1][0].fields), reader=reader)


def _check_target(target: str, path: str) -> None:
    if target != "reply":
        raise ConfigError(Message("data.target-is-reply", target=target, path=path))


# --- shuffling ------------------------------------------------------------------------------------


def _shuffle(talks: Iterator[Talk], fields: frozenset[str], name: str) -> Iterator[Talk]:
    """The same talks, with these fields from talks of other people."""
    seen: deque[Talk] = deque(maxlen=LOOK_BACK)
    ahead: deque[Talk] = deque()
    for talk in talks:
        ahead.append(talk)
        if len(ahead) > LOOK_BACK:
            yield _with_others(ahead[0], seen, ahead, fields, name)
            seen.append(ahead.popleft())
    while ahead:
        yield _with_others(ahead[0], seen, ahead, fields, name)
        seen.append(ahead.popleft())


def _with_others(talk: Talk, seen: deque[Talk], ahead: deque[Talk], fields: frozenset[str], name: str) -> Talk:
    people, records = talk
    donor = next((other for other in (*reversed(seen), *ahead) if not people & other[0] and other[1]), None)
    if donor is None:
        raise ConfigError(Message("data.nothing-to-shuffle", name=name))
    others = donor[1]
    made = (
        replace(record, fields={**record.fields, **{field: others[at % len(others)].fields[field] for field in fields}})
        for at, record in enumerate(records)
    )
    return people, tuple(made)


# --- two people's turns ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Person:
    name: str
    number: int
    profile: tuple[str, ...]
    traits: tuple[str, ...] = ()


class _History:
    """What each person said in earlier dialogues."""

    def __init__(self, choice: _Choice) -> None:
        self.choice = choice
        self.said: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=choice.history_turns))

    def talk(self, name: str, people: Mapping[str, _Person], turns: list[tuple[str, str]], scene: str) -> Talk:
        """The answers of one dialogue: every turn of those who are to be learned, but the very first."""
        order = list(people)
        records = []
        for at, (who, text) in enumerate(turns):
            place = {"first": 0, "second": 1}.get(self.choice.answers)
            if at == 0 or (place is not None and order.index(who) != place):
                continue
            partner = next(other for other in order if other != who)
            before = turns[max(0, at - self.choice.context_turns) : at]
            fields = {
                "profile": list(people[who].profile),
                "traits": list(people[who].traits),
                "scene": scene,
                "history": list(self.said[who]),
                "context": [f"{people[speaker].name}: {line}" for speaker, line in before],
            }
            records.append(
                AnswerRecord(
                    name=str(Message("data.turn", name=name, number=at + 1)),
                    fields=fields,
                    target=text,
                    speaker=people[who].name,
                    partner=people[partner].name,
                    groups=(people[who].number, people[partner].number),
                )
            )
        for who, text in turns:
            self.said[who].append(text)
        return frozenset(order), tuple(records)


@dataclass(frozen=True, kw_only=True)
class _Shipped:
    """One file: people by id, and dialogues of two of them."""

    file: Path
    choice: _Choice

    def talks(self) -> Iterator[Talk]:
        tree = parse_json(self.file.read_text(encoding="utf-8"))
        people = {
            key: _Person(name=value["name"], number=number, profile=tuple(value["profile"]))
            for number, (key, value) in enumerate(tree["people"].items())
        }
        history = _History(self.choice)
        for each in tree["dialogues"]:
            pair = {key: people[key] for key in each["people"]}
            turns = [(each["people"][at % 2], text) for at, text in enumerate(each["turns"])]
            yield history.talk(each["id"], pair, turns, each["scene"])


# --- RealPersonaChat ------------------------------------------------------------------------------


def _real_persona_chat(folder: Path, choice: _Choice) -> Talks:
    root = folder if (folder / "interlocutors.json").is_file() else folder / "real_persona_chat"
    people, dialogues = root / "interlocutors.json", root / "dialogues"
    if not people.is_file() or not dialogues.is_dir():
        raise ConfigError(Message("data.not-dialogues", folder=folder))
    files = tuple(sorted(dialogues.glob("*.json")))
    if not files:
        raise ConfigError(Message("data.no-dialogues", folder=dialogues))
    reader = _RealPersonaChat(people=people, files=files, choice=choice)
    return Talks(name=str(folder), files=(people, *files), fields=FIELDS, reader=reader, said=(NOTICE,))


@dataclass(frozen=True, kw_only=True)
class _RealPersonaChat:
    people: Path
    files: tuple[Path, ...]
    choice: _Choice

    def talks(self) -> Iterator[Talk]:
        people = self._people()
        history = _History(self.choice)
        for file in self.files:
            tree = _object(file)
            try:
                pair = {who: people[who] for who in tree["interlocutors"]}
                turns = [(each["interlocutor_id"], each["text"]) for each in tree["utterances"]]
                name = str(tree.get("dialogue_id", file.stem))
                if len(pair) != 2 or any(who not in pair or not isinstance(text, str) for who, text in turns):
                    raise KeyError("utterances")
            except (KeyError, TypeError) as error:
                raise ConfigError(Message("data.not-a-dialogue", file=file, key=error)) from None
            yield history.talk(name, pair, turns, "")

    def _people(self) -> dict[str, _Person]:
        tree = _object(self.people)
        middles = _medians(tree)
        made = {}
        for number, (who, each) in enumerate(sorted(tree.items())):
            persona = each.get("persona") if isinstance(each, Mapping) else None
            if not isinstance(persona, list) or not all(isinstance(line, str) for line in persona):
                raise ConfigError(Message("data.no-persona", who=who, people=self.people))
            # `BigFive_Openness` above the middle → `openness: high`.
            made[who] = _Person(
                name=who,
                number=number,
                profile=tuple(persona),
                traits=tuple(
                    f"{trait.rpartition('_')[2].lower()}: {'high' if value > middles[trait] else 'low'}"
                    for trait, value in _numbers(each)
                ),
            )
        return made


def _medians(people: Mapping[str, Any]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for each in people.values():
        for trait, value in _numbers(each):
            values[trait].append(value)
    return {trait: median(found) for trait, found in values.items()}


def _numbers(person: Any) -> Iterator[tuple[str, float]]:
    personality = person.get("personality") if isinstance(person, Mapping) else None
    if isinstance(personality, Mapping):
        for trait, value in personality.items():
            if trait.startswith("BigFive_") and isinstance(value, int | float):
                yield trait, float(value)


def _object(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            tree = json.load(file)
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Message("data.unreadable-json", path=path, why=error)) from None
    if not isinstance(tree, dict):
        raise ConfigError(Message("data.not-an-object", path=path))
    return tree


# --- a file of one's own --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Own:
    """Every example is a talk of its own."""

    file: SourceFile
    target: str
    speaker: str | None

    def talks(self) -> Iterator[Talk]:
        numbers: dict[str, int] = {}
        for number, (unit, tree) in enumerate(trees_in(self.file), start=1):
            where = Message("data.of-file", name=unit, path=self.file.path)
            if not isinstance(tree, Mapping):
                raise ConfigError(Message("data.record-no-object", where=where, found=shown(tree)))
            target = tree.get(self.target)
            if not isinstance(target, str):
                raise ConfigError(Message("data.record-lacks-target", where=where, target=self.target))
            who = str(tree.get(self.speaker)) if self.speaker else str(number)
            if self.speaker and tree.get(self.speaker) is None:
                raise ConfigError(Message("data.record-lacks-speaker", where=where, speaker=self.speaker))
            fields = {key: _field(value, key, where) for key, value in tree.items() if key != self.target}
            group = numbers.setdefault(who, len(numbers))
            record = AnswerRecord(
                name=str(unit), fields=fields, target=target, speaker=who if self.speaker else "", partner="",
                groups=(group, -1),
            )  # fmt: skip
            yield frozenset([who]), (record,)


def _field(value: Any, key: str, where: Said) -> Any:
    """Text, a list of lines, or nothing; numbers are written out."""
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        return value
    raise ConfigError(Message("data.not-lines", key=key, where=where, value=shown(value)))
