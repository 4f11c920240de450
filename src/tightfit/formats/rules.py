"""What lint looks for and what it found, and the sheet that the rules of a format write on: one file, and what it is
checked against. `docs/lint.md` says what each rule finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tightfit.formats.document import Document
from tightfit.inputs.spelling import as_number
from tightfit.messages import Message, Said, bare
from tightfit.types import UserError

if TYPE_CHECKING:
    from tightfit.formats.target import Target

Severity = Literal["error", "warning", "note"]
"""error: the tool refuses the file, or trains something else than what is written; warning: a line has no effect or a
bad one; note: worth knowing, and nothing to repair."""


def rules(words: str) -> dict[str, Severity]:
    """A table of rules by their ids: `!` stands behind an error, `?` behind a warning, `.` behind a note."""
    severities: dict[str, Severity] = {"!": "error", "?": "warning", ".": "note"}
    return {word[:-1]: severities[word[-1]] for word in words.split()}


IN_ANY_FILE = rules("key-twice! not-finite!")
BESIDE_DEEPSPEED = IN_ANY_FILE | rules("json-comments! pair-missing! pair-hjson!")
"""For files that may name a DeepSpeed file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One place in a file, what happens there, and what to write instead."""

    file: str  # the file's path from here: a config may name another file, which is read with it
    place: str  # the key, with the blocks that it stands in: `zero_optimization.offload_param`
    line: int | None  # counted from 1; None: about something that is not there
    severity: Severity
    what: Said  # what really happens, in a sentence
    fix: Said  # what to write
    rule: str  # the rule's id


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was found in a file and in the DeepSpeed file that it names."""

    file: str
    kind: str  # the name of the dialect that it was taken for
    findings: tuple[Finding, ...]  # by file, then by line

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)


_LARGEST = 1e18
"""What is larger was a slip of the finger, and is left to the tool; infinity and NaN fall under it as well."""


@dataclass(slots=True, kw_only=True)
class Sheet:
    """A file under examination. The only thing in this room that changes."""

    document: Document
    rules: Mapping[str, Severity]  # what is looked for in such a file
    target: Target
    world: int | None = None  # the number of GPUs, where it is known
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
        file, line = self.document.shown_path, self.document.line(place)
        whole = ".".join(filter(None, (self.document.within, place)))
        severity = self.rules[rule]
        self.found.append(Finding(file=file, place=whole, line=line, severity=severity, what=what, fix=fix, rule=rule))


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
