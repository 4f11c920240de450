"""Somebody's version as numbers that can be compared, and which DeepSpeed a training will meet.

What a program can do is told by the release that it was built from: `0.19.0+git1`, `0.19.0rc1` and a nightly
`0.19.0.dev20260101` all behave as 0.19.0 does, though by the rules of packaging the last two come before it.
"""

from __future__ import annotations

import re
from functools import lru_cache

from packaging.version import VERSION_PATTERN, InvalidVersion, Version

from tightfit.messages import Message, Said
from tightfit.types import ConfigError, Hardware, Levers, Trainer

Release = tuple[int, int, int]

LLAMAFACTORY_VERSION = "0.9.5"  # the newest LLaMA-Factory that we have read

_NEWEST_DEEPSPEED = {(0, 9, 2): "0.16.4", (0, 9, 3): "0.16.9", (0, 9, 4): "0.16.9", (0, 9, 5): "0.18.4"}
"""The newest DeepSpeed that LLaMA-Factory asks for (`requirements/deepspeed.txt`), by the release that began it."""

DTK_DEEPSPEED = "0.14.2"  # what Hygon's own stack ships

_VERSION = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)


@lru_cache(maxsize=256)
def release(version: str) -> Release:
    """`0.14.2+das.opt1.dtk25041` is release (0, 14, 2), and `5.10` is (5, 10, 0); what a vendor writes behind it in a
    way of his own (HIP's `6.2.41133-dd7f95766`) is passed over."""
    found = _VERSION.match(version.strip())
    if found is None:
        raise ConfigError(Message("inputs.not-a-version", version=version))
    read = Version(found[0])
    return read.major, read.minor, read.micro


def is_version(text: str) -> bool:
    """Whether it is a package's version whole; a number alone is none to us, being a slip more often."""
    try:
        return len(Version(text).release) > 1
    except InvalidVersion:
        return False


def find_installed(package: str) -> str | None:
    """The version of a package that is installed here; None: there is none, or none that can be read."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version(package)
    except PackageNotFoundError:
        return None
    return found if found and is_version(found) else None


def newest_deepspeed(trainer: Trainer, llamafactory_version: str = LLAMAFACTORY_VERSION) -> str | None:
    """The newest DeepSpeed that the trainer asks for; None: any."""
    if trainer != "llamafactory":
        return None
    at = release(llamafactory_version)
    known = [newest for since, newest in _NEWEST_DEEPSPEED.items() if since <= at]
    return known[-1] if known else None


def choose_deepspeed(
    hardware: Hardware | None, trainer: Trainer = "tightfit", llamafactory: str | None = None
) -> tuple[str, tuple[Said, ...]]:
    """The DeepSpeed that will run the plan, where nobody named one, and a sentence if that may surprise.

    `llamafactory`: the release that was named; None: the one that is installed, or the newest that we know.
    """
    if hardware is not None and hardware.gpu.vendor == "hygon":
        return DTK_DEEPSPEED, (Message("inputs.deepspeed-of-hygon", version=DTK_DEEPSPEED),)
    here, usual = find_installed("deepspeed"), Levers().deepspeed_version
    if trainer == "llamafactory":
        factory = llamafactory or find_installed("llamafactory") or LLAMAFACTORY_VERSION
        newest = newest_deepspeed(trainer, factory)
        if newest is not None and release(here or usual) > release(newest):
            return newest, (Message("inputs.deepspeed-of-factory", version=newest, factory=factory),)
    if here is None or here == usual:
        return usual, ()
    return here, (Message("inputs.deepspeed-here", version=here),)
