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

from tightfit.messages import Message, say_why
from tightfit.types import ConfigError

_MARK = re.compile(r"\.tightfit-\d+$")
FIRST = 2  # the user's own file is the first
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
        raise ConfigError(Message("planfile.cannot-write-beside", path=path, error=say_why(error))) from None
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
    changed = change_in_place(text, changes)
    if changed is None:
        return yaml_tree_with(yaml.safe_load(text), changes)
    body, added = changed
    return "\n".join([body.rstrip("\n"), *added, ""]) if added else body


def change_in_place(body: str, changes: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """The text with the keys changed that it has, and a line for each that it has not; None: it is no plain list of
    keys."""
    root = yaml.compose(body, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        return None
    nodes = {key.value: (key, value) for key, value in root.value}
    for name in sorted(set(changes) & set(nodes), key=lambda name: -nodes[name][0].start_mark.index):
        key, value = nodes[name]
        start, end = key.end_mark.index, max(_end(value), key.end_mark.index)
        if changes[name] is None:
            begins = body.rfind("\n", 0, key.start_mark.index) + 1
            ends = body.find("\n", end)
            body = body[:begins] + ("" if ends < 0 else body[ends + 1 :])
        else:
            colon = body.index(":", start) + 1
            body = f"{body[:colon]} {scalar(changes[name])}{body[max(end, colon) :]}"
    return body, [f"{key}: {scalar(value)}" for key, value in changes.items() if key not in nodes and value is not None]


def _end(node: yaml.Node) -> int:
    """Where the last word of a value ends: PyYAML counts the blank lines after a list as the list's."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def scalar(value: object) -> str:
    """A value as YAML: 1.0e-05, which is read as a number, and 'no', which is not read as false."""
    plain: str = yaml.safe_dump(value, allow_unicode=True, width=10**6, default_flow_style=True)
    return plain.removesuffix("\n").removesuffix("\n...")
