"""Recipes: which fields of an example make up its prompt, ablations of them, and the dialogues that they are for.

A recipe is a YAML file:

    source: shipped:dialogues      # a folder in RealPersonaChat's layout, or a JSON or JSONL file of your own
    target: reply                  # the field that is learned
    sections:                      # in the order in which they stand in the prompt
      - field: profile
        role: system               # or user
        template: "You are {speaker}.\\n{text}"
        budget_tokens: 200         # the most of it that is kept
        drop: 2                    # where all is too long, what goes first: 1 before 2, what has no number last
    ablations:
      no_profile: {profile: off}
      wrong_profile: {profile: shuffled}

An ablation changes prompts and nothing else: examples, split, order and answers are those of every other ablation of
the recipe, and the cache refuses an ablation whose answers differ. `shuffled` gives a field the value of an example by
other people: the length and the look stay, the sense goes. `profile_and_history` is a name that needs no definition:
these fields on, the others off.

Dialogues between two people are read as records with named fields. Three layouts are known: the set that ships (one
file), RealPersonaChat's (a folder with `dialogues/*.json` and `interlocutors.json`), and a JSON or JSONL file of one's
own, whose fields are what it calls them. The first two give these fields:

    profile   sentences about the one who answers; never about the other
    traits    their traits as words, where the source has numbers (high or low: against the median of all people)
    scene     where and why they talk, where the source says so
    history   what the one who answers said in dialogues before this one
    context   the turns of this dialogue before the answer
    reply     the answer

A talk's records are made together, so that a shuffled field can come from the nearest earlier talk of other people
(the first talks take it from the first later one). Nothing is drawn at random: the same files give the same records.

In a prompt, room is made for the answer first: how much is left for the prompt depends on the answer and the template
alone, never on the ablation, so that all ablations keep the same answers. Then each section is brought within its own
budget, and while the whole is still too long, the section with the lowest `drop` gives way. A list of lines loses its
oldest; a text loses its end.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from operator import add, attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal

import yaml

from tightfit.inputs.records import parse_json
from tightfit.inputs.spelling import open_regular, read_text, shown, unknown_key
from tightfit.messages import Choice, Message, Said, text
from tightfit.train.data.chat import SHIPPED, STAND_IN, Rendered, Turn, hint_at
from tightfit.train.data.examples import SHIPPED_WORDS, ExampleError, SourceFile, not_utf8, one_file, trees_in
from tightfit.train.data.spec import DataSpec
from tightfit.train.data.tokens import Encoded, Encoder
from tightfit.types import ConfigError

Switch = Literal["on", "off", "shuffled"]

SHIPPED_RECIPES = {"shipped:persona": "persona.yaml"}
KEYS = ("source", "target", "sections", "ablations", "answers", "context_turns", "history_turns", "speaker")
SECTION_KEYS = ("field", "role", "template", "budget_tokens", "drop")
ALL_ON = "everything"
FIELDS = ("profile", "traits", "scene", "history", "context")
LOOK_BACK = 64  # talks among which one by other people is looked for
TRIES = 24
LAST = 10**9
_counted = attrgetter("examples", "tokens", "lost", "cut", "dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the prompt."""

    field: str
    role: Literal["system", "user"] = "user"
    template: str = "{text}"
    budget_tokens: int | None = None
    drop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a recipe file says."""

    name: str
    folder: Path
    source: str
    target: str = "reply"
    sections: tuple[Section, ...]
    ablations: Mapping[str, Mapping[str, Switch]]
    answers: Literal["first", "second", "both"] = "both"
    """Whose turns are learned: the one who opens the dialogue, the other, or both."""
    context_turns: int = 12
    history_turns: int = 12
    speaker: str | None = None  # of a file of your own: the field that says who answers, to split by


# --- dialogues ------------------------------------------------------------------------------------


Record = dict[str, Any]
"""One answer with all that could stand before it: its name, its fields (text, or a list of lines of which the last
matter most), the target, the speaker, the partner, and the groups of both."""

Talk = tuple[frozenset[str], list[Record]]  # the people, and the answers that they give


@dataclass(frozen=True, kw_only=True)
class Talks:
    """A source of dialogues."""

    name: str
    files: tuple[Path, ...]  # everything that is read, to be hashed
    fields: tuple[str, ...]
    read: Callable[[], Iterator[Talk]]
    said: tuple[Message, ...] = ()

    def shuffle(self, fields: Collection[str]) -> Iterator[Talk]:
        """The talks, with these fields from talks of other people."""
        seen: deque[Talk] = deque(maxlen=LOOK_BACK)
        ahead: deque[Talk] = deque()
        talks = self.read()
        while True:
            ahead.extend(islice(talks, LOOK_BACK + 1 - len(ahead)))
            if not ahead:
                return
            people, records = ahead[0]
            others = next((talk[1] for talk in (*reversed(seen), *ahead) if not people & talk[0] and talk[1]), None)
            if others is None:
                raise ConfigError(Message("data.nothing-to-shuffle", name=self.name))
            wrong = ({field: other["fields"][field] for field in fields} for other in cycle(others))
            yield people, [{**each, "fields": {**each["fields"], **next(wrong)}} for each in records]
            seen.append(ahead.popleft())


def open_talks(path: str, recipe: Recipe) -> Talks:
    """The dialogues that a recipe's source names."""
    here = Path(path).expanduser()
    is_shipped = path == "shipped:dialogues"
    if (is_shipped or here.is_dir()) and recipe.target != "reply":
        raise ConfigError(Message("data.target-is-reply", target=recipe.target, path=path))
    if is_shipped:
        file = SHIPPED / SHIPPED_WORDS[path]
        return Talks(name=path, files=(file,), fields=FIELDS, read=lambda: _find_answers(_read_shipped(file), recipe))
    if here.is_dir():
        root = here if (here / "interlocutors.json").is_file() else here / "real_persona_chat"
        people, dialogues = root / "interlocutors.json", root / "dialogues"
        if not people.is_file() or not dialogues.is_dir():
            raise ConfigError(Message("data.not-dialogues", folder=here))
        files = tuple(sorted(dialogues.glob("*.json")))
        if not files:
            raise ConfigError(Message("data.no-dialogues", folder=dialogues))
        return Talks(
            name=str(here),
            files=(people, *files),
            fields=FIELDS,
            read=lambda: _find_answers(_read_persona_chat(people, files), recipe),
            said=(Message("data.persona-licence"),),
        )
    if not here.is_file():
        raise ConfigError(Message("data.no-source", path=path))
    read = partial(_read_own, one_file(here, "auto"), recipe)
    first = next(read(), None)
    if first is None:
        raise ConfigError(Message("data.empty", path=here))
    return Talks(name=str(here), files=(here,), fields=tuple(first[1][0]["fields"]), read=read)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Person:
    name: str
    number: int
    profile: list[str]
    traits: list[str] = field(default_factory=list)


