"""Rules for a DeepSpeed config, whether it stands alone or a trainer's config names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tightfit.formats.deepspeed.check_keys import check_keys
from tightfit.formats.deepspeed.check_kinds import check_kinds
from tightfit.formats.deepspeed.check_values import check_values
from tightfit.formats.deepspeed.read import read_deepspeed
from tightfit.formats.deepspeed.rules import CHECKED
from tightfit.formats.document import Document, read_document
from tightfit.formats.faults import part_fault, say_fault
from tightfit.formats.sheet import Sheet
from tightfit.inputs.spelling import nearest, shown
from tightfit.messages import Message, id_of
from tightfit.types import ConfigError


def check_deepspeed(sheet: Sheet) -> None:
    """Every rule for a DeepSpeed file, and as a last net what our own reader of such files refuses."""
    check_keys(sheet)
    check_kinds(sheet)
    check_values(sheet)
    if sheet.document.within or any(finding.severity == "error" for finding in sheet.found):
        return
    try:
        read_deepspeed(sheet.document.path, hidden_size=4096, version=sheet.target.deepspeed_version)
    except ConfigError as error:
        # What cannot be priced may be quite right; an unknown key, which is about none, has rules of its own; and
        # DeepSpeed takes what we do not, a switch as "yes", say.
        if error.at and id_of(error.said) not in _NOT_WRONG and all(each.place != error.at for each in sheet.found):
            say_fault(sheet, "ds-value", error, Message("lint.as-deepspeeds-docs"))


_NOT_WRONG = ("deepspeed.stage-auto", "deepspeed.optimizer-meant", "deepspeed.optimizer-unknown")


def deepspeed_beside(sheet: Sheet, place: str) -> Sheet | None:
    """The DeepSpeed file that a config names at a place, or that it holds as a block; None where there is none."""
    value = sheet.get(place)
    if isinstance(value, Mapping) and value and "." not in place:
        document = sheet.document.block(place)
    elif isinstance(value, str) and value.strip() not in ("", "none"):
        named = _read(sheet, place, value)
        if named is None:
            return None
        document = named
    else:
        return None
    other = Sheet(document=document, rules=CHECKED, target=sheet.target, world=sheet.world, paired=True)
    if document.syntax == "hjson" and not document.within:
        sheet.say("pair-hjson", place, Message("lint.pair-hjson", file=document.path.name), document.json_remedy)
    return other


def _read(sheet: Sheet, place: str, name: str) -> Document | None:
    """The file of that name. Where there is none, the trainer fails as well."""
    found = _find(name, sheet.document.path)
    if found is None:
        folder = sheet.document.path.parent
        close = nearest(Path(name).name, [other.name for other in folder.glob("*.json")]) if folder.is_dir() else None
        what = Message("lint.pair-missing", name=shown(name), file=sheet.document.path.name)
        fix = Message("lint.write", what=close) if close else Message("lint.write-its-path")
        sheet.say("pair-missing", place, what, fix)
        return None
    try:
        return read_document(found)
    except ConfigError as error:
        problem, remedy = part_fault(error)
        what = Message("lint.cannot-start", what=problem)
        sheet.say("pair-missing", place, what, remedy or Message("lint.write-deepspeed-config"))
        return None


def _find(name: str, beside: Path) -> Path | None:
    try:
        places = (Path(name).expanduser(), beside.parent / name)
        return next((place for place in places if place.is_file()), None)
    except (ValueError, RuntimeError, OSError):  # a path that no file system can hold, a home that nobody has
        return None
