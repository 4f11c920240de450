"""Records: the small JSON files by which our processes speak to each other, and to later starts and versions.

A record is one frozen dataclass. `read_record` is its only reader and `record_text` what its writer writes: a file is
replaced whole, and read only where it is an ordinary file of a sensible size. Every field must have the type that the
class says; a field that the class does not know, as a newer version may have written, is passed over, and one that has
a default may be missing. A class with a `SCHEMA` refuses files of another one. Whatever is wrong is an OSError where
the file cannot be read at all, and otherwise a ValueError whose text says which field.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tightfit.inputs.spelling import MOST_TEXT_BYTES, open_regular, shown
from tightfit.messages import Message, as_json, from_json

T = TypeVar("T")


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """The tree in a text, or ValueError. `finite`: NaN and infinities, which are no JSON, are refused as well."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, parse_constant=refuse if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, *, most_bytes: int = MOST_TEXT_BYTES, finite: bool = False) -> Any:
    """The tree in a file. OSError: it cannot be read, or is no ordinary file; ValueError: too large, or no JSON."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise ValueError(f"it is larger than {most_bytes >> 20} MiB")
        return parse_json(file.read(most_bytes), finite=finite)


def find_json(path: Path) -> Any:
    """The tree in a file; None: there is none, or none that can be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def read_record(path: Path, kind: type[T]) -> T:
    """The record in a file. OSError: it cannot be read; ValueError: it is torn, another's, or a newer version's."""
    return as_record(read_json(path), kind)


def find_record(path: Path, kind: type[T]) -> T | None:
    """The record in a file; None: there is none, or none that can be read."""
    try:
        return read_record(path, kind)
    except (OSError, ValueError):
        return None


def record_text(record: Any, more: Mapping[str, Any] | None = None) -> str:
    """What the file of a record holds, for `replace_file` of `owned.py`. `more`: what else it says, to people."""
    schema = {"schema": record.SCHEMA} if hasattr(record, "SCHEMA") else {}
    return json_text({**schema, **asdict(record), **(more or {})})


def json_text(tree: Mapping[str, Any]) -> str:
    """A tree as a file of ours has it, for people to read as well."""

    def plain(value: object) -> object:
        return value.isoformat(timespec="seconds") if isinstance(value, datetime) else as_json(value)

    return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False, default=plain) + "\n"


def as_record(tree: object, kind: type[T]) -> T:
    """A tree as a record of this kind, or ValueError."""
    schema = getattr(kind, "SCHEMA", None)
    if schema is not None and isinstance(tree, dict) and tree.get("schema") != schema:
        raise ValueError(f"it has schema {shown(tree.get('schema'))}, and this version knows {schema}")
    try:
        found: T = _value(tree, kind, "")
    except OverflowError:
        raise ValueError("a number is beyond all sense") from None
    return found


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type, and whether it may be missing."""
    hints = get_type_hints(kind)
    return tuple(
        (each.name, hints[each.name], each.default is not MISSING or each.default_factory is not MISSING)
        for each in fields(kind)
    )


def _value(value: Any, kind: Any, place: str) -> Any:
    """What JSON has for a value of this type, as this type."""
    if kind is Any or (kind is not float and type(value) is kind):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        found = {}
        for name, inner, optional in _fields(kind):
            where = f"{place}.{name}" if place else name
            if name in value:
                found[name] = _value(value[name], inner, where)
            elif not optional:
                raise ValueError(f"{where} is missing")
        return kind(**found)
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal and isinstance(value, str) and value in inside:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_value(each, inside[0], f"{place}[{number}]") for number, each in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _value(each, inside[1], f"{place}.{key}") for key, each in value.items()}
    if origin in (Union, UnionType):
        if value is None and NoneType in inside:
            return None
        *others, last = (each for each in inside if each is not NoneType)
        for each in others:
            with suppress(ValueError):
                return _value(value, each, place)
        return _value(value, last, place)
    if kind is Message and isinstance(value, dict):
        return from_json(value)
    if kind is datetime and isinstance(value, str):
        return datetime.fromisoformat(value)
    raise ValueError(f"{place or 'it'} cannot be {shown(value)}")