Dialogue = tuple[str, dict[str, _Person], list[tuple[str, str]], str]
"""Its name, the two people by their ids, who says what, and the scene."""


def _find_answers(dialogues: Iterator[Dialogue], recipe: Recipe) -> Iterator[Talk]:
    """The answers of each dialogue: every turn of those who are to be learned, but the very first."""
    history: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=recipe.history_turns))
    place = {"first": 0, "second": 1}.get(recipe.answers)
    for name, people, turns, scene in dialogues:
        order = list(people)
        records = []
        for at, (who, answer) in enumerate(turns):
            if at == 0 or (place is not None and order.index(who) != place):
                continue
            person, partner = people[who], people[next(other for other in order if other != who)]
            before = turns[max(0, at - recipe.context_turns) : at]
            record = {
                "name": str(Message("data.turn", name=name, number=at + 1)),
                "fields": {
                    "profile": person.profile,
                    "traits": person.traits,
                    "scene": scene,
                    "history": list(history[who]),
                    "context": [f"{people[speaker].name}: {line}" for speaker, line in before],
                },
                "target": answer,
                "speaker": person.name,
                "partner": partner.name,
                "groups": (person.number, partner.number),
            }
            records.append(record)
        for who, line in turns:
            history[who].append(line)
        yield frozenset(order), records


