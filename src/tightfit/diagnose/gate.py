"""Which lines of a log are worth a look: a sieve of words in front of some hundreds of regular expressions.

Trying every expression on every line would take minutes for a log of some size. So each expression is asked, once, for
a word that any text it matches must contain as a whole word; a piece of the log is broken into its set of words, which
costs the same however many expressions there are; and only where a word of the sieve occurs, the lines around it are
looked at, and of the expressions only those that wait for this word.

The word is found by reading the expression: a run of plain letters with something that is no letter on either side of
it. An expression without one is refused when the catalogue is read, and says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

WORDS = bytes((c + 32 if 65 <= c <= 90 else c if 97 <= c <= 122 or c == 95 else 32) for c in range(256))
"""For bytes.translate: small letters and underscores stay, all else is a space."""
ZEROS = bytes(48 if 49 <= c <= 57 else c for c in range(256))
"""Every digit is a zero: what is left of a line is its kind."""
FLAT = bytes((c + 32 if 65 <= c <= 90 else 10 if c == 13 else c) for c in range(256))
"""Small letters; a drawing of a progress bar ends like a line."""

_UNKNOWN, _EDGE, _MAYBE = "\0", "\1", "\2"
"""In the reading of an expression: anything; no letter; no letter, or nothing."""
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


@dataclass(frozen=True, slots=True)
class Mark:
    """What a text must contain before an expression is worth trying on it."""

    word: str  # as a whole word
    runs: tuple[bytes, ...]  # all of them somewhere, in small letters
    digits: tuple[bytes, ...] | None = None
    """One of these numbers; none: whatever the numbers in a text are, it makes no difference; empty: it may."""

    def is_in_kind(self, kind: bytes) -> bool:
        """Whether a line could have all runs, to judge by what is left of it with zeros for digits."""
        return all(run.translate(ZEROS) in kind for run in self.runs)


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
    (plain,) = _Reader(pattern, coarse=True).branches()
    branches = [plain] if _best_word(plain, dull=False) else _Reader(pattern).branches()
    words = {_best_word(branch) for branch in branches}
    if not all(words):
        raise ValueError(f"{pattern!r} has no whole plain word that it always matches: add one, with \\b beside it")
    found = sorted(re.split(f"[{_UNKNOWN}{_EDGE}{_MAYBE}]", plain), key=len, reverse=True)
    runs = tuple(run.encode() for run in found if len(run) > 2)
    digits: tuple[bytes, ...] | None = None
    if re.search(r"\d", re.sub(r"\{\d*,?\d*\}|\\\d", "", pattern)):  # it asks for numbers by name
        try:
            asked = [re.findall(r"-?\d+", branch) for branch in _Reader(pattern).branches()]
        except ValueError:
            asked = [[]]
        digits = tuple({max(numbers, key=len).encode() for numbers in asked}) if all(asked) else ()
    return tuple(Mark(word, runs, digits) for word in sorted(words))


def _best_word(branch: str, *, dull: bool = True) -> str:
    """The longest run of letters with a known non-letter on both sides, if possible one that not every log is full of;
    empty: there is none."""
    words = []
    for found in re.finditer(r"[a-z_]{3,}", branch):
        before = branch[: found.start()].rstrip(_MAYBE)[-1:]
        after = branch[found.end() :].lstrip(_MAYBE)[:1]
        is_whole = all(side and side != _UNKNOWN and not side.isalpha() and side != "_" for side in (before, after))
        if is_whole and (dull or found[0] not in _DULL):
            words.append(found[0])
    return max(words, key=lambda each: (each not in _DULL, len(each)), default="")


class _Reader:
    """A regular expression as the plain texts that it asks for; everything else in it is an unknown.

    Read coarsely, choices are unknowns too; otherwise each makes a text of its own.
    """

    def __init__(self, pattern: str, *, coarse: bool = False) -> None:
        self.pattern = pattern
        self.coarse = coarse
        self.at = 0

    def branches(self) -> list[str]:
        done: list[str] = []
        current = [""]
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.pattern[self.at] == "|":
                self.at += 1
                done += current
                current = [""]
                continue
            atoms = self._quantify(self._atom())
            if len(current) * len(atoms) > _MOST_BRANCHES:
                raise ValueError(f"{self.pattern!r} has too many alternatives: make it several expressions")
            current = [a + b for a, b in product(current, atoms)]
        return done + current

    def _atom(self) -> list[str]:
        letter = self.pattern[self.at]
        self.at += 1
        if letter == "(":
            return self._group()
        if letter == "[":
            start = self.at
            self.at += 1 if self.pattern[self.at] != "^" else 2
            while self.pattern[self.at] != "]":
                self.at += 2 if self.pattern[self.at] == "\\" else 1
            body = self.pattern[start : self.at]
            self.at += 1
            if not body.startswith("^") and len(set(body.lower())) == 1:
                return [body[0].lower()]
            # A set that has no letter in it is at least an edge.
            has_letter = any(each.isalpha() or each in "_\\" for each in body)
            return [_UNKNOWN if body.startswith("^") or has_letter else _EDGE]
        if letter == "\\":
            escaped = self.pattern[self.at]
            self.at += 1
            if escaped in "bdsAZtn":
                return [_EDGE]
            return [_UNKNOWN if escaped.isalpha() else escaped]
        if letter in "^$":
            return [_EDGE]
        return [_UNKNOWN if letter == "." else letter.lower()]

    def _group(self) -> list[str]:
        head = ""
        if self.pattern.startswith("?", self.at):
            end = self.at + 1
            while self.pattern[end] not in ":=!<>)P":
                end += 1
            if self.pattern[end] in "P<" and self.pattern[end + 1 : end + 2] not in ("=", "!"):
                end = self.pattern.index(">", end)
            elif self.pattern[end] == "<":
                end += 1
            head = self.pattern[self.at : end + 1]
            self.at = end + 1
            if head.endswith(")"):
                return [""]
        inner = self.branches()
        self.at += 1
        if head.endswith("=") or head.endswith("!"):
            return [_UNKNOWN]  # a look around: it takes no text, and what is beside it is not known to be an edge
        inner = list(dict.fromkeys(inner))
        return [_UNKNOWN] if self.coarse and len(inner) > 1 else inner

    def _quantify(self, atoms: list[str]) -> list[str]:
        letter = self.pattern[self.at : self.at + 1]
        if letter == "" or letter not in "?*+{":
            return atoms
        least_one = letter == "+"
        if letter == "{":
            end = self.pattern.index("}", self.at)
            least_one = self.pattern[self.at + 1] not in "0,"
            self.at = end
        self.at += 1
        if self.pattern[self.at : self.at + 1] in ("?", "+"):
            self.at += 1
        no_letters = all(not any(each.isalpha() or each in "_\0" for each in atom) for atom in atoms)
        if least_one:
            return [_EDGE] if no_letters else [atom + _UNKNOWN for atom in atoms]
        if no_letters:
            return [_MAYBE]
        return [_UNKNOWN] if self.coarse or letter != "?" else [*atoms, ""]
