"""The text of a job file as a tree of plain values: mappings, lists, text, numbers, true, false and null.

YAML can hold far more than that: dates, bytes, sets, numbers without end, and a handful of lines that unfold into
gigabytes. Whatever a job cannot mean ends here, in a sentence that names the line or the field.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.inputs.spelling import LARGEST, check_keys, json_fault, read_text, shown, without_comments, yaml_fault
from tightfit.messages import Message, Said
from tightfit.types import ConfigError

MOST_VALUES = 20_000
MOST_DEPTH = 32  # no job is larger or deeper than this; what is, was tied together with YAML's anchors


@dataclass(frozen=True, slots=True, kw_only=True)
class JobText:
    """A file that was read and parsed, once for all who ask what it says."""

    path: Path
    text: str
    values: Mapping[Any, Any]  # as YAML or JSON has them, dates and all
    tree: Mapping[str, Any]  # the same in plain values


def read_job_text(path: Path) -> JobText:
    text = read_text(path, Message("job.a-job-file"))
    values = _json(text, path.name) if is_json(path) else _yaml(text, path.name)
    if values is None:
        raise ConfigError(Message("job.empty", file=path.name))
    if not isinstance(values, dict):
        raise ConfigError(Message("job.no-fields", file=path.name, value=shown(values)))
    check_keys(values, path.name)
    return JobText(path=path, text=text, values=values, tree=_copy(values, path.name, iter(range(MOST_VALUES))))


def name_in(name: str, file: str | None) -> Said:
    """What messages call a field, with the file that it stands in; or the file, where the name is empty."""
    if not name or file is None:
        return name or file or ""
    return Message("inputs.in-file", name=name, file=file)


def is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _yaml(text: str, file: str) -> Any:
    import yaml

    try:
        loader = yaml.SafeLoader(text)  # raises, too, for letters that YAML does not have
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(Message("job.not-yaml", file=file, fix=yaml_fault(error))) from None
    except RecursionError:
        raise ConfigError(Message("job.too-deep", file=file)) from None
    except ValueError as error:  # a date or a number that Python cannot hold
        raise ConfigError(Message("job.odd-value", file=file, reason=_reason(error))) from None
    except (TypeError, LookupError, AttributeError):  # how PyYAML answers `!!int ''` and `!!timestamp x`
        raise ConfigError(Message("job.wrong-tag", file=file)) from None
    if twice := _find_double(node):
        raise ConfigError(Message("job.key-twice", key=shown(twice[0]), file=file, line=twice[1]))
    return values


def _find_double(node: Any) -> tuple[str, int] | None:
    """The first key that a mapping has twice, and the line: PyYAML would keep the last without a word."""
    import yaml

    waiting, known = [node], set()
    while waiting:
        here = waiting.pop()
        if id(here) in known:
            continue
        known.add(id(here))
        if isinstance(here, yaml.SequenceNode):
            waiting += here.value
        elif isinstance(here, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in here.value:
                waiting.append(value)
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    return key.value, key.start_mark.line + 1
                seen.add(str(key.value))
    return None


def _json(text: str, file: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            again = next(key for index, key in enumerate(keys) if key in keys[:index])
            raise ConfigError(Message("job.key-twice", key=shown(again), file=file, line=None))
        return dict(pairs)

    try:
        # Comments, and a comma behind the last value, are what people write beside their settings.
        return json.loads(without_comments(text), object_pairs_hook=once)
    except json.JSONDecodeError:
        if not text.strip():
            return None
        raise ConfigError(Message("job.not-json", file=file, fix=json_fault(text))) from None
    except RecursionError:
        raise ConfigError(Message("job.too-deep", file=file)) from None
    except ValueError as error:
        raise ConfigError(Message("job.long-number", file=file, reason=_reason(error))) from None


def _reason(error: Exception) -> str:
    """What a parser complained of, without its advice to programmers."""
    lines = str(error).splitlines() or ["unreadable"]
    return lines[0].partition("; ")[0].lower()


def _copy(value: Any, file: str, left: Iterator[int], path: str = "", depth: int = 0) -> Any:
    """A copy in plain values, counted by `left`: a knot of anchors is small in the file, and endless in memory."""
    if next(left, None) is None or depth > MOST_DEPTH:
        raise ConfigError(Message("job.too-much", where=file, fix=Message("job.look-for-anchors")))
    if isinstance(value, dict):
        named = ((str(_scalar(key, path, file)), inside) for key, inside in value.items())
        return {key: _copy(inside, file, left, f"{path}.{key}" if path else key, depth + 1) for key, inside in named}
    if isinstance(value, list):
        return [_copy(inside, file, left, path, depth + 1) for inside in value]
    return _scalar(value, path, file)


def _scalar(value: Any, path: str, file: str) -> Any:
    if isinstance(value, datetime.date):
        return value.isoformat()
    # Surrogates, half a letter, can be spelt in JSON and held by no file.
    if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) <= LARGEST and not math.isnan(value):
        return value
    where, fix = name_in(path if path.isprintable() else shown(path), file), Message("job.write-plain-value")
    raise ConfigError(Message("job.impossible", where=where, value=ascii(value)[:48], fix=fix))
