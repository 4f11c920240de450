"""What lint looks for: a rule is an id, how grave it is, and what it finds. Each format lists those of its files."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.formats.finding import Severity


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that lint looks for."""

    id: str
    severity: Severity
    finds: str
    """In a few words."""


def rules(*rows: tuple[str, Severity, str]) -> tuple[Rule, ...]:
    """A table of them."""
    return tuple(Rule(*row) for row in rows)


(KEY_TWICE, NOT_FINITE, JSON_COMMENTS, *BESIDE) = rules(
    ("key-twice", "error", "a key that stands twice in a block"),
    ("not-finite", "error", "a number that is infinite or not a number (`.inf`, `NaN`, `1e999`)"),
    ("json-comments", "error", "comments or a trailing comma in JSON, which all but DeepSpeed refuse"),
    ("pair-missing", "error", "a DeepSpeed file that is not there, or cannot be read"),
    ("pair-hjson", "error", "a DeepSpeed file with comments, which the Hugging Face layer refuses"),
)
"""For files of several programs; `BESIDE` for those that name a DeepSpeed file."""
