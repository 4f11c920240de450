"""A version of somebody's package, as numbers that can be compared."""

from __future__ import annotations

import re

from tightfit.types import ConfigError

Release = tuple[int, int, int]


def release(version: str) -> Release:
    """`0.14.2+das.opt1.dtk25041` is release (0, 14, 2), and `5.10` is (5, 10, 0)."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version.strip())
    if found is None:
        raise ConfigError(f"{version!r} is not a version: write its numbers, 0.19.8 say")
    return int(found[1]), int(found[2] or 0), int(found[3] or 0)
