"""Rules for our own job files: whatever their reader refuses or has understood in its own way."""

from __future__ import annotations

from tightfit.formats.sentences import begun, parted, place_in
from tightfit.formats.sheet import Sheet
from tightfit.formats.worker.keys import is_workers
from tightfit.job.fields import job_fields
from tightfit.job.file import job_faults, read_job
from tightfit.messages import Message


def check_job(sheet: Sheet) -> None:
    """Ask the door for job files."""
    if is_workers(sheet.document.values):
        sheet.say("job-generated", "", Message("lint.job-generated"), Message("lint.write-job-again"))
        return
    for place in sheet.document.doubles:
        sheet.say("key-twice", place, Message("lint.job-key-twice"), Message("lint.keep-one"))
    if sheet.document.doubles or sheet.document.syntax == "hjson":
        return
    faults = job_faults(sheet.document.path)
    for fault in faults:
        sentence = str(fault)
        place = fault.at if fault.at in sheet.document.lines else place_in(sentence, sheet.document)
        what, fix = parted(sentence)
        field = job_fields().get(place)
        otherwise = Message("lint.write", what=field.phrase) if field else Message("lint.see-schema")
        sheet.say("job-refused", place, begun(what, sheet.document), fix or otherwise)
    if faults:
        return
    for sentence in map(str, read_job(sheet.document.path).said):
        place = place_in(sentence, sheet.document)
        what = begun(sentence.rstrip("."), sheet.document)
        sheet.say("job-said", place, what, Message("lint.nothing-if-meant"))
