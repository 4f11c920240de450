"""How keys and values in a user's file are spelt, and the one sentence for each that is not.

A file that some other program reads is full of traps: a misspelt key that the program ignores without
a word, a number in quotes, `1e-4` which YAML takes for text. `Fields` reads one block of such a file
key by key, with the kind that each value must have; whatever is wrong becomes a `ConfigError` that
names the key by its full path and says what would have been right.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tightfit.messages import Choice, Message, Said, say_why, text
from tightfit.types import ConfigError

if TYPE_CHECKING:
    import yaml

LARGEST = 2**63 - 1  # no count in any of these files can mean more; what is larger was a slip of the finger


MOST_TEXT_BYTES = 16 << 20
"""The longest config, job file or index that anybody writes is far below; what is longer is data, or has no end."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that `word` was probably meant to be; None when nothing is close."""
    by_fold = {fold(name): name for name in known}
    close = get_close_matches(fold(word), by_fold, n=5, cutoff=cutoff)
    return next((by_fold[name] for name in close if _is_slip(fold(word), name)), None)


def _is_slip(word: str, name: str) -> bool:
    """Whether two words that look alike can mean the same. `warmup_steps` and `max_steps` share most of their letters
    and nothing of their meaning: each part of the shorter name must have its like in the longer one."""
    fewer, more = sorted((word.strip("_").split("_"), name.strip("_").split("_")), key=len)
    if len(more) == 1 or SequenceMatcher(None, "".join(fewer), "".join(more)).ratio() > 0.9:
        return True
    return all(get_close_matches(part, more, n=1) for part in fewer)


