"""By which keys our own worker's file is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_workers(values: Mapping[str, Any]) -> bool:
    """Whether this is the config that we write for our own worker."""
    return {"schema", "levers", "buckets", "predicted"} <= set(values)
