"""The page of all symptoms, made from the catalogue."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.diagnose.catalogue import Catalogue, Symptom
from tightfit.diagnose.verdict import Kind
from tightfit.diagnose.wording import fixes_of
from tightfit.formats.known import KnownConfig

TITLES: dict[Kind, str] = {
    "device-oom": "The GPU's memory",
    "fragmentation": "Memory in pieces",
    "other-process": "Somebody else on the GPU",
    "host-oom": "The host's memory",
    "pinned-memory": "Pinned memory",
    "shared-memory": "Shared memory",
    "communication": "Communication between ranks",
    "hang": "Ranks that hang",
    "not-finite": "Numbers that are none",
    "loss-scale": "The loss scale",
    "disk-full": "The disk",
    "data": "The data",
    "code": "The program",
    "config": "Settings",
    "environment": "The environment",
    "preempted": "Asked to leave",
    "hardware": "Hardware",
    "unknown": "Unknown",
}

HEAD = """# Symptoms

What [`tightfit diagnose`](diagnose.md) knows: {count} symptoms, by the kind of their cause. The supervisor of \
`tightfit train` judges by the same catalogue. This page is made from it (`python tests/diagnose/test_page.py`).

- *certain*, *likely*, *possible*: how sure a verdict of this name is.
- *special case of*: it is looked for where the other was found, and says more.
- *echo*, *trailing*: it follows from a failure elsewhere, and is the verdict only where nothing else is known.
- *ending*: how a process ended; what it said before counts first.
- *note*: worth knowing, and never the verdict.
- A fix marked *changes the training* changes what is trained, and not only how.
"""


def symptom_page(known: Catalogue) -> str:
    """The text of docs/symptoms.md."""
    blocks = [HEAD.format(count=len(known.symptoms))]
    for kind, title in TITLES.items():
        ours = [symptom for symptom in known.symptoms if symptom.kind == kind]
        if ours:
            blocks.append(f"## {title}\n")
            blocks += [_entry(symptom) for symptom in sorted(ours, key=lambda each: each.id)]
    return "\n".join(blocks)


def _entry(symptom: Symptom) -> str:
    return "\n".join([f"### {symptom.id}\n", *_lines(symptom), ""])


def _lines(symptom: Symptom) -> Iterator[str]:
    facts: list[str] = [symptom.confidence]
    if symptom.role not in ("fault", "state"):
        facts.append(symptom.role)
    if symptom.refines:
        facts.append("special case of " + ", ".join(f"[{base}](#{base})" for base in symptom.refines))
    yield f"**{symptom.title}.** {_safe(symptom.cause_of_any)}. *({'; '.join(facts)})*\n"
    for fix in fixes_of(symptom, KnownConfig(), {}):
        cost = " *(changes the training)*" if fix.is_costly else ""
        command = f" `{fix.command}`" if fix.command else ""
        yield f"- {_safe(str(fix.text))}{command}{cost}"
    if symptom.sources:
        yield f"\nFrom {', '.join(symptom.sources)}."


def _safe(text: str) -> str:
    """Braces are filled in from the log, and underscores are no emphasis."""
    return text.replace("{where}", "").replace("{", "*").replace("}", "*").replace("_", "\\_")