def _read_shipped(file: Path) -> Iterator[Dialogue]:
    """One file: people by id, and dialogues of two of them."""
    tree = parse_json(file.read_text(encoding="utf-8"))
    people = {
        key: _Person(name=value["name"], number=number, profile=value["profile"])
        for number, (key, value) in enumerate(tree["people"].items())
    }
    for each in tree["dialogues"]:
        turns = [(each["people"][at % 2], text) for at, text in enumerate(each["turns"])]
        yield each["id"], {key: people[key] for key in each["people"]}, turns, each["scene"]


def _read_persona_chat(people_file: Path, files: tuple[Path, ...]) -> Iterator[Dialogue]:
    tree = _object(people_file)
    scores: dict[str, list[float]] = defaultdict(list)
    for each in tree.values():
        for trait, value in _numbers(each):
            scores[trait].append(value)
    middles = {trait: median(found) for trait, found in scores.items()}
    people = {}
    for number, (who, each) in enumerate(sorted(tree.items())):
        persona = each.get("persona") if isinstance(each, Mapping) else None
        if not isinstance(persona, list) or not all(isinstance(line, str) for line in persona):
            raise ConfigError(Message("data.no-persona", who=who, people=people_file))
        traits = [  # `BigFive_Openness` above the middle → `openness: high`
            f"{trait.rpartition('_')[2].lower()}: {'high' if value > middles[trait] else 'low'}"
            for trait, value in _numbers(each)
        ]
        people[who] = _Person(name=who, number=number, profile=persona, traits=traits)
    for file in files:
        tree = _object(file)
        try:
            pair = {who: people[who] for who in tree["interlocutors"]}
            turns = [(each["interlocutor_id"], each["text"]) for each in tree["utterances"]]
            if len(pair) != 2 or any(who not in pair or not isinstance(text, str) for who, text in turns):
                raise KeyError("utterances")
        except (KeyError, TypeError) as error:
            raise ConfigError(Message("data.not-a-dialogue", file=file, key=error)) from None
        yield str(tree.get("dialogue_id", file.stem)), pair, turns, ""


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


def _read_own(file: SourceFile, recipe: Recipe) -> Iterator[Talk]:
    """A file of one's own: every example is a talk of its own."""
    numbers: dict[str, int] = {}
    for number, (unit, tree) in enumerate(trees_in(file), start=1):
        where = Message("data.of-file", name=unit, path=file.path)
        if not isinstance(tree, Mapping):
            raise ConfigError(Message("data.record-no-object", where=where, found=shown(tree)))
        target = tree.get(recipe.target)
        if not isinstance(target, str):
            raise ConfigError(Message("data.record-lacks-target", where=where, target=recipe.target))
        if recipe.speaker and tree.get(recipe.speaker) is None:
            raise ConfigError(Message("data.record-lacks-speaker", where=where, speaker=recipe.speaker))
        fields = {key: value for key, value in tree.items() if key != recipe.target}
        for key, value in fields.items():
            if value is None:
                fields[key] = ""
            elif isinstance(value, bool | int | float):
                fields[key] = str(value)
            elif not all(isinstance(each, str) for each in (value if isinstance(value, list) else [value])):
                raise ConfigError(Message("data.not-lines", key=key, where=where, value=shown(value)))
        who = str(tree.get(recipe.speaker)) if recipe.speaker else str(number)
        groups = numbers.setdefault(who, len(numbers)), -1
        names = {"speaker": who if recipe.speaker else "", "partner": ""}
        yield frozenset([who]), [{"name": str(unit), "fields": fields, "target": target, **names, "groups": groups}]


