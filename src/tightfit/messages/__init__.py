"""What is said to people: a message is an id with its fields, and becomes text at the edge, in the reader's language.

    raise ModelError(Message("model.no-config", folder=shown(path)))
    print(text("train.saved", path=path))  # where it is shown at once

The texts stand one under the other, English and Chinese, in one file for each area: the area is the first word of the
id, so `model.no-config` is the entry `no-config` of `messages/model.txt`:

    no-config
        {folder} has no config.json
        {folder} 中没有 config.json

A text is one line, `\\n` in it begins another. It names its fields in braces, as `str.format` does. Some things are
added:

    {steps:# step|# steps}   one or many, with the number in place of #
    {way:capital}            with a capital letter, at the beginning of a sentence
    {cause:bare}             without its full stop
    {cause:stop}             with one
    {cause:sentence}         with a capital letter and a full stop
    [[ (port {port})]]       left out where the field is missing or None
    a field that is a Message, or a `Listing` of some, is put into the same language
    Chinese gets a space where it meets Latin letters or digits, and nowhere else; a field that is text stays as it is

The area `symptom` is the catalogue of symptoms, whose texts stand in `diagnose/symptoms/*.yaml` (see `symptoms.py`).

What a program decides, it decides from the id and the fields, never from the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
FOLDER = Path(__file__).parent
SYMPTOM = "symptom"
OPTIONAL = re.compile(r"\[\[([^\[\]]*\{[^\[\]]*)\]\]")

_spoken: Language = "en"


def speak(language: Language) -> None:
    """Have this process say everything in this language from now on."""
    global _spoken  # noqa: PLW0603
    _spoken = language


class Message:
    """Something to say. Equal where id and fields are; `str()` is its text in the language of this process."""

    __slots__ = ("fields", "id")

    def __init__(self, id: str, /, **fields: object) -> None:  # noqa: A002
        self.id, self.fields = id, fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and (self.id, self.fields) == (other.id, other.fields)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Message({', '.join([repr(self.id), *(f'{name}={value!r}' for name, value in self.fields.items())])})"

    def __str__(self) -> str:
        return self.text(_spoken)

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)

    def text(self, language: Language) -> str:
        filler = _Filler(language)
        made = filler.fill(self)
        return filler.put_back(space_chinese(made)) if language == "zh" else made


Joint = Literal["or", "and", ",", ";", "."]
_JOINTS: dict[Joint, tuple[tuple[str, str], tuple[str, str]]] = {
    "or": ((", ", " or "), ("、", " 或 ")),
    "and": ((", ", " and "), ("、", " 和 ")),
    ",": ((", ", ", "), ("，", "，")),
    ";": (("; ", "; "), ("；", "；")),
    ".": ((" ", " "), ("", "")),
}
"""Between most of them and before the last, in each of LANGUAGES; `.`: they are whole sentences."""


class Listing:
    """Words or messages in a row: `Listing(names, "and")` says `a, b and c`."""

    __slots__ = ("joint", "parts")

    def __init__(self, parts: Iterable[Message | str], joint: Joint = ",") -> None:
        self.parts, self.joint = tuple(parts), joint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listing) and (self.joint, self.parts) == (other.joint, other.parts)

    def __hash__(self) -> int:
        return hash((self.joint, self.parts))

    def __repr__(self) -> str:
        return f"Listing({self.parts!r}, {self.joint!r})"

    def __str__(self) -> str:
        return self.text(_spoken)

    def text(self, language: Language) -> str:
        filler = _Filler(language)
        return filler.put_back(filler.join(self))


Choice = partial(Listing, joint="or")  # words of which one is to be taken: `a, b or c`
Said = Message | str  # a message, or text that was made elsewhere: by a user, a log, another program


def id_of(said: Said) -> str | None:
    """Which message it is; None: text that was made elsewhere."""
    return said.id if isinstance(said, Message) else None


def message_of(error: BaseException) -> Said:
    """What an error says: the message that it was raised with, or its text, on one line."""
    said = error.args[0] if error.args else ""
    return said if isinstance(said, Message) else " ".join(str(error).split())


def say_why(error: OSError) -> str:
    """The system's own word for what went wrong, as the end of a sentence."""
    return (error.strerror or str(error)).lower()


def say(said: Said, language: Language) -> str:
    """The text of a message in a language; what is text already stays as it is."""
    return said.text(language) if isinstance(said, Message) else said


def change_texts(said: Said, change: Callable[[str], str]) -> Said:
    """The same with each text in it changed: cut, cleaned, its secrets struck out."""
    if isinstance(said, str):
        return change(said)

    def inside(value: object) -> object:
        if isinstance(value, Listing):
            return Listing((change_texts(part, change) for part in value.parts), value.joint)
        return change_texts(value, change) if isinstance(value, Message | str) else value

    return Message(said.id, **{name: inside(value) for name, value in said.fields.items()})


def bare(said: Said) -> str:
    """Its text without the full stop, for one who goes on with the sentence."""
    return str(said).rstrip(".。")


def end_sentence(said: Said) -> str:
    """Its text, with a full stop if it has none."""
    made = str(said)
    stop = "。" if _spoken == "zh" and (isinstance(said, Message) or re.search(f"[{_WIDE}]", made)) else "."
    return made if made.endswith((".", "!", "?", "。", "！", "？")) else made + stop


def as_json(said: object) -> object:
    """A message, or a field of one, as it is written into a record: the page says it in the language of its reader."""
    if isinstance(said, Message):
        return {"message": said.id, **{name: as_json(value) for name, value in said.fields.items()}}
    if isinstance(said, Listing):
        return {"list": [as_json(part) for part in said.parts], "joint": said.joint}
    return said if said is None or isinstance(said, str | int | float) else str(said)


