"""The dialects, a line each. To add one: a folder beside this file with a `dialect.py`, and its name here."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from tightfit.formats.dialect import Dialect, Launcher
from tightfit.formats.rules import BESIDE, JSON_COMMENTS, KEY_TWICE, NOT_FINITE, Rule

FOLDERS = (
    "deepspeed",
    "torchrun",
    "accelerate",
    "huggingface",
    "llamafactory",
    "worker",
    "launch",
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


def kinds_by_rule() -> dict[Rule, tuple[str, ...]]:
    """Every rule, with the kinds of file in which it is looked for."""
    shared = (KEY_TWICE, NOT_FINITE, JSON_COMMENTS, *BESIDE)
    every = dict.fromkeys((*shared, *(rule for each in kinds().values() for rule in each.rules)))
    return {rule: tuple(name for name, each in kinds().items() if rule in each.rules) for rule in every}


def rule_table() -> str:
    """The same as a Markdown table."""
    rows = [
        f"| `{rule.id}` | {', '.join(names)} | {rule.severity} | {rule.finds} |"
        for rule, names in kinds_by_rule().items()
    ]
    return "\n".join(["| rule | kind of file | severity | what it finds |", "|---|---|---|---|", *rows])