# --- recipes --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A recipe with one ablation and its source."""

    recipe: Recipe
    arm: str
    switches: Mapping[str, Switch]
    talks: Talks

    @property
    def shared_json(self) -> str:
        """All that the ablations of a recipe have in common."""
        recipe = self.recipe
        shared = [recipe.target, recipe.answers, recipe.context_turns, recipe.history_turns, recipe.speaker]
        return json.dumps([*shared, [asdict(section) for section in recipe.sections]])

    @property
    def arm_json(self) -> str:
        """What the ablation is, whatever its name."""
        return json.dumps(sorted(self.switches.items()))

    @property
    def sections(self) -> tuple[Section, ...]:
        """Those that are on."""
        return tuple(each for each in self.recipe.sections if self.switches[each.field] != "off")

    def records(self) -> Iterator[Record]:
        """Every example, with the shuffled fields of others."""
        shuffled = [field for field, switch in self.switches.items() if switch == "shuffled"]
        for _, records in self.talks.shuffle(shuffled) if shuffled else self.talks.read():
            yield from records


def resolve(spec: DataSpec) -> Resolved:
    """The recipe that a job names, with its ablation and its source."""
    recipe = read_recipe(spec.recipe or "shipped:persona")
    path = spec.path or recipe.source
    here = Path(path).expanduser()
    if not spec.path and not path.startswith("shipped:") and not here.is_absolute() and (recipe.folder / here).exists():
        path = str(recipe.folder / here)  # it counts from its recipe, unless it leads somewhere from here
    talks = open_talks(path, recipe)
    for section in recipe.sections:
        if section.field not in talks.fields:
            raise _no_field(section.field, talks.fields, recipe.name)
    arm, switches = ablation_of(recipe, spec.ablation)
    return Resolved(recipe=recipe, arm=arm, switches=switches, talks=talks)


def ablation_of(recipe: Recipe, name: str | None) -> tuple[str, Mapping[str, Switch]]:
    """The switches of an ablation: one that the recipe defines, or fields joined by `_and_`."""
    fields = [section.field for section in recipe.sections]
    on: dict[str, Switch] = dict.fromkeys(fields, "on")
    if name is not None and name in recipe.ablations:
        return name, {**on, **recipe.ablations[name]}
    if name is None or name == ALL_ON:
        return ALL_ON, on
    named = name.split("_and_")
    unknown = [field for field in named if field not in fields]
    if not unknown:
        return name, {field: "on" if field in named else "off" for field in fields}
    if len(named) > 1:
        raise _no_field(unknown[0], fields, recipe.name)
    known = [*recipe.ablations, ALL_ON, *fields]
    hint = hint_at(name, known, Message("data.known-ablations", known=", ".join(known)))
    raise ConfigError(Message("data.no-ablation", recipe=recipe.name, name=name, hint=hint))


