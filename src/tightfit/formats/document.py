"""A user's file as values, and the line on which each of its keys stands.

Python's readers of JSON and YAML give values without places. For YAML the places come from PyYAML's own node tree. For
JSON they come from a small scanner that walks the text beside the real parser: it knows strings, comments, brackets
and Hjson's bare words, and notes where each key begins. It is never asked what a value is, so where it loses its way in
exotic Hjson, a line number is missing and nothing else is wrong.

A key that stands twice is no error here: most readers keep the last one without a word, which is just what lint is for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.inputs.spelling import check_keys, json_fault, read_text, yaml_fault
from tightfit.messages import Message, Said
from tightfit.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file, or one block of it that stands for a file."""

    path: Path
    values: Mapping[str, Any]
    syntax: str  # json, hjson or yaml
    lines: Mapping[str, int]  # dotted key → line
    doubles: tuple[str, ...] = ()  # keys that stand more than once
    quoted: frozenset[str] = frozenset()  # keys of YAML whose value is text because of its quotes
    json_remedy: Said = ""  # of Hjson: what to write so that a reader of plain JSON takes it
    within: str = ""  # the block of the file that this is, where it is not the whole file

    @property
    def shown_path(self) -> str:
        """The path from where the user stands; as it was given where it lies elsewhere."""
        try:
            return str(self.path.absolute().relative_to(Path.cwd()))
        except (ValueError, OSError):  # OSError: the folder that one stands in is gone
            return str(self.path)

    def line(self, place: str) -> int | None:
        """The line of a key, or of the nearest block around it that is there."""
        while place:
            if place in self.lines:
                return self.lines[place]
            place = place.rpartition(".")[0]
        return self.lines.get("") if self.within else None

    def at(self, place: str) -> Any:
        """The value at a dotted place, None where there is none."""
        value: Any = self.values
        for key in place.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def block(self, key: str) -> Document:
        """The block under a key of the top level, as if it were a file."""
        inside = {place.removeprefix(f"{key}."): line for place, line in self.lines.items() if place != key}
        inside[""] = self.lines.get(key, 1)
        doubles = tuple(place.removeprefix(f"{key}.") for place in self.doubles if place.startswith(f"{key}."))
        return Document(
            path=self.path, values=self.values[key], syntax=self.syntax, lines=inside, doubles=doubles, within=key
        )


def read_document(path: Path) -> Document:
    """Read a JSON, Hjson or YAML file that holds one block of keys."""
    text = read_text(path, "JSON or YAML")
    suffix = path.suffix.lower()
    looks_like_json = suffix in (".json", ".hjson") or (text.lstrip()[:1] == "{" and suffix not in (".yaml", ".yml"))
    document = parse_json_document(path, text) if looks_like_json else _read_yaml(path, text)
    if not isinstance(document.values, dict) or not document.values:
        raise ConfigError(Message("lint.no-keys", name=path.name))
    check_keys(document.values, path.name)
    return document


def _read_yaml(path: Path, text: str) -> Document:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(Message("lint.no-yaml", name=path.name, fix=yaml_fault(error))) from None
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        # PyYAML lets dates, numbers and keys that Python cannot hold fall through as plain errors.
        reason = (str(error) or "unreadable").splitlines()[0]
        raise ConfigError(
            Message("lint.no-yaml-value", name=path.name, reason=reason, fix=Message("lint.quote-value"))
        ) from None
    lines: dict[str, int] = {}
    doubles: list[str] = []
    quoted: set[str] = set()
    pending = [("", node)]
    seen: set[int] = set()  # an anchor can tie a node into a knot
    while pending:
        place, node = pending.pop()
        if not isinstance(node, yaml.MappingNode) or id(node) in seen:
            continue
        seen.add(id(node))
        for key, value in node.value:
            inner = f"{place}.{key.value}" if place else str(key.value)
            if inner in lines:
                doubles.append(inner)
            lines[inner] = key.start_mark.line + 1
            if isinstance(value, yaml.ScalarNode) and value.style:
                quoted.add(inner)
            pending.append((inner, value))
    return Document(
        path=path, values=values, syntax="yaml", lines=lines, doubles=tuple(doubles), quoted=frozenset(quoted)
    )


def parse_json_document(path: Path, text: str) -> Document:
    """A text of JSON, or of Hjson, which DeepSpeed reads as well."""
    try:
        values, syntax = json.loads(text), "json"
    except (ValueError, RecursionError):
        import hjson

        try:
            values, syntax = hjson.loads(text, object_pairs_hook=dict), "hjson"
        except (ValueError, OverflowError, RecursionError):  # OverflowError: how Hjson answers 1e400
            # Hjson forgives so much that its complaints are no help: what is said is how to make it JSON.
            raise ConfigError(Message("lint.no-json", name=path.name, fix=json_fault(text))) from None
    lines, doubles = _scan(text)
    remedy = json_fault(text) if syntax == "hjson" else ""
    return Document(path=path, values=values, syntax=syntax, lines=lines, doubles=doubles, json_remedy=remedy)


_SKIP = re.compile(r"(?:[\s,]|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r"'''.*?'''|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_LITERAL = re.compile(r"(?:-?\d[\d.eE+-]*|true|false|null)(?=\s*(?:[,\]}\n#]|//|/\*|$))")
_BARE_KEY = re.compile(r"[^\s:{}\[\],\"']+")


def _scan(text: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """Where each key stands, and which stand twice."""
    lines: dict[str, int] = {}
    doubles: list[str] = []
    blocks: list[tuple[str, str | None]] = []  # the open brackets, each with its key; None: nothing inside has a place
    name: str | None = ""  # of the value that comes next
    wants_key = False
    at = _skip(text, 0)
    while at < len(text):
        char = text[at]
        if char in "{[":
            blocks.append((char, name if char == "{" else None))
            at += 1
        elif char in "}]":
            blocks = blocks[:-1]
            at += 1
        elif wants_key:
            found = _STRING.match(text, at) or _BARE_KEY.match(text, at)
            colon = _skip(text, found.end()) if found else at
            if not found or text[colon : colon + 1] != ":":
                break
            name = found[0].strip("'\"")
            if found[0].startswith('"'):
                with suppress(ValueError):
                    name = str(json.loads(found[0]))
            outer = [key for _, key in blocks]
            if None not in outer:
                place = ".".join([key for key in outer if key] + [name])
                doubles += [place] * (place in lines)
                lines[place] = text.count("\n", 0, at) + 1
            at, wants_key = _skip(text, colon + 1), False
            continue
        else:
            found = _STRING.match(text, at) or _LITERAL.match(text, at)
            # Hjson's bare text ends with its line; a lone character is stepped over in any case.
            end = text.find("\n", at)
            at = found.end() if found else len(text) if end < 0 else max(end, at + 1)
        name, wants_key = None, bool(blocks) and blocks[-1][0] == "{"
        at = _skip(text, at)
    return lines, tuple(doubles)


def _skip(text: str, at: int) -> int:
    found = _SKIP.match(text, at)
    return found.end() if found else at
