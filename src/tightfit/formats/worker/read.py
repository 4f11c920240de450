"""`worker.json` read back, for the worker and for whoever at the desk wants to know what a run was told.

The one reader: whatever is no such file is one sentence. Light, since every rank imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.inputs.records import parse_json
from tightfit.inputs.spelling import read_text
from tightfit.messages import Message
from tightfit.types import ConfigError

WORKER_FILE = "worker.json"
SCHEMA = 1  # of this file. A worker refuses a number that it does not know
AGAIN = Message("planfile.write-again")


def parse_worker(text: str, where: str) -> dict[str, Any]:
    """The text of a worker.json; `where`: what to call it in a sentence."""
    try:
        tree = parse_json(text)
    except ValueError:
        raise ConfigError(Message("planfile.no-json", where=where, again=AGAIN)) from None
    schema = tree.get("schema") if isinstance(tree, dict) else None
    if schema != SCHEMA:
        raise ConfigError(Message("planfile.other-schema", where=where, schema=repr(schema), known=SCHEMA, again=AGAIN))
    found: dict[str, Any] = tree
    return found


def read_worker(path: Path) -> dict[str, Any]:
    """The file, or one sentence about what is wrong with it."""
    if not path.exists():
        raise ConfigError(Message("planfile.no-worker", path=path))
    return parse_worker(read_text(path, "JSON"), str(path))


def find_worker(plan: Path) -> dict[str, Any]:
    """That of a plan's folder; empty: there is none, or none that can be read."""
    try:
        return read_worker(plan / WORKER_FILE)
    except ConfigError:
        return {}


def is_workers(values: Mapping[str, Any]) -> bool:
    """Whether this is the config that we write for our own worker."""
    return {"schema", "levers", "buckets", "predicted"} <= set(values)
