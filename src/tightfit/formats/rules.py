"""What lint looks for: a rule is an id, how grave it is, and what it finds. Each format lists those of its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tightfit.messages import Said


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


Severity = Literal["error", "warning", "note"]
"""error: the tool refuses the file, or trains something else than what is written; warning: a line has no effect or a
bad one; note: worth knowing, and nothing to repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One place in a file, what happens there, and what to write instead."""

    file: str
    """The file's path from here: a config may name another file, which is read with it."""
    place: str
    """The key, with the blocks that it stands in: `zero_optimization.offload_param`."""
    line: int | None
    """Counted from 1; None: about something that is not there."""
    severity: Severity
    what: Said
    """What really happens, in a sentence."""
    fix: Said
    """What to write."""
    rule: str
    """The rule's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was found in a file and in the DeepSpeed file that it names."""

    file: str
    kind: str
    """The name of the dialect that it was taken for."""
    findings: tuple[Finding, ...]
    """By file, then by line."""

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)
