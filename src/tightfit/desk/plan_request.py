"""What was asked of `tightfit plan`: flags, a file and the machine, become one request.

The file is a job file or a LLaMA-Factory YAML; flags win over it. What is decided here without being asked for, and
what was said without effect, comes back as a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from tightfit.desk.request import Request, find_idle, pick_stage
from tightfit.inputs.flags import spelt
from tightfit.inputs.versions import choose_deepspeed
from tightfit.job import Job
from tightfit.job.file import (
    JOB_FLAGS,
    JobFile,
    adapter_dtype_of,
    dump_job,
    hardware_of,
    job_from_flags,
    job_from_text,
    model_of,
    names_in,
)
from tightfit.job.text import name_in
from tightfit.messages import Message, Said, id_of
from tightfit.model.presets import PRESETS
from tightfit.planner.trainers import NAMES, STARTS
from tightfit.types import READ_TOGETHER, ConfigError, Hardware, HardwareError, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """What is to be planned, once flags, file and machine are one."""

    job: Job
    shape: ModelShape
    hardware: Hardware
    explicit: frozenset[str]  # the fields of the job that the user set, by dotted name
    said: tuple[Said, ...]


def resolve_request(
    request: Request,
    adapt: Callable[[Job, Hardware], Hardware] | None = None,
    *,
    runs_here: bool = False,
    for_others: bool = False,
) -> PlanInput:
    """Flags, file and machine as one; `adapt`: what the caller knows about the machine beyond its cards; `runs_here`:
    other cards than this machine's are of no use; `for_others`: another trainer than our own worker may run it."""
    from tightfit.hardware.catalogue import native_bf16

    given, path = dict(request.flags), request.file.path if request.file else None
    launcher = request.launcher if for_others else "torchrun"
    file, batch_per_gpu = _read_file(request, launcher)
    if file is None and request.model is not None:
        given["model"] = request.model
    stage = pick_stage(request, file.job if file else None)
    if file is not None and stage is not None:
        given["output"] = str(stage.folder)
        if stage.number > 1:
            given.pop("model", None)
        told = (*file.said, Message("desk.stage-note", stage=stage.words))
        file = replace(file, job=stage.job, explicit=file.explicit | names_in(stage.fields), said=told)
    base = file.job if file else request.job
    job = job_from_flags(given, base)
    explicit = {JOB_FLAGS[name] for name in given} | {"levers.deepspeed_version"}
    explicit |= file.explicit if file else names_in(dump_job(base)) if base else set()
    if not for_others and job.trainer != "tightfit":
        raise ConfigError(Message("desk.for-another-trainer", trainer=NAMES[job.trainer]))
    job, said = _choose_trainer(request, job, launcher, explicit)
    hardware = _hardware(request, job, file, runs_here=runs_here)
    hardware = hardware if adapt is None else adapt(job, hardware)
    # What the file's reader had to say, and which of its numbers makes way for a flag.
    winner = next(iter(_find_counts(request)), None)
    if file is not None and winner is not None and file.num_gpus is not None:
        said += [each for each in file.said if id_of(each) != "job.gpus-of-this-machine"]
        if hardware.gpus_per_node != file.num_gpus or hardware.nodes != 1:
            said.append(Message("desk.flag-wins", flag=winner, num_gpus=file.num_gpus))
    elif file is not None:
        said += file.said
    if path is not None and batch_per_gpu is not None and "effective_batch" not in explicit:
        each = batch_per_gpu
        world = hardware.world // prod(int(job.levers.get(name, 1)) for name in READ_TOGETHER)
        job = replace(job, effective_batch=each * world)
        said.append(Message("desk.batch-per-gpu", file=path.name, each=each, gpus=world, batch=each * world))
        explicit.add("effective_batch")
    if request.max is not None:
        # Without what `--max` replaces. Flags that contradict it are refused; a file's values only make way.
        if job.tier is not None:
            raise ConfigError(Message("desk.max-and-tier", wanted=request.max))
        job = replace(job, limits=replace(job.limits, allow=()))
        if request.max == "micro-batch":
            if job.effective_batch is not None:
                said.append(Message("desk.batch-makes-way", batch=job.effective_batch))
            levers = {name: value for name, value in job.levers.items() if name != "micro_batch"}
            job = replace(job, effective_batch=None, levers=levers)
    if "deepspeed_version" not in job.levers:  # what it holds in memory differs between versions
        version, why = choose_deepspeed(hardware, job.trainer, request.llamafactory_version)
        job = replace(job, levers={**job.levers, "deepspeed_version": version})
        said += why
    if job.precision == "bf16" and native_bf16(hardware.gpu.arch) is False:
        # It is the user's; where nobody named one, it is what the card multiplies.
        asked = "precision" in explicit
        job = job if asked else replace(job, precision="fp16")
        said.append(Message("desk.no-bf16" if asked else "desk.fp16-chosen", card=hardware.gpu.name))
    shape = model_of(job, trust_trace=request.trace)
    if stage is not None and stage.model is not None and (stage.model.exists() or request.write is not None):
        job = replace(job, model=str(stage.model.absolute()))  # of the same shape, and there when its turn comes
    # What was said for nothing.
    said += find_idle({name: spelt(name) if name in request.flags else f"levers.{name}" for name in job.levers}, shape)
    if job.schedule == "constant" and job.warmup and "warmup" in explicit:
        warmup = next((spelt(name) for name in ("warmup_steps", "warmup_ratio") if name in request.flags), "warmup")
        said.append(Message("desk.no-warm-up", name=warmup))
    if request.hostfile is not None and hardware.nodes == 1:
        said.append(Message("desk.hostfile-idle"))
    job = place_job(job, path)
    return PlanInput(job=job, shape=shape, hardware=hardware, explicit=frozenset(explicit), said=tuple(said))


