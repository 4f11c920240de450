"""Several trainings in one job file: `stages`, each from the model that the one before it left.

A stage is a block of the job's own fields, which win over those outside it:

    model: Qwen/Qwen2.5-0.5B
    method: lora
    stages:
      - {trains: embeddings, max_steps: 200}
      - {max_steps: 2000}

The first trains the embeddings alone, the second adapters on the model that came out. Every stage is a run with a
folder of its own below the job's: `output/stage-1`, `output/stage-2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tightfit.job import Job
from tightfit.job.fields import Source, job_fields, job_from_tree
from tightfit.job.text import name_in
from tightfit.job.training import translate
from tightfit.messages import Choice, Message, text
from tightfit.types import ConfigError, UserError

FOR_ALL = ("model", "stages", "hardware", "saving.folder")
"""What belongs to the whole job: no stage has its own."""


def merge_stage(job: Job, tree: Mapping[str, Any], number: int, file: str | None) -> Job:
    """The job of one stage, counted from 1. `tree`: the job as plain values."""
    block = job.stages[number - 1]
    for path in FOR_ALL:
        outer, _, inner = path.rpartition(".")
        inside = block.get(outer) if outer else block
        if isinstance(inside, Mapping) and inner in inside:
            name, fix = name_in(f"stages[{number}].{path}", file), Message("job.stand-outside", names=Choice(FOR_ALL))
            raise ConfigError(Message("job.for-all-stages", name=name, fix=fix))
    merged = _lay_over({key: value for key, value in tree.items() if key != "stages"}, block)
    for length, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
        if length in block and other not in block:
            merged.pop(other, None)
    if block.get("trains") == "embeddings" and "method" not in block:
        merged.pop("method", None)  # adapters train nothing but themselves: this stage comes before them
        merged.pop("lora", None)
    names = {path: f"stages[{number}].{path}" for path in job_fields()}
    ours = translate(merged, file or text("job.the-job"))
    made, _ = job_from_tree(ours.tree, Source(file=file, names={**names, **ours.names}, kind="yaml"))
    return made


def check_stages(job: Job, tree: Mapping[str, Any], file: str | None) -> Iterator[UserError]:
    """What is wrong in the stages, a sentence for each stage."""
    for number in range(1, len(job.stages) + 1):
        try:
            merge_stage(job, tree, number, file)
        except UserError as error:
            yield error


def stage_folder(root: str | Path, number: int) -> Path:
    """Where a stage of a job runs."""
    return Path(root) / f"stage-{number}"


def folder_of_merged_model(root: str | Path, number: int) -> Path:
    """The model of a stage that trained adapters, with these in its weights."""
    return Path(root) / f"stage-{number}-merged"


def model_left_by(root: str | Path, number: int) -> Path | None:
    """The model with which the next stage begins; None: it is not there yet."""
    for folder in (folder_of_merged_model(root, number), stage_folder(root, number) / "model"):
        if (folder / "config.json").is_file():
            return folder
    return None


def _lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[key] = _lay_over(under, value) if both else value  # type: ignore[arg-type]
    return merged