def read_recipe(name: str) -> Recipe:
    """A recipe file, or one that ships."""
    path = SHIPPED / SHIPPED_RECIPES[name] if name in SHIPPED_RECIPES else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(Message("data.no-recipe", name=name, shipped=Choice(SHIPPED_RECIPES)))
    file = path.name
    try:
        tree = yaml.safe_load(read_text(path, text("data.a-recipe")))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = Message("data.at-line", line=mark.line + 1) if mark else ""
        why = getattr(error, "problem", error)
        raise ConfigError(Message("data.recipe-not-yaml", name=file, where=where, why=why)) from None
    if not isinstance(tree, Mapping):
        raise ConfigError(Message("data.recipe-no-fields", name=file))
    for key in tree:
        if key not in KEYS:
            raise unknown_key(str(key), KEYS, file)
    sections = tree.get("sections")
    if not isinstance(sections, list) or not sections:
        raise ConfigError(Message("data.sections-no-list", file=file))
    made = []
    for number, section in enumerate(sections, start=1):
        where = Message("data.section", number=number, file=file)
        if not isinstance(section, Mapping):
            raise ConfigError(Message("data.section-no-block", where=where, found=shown(section)))
        for key in section:
            if key not in SECTION_KEYS:
                raise unknown_key(str(key), SECTION_KEYS, str(where))
        role = section.get("role", "user")
        if role not in ("system", "user"):
            raise ConfigError(Message("data.section-role", where=where, role=shown(role)))
        template = _word(section, "template", where, "{text}")
        if "{text}" not in template:
            raise ConfigError(Message("data.template-no-text", where=where))
        field = _word(section, "field", where, None)
        budget, drop = _count(section, "budget_tokens", where), _count(section, "drop", where)
        made.append(Section(field=field, role=role, template=template, budget_tokens=budget, drop=drop))
    fields = [section.field for section in made]
    for field in fields:
        if fields.count(field) > 1:
            raise ConfigError(Message("data.section-twice", file=file, field=field))
    answers = tree.get("answers", "both")
    if answers not in ("first", "second", "both"):
        raise ConfigError(Message("data.unknown-answers", file=file, answers=shown(answers)))
    source, target = _word(tree, "source", file, "shipped:dialogues"), _word(tree, "target", file, "reply")
    ablations = tree.get("ablations") or {}
    if not isinstance(ablations, Mapping):
        raise ConfigError(Message("data.ablations-no-names", file=file))
    words: dict[Any, Switch] = {True: "on", False: "off", "on": "on", "off": "off", "shuffled": "shuffled"}
    arms: dict[str, dict[str, Switch]] = {}
    for name, switches in ablations.items():
        if not isinstance(switches or {}, Mapping):
            raise ConfigError(Message("data.ablation-no-switch", name=name, file=file))
        arm = arms[str(name)] = {}
        for field, switch in (switches or {}).items():
            if field not in fields:
                raise _no_field(str(field), fields, Message("data.ablation", name=name, file=file))
            if not isinstance(switch, str | bool) or switch not in words:
                fault = Message("data.unknown-switch", field=field, name=name, file=file, switch=shown(switch))
                raise ConfigError(fault)
            arm[str(field)] = words[switch]
    return Recipe(
        name=file,
        folder=path.parent,
        source=source,
        target=target,
        sections=tuple(made),
        ablations=arms,
        answers=answers,
        context_turns=_count(tree, "context_turns", file) or 12,
        history_turns=_count(tree, "history_turns", file) or 12,
        speaker=_word(tree, "speaker", file, None) if "speaker" in tree else None,
    )


def _word(tree: Mapping[Any, Any], key: str, where: Said, default: str | None) -> str:
    value = tree.get(key, default)
    if not isinstance(value, str) or not value:
        raise ConfigError(Message("data.key-no-text", key=key, where=where, value=shown(value)))
    return value


def _count(tree: Mapping[Any, Any], key: str, where: Said) -> int | None:
    value = tree.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(Message("data.no-count", key=key, where=where, value=shown(value)))
    return value


def _no_field(field: str, known: Collection[str], where: Said) -> ConfigError:
    hint = hint_at(field, known, Message("data.there-are", known=", ".join(known)))
    return ConfigError(Message("data.no-such-field", where=where, field=field, hint=hint))


# --- prompts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SectionCount:
    """How a section fared, in one example or over many."""

    field: str
    examples: int = 0  # in which the field holds something
    tokens: int = 0  # kept, with the section's template
    lost: int = 0
    cut: int = 0  # examples in which it was shortened
    dropped: int = 0  # examples in which nothing of it was left


