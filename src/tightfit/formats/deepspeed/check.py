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
from tightfit.formats.sentences import begun, parted, place_in
from tightfit.formats.sheet import Sheet
from tightfit.inputs.spelling import nearest, shown
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
        sentence = str(error)
        # Unknown keys have rules of their own, and what cannot be priced may be quite right.
        if not any(words in sentence for words in ("unknown key", "not priced", "'auto', and nobody")):
            what, fix = parted(sentence)
            place = place_in(sentence, sheet.document)
            if any(place and finding.place == place for finding in sheet.found):
                return  # a switch as "yes", say: DeepSpeed takes what we do not
            sheet.say("ds-value", place, begun(what, sheet.document), fix or "write what DeepSpeed's own docs give")


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
        what = f"{document.path.name} has comments or other Hjson: transformers and accelerate read plain JSON and fail"
        sheet.say("pair-hjson", place, what, document.json_remedy)
    return other


def _read(sheet: Sheet, place: str, name: str) -> Document | None:
    """The file of that name. Where there is none, the trainer fails as well."""
    found = _find(name, sheet.document.path)
    if found is None:
        folder = sheet.document.path.parent
        close = nearest(Path(name).name, [other.name for other in folder.glob("*.json")]) if folder.is_dir() else None
        what = (
            f"{shown(name)} is neither in this folder nor beside {sheet.document.path.name}: the training cannot start"
        )
        fix = f"write {close}" if close else "write its path as seen from where the training is started"
        sheet.say("pair-missing", place, what, fix)
        return None
    try:
        return read_document(found)
    except ConfigError as error:
        what, fix = parted(str(error))
        sheet.say("pair-missing", place, f"{what}: the training cannot start", fix or "write a DeepSpeed config there")
        return None


def _find(name: str, beside: Path) -> Path | None:
    try:
        places = (Path(name).expanduser(), beside.parent / name)
        return next((place for place in places if place.is_file()), None)
    except (ValueError, RuntimeError, OSError):  # a path that no file system can hold, a home that nobody has
        return None
