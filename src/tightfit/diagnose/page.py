"""The pages of all symptoms, docs/symptoms.md and docs/zh/symptoms.md, made from the catalogue."""

from __future__ import annotations

from tightfit.diagnose.catalogue import Catalogue, Role
from tightfit.diagnose.judge import fixes_of
from tightfit.diagnose.verdict import Confidence, Kind
from tightfit.job.known import KnownConfig
from tightfit.messages import Language, Listing, Message, Said, say

TITLES: dict[Kind, Message] = {
    "device-oom": Message("diagnose.kind-device-oom"),
    "fragmentation": Message("diagnose.kind-fragmentation"),
    "other-process": Message("diagnose.kind-other-process"),
    "host-oom": Message("diagnose.kind-host-oom"),
    "pinned-memory": Message("diagnose.kind-pinned-memory"),
    "shared-memory": Message("diagnose.kind-shared-memory"),
    "communication": Message("diagnose.kind-communication"),
    "hang": Message("diagnose.kind-hang"),
    "not-finite": Message("diagnose.kind-not-finite"),
    "loss-scale": Message("diagnose.kind-loss-scale"),
    "disk-full": Message("diagnose.kind-disk-full"),
    "data": Message("diagnose.kind-data"),
    "code": Message("diagnose.kind-code"),
    "config": Message("diagnose.kind-config"),
    "environment": Message("diagnose.kind-environment"),
    "preempted": Message("diagnose.kind-preempted"),
    "hardware": Message("diagnose.kind-hardware"),
    "unknown": Message("diagnose.kind-unknown"),
}
_SURE: dict[Confidence, Message] = {
    "certain": Message("diagnose.sure-certain"),
    "likely": Message("diagnose.sure-likely"),
    "possible": Message("diagnose.sure-possible"),
}
_ROLES: dict[Role, Message] = {
    "ending": Message("diagnose.role-ending"),
    "echo": Message("diagnose.role-echo"),
    "trailing": Message("diagnose.role-trailing"),
    "note": Message("diagnose.role-note"),
}
"""Those of which the page says something."""

_OTHER: dict[Language, str] = {"en": "[中文](zh/symptoms.md)", "zh": "[English](../symptoms.md)"}


def symptom_page(known: Catalogue, language: Language) -> str:
    """The text of the page in a language."""
    head = Message("diagnose.page-head", count=len(known.symptoms), other=_OTHER[language])
    blocks = [head.text(language)]
    for kind, title in TITLES.items():
        ours = sorted((symptom for symptom in known.symptoms if symptom.kind == kind), key=lambda each: each.id)
        if ours:
            blocks.append(f"## {title.text(language)}\n")
        for symptom in ours:
            facts = [_SURE[symptom.confidence], *([_ROLES[symptom.role]] if symptom.role in _ROLES else [])]
            if symptom.refines:
                bases = Listing(f"[{base}](#{base})" for base in symptom.refines)
                facts.append(Message("diagnose.page-special-case", bases=bases))
            cause = _escape(symptom.cause.fill_any("*{}*"), language)
            said: list[Said] = [
                f"### {symptom.id}\n",
                Message("diagnose.page-symptom", title=symptom.title, cause=cause, facts=Listing(facts, ";")),
                "",
            ]
            for fix in fixes_of(symptom, KnownConfig(), {}):
                message = "diagnose.page-costly-fix" if fix.is_costly else "diagnose.page-fix"
                said.append(Message(message, text=_escape(fix.text, language), command=fix.command))
            if symptom.sources:
                said += ["", Message("diagnose.page-sources", sources=", ".join(symptom.sources))]
            blocks.append("\n".join([*(say(line, language) for line in said), ""]))
    return "\n".join(blocks)


def _escape(said: Said, language: Language) -> str:
    """Underscores are no emphasis."""
    return say(said, language).replace("_", "\\_")
