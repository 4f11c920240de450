"""What was asked of `tightfit plan`: flags, a file and the machine, become one request.

The file is a job file or a LLaMA-Factory YAML; flags win over it. What is decided here without being asked for, and
what was said without effect, comes back as a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.desk.lever_flags import without_effect
from tightfit.desk.request import Request
from tightfit.desk.stages import stage_asked
from tightfit.inputs.flags import spelt
from tightfit.inputs.versions import choose_deepspeed
from tightfit.job import Job
from tightfit.job.file import (
    JOB_FLAGS,
    adapter_dtype_of,
    dump_job,
    hardware_of,
    job_from_flags,
    job_from_text,
    model_of,
    names_in,
)
from tightfit.messages import Said
from tightfit.model.presets import PRESETS
from tightfit.planner.trainers import NAMES, STARTS
from tightfit.types import ConfigError, Hardware, HardwareError, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """What is to be planned, once flags, file and machine are one."""

    job: Job
    shape: ModelShape
    hardware: Hardware
    explicit: frozenset[str]
    """The fields of the job that the user set, by dotted name."""
    said: tuple[Said, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSays:
    """What a file asks for."""

    path: Path
    job: Job
    explicit: frozenset[str]
    """The fields that it sets, also those set to their defaults."""
    said: tuple[Said, ...] = ()
    num_gpus: int | None = None
    """GPUs of a node, where the file gives a number and need not name a card."""
    batch_per_gpu: int | None = None
    """Sequences a step of one GPU, where the file counts them so, as LLaMA-Factory's do."""

    @property
    def is_llamafactory(self) -> bool:
        return self.batch_per_gpu is not None


def resolve_request(
    request: Request,
    adapt: Callable[[Job, Hardware], Hardware] | None = None,
    *,
    runs_here: bool = False,
    for_others: bool = False,
) -> PlanInput:
    """Flags, file and machine as one; `adapt`: what the caller knows about the machine beyond its cards; `runs_here`:
    other cards than this machine's are of no use; `for_others`: another trainer than our own worker may run it."""
    given = dict(request.flags)
    launcher = request.launcher if for_others else "torchrun"
    file = _file(request, launcher)
    if file is None and request.model is not None:
        given["model"] = request.model
    stage = stage_asked(request, file.job if file else None)
    if file is not None and stage is not None:
        given["output"] = str(stage.folder)
        if stage.number > 1:
            given.pop("model", None)
        said = (*file.said, f"{stage.words}.")
        file = replace(file, job=stage.job, explicit=file.explicit | names_in(stage.fields), said=said)
    base = file.job if file else request.job
    job = job_from_flags(given, base)
    explicit = {JOB_FLAGS[name] for name in given} | {"levers.deepspeed_version"}
    explicit |= file.explicit if file else names_in(dump_job(base)) if base else set()
    if not for_others and job.trainer != "tightfit":
        raise ConfigError(
            f"the job is for {NAMES[job.trainer]}, and this starts tightfit's own worker: leave trainer out of it, or "
            "write its files with `tightfit plan --write DIR`"
        )
    job, trainer_said = _trained_by(job, file, launcher, explicit)
    hardware = _hardware(request, job, file, runs_here=runs_here)
    hardware = hardware if adapt is None else adapt(job, hardware)
    job, batch_said = _batched(job, file, hardware, explicit)
    if file is not None and file.is_llamafactory:
        explicit.add("effective_batch")
    job, max_said = _for_max(request, job)
    job, version_said = _settle_deepspeed(job, hardware, request.llamafactory_version)
    job, precision_said = _precise(job, hardware, "precision" in explicit)
    shape = model_of(job, trust_trace=request.trace)
    if stage is not None and stage.model is not None and (stage.model.exists() or request.write is not None):
        job = replace(job, model=str(stage.model.absolute()))  # of the same shape, and there when its turn comes
    said = (*trainer_said, *_said_by(request, file, hardware), *batch_said, *max_said, *version_said, *precision_said)
    return PlanInput(
        job=place_job(job, file.path if file else None),
        shape=shape,
        hardware=hardware,
        explicit=frozenset(explicit),
        said=(*said, *_idle(request, job, hardware, shape, explicit)),
    )


# --- the file -----------------------------------------------------------------------------------