def from_json(value: object) -> Said:
    """What `as_json` wrote. What this version does not know, or was written by hand, is shown as text."""
    try:
        made = _from_json(value)
    except RecursionError:
        return "?"
    if isinstance(made, Message):
        try:
            for language in LANGUAGES:
                made.text(language)
        except (KeyError, ValueError, TypeError, OSError):
            return ", ".join(str(part) for part in (made.id, *made.fields.values()))
    return made if isinstance(made, Message) else str(made)


def _from_json(value: object) -> object:
    if not isinstance(value, dict):
        return value
    fields = {str(name): _from_json(each) for name, each in value.items()}
    if isinstance(parts := value.get("list"), list) and str(value.get("joint")) in _JOINTS:
        return Listing(map(from_json, parts), value["joint"])
    said = fields.pop("message", None)
    area, _, name = str(said).partition(".")
    is_area = area == SYMPTOM or (area.isidentifier() and (FOLDER / f"{area}.txt").is_file())
    if is_area and name in texts_of(area):
        return Message(f"{area}.{name}", **fields)
    return ", ".join(str(part) for part in (said, *fields.values()) if part is not None)


def text(id: str, /, **fields: object) -> str:  # noqa: A002
    return Message(id, **fields).text(_spoken)


@cache
def texts_of(area: str) -> Mapping[str, tuple[str, ...]]:
    """Of one area: name → the text in each of LANGUAGES."""
    if area == SYMPTOM:
        from tightfit.messages.symptoms import read_texts  # needs YAML

        return read_texts()
    written = (FOLDER / f"{area}.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in written if line.strip() and not line.startswith("#")]
    size = 1 + len(LANGUAGES)
    entries = (lines[start : start + size] for start in range(0, len(lines), size))
    return {name: tuple(each[4:].replace("\\n", "\n") for each in texts) for name, *texts in entries}


def explain_field(block: Literal["levers", "job"], name: str, english: str) -> str:
    """What a lever or a field of a job means. The English stands on the field itself."""
    return english if _spoken == "en" else space_chinese(_chinese_fields()[block].get(name, english))


@cache
def _chinese_fields() -> Mapping[str, Mapping[str, str]]:
    import yaml

    made: Mapping[str, Mapping[str, str]] = yaml.safe_load((FOLDER / "fields.zh.yaml").read_text(encoding="utf-8"))
    return made


class _Filler(Formatter):
    def __init__(self, language: Language) -> None:
        self.language = language
        self.kept: list[str] = []  # text of others, in which no space may be set: a path, what a log says

    def fill(self, message: Message) -> str:
        area, _, name = message.id.partition(".")
        written, fields = texts_of(area)[name][LANGUAGES.index(self.language)], message.fields

        def fill_optional(found: re.Match[str]) -> str:
            names = [name for _, name, _, _ in self.parse(found[1]) if name is not None]
            return found[1] if all(fields.get(name) is not None for name in names) else ""

        return self.vformat(OPTIONAL.sub(fill_optional, written) if "[[" in written else written, (), fields)

    def join(self, listing: Listing) -> str:
        if not listing.parts:
            return ""
        *most, last = (str(self.format_field(part, "")) for part in listing.parts)
        between, before_last = _JOINTS[listing.joint][LANGUAGES.index(self.language)]
        return f"{between.join(most)}{before_last}{last}" if most else last

    def put_back(self, made: str) -> str:
        for place, text in enumerate(self.kept):
            made = made.replace(chr(_FIRST_KEPT + place), text)
        return made

    def format_field(self, value: Any, format_spec: str) -> Any:
        if "|" in format_spec:
            one, many = format_spec.split("|")
            return (one if value == 1 else many).replace("#", f"{value:,}")
        is_others = isinstance(value, str | Path)
        if isinstance(value, Message):
            value = self.fill(value)
        elif isinstance(value, Listing):
            value = self.join(value)
        if format_spec in ("bare", "capital", "sentence", "stop"):
            value, format_spec = _reshape(str(value), format_spec, self.language), ""
        if is_others and self.language == "zh" and space_chinese(str(value)) != str(value):
            self.kept.append(str(value))
            value = chr(_FIRST_KEPT + (len(self.kept) - 1))
        return super().format_field(value, format_spec)


_FIRST_KEPT = 0xE000  # marks of private use


def _reshape(text: str, spec: str, language: Language) -> str:
    """The same words at another place of a sentence, or as one."""
    if spec != "capital":
        text = bare(text)
    if spec in ("capital", "sentence"):
        text = text[:1].upper() + text[1:]
    return text + (("." if language == "en" else "。") if spec in ("sentence", "stop") else "")


_WIDE, _WIDE_MARK = "\u4e00-\u9fff", "\uff00-\uffef\u3000-\u303f"
_LATIN = "A-Za-z0-9\ue000-\uf8ff"  # and marks of private use, which stand for a name
_SPACES = (
    (re.compile(f"(?<=[{_WIDE}]) +(?=[{_WIDE}])"), ""),
    (re.compile(f" *([{_WIDE_MARK}]) *"), r"\1"),
    (re.compile(f"(?<=[{_WIDE}])(?=[{_LATIN}])|(?<=[{_LATIN}%])(?=[{_WIDE}])"), " "),
)


def space_chinese(text: str) -> str:
    """With a space where one script meets the other, and nowhere else."""
    for found, instead in _SPACES:
        text = found.sub(instead, text)
    return text
