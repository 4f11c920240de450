"""A dialect: all that tightfit knows of the files of one outside program.

Each has a folder here, whose `dialect.py` fills in this record as far as tightfit knows how: keys by which its file is
recognised, rules and their check, what a file says of a training, the files that a plan becomes. `FOLDERS` lists
them, and whoever deals with such files walks that list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tightfit.formats.rules import Severity
from tightfit.job.known import KnownConfig
from tightfit.messages import Message, Said
from tightfit.types import Trainer

if TYPE_CHECKING:  # the names of the dialects cost no planner
    from tightfit.formats.rules import Sheet
    from tightfit.formats.target import Target
    from tightfit.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A file that a plan becomes."""

    name: str
    what: Message  # what it is, for PLAN.md
    write: Callable[[Plan, Target, Collection[str]], str | None]
    """Its text, beside those that were written before; None: this plan has none. A ConfigError says why it cannot say
    what the plan says."""
    notes: Callable[[Plan, Target], Iterable[Said]] = lambda plan, target: ()  # what has to be known about it
    version: Callable[[Plan, Target], Said | None] = lambda plan, target: None
    """The release that it is written for, as the end of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable of a run."""

    name: str
    value: str | None  # what it is set to, as the shell reads it; None: left out
    reason: Message
    unset: bool = False  # a value that the user's shell may hold is taken away


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A program that starts the ranks."""

    program: str
    reads: tuple[str, ...]  # the files of a plan that its command reads
    command: Callable[[Plan, Target], Iterable[str]]  # the end of `launch.sh`
    needs: str | None = None  # the file without which it cannot start
    variables: Callable[[Plan, Target], tuple[Variable, ...]] = lambda plan, target: ()
    """What it alone is told through the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One outside program."""

    name: str  # the folder's; what `--kind` calls its files
    trainer: Trainer | None = None  # the trainer that its files are for, and no plan for another becomes them

    # --- recognising ---
    title: Said = ""  # whose files they are: DeepSpeed's
    one: Said = ""  # one such file: a DeepSpeed JSON
    keys: frozenset[str] = frozenset()  # of the top level
    telling: tuple[str, ...] = ()  # those that are its own
    hinting: tuple[str, ...] = ()  # those that others have too, and that tell a little more than the rest
    claims: Callable[[Mapping[str, Any]], bool] = lambda values: False
    """Whether a file is surely its own, though others have more of the keys."""
    extends: str | None = None
    """The dialect all of whose keys it takes beside its own: without one of its own, a file is that one's."""
    is_mixed: bool = False
    """Whether scripts keep keys of their own in its files, so that a file of mostly others' needs a telling one."""

    # --- reading and checking ---
    rules: Mapping[str, Severity] = field(default_factory=dict)
    """What lint looks for; none: no file of it is ever checked."""
    check: Callable[[Sheet], Sheet | None] = lambda sheet: None
    """Notes what it finds on the sheet; the sheet of the DeepSpeed file that the file names, if it names one."""
    known: Callable[[Mapping[str, Any]], KnownConfig] = lambda values: KnownConfig()
    """What a file says of how its training is computed."""
    deepspeed_at: str | None = None  # the key, dotted, that names a DeepSpeed file or holds its block

    # --- writing ---
    files: tuple[PlanFile, ...] = ()  # what a plan becomes; the config of the program itself is the first
    launcher: Launcher | None = None  # the program, where it starts ranks; `--launcher` calls it by the dialect's name


FOLDERS = (
    "deepspeed",
    "torchrun",
    "accelerate",
    "huggingface",
    "llamafactory",
    "worker",
    "launch",
    "kubernetes",
    "ray",
    "job",
)
"""In the order in which a plan's files are written and listed: `launch` asks for those that were written before."""


@cache
def dialects() -> tuple[Dialect, ...]:
    """All of them."""
    return tuple(import_module(f"tightfit.formats.{folder}.dialect").DIALECT for folder in FOLDERS)


@cache
def kinds() -> dict[str, Dialect]:
    """Those whose files lint checks, by name; one that extends another comes before it."""
    checked = [each for each in dialects() if each.rules]
    ordered = [each for base in checked for each in (*(ext for ext in checked if ext.extends == base.name), base)]
    return {each.name: each for each in ordered}


@cache
def launchers() -> dict[str, Launcher]:
    """The programs that start ranks, by name."""
    return {each.name: each.launcher for each in dialects() if each.launcher is not None}
