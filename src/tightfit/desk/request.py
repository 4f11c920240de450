"""What was asked, whoever asks: the command line, the page, or Python.

Everybody who plans, estimates, trains or rehearses comes through `read_request`. A request holds what was said and
nothing else: what was not said is None, or not among the flags, so that the file, the machine or a default can say it.
Its file is opened and parsed here, once; who asks later what it says asks the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from tightfit.inputs.flags import LEVERS, meant, spelt
from tightfit.inputs.spelling import as_number
from tightfit.job import Job, Wanted
from tightfit.job.file import JOB_FLAGS, folder_of_merged_model, job_from_text, model_left_by, stage_folder, stage_of
from tightfit.job.text import JobText, read_job_text
from tightfit.messages import Message, Said
from tightfit.model.presets import PRESETS
from tightfit.types import Attention, ConfigError, Mamba1, Mamba2, ModelShape, Traced, UserError

LLAMAFACTORY_MARK = "model_name_or_path"  # the key that every LLaMA-Factory training has, and no job file
MOST_MARGIN = 90  # percent: what is below this may be meant as a percentage


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFile:
    """The file that a request starts from. Whose it is decides who says what is wrong in it."""

    path: Path
    found: JobText | UserError  # what it holds, or why it cannot be read

    def read(self) -> JobText:
        if isinstance(self.found, UserError):
            raise self.found
        return self.found

    @property
    def is_llamafactory(self) -> bool:
        """What cannot be read at all is left to the reader of job files to say."""
        return isinstance(self.found, JobText) and LLAMAFACTORY_MARK in self.found.tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked; the machine and the defaults come later, in `resolve_request` or `estimate_request`."""

    flags: Mapping[str, Any] = field(default_factory=dict)  # the fields of a job that were said, by `JOB_FLAGS`
    file: RequestFile | None = None  # a job file, or a LLaMA-Factory YAML; flags win over it
    job: Job | None = None  # in place of a file, from Python
    deepspeed: str | None = None  # a DeepSpeed JSON to estimate
    trace: bool = False  # whether a model of an unknown kind is built on the meta device
    num_gpus: int | None = None
    world: int | None = None
    only_stage: int | None = None
    max: Wanted | None = None  # the most that fits of this, instead of the fastest way
    calibrates: bool = True  # whether what earlier runs have taught counts
    write: str | None = None  # the folder for the files of the plan
    force: bool = False
    launcher: str | None = None
    target: str | None = None  # the cluster that will start it
    port: int | None = None
    hostfile: str | None = None
    transformers_version: str | None = None
    llamafactory_version: str | None = None

    @property
    def model(self) -> str | None:
        """The model that a flag names; of `--max model` any preset, whose place every one takes."""
        model: str | None = self.flags.get("model")
        return next(iter(PRESETS)) if model is None and self.max == "model" else model


_SAID_ELSEWHERE = {"flags", "file", "job", "max", "calibrates"}
_OWN = tuple(each.name for each in fields(Request) if each.name not in _SAID_ELSEWHERE)


def read_request(said: Mapping[str, Any], job: Job | None = None) -> Request:
    """The request that flags mean, by their names with `_` for `-`; `file` is the file's path. What else a verb has for
    itself (`json`, say) is left to it."""
    return Request(
        flags={name: value for name, value in said.items() if name in JOB_FLAGS},
        max=_check_flags(said),
        file=read_file(Path(said["file"])) if "file" in said else None,
        job=job,
        calibrates="no_calibration" not in said,
        **{name: said[name] for name in _OWN if name in said},
    )


def read_file(path: Path) -> RequestFile:
    try:
        return RequestFile(path=path, found=read_job_text(path))
    except UserError as error:
        return RequestFile(path=path, found=error)


def _check_flags(said: Mapping[str, Any]) -> Wanted | None:
    """Refuse flags that contradict each other; returns what `--max` asks for."""
    if "force" in said and "write" not in said:
        raise ConfigError(Message("desk.force-needs-write"))
    if "target" in said and "write" not in said:
        raise ConfigError(Message("desk.target-needs-write", target=said["target"]))
    if "num_gpus" in said and "world" in said:
        raise ConfigError(Message("desk.num-gpus-and-world"))
    for name in ("num_gpus", "world"):
        if said.get(name, 1) < 1:
            least = Message("inputs.at-least", least=1)
            raise ConfigError(Message("inputs.flag-must-be", flag=spelt(name), must=least, value=said[name]))
    margin = as_number(said["margin"]) if "margin" in said else None
    if margin is not None and 1 <= margin < MOST_MARGIN:
        raise ConfigError(Message("desk.margin-is-share", margin=margin, share=margin / 100))
    if "max" not in said:
        return None
    word = said["max"].lower().replace("_", "-")
    wanted: Wanted | None = next((each for each in get_args(Wanted) if each == word), None)
    if wanted is None:
        hint = meant(word, get_args(Wanted))
        raise ConfigError(Message("inputs.unknown-value", flag="--max", word=word, hint=hint))
    for name in (*REPLACES[wanted], "tier", "allow"):
        if name in said:
            raise ConfigError(Message("desk.max-and-flag", wanted=wanted, flag=spelt(name)))
    return wanted


REPLACES: Mapping[Wanted, tuple[str, ...]] = {
    "seq": ("seq",),
    "micro-batch": ("micro_batch", "effective_batch"),
    "model": ("model",),
}
"""What `--max` asks for → the flags in whose place the answer comes."""


def flags_of(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name in LEVERS}


def find_idle(named: Mapping[str, str], shape: ModelShape) -> tuple[Said, ...]:
    """What was said about layers that the model does not have. `named`: lever → how the user called it."""
    kinds = [type(block.mixer) for block in shape.blocks]
    if Traced in kinds:  # what is in there is not known
        return ()
    said = []
    if "attention" in named and Attention not in kinds:
        said.append(Message("desk.no-attention", name=named["attention"], model=shape.name))
    if "scan" in named and not {Mamba1, Mamba2} & set(kinds):
        said.append(Message("desk.no-mamba", name=named["scan"], model=shape.name))
    return tuple(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStage:
    number: int
    count: int
    job: Job
    root: str  # the folder of the whole job
    fields: Mapping[str, Any]  # what the stage itself sets
    model: Path | None  # where it starts from, there or not yet; None: from the job's model

    @property
    def folder(self) -> Path:
        return stage_folder(self.root, self.number)

    @property
    def words(self) -> Message:
        what = {"embeddings": Message("desk.embeddings-alone"), "layers": Message("desk.all-but-embeddings")}
        method = None if self.job.method == "full" else self.job.method
        trains = what.get(self.job.trains)
        return Message("desk.stage", number=self.number, count=self.count, trains=trains, method=method)


def pick_stage(request: Request, job: Job | None) -> JobStage | None:
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
    return JobStage(number=number, count=count, job=staged, root=root, fields=job.stages[before], model=model)


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
