"""What the planner says, in another language.

Its sentences are made in English, where the figures are at hand. Here they are recognised by their pattern and said
again: `words/sentences.zh.yaml` has the pairs, English with its changing parts in braces, and the same in the other
language. A changing part may be a sentence or a word of its own, and is looked up in turn; one whose name begins with
`n_` is a number. What has no pattern stays English and is marked as such.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache

import yaml

from tightfit.web.words import FOLDER

DEEPEST = 4
"""Sentences within sentences."""
_BRACES = re.compile(r"\{(\w+)\}")
_WIDE, _WIDE_MARK = "\u4e00-\u9fff", "\uff00-\uffef\u3000-\u303f"
_SPACES = (
    (re.compile(f"(?<=[{_WIDE}]) +(?=[{_WIDE}])"), ""),
    (re.compile(f" *([{_WIDE_MARK}]) *"), r"\1"),
    (re.compile(f"(?<=[{_WIDE}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9%])(?=[{_WIDE}])"), " "),
)
"""Where one script meets the other there is a space, and nowhere else."""


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    is_foreign: bool
    """It is English in a page of another language."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    english: re.Pattern[str]
    told: str


@lru_cache(maxsize=4096)
def said_in(language: str, english: str) -> Sentence:
    if language == "en":
        return Sentence(english, is_foreign=False)
    told = _told(language, english, DEEPEST)
    if told is None:
        return Sentence(english, is_foreign=" " in english)  # a name is the same everywhere
    for found, instead in _SPACES:
        told = found.sub(instead, told)
    return Sentence(told, is_foreign=False)


def _told(language: str, english: str, depth: int) -> str | None:
    words, patterns = _known(language)
    if english in words:
        return words[english]
    if not depth:
        return None
    for pattern in patterns:
        found = pattern.english.fullmatch(english)
        if found:
            parts = {name: _told(language, part, depth - 1) or part for name, part in found.groupdict().items()}
            return pattern.told.format(**parts)
    return None


@cache
def _known(language: str) -> tuple[dict[str, str], tuple[_Pattern, ...]]:
    tree = yaml.safe_load((FOLDER / f"sentences.{language}.yaml").read_text(encoding="utf-8"))
    return dict(tree["words"]), tuple(_Pattern(_compiled(english), told) for english, told in tree["sentences"])


def _compiled(english: str) -> re.Pattern[str]:
    pieces = _BRACES.split(english)
    return re.compile(
        "".join(_group(piece) if place % 2 else re.escape(piece) for place, piece in enumerate(pieces)), re.DOTALL
    )


def _group(name: str) -> str:
    return f"(?P<{name}>{'[-+0-9.,]+' if name.startswith('n_') else '.+?'})"
