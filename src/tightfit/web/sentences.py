"""What the planner, a diagnosis or a run says, in another language.

Its sentences are made in English, where the figures are at hand. Here they are recognised by their pattern and said
again. The pairs lie in `words/sentences.*.zh.yaml`. The English has its changing parts in braces:

    {name}         a sentence or a word of its own, which is looked up in turn
    {told_name}    likewise, and the pattern only holds where it is known
    {n_name}       a number
    {raw_name}     stays as it is: a path, or what a log says
    {word_name}    likewise, without a space in it
    [[ …]]         may be missing; in the other language it is said where its parts are there

What has no pattern stays English and is marked as such. A full stop at the end and a capital at the beginning make no
difference, for a cause stands alone here and inside another sentence there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from tightfit.messages import Language, Message, Said, change_texts, say, space_chinese

FOLDER = Path(__file__).with_name("words")
FILES = ("sentences.runs", "sentences", "sentences.errors", "sentences.worker")
"""In which order patterns are tried: who asks about a run has many sentences at once."""
DEEPEST = 6
"""Sentences within sentences."""
LONGEST, LONGEST_LIST = 2500, 24
"""Characters, and entries; what is longer is somebody's text."""
MOST_TRIES, MOST_PLACES = 200, 200
"""Parts of one sentence that are looked up, and places where a part of a pattern may end: a text that was made to fit
everything comes to an end here, and costs moments."""
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")
_HOLES = re.compile(r"\{(\w+)\}")
_KINDS = {"n": re.compile(r"[-+0-9.,]+"), "word": re.compile(r"\S+")}
_SEMICOLON, _COMMA = ("; ", "；"), (", ", "，")
_BETWEEN = re.compile(r"(?<=[.?]) (?=[A-Z-])")
_OWN = re.compile("[\u4e00-\u9fff]{2}")
"""What was told before."""
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Around the number of what stays as it is, until the spaces are right."""


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    is_foreign: bool
    """It is English in a page of another language."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Text, a part, text, a part … text: what stands between two parts is found from left to right."""

    texts: tuple[str, ...]
    names: tuple[str, ...]
    told: str
    mark: str
    """What a sentence of this pattern must hold: it is quickly seen, and few patterns have to be tried."""

    def parts(self, body: str) -> dict[str, str] | None:
        """What stands in the place of each part; None: it is another sentence."""
        first = self.texts[0]
        if self.mark not in body or _small(body[: len(first)]) != _small(first) or not body.endswith(self.texts[-1]):
            return None
        found: list[str] = []
        tries = MOST_PLACES

        def fits(number: int, start: int) -> bool:
            nonlocal tries
            if number == len(self.names):
                return start == len(body)
            text, is_last = self.texts[number + 1], number == len(self.names) - 1
            kind, end = _KINDS.get(self.names[number].partition("_")[0]), start
            while tries > 0:
                tries -= 1
                end = len(body) - len(text) if is_last else body.find(text, end + 1)
                if end <= start or (kind is not None and kind.fullmatch(body, start, end) is None):
                    return False  # a longer one is none either
                found.append(body[start:end])
                if fits(number + 1, end + len(text)):
                    return True
                found.pop()
                if is_last:
                    return False
            return False

        return dict(zip(self.names, found, strict=True)) if fits(0, len(first)) else None


@dataclass(frozen=True, slots=True)
class _Known:
    words: dict[str, str]
    patterns: tuple[_Pattern, ...]


@lru_cache(maxsize=4096)
def said_in(language: Language, english: Said) -> Sentence:
    if isinstance(english, Message):  # what an old record holds as text stands in it
        message = change_texts(english, lambda part: said_in(language, part).text if " " in part else part)
        return Sentence(say(message, language), is_foreign=False)
    if language == "en":
        return Sentence(english, is_foreign=False)
    teller = _Teller(_known(language))
    is_plain = len(english) <= LONGEST and _OPEN not in english
    told = teller.told(english, DEEPEST) if is_plain else None
    if told is None:
        is_word = " " not in english  # a name is the same everywhere
        return Sentence(english, is_foreign=not is_word and _OWN.search(english) is None)
    return Sentence(teller.whole(space_chinese(told)), is_foreign=False)


def pairs_of(language: str) -> Iterator[tuple[str, str]]:
    """What the program says, but for the catalogue: English, and the same in the other language."""
    for name in FILES:
        tree = _tree(FOLDER / f"{name}.{language}.yaml")
        yield from tree["words"].items()
        yield from ((english, told) for english, told in tree["sentences"])


