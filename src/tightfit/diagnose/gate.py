"""Which lines of a log are worth a look: a sieve of words in front of some hundreds of regular expressions.

Trying every expression on every line would take minutes for a log of some size. So each expression is asked, once, for
a word that any text it matches must contain as a whole word; a piece of the log is broken into its set of words, which
costs the same however many expressions there are; and only where a word of the sieve occurs, the lines around it are
looked at, and of the expressions only those that wait for this word.

The word is found by reading the expression: a run of plain letters with something that is no letter on either side of
it. An expression without one is refused when the catalogue is read, and says so.

Where an expression is tried, it first asks whether a text has one of the runs of letters in it without which it cannot
match: that takes a microsecond, and an expression of many alternatives fifty.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

_parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")  # how Python itself reads one
WORDS = bytes((c + 32 if 65 <= c <= 90 else c if 97 <= c <= 122 or c == 95 else 32) for c in range(256))
"""For bytes.translate: small letters and underscores stay, all else is a space."""
ZEROS = bytes(48 if 49 <= c <= 57 else c for c in range(256))  # digits are zeros: what is left of a line is its kind
FLAT = bytes((c + 32 if 65 <= c <= 90 else 10 if c == 13 else c) for c in range(256))
"""Small letters; a drawing of a progress bar ends like a line."""

_UNKNOWN, _EDGE, _MAYBE = "\0", "\1", "\2"  # in a reading: anything; no letter; no letter, or nothing
_NO_LETTERS = {_parser.CATEGORY_DIGIT, _parser.CATEGORY_SPACE, (48, 57)}  # in a set of characters
_MOST_BRANCHES = 64
_DULL = frozenset(
    """accelerate accumulation all and any are argument at attention available avg_loss batch be but bytes can cannot
    cast checkpoint code command compiled config configuration connect connection constraint contains cpu cuda
    current data dataset dataset_info deepspeed device directory distributed error errors evaluation event
    exception exist exit expected failed file files find finished following for found from function gpu grad_norm
    gradient gradients greater has have host image index info initialize initialized initializing input install
    installed internal is job key labels limit line lm_loss load location loss mean_loss memory messages missing
    model module modules most name named need network no node not number of on open operation optimizer out output
    padding parameter parameters parse path please port precision probably process processes processor prompt
    python query question rank ranks reached read real received rejected remote required requires response role
    row run running runtime runtimeerror same samples seconds sequence server service set should signal since size
    source space specified split stage status step system target temperature template tensor tensors text that the
    this thread time to token tokenizer torch total_loss train train_loss trainer training transformers type
    unable unknown use using validation value valueerror variable vocabulary warning was weight weights when with
    worker workers world_size you your zero""".split()
)
"""Words that ordinary logs are full of: only where an expression has no better one."""


_SHORTEST_RUN = 3
_OPENING = re.compile(r"""^(?:\\b|\['"\]\?)+""")
_CAPITAL = re.compile(r"(\(\?P|\\.)|[A-Z]")


class Expression:
    """A regular expression that is compiled when it is first used: a log needs a few of some hundreds."""

    def __init__(self, text: str, flags: re.RegexFlag = re.IGNORECASE) -> None:
        self.text, self._flags = text, flags
        self.is_anchored = text.startswith("^")  # it asks for the beginning of a message

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.text, self._flags)

    @cached_property
    def _needed(self) -> tuple[str, ...]:
        """A text that it matches has one of these in it, in small letters; empty: nobody knows."""
        runs = tuple({longest_run(each) for each in alternatives(self.text)})
        return runs if min(map(len, runs)) >= _SHORTEST_RUN else ()

    def search(self, text: str) -> re.Match[str] | None:
        return self.compiled.search(text) if self._has_run(text.lower()) else None

    def _has_run(self, flat: str) -> bool:
        for run in self._needed:
            if run in flat:
                return True
        return not self._needed

    @cached_property
    def _flat(self) -> re.Pattern[str]:
        """The same in small letters, without what makes no difference at its beginning: if that is plain letters then,
        they are looked for quickly."""
        return re.compile(_CAPITAL.sub(lambda found: found[1] or found[0].lower(), _OPENING.sub("", self.text)))

    def may_match(self, flat: str) -> bool:
        """Of an expression of the catalogue; `flat`: in small letters."""
        return self._has_run(flat) and self._flat.search(flat) is not None


@dataclass(frozen=True, slots=True)
class Mark:
    """What a text must contain before an expression is worth trying on it."""

    word: str  # as a whole word
    runs: tuple[bytes, ...]  # all of them somewhere, in small letters
    digits: tuple[bytes, ...] | None = None
    """One of these numbers; none: whatever the numbers in a text are, it makes no difference; empty: it may."""


def alternatives(pattern: str) -> list[str]:
    """An expression as those that it is made of with `|` between them."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif letter == "[":
            at = pattern.index("]", at + 2)
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "|" and depth == 0:
            parts.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*parts, pattern[start:]]


def marks_of(pattern: str) -> tuple[Mark, ...]:
    """One for each word that a match may be known by. ValueError: there is a way to match without one."""
    expression = _parser.parse(pattern)
    (plain,) = _texts(expression, coarse=True)
    branches = [plain] if _best_word(plain, dull=False) else _texts(expression)
    words = {_best_word(branch) for branch in branches}
    if not all(words):
        raise ValueError(f"{pattern!r} has no whole plain word that it always matches: add one, with \\b beside it")
    runs = tuple(run.encode() for run in _runs(plain) if len(run) > 2)
    digits: tuple[bytes, ...] | None = None
    if re.search(r"\d", re.sub(r"\{\d*,?\d*\}|\\\d", "", pattern)):  # it asks for numbers by name
        try:
            asked = [re.findall(r"-?\d+", branch) for branch in _texts(expression)]
        except ValueError:
            asked = [[]]
        digits = tuple({max(numbers, key=len).encode() for numbers in asked}) if all(asked) else ()
    return tuple(Mark(word, runs, digits) for word in sorted(words))


def longest_run(pattern: str) -> str:
    """The longest text that whatever an expression matches has in it, in small letters; empty: there is none."""
    (plain,) = _texts(_parser.parse(pattern), coarse=True)
    return _runs(plain)[0]


def _runs(plain: str) -> list[str]:
    """What a reading asks for by the letter, the longest first."""
    return sorted(re.split(f"[{_UNKNOWN}{_EDGE}{_MAYBE}]", plain), key=len, reverse=True)


def _best_word(branch: str, *, dull: bool = True) -> str:
    """The longest run of letters with a known non-letter on both sides, if possible one that not every log is full of;
    empty: there is none."""
    words = []
    for found in re.finditer(r"[a-z_]{3,}", branch):
        before = branch[: found.start()].rstrip(_MAYBE)[-1:]
        after = branch[found.end() :].lstrip(_MAYBE)[:1]
        is_whole = all(side and not _is_letter(side) for side in (before, after))
        if is_whole and (dull or found[0] not in _DULL):
            words.append(found[0])
    return max(words, key=lambda each: (each not in _DULL, len(each)), default="")


def _texts(expression: Any, *, coarse: bool = False) -> list[str]:
    """The plain texts that an expression, as Python reads it, asks for; everything else in it is an unknown. Read
    coarsely, choices are unknowns too; otherwise each makes a text of its own."""

    def read(parts: Any) -> list[str]:
        found = [""]
        for operation, given in parts.data:
            if operation is _parser.LITERAL:  # mostly
                letter = chr(given).lower()
                found = [before + letter for before in found]
                continue
            texts = list(dict.fromkeys(read_one(operation, given)))
            texts = [_UNKNOWN] if coarse and len(texts) > 1 else texts
            if len(found) * len(texts) > _MOST_BRANCHES:
                raise ValueError("there are too many alternatives: make it several expressions")
            found = [before + text for before in found for text in texts]
        return found

    def read_one(operation: Any, given: Any) -> list[str]:
        match operation:
            case _parser.AT:
                return [_EDGE]
            case _parser.BRANCH:
                return [text for branch in given[1] for text in read(branch)]
            case _parser.SUBPATTERN:
                return read(given[-1])
            case _parser.IN:
                letters = [chr(each).lower() for kind, each in given if kind is _parser.LITERAL]
                if len(letters) < len(given):  # a set that has no letter in it is at least an edge
                    others = {each for kind, each in given if kind is not _parser.LITERAL}
                    return [_EDGE if others <= _NO_LETTERS and not any(map(_is_letter, letters)) else _UNKNOWN]
                return letters if any(map(_is_letter, letters)) else [_EDGE]
            case _parser.MAX_REPEAT | _parser.MIN_REPEAT:
                least, most, inner = given
                texts = read(inner)
                if not any(_is_letter(each) for text in texts for each in text):
                    return [_EDGE if least else _MAYBE]
                if least:
                    return [text + _UNKNOWN for text in texts]
                return [*texts, ""] if most == 1 else [_UNKNOWN]
        return [_UNKNOWN]  # any letter; or a look around: it takes no text, and what is beside it is no known edge

    return read(expression)


def _is_letter(each: str) -> bool:
    return each.isalpha() or each in (_UNKNOWN, "_")
