"""A job of several stages, asked for as a whole or stage by stage: see `job/file.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tightfit.desk.request import Request
from tightfit.job import Job
from tightfit.job.file import folder_of_merged_model, job_from_text, model_left_by, stage_folder, stage_of
from tightfit.messages import Message
from tightfit.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a job."""

    number: int
    count: int
    job: Job
    root: str
    """The folder of the whole job."""
    fields: Mapping[str, Any]
    """What the stage itself sets."""
    model: Path | None
    """The folder from which it starts, whether it is there yet or not; None: the first starts from the job's model."""

    @property
    def folder(self) -> Path:
        return stage_folder(self.root, self.number)

    @property
    def words(self) -> Message:
        what = {"embeddings": Message("desk.embeddings-alone"), "layers": Message("desk.all-but-embeddings")}
        method = None if self.job.method == "full" else self.job.method
        trains = what.get(self.job.trains)
        return Message("desk.stage", number=self.number, count=self.count, trains=trains, method=method)


def pick_stage(request: Request, job: Job | None) -> Stage | None:
    """The stage that `--only-stage` picks of the job of a request's file; None: it has none, or there is no file."""
    number, file = request.only_stage, request.file.path if request.file else None
    if job is None or file is None or not job.stages:
        if number is not None:
            raise ConfigError(Message("desk.no-stages"))
        return None
    count = len(job.stages)
    if number is None:
        raise ConfigError(Message("desk.which-stage", file=file.name, count=count))
    if not 1 <= number <= count:
        raise ConfigError(Message("desk.no-such-stage", number=number, file=file.name, count=count))
    root, model, before = request.flags.get("output", job.saving.folder), None, number - 1
    staged = stage_of(job, number, file.name)
    if before:
        adapters = stage_of(job, before, file.name).method != "full"
        usual = folder_of_merged_model(root, before) if adapters else stage_folder(root, before) / "model"
        model = model_left_by(root, before) or usual
    return Stage(number=number, count=count, job=staged, root=root, fields=job.stages[before], model=model)


def each_stage(request: Request) -> list[Request]:
    """The same question for every stage of a job; empty: it has none, or one was picked."""
    if request.file is None or request.only_stage is not None or request.file.is_llamafactory:
        return []
    job = job_from_text(request.file.read(), model=request.model).job
    asked = []
    for number in range(1, len(job.stages) + 1):
        one = replace(request, only_stage=number)
        if request.write is not None:
            root = Path(request.flags.get("output", job.saving.folder)).expanduser().absolute()
            folder = str(stage_folder(request.write, number))
            one = replace(one, write=folder, flags={**request.flags, "output": str(root)})
        asked.append(one)
    return asked
