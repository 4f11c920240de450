"""The sheet that the rules write on: one file, what it is checked against, and what was found so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightfit.formats.document import Document
from tightfit.formats.rules import Finding, Rule
from tightfit.formats.target import Target
from tightfit.inputs.spelling import as_number
from tightfit.messages import Message, Said, bare
from tightfit.types import UserError

_LARGEST = 1e18
"""What is larger was a slip of the finger, and is left to the tool; infinity and NaN fall under it as well."""


@dataclass(slots=True, kw_only=True)
class Sheet:
    """A file under examination. The only thing in this room that changes."""

    document: Document
    rules: tuple[Rule, ...]
    """What is looked for in such a file."""
    target: Target
    world: int | None = None
    """The number of GPUs, where it is known."""
    paired: bool = False
    """A DeepSpeed file that a trainer's config names: the Hugging Face layer reads it and fills in `auto`."""
    found: list[Finding] = field(default_factory=list)

    def get(self, place: str) -> Any:
        """The value at a dotted place, None where there is none."""
        return self.document.at(place)

    def has(self, place: str) -> bool:
        """Whether the key is written at all, if only with null."""
        outer, _, key = place.rpartition(".")
        return key in self.block(outer)

    def block(self, place: str) -> Mapping[str, Any]:
        """The block at a place, empty where there is none."""
        value = self.get(place) if place else self.document.values
        return value if isinstance(value, Mapping) else {}

    def on(self, place: str) -> bool:
        """Whether a switch is on. Text is what Python makes of it: true."""
        value = self.get(place)
        return bool(value) and value != "auto"

    def number(self, place: str) -> float | None:
        """A number, also where it is written as text; None for `auto`, and for anything else."""
        value = self.get(place)
        if isinstance(value, str):
            value = as_number(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
            return None
        return value

    def note(self, rule: str, place: str, what: str, fix: str | Message, /, **fields: object) -> None:
        """Note a finding: `what` is the id of a message, which takes the fields; `fix` an id too, or a message."""
        self.say(rule, place, Message(what, **fields), Message(fix) if isinstance(fix, str) else fix)

    def say(self, rule: str, place: str, what: Said, fix: Said) -> None:
        """Likewise, of messages that are made already. `what` and `fix` are sentences without their full stops."""
        inner = self.document.within
        self.found.append(
            Finding(
                file=self.document.shown_path,
                place=f"{inner}.{place}" if inner and place else inner or place,
                line=self.document.line(place),
                severity=next(each.severity for each in self.rules if each.id == rule),
                what=what,
                fix=fix,
                rule=rule,
            )
        )


def part_fault(error: UserError) -> tuple[Said, Said | None]:
    """What is wrong, without the file's name, which stands above it; and the fix, None: the error names none.

    Messages about a file say both where they have them: `{key}[[ in {file}]] is wrong[[: {fix}]]`.
    """
    if not isinstance(error.said, Message):
        return bare(error.said), None
    fields = {name: value for name, value in error.said.fields.items() if name not in ("file", "fix")}
    fix = error.said.fields.get("fix")
    return Message(error.said.id, **fields), fix if isinstance(fix, Message | str) else None


def say_fault(sheet: Sheet, rule: str, error: UserError, otherwise: Said) -> None:
    """Note it on the sheet. `otherwise`: the fix where the error names none."""
    what, fix = part_fault(error)
    sheet.say(rule, error.at, what, fix or otherwise)


DELETE, KEEP_ONE = Message("lint.delete"), Message("lint.keep-one")


def propose(what: object) -> Message:
    """The fix that is something else to write; None: there is nothing, so that it is to be deleted."""
    return DELETE if what is None else Message("lint.write", what=what)
