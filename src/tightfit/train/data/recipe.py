"""Recipes: which fields of an example make up its prompt, and ablations of them.

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
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tightfit.inputs.spelling import nearest, read_text, shown, unknown_key
from tightfit.messages import Choice, Message, Said, text
from tightfit.train.data.dialogues import Talks, open_talks
from tightfit.train.data.sources import SHIPPED
from tightfit.train.data.spec import DataSpec
from tightfit.types import ConfigError

Switch = Literal["on", "off", "shuffled"]

SHIPPED_RECIPES = {"shipped:persona": "persona.yaml"}

KEYS = ("source", "target", "sections", "ablations", "answers", "context_turns", "history_turns", "speaker")
SECTION_KEYS = ("field", "role", "template", "budget_tokens", "drop")
ALL_ON = "everything"


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
    ablations: tuple[tuple[str, tuple[tuple[str, Switch], ...]], ...] = ()
    answers: Literal["first", "second", "both"] = "both"
    """Whose turns are learned: the one who opens the dialogue, the other, or both."""
    context_turns: int = 12
    history_turns: int = 12
    speaker: str | None = None
    """Of a file of your own: the field that says who answers, to split by."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A recipe with one ablation and its source."""

    recipe: Recipe
    arm: str
    switches: tuple[tuple[str, Switch], ...]
    talks: Talks

    @property
    def name(self) -> str:
        return self.talks.name

    @property
    def files(self) -> tuple[Path, ...]:
        return self.talks.files

    @property
    def said(self) -> tuple[Message, ...]:
        return self.talks.said

    @property
    def shared_json(self) -> str:
        """All that the ablations of a recipe have in common."""
        recipe = self.recipe
        shared = [recipe.target, recipe.answers, recipe.context_turns, recipe.history_turns, recipe.speaker]
        return json.dumps([*shared, [asdict(section) for section in recipe.sections]])

    @property
    def arm_json(self) -> str:
        """What the ablation is, whatever its name."""
        return json.dumps(sorted(self.switches))

    @property
    def json(self) -> str:
        """For the processes that build prompts."""
        sections = [asdict(each) for each in self.recipe.sections if dict(self.switches)[each.field] != "off"]
        return json.dumps({"name": self.recipe.name, "sections": sections})

    def records(self) -> Iterator[dict[str, Any]]:
        """Every example, with the shuffled fields of others."""
        shuffled = frozenset(field for field, switch in self.switches if switch == "shuffled")
        return self.talks.records(shuffled)


def resolve(spec: DataSpec) -> Resolved:
    """The recipe that a job names, with its ablation and its source."""
    recipe = read_recipe(spec.recipe or "shipped:persona")
    path = spec.path or recipe.source
    talks = open_talks(
        path if spec.path or path.startswith("shipped:") else _beside(recipe.folder, path),
        target=recipe.target,
        answers=recipe.answers,
        context_turns=recipe.context_turns,
        history_turns=recipe.history_turns,
        speaker=recipe.speaker,
    )
    for section in recipe.sections:
        if section.field not in talks.fields:
            raise _no_field(section.field, talks.fields, recipe.name)
    arm, switches = ablation_of(recipe, spec.ablation)
    return Resolved(recipe=recipe, arm=arm, switches=switches, talks=talks)


def _beside(folder: Path, path: str) -> str:
    """A source's path counts from its recipe, unless it leads somewhere from here."""
    here = Path(path).expanduser()
    return path if here.is_absolute() or not (folder / here).exists() else str(folder / here)


def ablation_of(recipe: Recipe, name: str | None) -> tuple[str, tuple[tuple[str, Switch], ...]]:
    """The switches of an ablation: one that the recipe defines, or fields joined by `_and_`."""
    fields = [section.field for section in recipe.sections]
    on: dict[str, Switch] = dict.fromkeys(fields, "on")
    defined = dict(recipe.ablations)
    if name is None:
        return ALL_ON, tuple(on.items())
    if name in defined:
        return name, tuple((on | dict(defined[name])).items())
    if name == ALL_ON:
        return ALL_ON, tuple(on.items())
    named = name.split("_and_")
    unknown = [field for field in named if field not in fields]
    if not unknown:
        return name, tuple((field, "on" if field in named else "off") for field in fields)
    if len(named) > 1:
        raise _no_field(unknown[0], fields, recipe.name)
    known = [*defined, ALL_ON, *fields]
    close = nearest(name, known)
    hint = (
        Message("data.did-you-mean", close=close) if close else Message("data.known-ablations", known=", ".join(known))
    )
    raise ConfigError(Message("data.no-ablation", recipe=recipe.name, name=name, hint=hint))


