"""What lint looks for in a job file."""

from __future__ import annotations

from tightfit.formats.rules import rules

RULES = rules(
    ("job-refused", "error", "whatever a plan would refuse"),
    ("job-generated", "note", "our worker's config, which a plan wrote: nothing to lint"),
    ("job-said", "note", "what was understood from another form of job file"),
)
