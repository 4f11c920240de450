"""`lint`: what the tools themselves accept silently and get wrong, or refuse only after everything has started."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from tightfit.formats.accelerate.check import check_accelerate
from tightfit.formats.deepspeed.check import (
    check_accelerate_pair,
    check_arguments_pair,
    check_deepspeed,
    check_llamafactory_pair,
    deepspeed_beside,
)
from tightfit.formats.document import read_document
from tightfit.formats.finding import Finding, Kind, Report
from tightfit.formats.huggingface.check import check_training_arguments
from tightfit.formats.job.check import check_job
from tightfit.formats.kinds import kind_of
from tightfit.formats.llamafactory.check import check_llamafactory
from tightfit.formats.sheet import Sheet
from tightfit.formats.target import Target
from tightfit.inputs.spelling import walk
from tightfit.inputs.versions import newest_deepspeed
from tightfit.types import UserError


def lint(
    path: Path, target: Target | None = None, *, kind: Kind | None = None, world: int | None = None
) -> tuple[Finding, ...]:
    """What is wrong in a config file, and in the DeepSpeed file that it names."""
    return examine(path, target, kind=kind, world=world).findings


def examine(path: Path, target: Target | None = None, *, kind: Kind | None = None, world: int | None = None) -> Report:
    """The same, with the kind of file that it was taken for."""
    document = read_document(path)
    kind = kind or kind_of(document)
    sheet = Sheet(document=document, target=_for_its_trainer(path, kind, target or Target()), world=world)
    if kind != "job" and _check_finite(sheet):
        return _report(kind, sheet)
    if kind == "deepspeed":
        check_deepspeed(sheet)
        return _report(kind, sheet)
    if document.syntax == "hjson":
        what = "the file has comments, a trailing comma or the like, and its reader takes plain JSON and refuses it"
        sheet.say("json-comments", "", what, document.json_remedy)
    if kind == "job":
        check_job(sheet)
        return _report(kind, sheet)
    if kind == "accelerate":
        return _report(kind, sheet, _accelerate(sheet))
    if kind == "llamafactory":
        check_llamafactory(sheet)
    else:
        check_training_arguments(sheet)
    deepspeed = deepspeed_beside(sheet, "deepspeed")
    if deepspeed is not None:
        check_arguments_pair(sheet, deepspeed)
        check_deepspeed(deepspeed)
    if kind == "llamafactory":
        check_llamafactory_pair(sheet, deepspeed)
    return _report(kind, sheet, deepspeed)


def _for_its_trainer(path: Path, kind: Kind, target: Target) -> Target:
    """Where nobody named the DeepSpeed: the newest that LLaMA-Factory asks for, if it reads the file."""
    read_by = kind == "llamafactory" or (kind == "deepspeed" and _is_llamafactorys(path))
    newest = newest_deepspeed("llamafactory", target.llamafactory_version)
    if not read_by or newest is None or target.deepspeed_version != Target().deepspeed_version:
        return target
    return replace(target, deepspeed_version=newest)


def _is_llamafactorys(path: Path) -> bool:
    """Whether the `llamafactory.yaml` beside it, as `tightfit plan --write` puts one there, names this file."""
    beside = path.with_name("llamafactory.yaml")
    try:
        return beside.is_file() and read_document(beside).values.get("deepspeed") == path.name
    except UserError:
        return False


def _check_finite(sheet: Sheet) -> bool:
    """Whether numbers were found with which nothing can be computed: no other rule has to reckon with them."""
    for place, value in walk(sheet.document.values):
        if isinstance(value, float) and not math.isfinite(value):
            sheet.say(
                "not-finite", place, f"it is {value}, with which nothing can be computed", "write a finite number"
            )
    return bool(sheet.found)


def _accelerate(sheet: Sheet) -> Sheet | None:
    check_accelerate(sheet)
    if sheet.get("distributed_type") != "DEEPSPEED":
        return None
    deepspeed = deepspeed_beside(sheet, "deepspeed_config.deepspeed_config_file")
    if deepspeed is not None:
        check_accelerate_pair(sheet, deepspeed)
        check_deepspeed(deepspeed)
    return deepspeed


def _report(kind: Kind, sheet: Sheet, other: Sheet | None = None) -> Report:
    own, theirs = sheet.found, other.found if other else []
    if other is not None and other.document.within:
        own, theirs = own + theirs, []

    def ordered(found: list[Finding]) -> list[Finding]:
        """By line; what is about the whole file or something missing comes last."""
        return sorted(found, key=lambda finding: (finding.line is None, finding.line or 0))

    findings = (*ordered(own), *ordered(theirs))
    return Report(file=sheet.document.shown_path, kind=kind, findings=findings)
