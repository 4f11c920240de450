"""What `tightfit diagnose` and `tightfit explain` show."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tightfit.diagnose.catalogue import Symptom
from tightfit.diagnose.verdict import Confidence, Diagnosis, Fix
from tightfit.messages import Listing, Message, Said, end_sentence, text
from tightfit.screen import phase_words, say

SURE: dict[Confidence, str] = {"certain": "screen.certain", "likely": "screen.likely", "possible": "screen.possible"}
_MOST_LINES = 12
_MOST_LETTERS = 400


def draw_diagnosis(console: Console, found: Diagnosis, expected: Said | None, names: Sequence[Said]) -> None:
    """The first cause with its proof and its fixes; one sentence, where nothing is wrong."""
    if found.verdict is None and expected is not None and not names:
        say(console, str(expected))
    elif found.verdict is None:
        where = names[0] if len(names) == 1 else Message("screen.logs", n=len(names))
        well = Message("screen.nothing-wrong-in", where=where) if names else Message("screen.nothing-wrong")
        say(console, well, style="bold green")
    else:
        verdict = found.verdict
        say(console, str(verdict.cause), style="bold red")
        facts = [Message(SURE[verdict.confidence])]
        if verdict.rank is not None:
            facts.append(Message("screen.first-rank", rank=verdict.rank))
        if verdict.phase is not None:
            facts.append(Message("screen.in-phase", phase=phase_words(verdict.phase)))
        say(console, str(Listing(facts, ".")))
        if expected is not None:
            say(console, str(expected))
        if verdict.evidence:
            console.print()
            console.print(text("screen.proof"))
        for line in verdict.evidence[:_MOST_LINES]:
            where = line.source if line.number is None else f"{line.source}:{line.number}"
            said = str(line.text)
            shown = said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]} …"
            say(console, f"{where}: {shown}", first="  ", indent="    ")
        _draw_fixes(console, verdict.fixes)
        console.print()
        say(console, text("screen.more", id=verdict.id))
    if found.also:
        console.print()
        console.print(text("screen.also" if found.verdict is not None else "screen.worth-knowing"))
        for also in found.also:
            say(console, f"{also.cause} [{also.id}]", first="  - ", indent="    ")


def _draw_fixes(console: Console, fixes: Sequence[Fix]) -> None:
    for title, costly in ((Message("screen.what-helps"), False), (Message("screen.what-changes"), True)):
        chosen = [fix for fix in fixes if fix.is_costly == costly]
        if not chosen:
            continue
        console.print()
        console.print(str(title))
        for fix in chosen:
            say(console, str(fix.text), first="  - ", indent="    ")
            if fix.command is not None:
                console.print(Text(f"      {fix.command}", style="cyan"), soft_wrap=True)


def draw_symptom(console: Console, symptom: Symptom, fixes: Sequence[Fix]) -> None:
    """One entry of the catalogue."""
    say(console, text("screen.about", name=symptom.id, what=symptom.title), style="bold")
    say(console, end_sentence(symptom.cause.fill_any()))
    facts = [Message("screen.kind", kind=symptom.kind)]
    if symptom.refines:
        facts.append(Message("screen.special-case", of=Listing(symptom.refines)))
    if symptom.role in ("echo", "trailing"):
        facts.append(Message("screen.follows"))
    if symptom.role == "note":
        facts.append(Message("screen.is-note"))
    say(console, str(Listing(facts, ".")))
    if symptom.lines:
        console.print()
        console.print(text("screen.log-shows"))
        for pattern in symptom.lines[:_MOST_LINES]:
            console.print(Text(f"  {pattern.text}"), soft_wrap=True)
    _draw_fixes(console, fixes)
    if symptom.sources:
        console.print()
        say(console, text("screen.sources", names=", ".join(symptom.sources)))


def draw_symptoms(console: Console, symptoms: Sequence[Symptom]) -> None:
    """All of them, a line each."""
    wide = max(len(symptom.id) for symptom in symptoms)
    for symptom in sorted(symptoms, key=lambda each: (each.kind, each.id)):
        say(console, f"{symptom.id:<{wide}}  {symptom.kind:<15} {symptom.title}", indent=" " * (wide + 18), first="")