def add_sections(sums: dict[str, SectionCount], more: Iterable[SectionCount]) -> None:
    """Count these to what was counted before, by field."""
    for each in more:
        before = sums.get(each.field, SectionCount(each.field))
        sums[each.field] = SectionCount(each.field, *map(add, _counted(before), _counted(each)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """What became of a record."""

    encoded: Encoded | None  # None: its answer does not fit
    rendered: Rendered | None
    target: str
    sections: tuple[SectionCount, ...]


@dataclass(slots=True, kw_only=True)
class _PromptPart:
    """A section of one example while it is being shortened."""

    section: Section
    template: str
    drop: int
    value: str | Sequence[str]
    whole_tokens: int = 0
    tokens: int = 0

    def text(self) -> str:
        if not self.value:
            return ""
        return self.template.replace("{text}", self.value if isinstance(self.value, str) else "\n".join(self.value))


@dataclass(frozen=True)
class Prompter:
    """A recipe's sections with what encodes them."""

    sections: tuple[Section, ...]
    encoder: Encoder

    def prompt(self, record: Mapping[str, Any]) -> Prompted:
        """The prompt and answer of one record."""
        target, cut = self._fit_target(str(record["target"]))
        if target is None:
            return Prompted(encoded=None, rendered=None, target="", sections=())
        parts = []
        for order, section in enumerate(self.sections):
            value = record["fields"].get(section.field)
            template = section.template.replace("{speaker}", str(record["speaker"]))
            part = _PromptPart(
                section=section,
                template=template.replace("{partner}", str(record["partner"])),
                # What has no number goes after all that have, the last first.
                drop=section.drop or LAST - order,
                value=value if isinstance(value, list) else str(value or ""),
            )
            part.whole_tokens = part.tokens = self.encoder.codec.count(part.text())
            if section.budget_tokens is not None:
                self._shorten(part, section.budget_tokens)
            parts.append(part)
        for _ in range(TRIES):
            rendered = self._render(parts, target)
            encoded = self.encoder.whole(rendered)
            excess = len(encoded.ids) - self.encoder.sequence
            if excess <= 0:
                break
            for part in sorted(parts, key=lambda part: part.drop):
                if excess > 0:
                    before = part.tokens
                    self._shorten(part, max(0, before - excess))
                    excess -= before - part.tokens
        else:
            raise ExampleError(Message("data.prompt-too-long"))
        counts = []
        for part in (part for part in parts if part.whole_tokens):
            lost = max(0, part.whole_tokens - part.tokens)
            was_cut, dropped = int(lost > 0 and part.tokens > 0), int(part.tokens == 0)
            counts.append(SectionCount(part.section.field, 1, part.tokens, lost, was_cut, dropped))
        encoded = replace(encoded, cut=cut)
        kept = encoded if encoded.loss_tokens else None
        return Prompted(encoded=kept, rendered=rendered, target=target, sections=tuple(counts))

    def _fit_target(self, target: str) -> tuple[str | None, bool]:
        """The answer, cut where even the emptiest prompt leaves no room for all of it; None: leave the example out."""
        least = len(self.encoder.whole(self._render((), target)).ids)
        if least <= self.encoder.sequence:
            return target, False
        ids, places = self.encoder.codec.encode_with_places(target)
        keep = len(ids) - (least - self.encoder.sequence)
        if self.encoder.overlong == "skip" or keep < 1:
            return None, False
        for count in range(keep, max(0, keep - 8), -1):  # a cut can split a word into more tokens than it was
            shorter = target[: places[count][0]]
            if shorter and len(self.encoder.whole(self._render((), shorter)).ids) <= self.encoder.sequence:
                return shorter, True
        return None, False

    def _shorten(self, part: _PromptPart, budget: int) -> None:
        """Keep as much of a section as fits into `budget` tokens, its template included."""
        codec = self.encoder.codec
        while part.value and part.tokens > budget:
            over = part.tokens - budget
            if isinstance(part.value, str):
                # Up to where the first token to go begins: a letter may be several tokens, and goes as a whole.
                _, places = codec.encode_with_places(part.value)
                part.value = part.value[: places[-over][0]].rstrip() if over < len(places) else ""
            else:
                at = 0
                while at < len(part.value) and over > 0:
                    over -= codec.count(part.value[at])
                    at += 1
                part.value = part.value[max(1, at) :]
            part.tokens = codec.count(part.text())

    def _render(self, parts: Sequence[_PromptPart], target: str) -> Rendered:
        system, user = (
            "\n\n".join(part.text() for part in parts if part.section.role == role and part.value)
            for role in ("system", "user")
        )
        turns = [Turn("system", system)] if system else []
        turns += [Turn("user", user or STAND_IN), Turn("assistant", target)]
        return self.encoder.template.render_pieces(turns, last_only=True)
