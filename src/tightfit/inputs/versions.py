"""Somebody's version as numbers that can be compared.

What a program can do is told by the release that it was built from: `0.19.0+git1`, `0.19.0rc1` and a nightly
`0.19.0.dev20260101` all behave as 0.19.0 does, though by the rules of packaging the last two come before it.
"""

from __future__ import annotations

import re
from functools import lru_cache

from packaging.version import VERSION_PATTERN, InvalidVersion, Version

from tightfit.types import ConfigError

Release = tuple[int, int, int]

_VERSION = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)


@lru_cache(maxsize=256)
def release(version: str) -> Release:
    """`0.14.2+das.opt1.dtk25041` is release (0, 14, 2), and `5.10` is (5, 10, 0); what a vendor writes behind it in a
    way of his own (HIP's `6.2.41133-dd7f95766`) is passed over."""
    found = _VERSION.match(version.strip())
    if found is None:
        raise ConfigError(f"{version!r} is not a version: write its numbers, 0.19.8 say")
    read = Version(found[0])
    return read.major, read.minor, read.micro


def is_version(text: str) -> bool:
    """Whether it is a package's version whole; a number alone is none to us, being a slip more often."""
    try:
        return len(Version(text).release) > 1
    except InvalidVersion:
        return False