# --- reading --------------------------------------------------------------------------------------


def read_recipe(name: str) -> Recipe:
    """A recipe file, or one that ships."""
    path = SHIPPED / SHIPPED_RECIPES[name] if name in SHIPPED_RECIPES else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(Message("data.no-recipe", name=name, shipped=Choice(SHIPPED_RECIPES)))
    try:
        tree = yaml.safe_load(read_text(path, text("data.a-recipe")))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = Message("data.at-line", line=mark.line + 1) if mark else ""
        raise ConfigError(
            Message("data.recipe-not-yaml", name=path.name, where=where, why=getattr(error, "problem", error))
        ) from None
    if not isinstance(tree, Mapping):
        raise ConfigError(Message("data.recipe-no-fields", name=path.name))
    file = path.name
    for key in tree:
        if key not in KEYS:
            raise unknown_key(str(key), KEYS, file)
    sections = tree.get("sections")
    if not isinstance(sections, list) or not sections:
        raise ConfigError(Message("data.sections-no-list", file=file))
    made = tuple(_section(each, number, file) for number, each in enumerate(sections, start=1))
    fields = [section.field for section in made]
    for field in fields:
        if fields.count(field) > 1:
            raise ConfigError(Message("data.section-twice", file=file, field=field))
    answers = tree.get("answers", "both")
    if answers not in ("first", "second", "both"):
        raise ConfigError(Message("data.unknown-answers", file=file, answers=shown(answers)))
    return Recipe(
        name=file,
        folder=path.parent,
        source=_word(tree, "source", file, "shipped:dialogues"),
        target=_word(tree, "target", file, "reply"),
        sections=made,
        ablations=tuple(_ablations(tree.get("ablations") or {}, fields, file)),
        answers=answers,
        context_turns=_count(tree, "context_turns", file) or 12,
        history_turns=_count(tree, "history_turns", file) or 12,
        speaker=_word(tree, "speaker", file, None) if "speaker" in tree else None,
    )


def _section(tree: Any, number: int, file: str) -> Section:
    where = Message("data.section", number=number, file=file)
    if not isinstance(tree, Mapping):
        raise ConfigError(Message("data.section-no-block", where=where, found=shown(tree)))
    for key in tree:
        if key not in SECTION_KEYS:
            raise unknown_key(str(key), SECTION_KEYS, str(where))
    role = tree.get("role", "user")
    if role not in ("system", "user"):
        raise ConfigError(Message("data.section-role", where=where, role=shown(role)))
    template = _word(tree, "template", where, "{text}")
    if "{text}" not in template:
        raise ConfigError(Message("data.template-no-text", where=where))
    return Section(
        field=_word(tree, "field", where, None),
        role=role,
        template=template,
        budget_tokens=_count(tree, "budget_tokens", where),
        drop=_count(tree, "drop", where),
    )


def _ablations(tree: Any, fields: list[str], file: str) -> Iterator[tuple[str, tuple[tuple[str, Switch], ...]]]:
    if not isinstance(tree, Mapping):
        raise ConfigError(Message("data.ablations-no-names", file=file))
    words: dict[Any, Switch] = {True: "on", False: "off", "on": "on", "off": "off", "shuffled": "shuffled"}
    for name, switches in tree.items():
        if not isinstance(switches or {}, Mapping):
            raise ConfigError(Message("data.ablation-no-switch", name=name, file=file))
        for field, switch in (switches or {}).items():
            if field not in fields:
                raise _no_field(str(field), fields, Message("data.ablation", name=name, file=file))
            if not isinstance(switch, str | bool) or switch not in words:
                raise ConfigError(
                    Message("data.unknown-switch", field=field, name=name, file=file, switch=shown(switch))
                )
        yield str(name), tuple((str(field), words[switch]) for field, switch in (switches or {}).items())


def _word(tree: Mapping[Any, Any], key: str, where: Said, default: str | None) -> str:
    value = tree.get(key, default)
    if not isinstance(value, str) or not value:
        raise ConfigError(Message("data.key-no-text", key=key, where=where, value=shown(value)))
    return value


def _count(tree: Mapping[Any, Any], key: str, where: Said) -> int | None:
    value = tree.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(Message("data.no-count", key=key, where=where, value=shown(value)))
    return value


def _no_field(field: str, known: Any, where: Said) -> ConfigError:
    close = nearest(field, known)
    hint = Message("data.did-you-mean", close=close) if close else Message("data.there-are", known=", ".join(known))
    return ConfigError(Message("data.no-such-field", where=where, field=field, hint=hint))
