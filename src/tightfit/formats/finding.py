"""What lint says about a file. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tightfit.messages import Said

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
