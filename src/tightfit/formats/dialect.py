"""A dialect: all that tightfit knows of the files of one outside program.

Each has a folder here, whose `dialect.py` fills in this record as far as tightfit knows how: keys by which its file is
recognised, rules and their check, what a file says of a training, the files that a plan becomes. `registry.py` lists
the folders, and whoever deals with such files walks that list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.formats.known import KnownConfig
from tightfit.formats.rules import Rule
from tightfit.formats.sheet import Sheet
from tightfit.types import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One outside program."""

    name: str
    """The folder's; what `--kind` calls its files."""
    trainer: Trainer | None = None
    """The trainer that its files are for, where a plan can be for one."""

    # --- recognising ---
    title: str = ""
    """Whose files they are: DeepSpeed's."""
    one: str = ""
    """One such file: a DeepSpeed JSON."""
    keys: frozenset[str] = frozenset()
    """Of the top level."""
    telling: tuple[str, ...] = ()
    """Those that are its own."""
    hinting: tuple[str, ...] = ()
    """Those that others have too, and that tell a little more than the rest."""
    claims: Callable[[Mapping[str, Any]], bool] = lambda values: False
    """Whether a file is surely its own, though others have more of the keys."""
    extends: str | None = None
    """The dialect all of whose keys it takes beside its own: without one of its own, a file is that one's."""
    is_mixed: bool = False
    """Whether scripts keep keys of their own in its files, so that a file of mostly others' needs a telling one."""

    # --- reading and checking ---
    rules: tuple[Rule, ...] = ()
    """What lint looks for; none: no file of it is ever checked."""
    check: Callable[[Sheet], Sheet | None] = lambda sheet: None
    """Notes what it finds on the sheet; the sheet of the DeepSpeed file that the file names, if it names one."""
    known: Callable[[Mapping[str, Any]], KnownConfig] = lambda values: KnownConfig()
    """What a file says of how its training is computed."""
    deepspeed_at: str | None = None
    """The key, dotted, that names a DeepSpeed file or holds its block."""
