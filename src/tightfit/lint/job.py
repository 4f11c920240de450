"""Rules for our own job files: whatever their reader refuses or has understood in its own way."""

from __future__ import annotations

from tightfit.lint.sentences import parted, place_in
from tightfit.lint.sheet import Sheet
from tightfit.types import UserError


def check_job(sheet: Sheet) -> None:
    """Ask the door for job files."""
    from tightfit.inputs.job_file import read_job

    for place in sheet.document.doubles:
        sheet.say("key-twice", place, "a job file may say a thing once only, and is refused", "keep one")
    if sheet.document.doubles:
        return
    try:
        said = read_job(sheet.document.path).said
    except UserError as error:
        sheet.say("job-refused", place_in(str(error), sheet.document), *parted(str(error)))
        return
    for sentence in said:
        place = place_in(sentence, sheet.document)
        sheet.say("job-said", place, sentence.rstrip("."), "nothing, if it is what you meant")
