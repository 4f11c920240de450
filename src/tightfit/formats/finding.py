"""What lint says about a file. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: the tool refuses the file, or trains something else than what is written; warning: a line has no effect or a
bad one; note: worth knowing, and nothing to repair."""

Kind = Literal["deepspeed", "accelerate", "llamafactory", "huggingface", "job"]
"""Whose file it is; huggingface: transformers' TrainingArguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that lint looks for."""

    id: str
    kinds: tuple[Kind, ...]
    """The kinds of file in which it is looked for."""
    severity: Severity
    finds: str
    """What it finds, in a few words."""


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
    what: str
    """What really happens, in a sentence."""
    fix: str
    """What to write."""
    rule: str
    """The rule's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was found in a file and in the DeepSpeed file that it names."""

    file: str
    kind: Kind
    findings: tuple[Finding, ...]
    """By file, then by line."""

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)