@dataclass(slots=True)
class _Teller:
    """Says one sentence."""

    known: _Known
    kept: list[str] = field(default_factory=list)
    """What stays as it is."""
    tries: int = MOST_TRIES

    def told(self, english: str, depth: int) -> str | None:
        body = _body(english)
        found = self.known.words.get(_small(body))
        self.tries -= 1
        if found is None and depth and self.tries > 0:
            found = self._one_by_one(english, depth) or self._in_pieces(body, depth)
            if found is not None and found.endswith("。"):
                return found
        return found if found is None or body == english else f"{found}。"

    def whole(self, told: str) -> str:
        return re.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda found: self.kept[int(found[1])], told)

    def _one_by_one(self, english: str, depth: int) -> str | None:
        """Several sentences, where all are known."""
        sentences = _BETWEEN.split(english)
        if len(sentences) == 1:
            return None
        told = [self.told(each, depth - 1) for each in sentences]
        return None if None in told else "".join(filter(None, told))

    def _in_pieces(self, body: str, depth: int) -> str | None:
        """A list before anything else, where it must be one: the parts of a pattern may be of any length."""
        first = [_SEMICOLON, *([_COMMA] if body.count(" → ") > 1 else [])]
        found = self._listed(body, depth, *first) or self._by_pattern(body, depth)
        return found or self._listed(body, depth, _COMMA)

    def _by_pattern(self, body: str, depth: int) -> str | None:
        for pattern in self.known.patterns:
            found = pattern.parts(body)
            parts = None if found is None else self._parts(found, depth)
            if parts is not None:
                return _filled(pattern.told, parts)
        return None

    def _parts(self, found: dict[str, str], depth: int) -> dict[str, str] | None:
        parts = {}
        for name, said in found.items():
            if name.startswith(("raw_", "word_")):
                parts[name] = f"{_OPEN}{len(self.kept)}{_CLOSE}"
                self.kept.append(said)
                continue
            told = said if name.startswith("n_") else self.told(said.strip(), depth - 1)
            if told is None and name.startswith("told_"):
                return None
            parts[name] = said if told is None else told
        return parts

    def _listed(self, body: str, depth: int, *marks: tuple[str, str]) -> str | None:
        """`a; b` or `a, b`, where all are known."""
        for mark, instead in marks:
            places = [found.start() for found in re.finditer(re.escape(mark), body)]
            for place in places[:8] if len(places) < LONGEST_LIST else ():
                first = self.known.words.get(_small(body[:place])) or self._by_pattern(body[:place], depth - 1)
                rest = None if first is None else self.told(body[place + len(mark) :], depth)
                if first is not None and rest is not None:
                    return f"{first}{instead}{rest}"
        return None


def _body(text: str) -> str:
    return text[:-1] if text.endswith(".") and not text.endswith("..") else text


def _small(text: str) -> str:
    return text[:1].lower() + text[1:]


def _filled(told: str, parts: dict[str, str]) -> str:
    def optional(found: re.Match[str]) -> str:
        return found[1] if all(name in parts for name in _HOLES.findall(found[1])) else ""

    return _HOLES.sub(lambda found: parts[found[1]], _OPTIONAL.sub(optional, told))


# --- what is known --------------------------------------------------------------------------------


@cache
def _known(language: str) -> _Known:
    words: dict[str, str] = {}
    patterns: list[_Pattern] = []
    for english, told in pairs_of(language):
        for body in _variants(_body(english)):
            if _HOLES.search(body) is None:
                words.setdefault(_small(body), _filled(told, {}).removesuffix("。"))
            else:
                patterns.append(_pattern(body, told.removesuffix("。")))
    return _Known(words, tuple(patterns))


def _variants(english: str) -> Iterator[str]:
    """With and without what may be missing."""
    found = _OPTIONAL.search(english)
    if found is None:
        yield english
        return
    for inside in (found[1], ""):
        yield from _variants(f"{english[: found.start()]}{inside}{english[found.end() :]}")


def _pattern(english: str, told: str) -> _Pattern:
    pieces = _HOLES.split(english)
    texts = pieces[::2]
    mark = max((texts[0][1:], *texts[1:]), key=len)
    return _Pattern(tuple(texts), tuple(pieces[1::2]), told, mark)


_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Safe either way; the one in C is many times as fast."""


def _tree(path: Path) -> Any:
    return _LOADER(path.read_text(encoding="utf-8")).get_single_data()
