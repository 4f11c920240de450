"""A config of another program, with a few keys changed, written beside the old one and never over it.

YAML is changed in its text: what is not changed keeps its bytes, comments and all, for a dumped `1e-4` would come back
as text in quotes, and OmegaConf would hand LLaMA-Factory a word for a number. JSON has no such traps and is written
anew, keys in their order.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tightfit.messages import Message
from tightfit.types import ConfigError

_MARK = re.compile(r"\.tightfit-\d+$")
FIRST = 2
"""The user's own file is the first."""
_MOST = 1000


def beside(path: Path, suffix: str | None = None) -> Path:
    """A name that nobody has: `x.tightfit-2.yaml`, or the next number that is free."""
    stem = _MARK.sub("", path.stem)
    for number in range(FIRST, _MOST):
        name = path.with_name(f"{stem}.tightfit-{number}{suffix or path.suffix}")
        if not name.exists():
            return name
    raise ConfigError(Message("planfile.too-many-beside", folder=path.parent, most=_MOST, stem=stem))


def write_beside(path: Path, text: str) -> Path:
    """Write a file that must not be there yet; a full disk or a folder without the right to write is the user's."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise ConfigError(Message("planfile.cannot-write-beside", path=path, error=what)) from None
    return path


def json_with(values: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """`changes`: dotted key → value; None takes a key away. The rest stays, in its order."""
    tree = copy.deepcopy(dict(values))
    for place, value in changes.items():
        *blocks, key = place.split(".")
        inside = tree
        for block in blocks:
            if not isinstance(inside.get(block), dict):
                if value is None:
                    break
                inside[block] = {}
            inside = inside[block]
        else:
            if value is None:
                inside.pop(key, None)
            else:
                inside[key] = value
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def yaml_tree_with(values: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Likewise for a YAML that its program reads as PyYAML does, which writes what it reads."""
    tree = json.loads(json_with(values, changes))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=10**6)


def yaml_text_with(text: str, changes: Mapping[str, Any]) -> str:
    """`changes`: key of the top level → value; None takes it away. Every other byte stays."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    spans = {key.value: (key.start_mark.index, key, value) for key, value in node.value}
    if node.flow_style:
        return yaml_tree_with(yaml.safe_load(text), changes)
    new = {key: value for key, value in changes.items() if key not in spans and value is not None}
    for start, key, value in sorted(
        (span for name, span in spans.items() if name in changes), reverse=True, key=_place
    ):
        text = _replace_span(text, start, value.end_mark.index, key.value, changes[key.value])
    if new:
        text = text.rstrip("\n") + "\n" + "".join(f"{_line(key, value)}\n" for key, value in new.items())
    return text


def _place(span: tuple[int, Any, Any]) -> int:
    return span[0]


def _replace_span(text: str, start: int, end: int, key: str, value: Any) -> str:
    """A block's end mark lies at the start of the next key: the line break before it stays."""
    ended = end
    while ended > start and text[ended - 1] in "\n ":
        ended -= 1
    if value is not None:
        return text[:start] + _line(key, value) + text[ended:]
    after = text.find("\n", ended)
    return text[:start] + ("" if after < 0 else text[after + 1 :])


def _line(key: str, value: Any) -> str:
    dumped = yaml.safe_dump(value, allow_unicode=True, width=10**6, default_flow_style=True)
    return f"{key}: {dumped.removesuffix(chr(10)).removesuffix(chr(10) + '...')}"
