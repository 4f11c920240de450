"""Our own job files, and what a plan wrote for our own worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from tightfit.formats.dialect import Dialect
from tightfit.formats.document import Document
from tightfit.formats.rules import Sheet, rules
from tightfit.formats.worker.read import is_workers
from tightfit.job import Job
from tightfit.job.fields import job_fields
from tightfit.job.file import job_faults, read_job
from tightfit.job.known import KnownConfig, block_in, whole, word
from tightfit.job.training import MARKS, translate
from tightfit.messages import Listing, Message, Said, bare
from tightfit.types import UserError


def known(values: Mapping[str, Any]) -> KnownConfig:
    with suppress(UserError):  # what is wrong in it is the job's own reader's to say
        values = translate(values, "").tree
    levers = block_in(values, "levers")
    engine = word(levers.get("engine")) or ""
    recompute = levers.get("checkpointing")
    return KnownConfig(
        stage=int(engine[-1]) if engine[:-1] == "zero" and engine[-1].isdigit() else None,
        offload_optimizer=word(levers.get("offload_optimizer")),
        offload_param=word(levers.get("offload_param")),
        micro_batch=whole(levers.get("micro_batch")),
        accumulation=whole(levers.get("accum")),
        sequence=whole(values.get("sequence")),
        precision=word(values.get("precision")),
        method=word(values.get("method")),
        checkpointing=None if recompute is None else recompute != "none",
        attention=word(levers.get("attention")),
        loss=word(levers.get("loss")),
    )


RULES = rules("key-twice! json-comments! job-refused! job-generated. job-said.")


_WITH_HINT = ("inputs.must-be", "inputs.unknown-word", "job.unknown-field")
_NUMBERS = {
    "inputs.at-least": "lint.write-number-of",
    "inputs.at-most": "lint.write-number-of",
    "job.below-one": "lint.write-number-below",
}
"""What is said after `must be`, and how it is said after `write`."""


def check_job(sheet: Sheet) -> None:
    """Ask the door for job files."""
    document = sheet.document
    if is_workers(document.values):
        sheet.note("job-generated", "", "lint.job-generated", "lint.write-job-again")
        return
    for place in document.doubles:
        sheet.note("key-twice", place, "lint.job-key-twice", "lint.keep-one")
    if document.doubles or document.syntax == "hjson":
        return
    faults = job_faults(document.path)
    for fault in faults:
        place = fault.at if fault.at in document.lines else _place_of(fault.said, document)
        field = job_fields().get(place)
        otherwise = Message("lint.write", what=field.phrase) if field else Message("lint.see-schema")
        sheet.say("job-refused", place, _tell(fault.said, document), _fix_of(fault.said) or otherwise)
    if faults:
        return
    for said in read_job(document.path).said:
        sheet.say("job-said", _place_of(said, document), _tell(said, document), Message("lint.nothing-if-meant"))


def _place_of(said: Said, document: Document) -> str:
    """The key of the file that a message is about: the longest one among its fields."""
    words = {word.strip("`'\",.:;()") for word in _words_in(said)}
    named = [place for place in document.lines if place in words or place.rpartition(".")[2] in words]
    return max(named, key=lambda place: (place in words, len(place)), default="")


def _words_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from value.split()
    for inside in value.fields.values() if isinstance(value, Message) else ():
        yield from _words_in(inside)
    for inside in value.parts if isinstance(value, Listing) else ():
        yield from _words_in(inside)


def _tell(said: Said, document: Document) -> str:
    """What it says without the file's name, which stands above it, and with a key at its beginning marked as one."""
    plain = bare(_strip(said))
    first, space, rest = plain.partition(" ")
    key = first.rstrip(":")
    segments = {segment for place in document.lines for segment in (place, *place.split("."))}
    return f"`{key}`{first[len(key) :]}{space}{rest}" if key in segments else plain


def _strip(said: Said) -> Said:
    """The same without the file, and without the fix."""
    if not isinstance(said, Message):
        return said
    if said.id == "inputs.in-file":
        return str(said.fields["name"])
    gone = ("file", "fix", "hint") if said.id in _WITH_HINT else ("file", "fix")
    kept = {name: value for name, value in said.fields.items() if name not in gone}
    return Message(
        said.id, **{name: _strip(value) if isinstance(value, Message) else value for name, value in kept.items()}
    )


def _fix_of(said: object) -> Said | None:
    """What to write instead; None: the message does not say it."""
    if not isinstance(said, Message):
        return None
    fix, hint = said.fields.get("fix"), said.fields.get("hint")
    if isinstance(fix, Message):
        return fix
    if said.id in _WITH_HINT and isinstance(hint, Message):
        meant = next((hint.fields[name] for name in ("close", "words", "names") if name in hint.fields), None)
        return hint if meant is None else Message("lint.write", what=meant)
    if isinstance(must := said.fields.get("must"), Message):
        return Message(_NUMBERS.get(must.id, "lint.write"), what=must)
    return _fix_of(said.fields.get("problem"))


DIALECT = Dialect(
    name="job",
    title=Message("lint.job-title"),
    one=Message("lint.job-one"),
    keys=frozenset(field.name for field in fields(Job)) | set(MARKS),
    telling=("hardware", "effective_batch", "levers", "limits", "training", "saving", "preset"),
    hinting=("model",),
    rules=RULES,
    check=check_job,
    known=known,
)
