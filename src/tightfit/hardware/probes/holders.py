"""Whose a process is, and what it is called, from /proc; a process of another container is a number alone."""

from __future__ import annotations

import pwd
from collections.abc import Sequence
from pathlib import Path

_LONGEST = 60
"""Characters of a command that tell it from others."""


def who_is(pid: int, proc: Path = Path("/proc")) -> tuple[str | None, str | None]:
    """User and command; None: not told."""
    place = proc / str(pid)
    try:
        return _user(place.stat().st_uid), _command(place.joinpath("cmdline").read_bytes().split(b"\0"))
    except OSError:
        return None, None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _command(parts: Sequence[bytes]) -> str | None:
    """A process's command, short, and in letters that a terminal can show.

    It is cut between words: whoever strikes out secrets knows a token by its whole form.
    """
    text = " ".join(part.decode(errors="replace") for part in parts if part)
    plain = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    if len(plain) <= _LONGEST:
        return plain or None
    words, _, _ = plain[: _LONGEST - 1].rpartition(" ")
    return (words or plain[: _LONGEST - 2]).rstrip() + " …"