def find_slip(word: str, known: Iterable[str]) -> str | None:
    """The known word of which `word` is a slip of the fingers, or a longer or shorter form; None: it is another word.

    `nearest` forgives more: to it `wandb_project` looks like `swanlab_project`.
    """
    close = nearest(word, known, cutoff=0.8)
    if close is None:
        return None
    plain, right = fold(word).replace("_", ""), fold(close).replace("_", "")
    is_form = plain.startswith(right) or right.startswith(plain)
    return close if is_form or _slips(plain, right) <= max(1, len(right) // 6) else None


def _slips(word: str, other: str) -> int:
    """Letters to add, drop, change or swap with their neighbour."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, 1):
        older, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted)))
            if i > 1 and j > 1 and letter == other[j - 2] and word[i - 2] == wanted:
                row[j] = min(row[j], older[j - 2] + 1)
    return row[-1]


def suggest(word: str, known: Iterable[str]) -> Message:
    """The tail of a message about a word that is not known: which one was meant, or which there are."""
    words = list(known)
    close = nearest(word, words)
    return Message("inputs.did-you-mean", close=close) if close else Message("inputs.it-takes", words=Choice(words))


def unknown_key(key: str, known: Iterable[str], where: Said, *, aside: Said = "") -> ConfigError:
    """The error for a key that nobody reads. `aside` says what the file's own program would do with it."""
    names = sorted(known)
    hint = suggest(key, names) if nearest(key, names) or len(names) <= 8 else None
    return ConfigError(Message("inputs.unknown-key", key=shown(key), where=where, hint=hint, aside=aside or None))


def read_text(path: Path, kind: Said) -> str:
    """The text of a file that should hold `kind`. Devices, pipes and files without end are refused, not read."""
    try:
        with open_regular(path) as file:
            data = file.read(MOST_TEXT_BYTES + 1)
        if len(data) > MOST_TEXT_BYTES:
            raise ConfigError(Message("inputs.file-too-large", path=path, most=MOST_TEXT_BYTES >> 20, kind=kind))
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    except NotOrdinary:
        raise ConfigError(Message("inputs.unreadable", path=path, why=Message("inputs.not-ordinary"))) from None
    except OSError as error:
        raise ConfigError(Message("inputs.unreadable", path=path, why=say_why(error))) from None
    except UnicodeDecodeError:
        raise ConfigError(Message("inputs.not-utf8", name=path.name, kind=kind)) from None
    except ValueError as error:  # a path that no file system can hold
        raise ConfigError(Message("inputs.unreadable", path=shown(str(path)), why=str(error))) from None


class NotOrdinary(OSError):
    """A pipe or a device."""


def open_regular(path: Path) -> BinaryIO:
    """The file, opened only if it is an ordinary one: a pipe would be waited for, and a device never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            raise NotOrdinary(errno.EINVAL, text("inputs.not-ordinary"))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def listed(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def check_keys(tree: object, file: str) -> None:
    """Refuse keys that are no text, at any depth: YAML has numbers, dates, null and `yes` as keys too."""
    for place, here in walk(tree):
        for key in here if isinstance(here, dict) else ():
            if not isinstance(key, str):
                raise ConfigError(Message("inputs.not-a-key", key=shown(key), place=place or None, file=file))


def walk(tree: object) -> Iterator[tuple[str, object]]:
    """Every value at any depth, the blocks and lists too, with the dotted place of its key."""
    waiting: list[tuple[str, object]] = [("", tree)]
    known: set[int] = set()  # YAML can tie a value into a knot
    while waiting:
        place, here = waiting.pop()
        if isinstance(here, dict | list):
            if id(here) in known:
                continue
            known.add(id(here))
        yield place, here
        if isinstance(here, list):
            waiting += [(place, inside) for inside in here]
        elif isinstance(here, dict):
            waiting += [(f"{place}.{key}" if place else str(key), inside) for key, inside in here.items()]


def shown(value: object) -> str:
    """A value as the user wrote it, short enough for a sentence."""
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)
    except (ValueError, RecursionError):  # YAML can tie a value into a knot
        text = f"a {type(value).__name__}"
    return text if len(text) <= 48 else text[:45] + "…"


def read_tables(path: Path) -> dict[str, dict[str, str]]:
    """Tables of words: under each `[name]` of the file its words, with the mark behind each (`bf16?`) or what it means
    (`lr:learning_rate`)."""
    tables: dict[str, dict[str, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table = tables.setdefault(line[1:-1], {})
        elif line and not line.startswith("#"):
            table |= dict(re.findall(r"([^\s?#~!:]+):?(\S*)", line))
    return tables


def fold(word: str) -> str:
    """As spellings are compared."""
    return word.strip().lower().replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """One block of a file. Each method gives the value of a key, or None where the key says nothing."""

    values: Mapping[str, object]
    file: str
    path: str = ""  # where in the file the block stands: `zero_optimization.offload_param`; empty for the whole file
    silent: tuple[object, ...] = (None,)
    """Values that say nothing, beside a missing key: null, and `auto` where another program fills it in."""
    text_numbers: bool = False  # numbers may come as text: YAML reads `1e-4` so

    def name(self, key: str) -> str:
        """The key as errors call it."""
        return f"{self.path}.{key}" if self.path else key

    def wrong(self, key: str, must: Said) -> ConfigError:
        """The error for a value of the wrong kind."""
        value = self.values.get(key)
        quoted = isinstance(value, str) and (as_number(value) is not None or value.lower() in ("true", "false"))
        hint = Message("inputs.without-quotes") if quoted else None
        name = self.name(key)
        called = Message("inputs.in-file", name=name, file=self.file)
        return ConfigError(Message("inputs.must-be", name=called, must=must, value=shown(value), hint=hint), at=name)

    def says(self, key: str) -> bool:
        """Whether the key is there with a value of its own."""
        value = self.values.get(key)
        return key in self.values and not any(value is word or value == word for word in self.silent)

    def integer(self, key: str, *, least: int | None = 0, most: int | None = LARGEST) -> int | None:
        """A whole number; `5e8` is one, `true` is not."""
        if not self.says(key):
            return None
        value = self._number(key, Message("inputs.whole-number"))
        if not float(value).is_integer():
            raise self.wrong(key, Message("inputs.whole-number"))
        if most is not None and abs(value) > most:
            raise self.wrong(key, Message("inputs.at-most", most=most))
        if least is not None and value < least:
            raise self.wrong(key, Message("inputs.at-least", least=least))
        return int(value)

    def number(self, key: str, *, least: float = 0.0, most: float = math.inf) -> float | None:
        """A number in a range."""
        if not self.says(key):
            return None
        value = self._number(key, Message("inputs.number"))
        if not least <= value <= most:
            must = Message("inputs.at-least", least=f"{least:g}")
            raise self.wrong(key, Message("inputs.from-to", least=least, most=most) if math.isfinite(most) else must)
        return float(value)

    def switch(self, key: str) -> bool | None:
        """True or false. The text "false" is refused: Python takes it for true."""
        if not self.says(key):
            return None
        value = self.values[key]
        if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
            return bool(value)
        raise self.wrong(key, Message("inputs.true-or-false"))

    def text(self, key: str) -> str | None:
        """Any text but an empty one."""
        if not self.says(key):
            return None
        value = self.values[key]
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, Message("inputs.text"))
        return value

    def word(self, key: str, words: Iterable[str]) -> str | None:
        """One of a few words."""
        if not self.says(key):
            return None
        value, words = self.values[key], list(words)
        if isinstance(value, str) and value in words:
            return value
        hint = suggest(value if isinstance(value, str) else "", words)
        called = Message("inputs.in-file", name=self.name(key), file=self.file)
        said = Message("inputs.unknown-word", name=called, value=shown(value), hint=hint)
        raise ConfigError(said, at=self.name(key))

    def _number(self, key: str, must: Message) -> int | float:
        value = self.values[key]
        if isinstance(value, str) and self.text_numbers:
            value = as_number(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 10**300:  # nor nan
            raise self.wrong(key, must)
        return value


def as_number(text: str) -> int | float | None:
    """The finite number that this text spells, or None."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return number if math.isfinite(number := float(text)) else None
    return None


_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


def seconds_in(text: str) -> float | None:
    """Seconds in a time as people write it (`12h`, `90m`, `1h30m`); None: it is no time."""
    found = re.findall(r"(\d+(?:\.\d+)?)\s*([dhms])", text.lower())
    units = [unit for _, unit in found]
    whole = "".join(count + unit for count, unit in found) == re.sub(r"\s+", "", text.lower())
    if not found or not whole or units != sorted(set(units), key=list(_UNITS_S).index):
        return None
    return sum(float(count) * _UNITS_S[unit] for count, unit in found)


# --------------------------------------------------------------------------------------------------
# What to mend in a file that is no JSON or no YAML.
#
# The parsers say what they expected, in the words of their grammar. A user wants to know what to write, and where.
# Their messages are few and old, so each is answered here with the slip that usually leads to it.

_COMMENT = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|,(?=\s*[}\]])")

