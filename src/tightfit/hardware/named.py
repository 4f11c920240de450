"""The machine that a user names: this one, one that was measured, or counts and a card."""

from __future__ import annotations

from pathlib import Path

from tightfit.hardware.words import parse_hardware
from tightfit.types import Hardware


def is_this(word: str | None) -> bool:
    """Whether this machine is meant, as it is where nobody says another."""
    return word is None or word.strip().lower() == "this"


def read_hardware(word: str | None, host_ram: str | None = None, nvme: str | None = None) -> Hardware:
    """`this` or nothing; the path of a measurement's file; or what `parse_hardware` reads."""
    if word is None or is_this(word):
        from tightfit.hardware.machine import this_machine

        return this_machine(host_ram, nvme)
    if names_file(word):
        from tightfit.hardware.measured import read_machine

        return read_machine(Path(word.strip()).expanduser(), host_ram, nvme)
    return parse_hardware(word, host_ram, nvme)


def names_file(word: str) -> bool:
    """Whether it is a file's name: no card ends like one, and none has a slash."""
    word = word.strip()
    try:
        path = Path(word).expanduser()
        return word.lower().endswith(".json") or ("/" in word and path.exists()) or ("." in word and path.is_file())
    except (OSError, RuntimeError, ValueError):  # longer than a name may be, a home that nobody has, a zero byte
        return False