def _file(request: Request, launcher: str | None) -> FileSays | None:
    if request.file is None:
        return None
    path = request.file.path
    if request.file.is_llamafactory:
        from tightfit.formats.llamafactory.job import llamafactory_job_from  # brings yaml

        usual = "llamafactory" if launcher in (None, "llamafactory") else None
        stays = request.flags.get("for", usual) == "llamafactory"
        found = llamafactory_job_from(request.file.read(), request.model, stays=stays)
        names = names_in(found.tree)
        return FileSays(path=path, job=found.job, explicit=names, said=found.said, batch_per_gpu=found.batch_per_gpu)
    read = job_from_text(request.file.read(), model=request.model)
    return FileSays(path=path, job=read.job, explicit=read.explicit, said=read.said, num_gpus=read.num_gpus)


def _said_by(request: Request, file: FileSays | None, hardware: Hardware) -> tuple[Said, ...]:
    """What the file's reader had to say, and which of its numbers makes way for a flag."""
    if file is None:
        return ()
    winner = next(iter(_counts_said(request)), None)
    if winner is None or file.num_gpus is None:
        return file.said
    kept = [sentence for sentence in file.said if not str(sentence).startswith("num_gpus ")]
    if hardware.gpus_per_node == file.num_gpus and hardware.nodes == 1:
        return tuple(kept)
    return (*kept, f"{winner} wins over the job file's num_gpus of {file.num_gpus}.")


def _counts_said(request: Request) -> list[str]:
    """The flags that were given and win over a job file's number of GPUs."""
    said = {"gpus": request.flags.get("gpus"), "num_gpus": request.num_gpus, "world": request.world}
    return [spelt(name) for name, value in said.items() if value is not None]


def _batched(
    job: Job, file: FileSays | None, hardware: Hardware, explicit: set[str] | frozenset[str]
) -> tuple[Job, tuple[str, ...]]:
    """The sequences of a step, where a file says how many each GPU does."""
    if file is None or file.batch_per_gpu is None or "effective_batch" in explicit:
        return job, ()
    batch = file.batch_per_gpu * hardware.world
    gpus = "one GPU" if hardware.world == 1 else f"{hardware.world} GPUs"
    each = "1 sequence" if file.batch_per_gpu == 1 else f"{file.batch_per_gpu} sequences"
    said = f"{file.path.name} does {each} a step on each GPU: with {gpus}, {batch} in all."
    return replace(job, effective_batch=batch), (said,)


# --- what was not said --------------------------------------------------------------------------


def _for_max(request: Request, job: Job) -> tuple[Job, tuple[str, ...]]:
    """Without what `--max` replaces. Flags that contradict it are refused; a file's values only make way."""
    wanted = request.max
    if wanted is None:
        return job, ()
    if job.tier is not None:
        raise ConfigError(f"--max {wanted} and the job's tier contradict each other: leave one out")
    job, said = replace(job, limits=replace(job.limits, allow=())), []
    if wanted == "micro-batch":
        if job.effective_batch is not None:
            said.append(f"--max micro-batch: the job's effective batch of {job.effective_batch} makes way.")
        levers = {name: value for name, value in job.levers.items() if name != "micro_batch"}
        job = replace(job, effective_batch=None, levers=levers)
    return job, tuple(said)


def _trained_by(
    job: Job, file: FileSays | None, launcher: str | None, explicit: set[str] | frozenset[str]
) -> tuple[Job, tuple[str, ...]]:
    """The job with its trainer: what was said, or the one that the launcher starts, or the one whose file this is."""
    said: tuple[str, ...] = ()
    if "trainer" in explicit:
        if launcher is not None and job.trainer != "tightfit" and launcher != STARTS[job.trainer]:
            raise ConfigError(f"--launcher {launcher} does not start {NAMES[job.trainer]}: leave --launcher out")
        if launcher == "llamafactory" and job.trainer == "tightfit":
            raise ConfigError("--launcher llamafactory starts LLaMA-Factory: leave --launcher out, or --for tightfit")
    elif launcher == "llamafactory":
        job = replace(job, trainer="llamafactory")
    elif launcher is None and file is not None and file.is_llamafactory and not job.frozen_layers:
        job = replace(job, trainer="llamafactory")
        said = (f"The plan is for LLaMA-Factory, whose file {file.path.name} is: --for tightfit plans for our worker.",)
    held = adapter_dtype_of(job)
    if "lora.dtype" in explicit and job.method != "full" and job.lora.dtype != held:
        raise ConfigError(
            f"{NAMES[job.trainer]} keeps adapters in {held}: leave --adapter-dtype {job.lora.dtype} out, or plan "
            "--for tightfit"
        )
    return job, said


