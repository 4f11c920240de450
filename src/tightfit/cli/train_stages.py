"""The stages of a job, one run after another, each from the model that the one before it left.

The same command goes on after an end: stages that are done are passed over, and the one that was under way resumes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tightfit.cli.train_flags import TrainOptions
from tightfit.desk.request import Request
from tightfit.desk.stages import Stage, pick_stage
from tightfit.job.file import folder_of_merged_model, job_from_text, model_left_by
from tightfit.messages import Message, text
from tightfit.runs.records import read_run
from tightfit.types import ConfigError


def train_stages(stages: Sequence[Request], options: TrainOptions, train: Callable[[Request], int]) -> int:
    """Every stage that is not done yet; the exit code of the last that ran."""
    for request in stages:
        stage = _stage(request)
        record = read_run(stage.folder)
        again = options.overwrite
        if record is not None and record.state == "done" and not again:
            _say(options, text("cli.done-already", words=stage.words, folder=stage.folder))
        elif stage.model is not None and not stage.model.exists():
            assert options.dry_run, "every stage before it is done"
            _say(options, text("cli.planned-when-stage", words=stage.words, number=stage.number - 1))
            continue
        else:
            merged = folder_of_merged_model(stage.root, stage.number)
            if again and merged.exists():
                raise ConfigError(Message("cli.holds-what-stage", merged=merged, number=stage.number))
            _say(options, text("cli.stage-in", words=stage.words, folder=stage.folder))
            code = train(request)
            if code != 0:
                return code
        if stage.number < stage.count and not options.dry_run and model_left_by(stage.root, stage.number) is None:
            _merge(stage)
    return 0


def _stage(request: Request) -> Stage:
    assert request.file is not None
    stage = pick_stage(request, job_from_text(request.file.read(), model=request.model).job)
    assert stage is not None
    return stage


def _merge(stage: Stage) -> None:
    """A stage that trained adapters leaves them beside the model: the next one starts from both in one."""
    from tightfit.cli.export import export

    if export([str(stage.folder), "--to", str(folder_of_merged_model(stage.root, stage.number))]) != 0:
        raise ConfigError(Message("cli.adapters-stage-could", number=stage.number))


def _say(options: TrainOptions, said: str) -> None:
    print(said, file=sys.stderr if options.json else sys.stdout, flush=True)