def _read_file(request: Request, launcher: str | None) -> tuple[JobFile | None, int | None]:
    """What the file asks for; and the sequences a step of one GPU, where it counts them so, as LLaMA-Factory's do."""
    if request.file is None:
        return None, None
    if not request.file.is_llamafactory:
        return job_from_text(request.file.read(), model=request.model), None
    from tightfit.formats.llamafactory.read import llamafactory_job_from

    usual = "llamafactory" if launcher in (None, "llamafactory") else None
    stays = request.flags.get("for", usual) == "llamafactory"
    found = llamafactory_job_from(request.file.read(), request.model, stays=stays)
    return JobFile(job=found.job, said=found.said, explicit=names_in(found.tree)), found.batch_per_gpu


def _find_counts(request: Request) -> list[str]:
    """The flags that were given and win over a job file's number of GPUs."""
    said = {"gpus": request.flags.get("gpus"), "num_gpus": request.num_gpus, "world": request.world}
    return [spelt(name) for name, value in said.items() if value is not None]


def _choose_trainer(request: Request, job: Job, launcher: str | None, explicit: set[str]) -> tuple[Job, list[Said]]:
    """The job with its trainer: what was said, or the one that the launcher starts, or the one whose file this is."""
    said, file = list[Said](), request.file
    if "trainer" in explicit:
        if launcher is not None and job.trainer != "tightfit" and launcher != STARTS[job.trainer]:
            raise ConfigError(Message("desk.other-launcher", launcher=launcher, trainer=NAMES[job.trainer]))
        if launcher == "llamafactory" and job.trainer == "tightfit":
            raise ConfigError(Message("desk.launcher-of-factory"))
    elif launcher == "llamafactory":
        job = replace(job, trainer="llamafactory")
    elif launcher is None and file is not None and file.is_llamafactory and not job.frozen_layers:
        job = replace(job, trainer="llamafactory")
        said.append(Message("desk.for-llamafactory", file=file.path.name))
    held = adapter_dtype_of(job)
    if "lora.dtype" in explicit and job.method != "full" and job.lora.dtype != held:
        raise ConfigError(Message("desk.adapter-dtype", trainer=NAMES[job.trainer], held=held, asked=job.lora.dtype))
    return job, said


def _hardware(request: Request, job: Job, file: JobFile | None, *, runs_here: bool) -> Hardware:
    """What the flags name, else what the file names, else this machine; as much of it as is to be used."""
    of_file = None if file is None or _find_counts(request) else file
    num_gpus = of_file.num_gpus if of_file else request.num_gpus
    try:
        hardware = hardware_of(job, num_gpus)
    except HardwareError as error:
        if id_of(error.said) not in ("job.no-gpus-there", "job.fewer-gpus-there") or job.hardware.gpus is not None:
            raise
        where = name_in("num_gpus", request.file.path.name) if of_file and request.file else "--num-gpus"
        if not runs_here:
            raise HardwareError(Message("desk.more-gpus-than-here", where=where, count=num_gpus)) from None
        machine = hardware_of(job)
        if machine.gpu.vendor == "cpu":
            raise HardwareError(Message("desk.no-gpu-here", where=where, count=num_gpus)) from None
        there = machine.gpus_per_node
        raise HardwareError(Message("desk.fewer-gpus-here", where=where, count=num_gpus, there=there)) from None
    world = hardware.world if request.world is None else request.world
    if world == hardware.world:
        return hardware
    if world > hardware.world:
        raise HardwareError(Message("desk.world-too-large", world=world, there=hardware.world))
    per_node = hardware.gpus_per_node
    if world > per_node and world % per_node:
        raise HardwareError(Message("desk.world-not-whole-nodes", world=world, per_node=per_node))
    nodes, each = (world // per_node, per_node) if world > per_node else (1, world)
    said = Message("desk.gpus-used", world=world, there=hardware.world)
    return replace(hardware, nodes=nodes, gpus_per_node=each, because=(*hardware.because, said))


def place_job(job: Job, file: Path | None) -> Job:
    """Paths that lead somewhere from here, made absolute: the written files may lie anywhere.

    Not the run's folder: it lies beside the written files unless it is absolute, whatever happens to be here.
    """

    def place(text: str | None) -> str | None:
        return placed(text, file.parent if file else None)

    def place_unless_named(text: str | None) -> str | None:
        """A template or a recipe may be called by a name, which a folder of that name here must not catch."""
        return place(text) if set("/.") & set(text or "") else text

    model = job.model
    if isinstance(model, str) and model.strip().lower() not in PRESETS:
        model = place(model.strip()) or model
    return replace(
        job,
        model=model,
        data=replace(
            job.data,
            path=place(job.data.path),
            template=place_unless_named(job.data.template),
            tokenizer=place(job.data.tokenizer),
            recipe=place_unless_named(job.data.recipe),
        ),
        saving=replace(job.saving, folder=str(Path(job.saving.folder).expanduser())),
        hardware=replace(job.hardware, nvme_path=place(job.hardware.nvme_path)),
    )


def placed(text: str | None, beside: Path | None) -> str | None:
    """What names a file counts from here, or else from the job file's folder; of `file:name`, the part before."""
    if text is None or text.startswith("shipped:"):
        return text
    path, colon, name = (text, "", "") if ":" not in text or Path(text).exists() else text.rpartition(":")
    for folder in (Path(), *((beside,) if beside else ())):
        found = folder / Path(path).expanduser()
        if path and found.exists():
            return f"{found.absolute()}{colon}{name}"
    return text