def _settle_deepspeed(job: Job, hardware: Hardware, llamafactory: str | None) -> tuple[Job, tuple[str, ...]]:
    """The job with the DeepSpeed that will run it: what it holds in memory differs between versions."""
    if "deepspeed_version" in job.levers:
        return job, ()
    version, said = choose_deepspeed(hardware, job.trainer, llamafactory)
    return replace(job, levers={**job.levers, "deepspeed_version": version}), said


def _precise(job: Job, hardware: Hardware, asked: bool) -> tuple[Job, tuple[str, ...]]:
    """The precision is the user's; where nobody named one, it is what the card multiplies."""
    from tightfit.hardware.catalogue import native_bf16

    if job.precision != "bf16" or native_bf16(hardware.gpu.arch) is not False:
        return job, ()
    card = f"the {hardware.gpu.name} has no bf16 of its own"
    if asked:
        return job, (f"{card[0].upper()}{card[1:]}: --precision fp16 is what it trains in.",)
    return replace(job, precision="fp16"), (f"No --precision was named, and {card}: fp16.",)


def _idle(
    request: Request, job: Job, hardware: Hardware, shape: ModelShape, explicit: Collection[str]
) -> tuple[str, ...]:
    """What was said for nothing."""
    names = {name: spelt(name) if name in request.flags else f"levers.{name}" for name in job.levers}
    said = without_effect(names, shape)
    warmup = next((spelt(name) for name in ("warmup_steps", "warmup_ratio") if name in request.flags), "warmup")
    if job.schedule == "constant" and job.warmup and "warmup" in explicit:
        said += (f"{warmup} is without effect: the schedule constant has no warm-up, constant_with_warmup has one.",)
    if request.hostfile is not None and hardware.nodes == 1:
        said += ("--hostfile is without effect: all the GPUs are in one node.",)
    return said


# --- the machine --------------------------------------------------------------------------------


def _hardware(request: Request, job: Job, file: FileSays | None, *, runs_here: bool) -> Hardware:
    """What the flags name, else what the file names, else this machine; as much of it as is to be used."""
    hardware = _node(request, job, file, runs_here=runs_here)
    world = hardware.world if request.world is None else request.world
    if world == hardware.world:
        return hardware
    if world > hardware.world:
        raise HardwareError(f"--world {world} is more than the {hardware.world} GPUs that there are: lower it")
    per_node = hardware.gpus_per_node
    if world > per_node and world % per_node:
        raise HardwareError(f"--world {world} is no whole number of nodes with {per_node} GPUs: use a multiple of it")
    nodes, each = (world // per_node, per_node) if world > per_node else (1, world)
    said = f"GPUs used: {world} of {hardware.world}."
    return replace(hardware, nodes=nodes, gpus_per_node=each, because=(*hardware.because, said))


def _node(request: Request, job: Job, file: FileSays | None, *, runs_here: bool) -> Hardware:
    counted = file is None or _counts_said(request)
    num_gpus = request.num_gpus if counted or file is None else file.num_gpus
    try:
        return hardware_of(job, num_gpus)
    except HardwareError as error:
        if not str(error).startswith("num_gpus is ") or job.hardware.gpus is not None:
            raise
        where = "--num-gpus" if counted or file is None else f"num_gpus in {file.path.name}"
        if runs_here:
            raise HardwareError(f"{where} is {num_gpus} and {_what_there_is(hardware_of(job))}") from None
        raise HardwareError(
            f"{where} is {num_gpus}, more GPUs than this machine has: name the cards with --gpus {num_gpus}x24GB"
        ) from None


def _what_there_is(machine: Hardware) -> str:
    if machine.gpu.vendor == "cpu":
        return "this machine has no GPU: leave it out to train on the CPU"
    count = machine.gpus_per_node
    return f"this machine has {count}: say --num-gpus {count}, or leave it out"


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