_YAML = (
    ("mapping values are not allowed", "inputs.quote-colon-or-key"),
    ("character '\\t'", "inputs.no-tab"),
    ("could not find expected ':'", "inputs.colon-and-space"),
    ("expected <block end>", "inputs.indent-alike"),
    ("expected ',' or", "inputs.comma-or-close"),
    ("unexpected end of stream", "inputs.close-quote"),
    ("undefined alias", "inputs.quote-star"),
    ("cannot start any token", "inputs.quote-value"),
    ("could not determine a constructor", "inputs.no-tag"),
    ("expected a single document", "inputs.one-document"),
    ("unexpected ':'", "inputs.quote-colon"),
)
"""A part of PyYAML's complaint → what to write."""

_JSON = (
    ("Expecting ',' delimiter", "inputs.write-comma"),
    ("Expecting ':' delimiter", "inputs.write-colon"),
    ("Extra data", "inputs.nothing-behind"),
    ("Unterminated string", "inputs.close-quote-in-line"),
    ("Invalid control character", "inputs.close-quote-in-line"),
    ("Invalid \\", "inputs.backslash"),
)
"""How json's complaint begins → what to write."""


def json_fault(text: str) -> Message:
    """What to write, and in which line, so that this text becomes JSON. Comments are not held against it."""
    bare = without_comments(text)
    try:
        json.loads(bare)
    except json.JSONDecodeError as error:
        comma = error.msg.startswith("Expecting ',' delimiter")  # which belongs where the last value ended
        line = bare[: error.pos].rstrip().count("\n") + 1 if comma else error.lineno
        return Message("inputs.in-line", remedy=_json_remedy(error, bare), line=line)
    except RecursionError:
        return Message("inputs.less-deep")
    except ValueError:  # int() refuses thousands of digits
        return Message("inputs.shorter-number")
    lines = zip(text.split("\n"), bare.split("\n"), strict=True)
    line = 1 + next((at for at, (written, left) in enumerate(lines) if written != left), 0)
    return Message("inputs.no-comments", line=line)


def without_comments(text: str) -> str:
    """The same text with blanks for what Hjson allows beyond JSON, so that every line and column stays."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])

    return _TRAILING_COMMA.sub(blank, _COMMENT.sub(blank, text))


def _json_remedy(error: json.JSONDecodeError, text: str) -> Message:
    here, before = text[error.pos : error.pos + 8], text[: error.pos].rstrip()[-1:]
    if not here.strip():
        return Message("inputs.write-value" if before == ":" else "inputs.close-bracket")
    if error.msg.startswith("Expecting property name"):
        return Message("inputs.second-comma" if here[0] in ",}" else "inputs.quote-key")
    for start, remedy in _JSON:
        if error.msg.startswith(start):
            return Message(remedy)
    words = {"True": "true", "Fals": "false", "None": "null"}
    if here[:4] in words:
        return Message("inputs.write-word", word=words[here[:4]])
    if here[0] in ",]}":
        return Message("inputs.write-value")
    return Message("inputs.quote-text" if here[0] != "." else "inputs.digit-first")


def yaml_fault(error: yaml.YAMLError) -> Message:
    """What to write, and in which line, so that the text becomes YAML."""
    import yaml

    if not isinstance(error, yaml.MarkedYAMLError):
        return Message("inputs.no-such-letters")
    problem = f"{error.problem or ''} {error.context or ''}"
    remedy = Message(next((remedy for part, remedy in _YAML if part in problem), "inputs.quote-value"))
    mark = error.problem_mark
    return Message("inputs.in-line", remedy=remedy, line=mark.line + 1) if mark else remedy
