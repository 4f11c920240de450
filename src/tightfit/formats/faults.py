"""An error of one of our own readers as a finding: which key, what is wrong, what to write."""

from __future__ import annotations

from tightfit.formats.sheet import Sheet
from tightfit.messages import Message, Said, bare
from tightfit.types import UserError


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
