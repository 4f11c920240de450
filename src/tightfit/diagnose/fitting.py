"""Does a symptom fit a finding? All that its entry asks for, beside the expression that found the line."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.diagnose.catalogue import Catalogue, OomShape, Symptom
from tightfit.diagnose.doing import Doing
from tightfit.diagnose.scan import LogFinding
from tightfit.job.known import KnownConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What is known around a finding, or around an end without a word."""

    config: KnownConfig
    doing: Doing | None
    steps: int | None
    shapes: frozenset[OomShape]
    text: str
    """The line itself, and what follows of its message."""
    after: str
    before: str
    frames: str


def around(finding: LogFinding, config: KnownConfig, shapes: frozenset[OomShape]) -> Around:
    return Around(
        config=config,
        doing=finding.doing,
        steps=finding.steps,
        shapes=shapes,
        text=finding.message.whole,
        after="\n".join(finding.after),
        before="\n".join(finding.before),
        frames="" if finding.traceback is None else finding.traceback.place,
    )


def fits(symptom: Symptom, known: Around) -> bool:
    """Whether all that the entry asks for is there."""
    if symptom.frames is not None and not symptom.frames.search(known.frames):
        return False
    if symptom.follows is not None and not symptom.follows.search(f"{known.text}\n{known.after}"):
        return False
    if symptom.precedes is not None and not symptom.precedes.search(known.before):
        return False
    if symptom.around is not None and not symptom.around.search(f"{known.before}\n{known.text}\n{known.after}"):
        return False
    if symptom.doing and known.doing not in symptom.doing:
        return False
    if symptom.oom and not set(symptom.oom) & known.shapes:
        return False
    if symptom.settings is not None and not symptom.settings.hold(known.config):
        return False
    steps = known.steps or 0
    if symptom.least_steps is not None and steps < symptom.least_steps:
        return False
    return symptom.most_steps is None or steps <= symptom.most_steps


def asks(symptom: Symptom) -> int:
    """How much an entry asks for: the more, the more it says."""
    named = (
        symptom.frames,
        symptom.follows,
        symptom.precedes,
        symptom.around,
        symptom.settings,
        symptom.least_steps,
        symptom.most_steps,
    )
    return sum(each is not None for each in named) + bool(symptom.doing) + bool(symptom.oom)


def best(symptoms: list[Symptom], known: Around) -> Symptom | None:
    """A fault before an echo; then the heaviest that fits; among equals the one that asks for more."""
    fitting = [symptom for symptom in symptoms if fits(symptom, known)]
    return max(fitting, key=lambda each: (-each.tier, each.weight, asks(each)), default=None)


def refine(symptom: Symptom, known: Around, entries: Catalogue) -> Symptom:
    """The most special case of a symptom that fits."""
    special = [
        each
        for each in entries.refinements(symptom)
        if not each.lines or any(pattern.search(f"{known.text}\n{known.after}") for pattern in each.lines)
    ]
    found = best(special, known)
    return symptom if found is None else refine(found, known, entries)
