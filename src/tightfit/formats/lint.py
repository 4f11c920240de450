"""`lint`: what the tools themselves accept silently and get wrong, or refuse only after everything has started."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from tightfit.formats.dialect import Dialect, dialects, kinds
from tightfit.formats.document import read_document
from tightfit.formats.recognise import recognise
from tightfit.formats.rules import Finding, Report, Sheet
from tightfit.formats.target import Target
from tightfit.inputs.spelling import walk
from tightfit.inputs.versions import newest_deepspeed
from tightfit.messages import Message
from tightfit.types import UserError


def lint(
    path: Path, target: Target | None = None, *, kind: str | None = None, world: int | None = None
) -> tuple[Finding, ...]:
    """What is wrong in a config file, and in the DeepSpeed file that it names."""
    return examine(path, target, kind=kind, world=world).findings


def examine(path: Path, target: Target | None = None, *, kind: str | None = None, world: int | None = None) -> Report:
    """The same, with the kind of file that it was taken for."""
    document = read_document(path)
    dialect = recognise(document) if kind is None else kinds()[kind]
    target = target or Target()
    if target.deepspeed_version == Target().deepspeed_version:
        # where nobody named the DeepSpeed: the newest that the trainer asks for which reads the file
        readers = [dialect] if dialect.name != "deepspeed" else [each for each in dialects() if _names(each, path)]
        newest = (newest_deepspeed(each.trainer, target.llamafactory_version) for each in readers if each.trainer)
        target = replace(target, deepspeed_version=next(filter(None, newest), target.deepspeed_version))
    sheet = Sheet(document=document, rules=dialect.rules, target=target, world=world)
    for place, value in walk(document.values) if "not-finite" in dialect.rules else ():
        if isinstance(value, float) and not math.isfinite(value):
            sheet.note("not-finite", place, "lint.not-finite", "lint.write-finite", value=value)
    if sheet.found:  # nothing can be computed with such numbers: no other rule has to reckon with them
        return _report(dialect, sheet)
    if "json-comments" in dialect.rules and document.syntax == "hjson":
        sheet.say("json-comments", "", Message("lint.json-comments"), document.json_remedy)
    return _report(dialect, sheet, dialect.check(sheet))


def _names(dialect: Dialect, path: Path) -> bool:
    """Whether the trainer's file beside it, as `tightfit plan --write` puts one there, names this DeepSpeed file."""
    if dialect.deepspeed_at is None or not dialect.files:
        return False
    beside = path.with_name(dialect.files[0].name)
    try:
        return beside.is_file() and read_document(beside).at(dialect.deepspeed_at) == path.name
    except UserError:
        return False


def _report(dialect: Dialect, sheet: Sheet, other: Sheet | None = None) -> Report:
    own, theirs = sheet.found, other.found if other else []
    if other is not None and other.document.within:
        own, theirs = own + theirs, []

    def ordered(found: list[Finding]) -> list[Finding]:
        """By line; what is about the whole file or something missing comes last."""
        return sorted(found, key=lambda finding: (finding.line is None, finding.line or 0))

    findings = (*ordered(own), *ordered(theirs))
    return Report(file=sheet.document.shown_path, kind=dialect.name, findings=findings)
