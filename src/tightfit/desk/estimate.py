"""What `tightfit estimate` answers: the flags and files of a question, priced as they stand.

A job file leaves open how it is computed, and `tightfit train` plans that. So where the machine is known and no engine
is named, it is the plan that is priced: anything else would be a verdict on a run that nobody starts. With an engine,
what the file pins is taken, and the rest has the values that `estimate` takes where nothing is said.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.desk.request import Request, find_idle, flags_of, pick_stage, read_request
from tightfit.inputs.flags import AUTO, levers_from_flags, spelt
from tightfit.inputs.layouts import check_layout, find_stream_obstacle
from tightfit.inputs.versions import choose_deepspeed
from tightfit.job import Job
from tightfit.job.file import hardware_of as hardware_of_job
from tightfit.job.file import job_from_flags, job_from_text, left_open, levers_of, model_of, names_in
from tightfit.job.known import KnownConfig
from tightfit.memory.pipeline import find_depth_obstacle
from tightfit.messages import Listing, Message, Said, id_of
from tightfit.model.load import load_model
from tightfit.model.presets import PRESETS, find_checkpoint
from tightfit.priced import Priced, strategy_name
from tightfit.types import (
    DDP,
    FSDP2,
    STREAM,
    ZERO3,
    ConfigError,
    Engine,
    Hardware,
    HardwareError,
    Levers,
    ModelShape,
    Offload,
    UserError,
)

if TYPE_CHECKING:  # brings the planner
    from tightfit.planner.plan import Way

STRATEGIES: tuple[tuple[Engine, Offload, Offload], ...] = (
    ("zero0", "none", "none"),
    ("zero1", "none", "none"),
    ("zero2", "none", "none"),
    (ZERO3, "none", "none"),
    ("zero2", "cpu", "none"),
    (ZERO3, "cpu", "none"),
    (ZERO3, "cpu", "cpu"),
    (FSDP2, "none", "none"),
    (FSDP2, "cpu", "cpu"),
    (STREAM, "none", "none"),
)
"""What `--compare` sets side by side: engine, place of the optimizer, place of the weights."""


Outcome = Priced | str  # an estimate, or why there is none


_ABOUT_PLANS = ("job.gpus-of-this-machine", "job.batch-kept", "job.batch-is")  # what a plan does with the file


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    file: str
    shape: ModelShape
    levers: Levers
    hardware: Hardware | None  # None: neither file nor flags name a machine
    world: int  # the GPUs that the file or the machine has; a flag may name fewer
    explicit: frozenset[str]  # the fields that the file sets
    said: tuple[Said, ...]
    batch_said: tuple[Said, ...]  # how the sequences of a step are shared out, where no plan does it
    tier: str | None


def estimated(request: Request) -> Priced:
    """What every GPU and the host will hold: of a job file that names no engine, under the plan that it would get."""
    job = _read_job(request)
    found = find_planned_way(request, job) if job is not None else None
    if found is not None:
        way, said = found
        return replace(price(way.shape, way.levers, way.world, way.hardware), said=said, planned=True)
    shape, levers, world, hardware, said = _resolve(request, job)
    return replace(price(shape, levers, world, hardware), said=said)


def comparison(request: Request) -> list[tuple[str, Outcome]]:
    shape, levers, world, hardware, _ = _resolve(request, _read_job(request))
    return compare(shape, levers, world, hardware)


def compare(shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None) -> list[tuple[str, Outcome]]:
    """Every strategy with the same training; what an engine cannot do says so in its row."""
    rows: list[tuple[str, Outcome]] = []
    for engine, optimizer, param in STRATEGIES:
        tried = replace(levers, engine=engine, offload_optimizer=optimizer, offload_param=param)
        if not tried.streams:
            tried = replace(tried, resident=0, update="waits")
        try:
            check_layout(tried, shape, world)
            if tried.streams and not levers.streams:
                tried = keep_most(shape, tried, world, hardware)
            rows.append((str(strategy_name(tried)), price(shape, tried, world, hardware)))
        except UserError as error:
            rows.append((str(strategy_name(tried)), str(error)))
    return rows


def price(shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None) -> Priced:
    from tightfit import memory

    if levers.checkpointing.select == AUTO:
        from tightfit.planner import settle_selection

        if hardware is None:
            raise ConfigError(Message("desk.auto-needs-gpus"))
        levers = settle_selection(shape, levers, part_of(hardware, world))
    footprint = memory.estimate(shape, levers, world, hardware)
    return Priced(shape=shape, levers=levers, world=world, hardware=hardware, footprint=footprint)


def keep_most(shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None) -> Levers:
    """With as many layers on the GPU as fit; none, where no GPU is named or nothing fits."""
    if hardware is None:
        return levers
    if (obstacle := find_stream_obstacle(levers, part_of(hardware, world).nodes)) is not None:
        raise ConfigError(obstacle)
    low, high = 0, shape.n_layers
    while low < high:
        middle = (low + high + 1) // 2
        spare = price(shape, replace(levers, resident=middle), world, hardware).gpu_spare_bytes
        low, high = (middle, high) if spare is not None and spare >= 0 else (low, middle - 1)
    return replace(levers, resident=low)


def part_of(hardware: Hardware, world: int) -> Hardware:
    """So many of its GPUs, on as few nodes as hold them evenly."""
    fewest = -(-world // hardware.gpus_per_node)
    nodes = next(nodes for nodes in range(fewest, world + 1) if world % nodes == 0)
    return replace(hardware, nodes=nodes, gpus_per_node=world // nodes)


# --- reading ------------------------------------------------------------------------------------


def _resolve(
    request: Request, job: JobInput | None
) -> tuple[ModelShape, Levers, int, Hardware | None, tuple[Said, ...]]:
    """What is to be priced, once flags and files are one, and what there is to say about that."""
    flags, explicit = request.flags, job.explicit if job else frozenset()
    hardware = job.hardware if job else hardware_of(request)
    world = world_of(request, hardware, job.world if job else 1)
    # The DeepSpeed that is priced: what was said, or the one that a plan would be for.
    version_said: tuple[Said, ...] = ()
    if "deepspeed_version" in flags:
        version = flags["deepspeed_version"]
    elif job is not None and "levers.deepspeed_version" in explicit:
        version = job.levers.deepspeed_version
    else:
        trainer = job.levers.trainer if job else "llamafactory" if request.file else "tightfit"
        version, version_said = choose_deepspeed(hardware, trainer)
    # A card without bf16 computes in fp16, unless somebody says otherwise.
    usual, chosen = replace(Levers(), deepspeed_version=version), list[Said]()
    is_others = request.file is not None and job is None
    named = "precision" in flags or "precision" in explicit or is_others or request.deepspeed is not None
    if not named and hardware is not None and _lacks_bf16(hardware):
        usual = replace(usual, precision="fp16")
        chosen.append(Message("desk.fp16-chosen", card=hardware.gpu.name))
    shape, base, said = _inputs(request, world, job, usual)
    levers = levers_from_flags(flags_of(flags), shape, base, world=world)
    if (obstacle := find_depth_obstacle(shape, levers)) is not None:
        raise ConfigError(obstacle)
    if hardware is not None and (obstacle := find_stream_obstacle(levers, part_of(hardware, world).nodes)) is not None:
        raise ConfigError(obstacle)
    is_counted = flags.get("resident", "auto") != "auto" or "levers.resident" in explicit
    if hardware is not None and levers.streams and levers.offload_optimizer == "nvme":
        from tightfit.planner import settle_states

        levers = settle_states(shape, levers, part_of(hardware, world))
    if levers.streams and not is_counted:
        levers = keep_most(shape, levers, world, hardware)
    # What was chosen without being asked for, and what the cards or our knowledge lack for it.
    if levers.uses_deepspeed:
        said += version_said
    has_engine = "engine" in flags or request.deepspeed is not None or is_others or "levers.engine" in explicit
    if not has_engine and world > 1 and levers.engine == "zero0":
        chosen.append(Message("desk.no-engine"))
    if hardware is not None and levers.precision == "bf16" and _lacks_bf16(hardware):
        chosen.append(Message("desk.no-bf16", card=hardware.gpu.name))
    if "nvme" in (levers.offload_optimizer, levers.offload_param):
        chosen.append(Message("desk.nvme-measured-once" if levers.streams else "desk.nvme-not-measured"))
    said += (*chosen, *find_idle({name: spelt(name) for name in flags}, shape))
    return shape, levers, world, hardware, said


def _lacks_bf16(hardware: Hardware) -> bool:
    from tightfit.hardware.catalogue import native_bf16

    return native_bf16(hardware.gpu.arch) is False


def hardware_of(request: Request) -> Hardware | None:
    """The machine that `--gpus` names; None: no machine, so no verdict."""
    word = request.flags.get("gpus")
    for flag in ("host_ram", "nvme", "network", "link"):
        if word is None and flag in request.flags:
            raise ConfigError(Message("desk.needs-gpus", flag=spelt(flag)))
    if word is None:
        return None
    sizes = {"host_ram": request.flags.get("host_ram"), "nvme": request.flags.get("nvme")}
    from tightfit.hardware.named import read_hardware
    from tightfit.hardware.words import connect

    return connect(read_hardware(word, **sizes), request.flags.get("network"), request.flags.get("link"))


def world_of(request: Request, hardware: Hardware | None, otherwise: int = 1) -> int:
    """How many GPUs train: what was said, or all there are, or what a file names, or one."""
    there = hardware.world if hardware else None
    world = (there or otherwise) if request.world is None else request.world
    if there is None or world <= there:
        return world
    if "gpus" in request.flags:
        raise HardwareError(Message("desk.world-beyond", world=world, there=there, gpus=request.flags["gpus"]))
    raise HardwareError(Message("desk.world-beyond-all", world=world, there=there))


def _read_job(request: Request) -> JobInput | None:
    """The job of the file, with what the flags say over it; None: it is no job file. What cannot be read at all is left
    to the other reader to say."""
    if request.file is None or request.file.is_llamafactory or isinstance(request.file.found, UserError):
        return None
    from tightfit.formats.llamafactory.keys import KNOWN
    from tightfit.job.training import MARKS, is_arguments

    tree = request.file.found.tree
    telling = {field.name for field in fields(Job)} | {*MARKS}  # the keys of a job file, in either of its forms
    if not is_arguments(tree) and not set(tree) & (telling - KNOWN):
        return None
    read = job_from_text(request.file.found, model=request.model)
    stage = pick_stage(request, read.job)
    job = job_from_flags(request.flags, read.job if stage is None else stage.job)
    num_gpus = read.num_gpus if request.world is None and "gpus" not in request.flags else None
    hardware = None if job.hardware.gpus is None else hardware_of_job(job, num_gpus)
    ids = job.hardware.gpu_ids
    world = hardware.world if hardware else num_gpus or (len(ids) if ids else 1)
    shape = model_of(job, trust_trace=request.trace)
    levers, batch_said = levers_of(job, shape), list[Said]()
    training = world if request.world is None else request.world
    if job.effective_batch is not None and "accum" not in job.levers:
        # The sequences of a step as forward passes of the micro batch that is pinned, or of one.
        batch, micro = job.effective_batch, levers.micro_batch
        share, rest = divmod(batch, training * micro)
        if rest:
            batch_said.append(Message("desk.batch-not-shared", batch=batch, gpus=training))
        else:
            levers = replace(levers, accumulation=share)
            batch_said.append(Message("desk.batch-priced", batch=batch, gpus=training, micro=micro, accum=share))
    return JobInput(
        file=request.file.path.name,
        shape=shape,
        levers=levers,
        hardware=hardware,
        world=world,
        explicit=(read.explicit | (names_in(stage.fields) if stage else set())) - left_open(job),
        said=tuple(said for said in read.said if id_of(said) not in _ABOUT_PLANS),
        batch_said=tuple(batch_said),
        tier=job.tier,
    )


def find_planned_way(request: Request, job: JobInput) -> tuple[Way, tuple[Said, ...]] | None:
    """The way that `tightfit train` would take, and the sentence about it; None: the job is to be taken as it stands.

    Where nothing fits, it is the way that needs least of a card.
    """
    named = "engine" in request.flags or request.deepspeed is not None or "levers.engine" in job.explicit
    if named or job.hardware is None or job.tier == "all":
        return None
    from tightfit.desk.plan import answered
    from tightfit.planner import Tiered
    from tightfit.planner.plan import Plan

    answer, _ = answered(request, advice=False)
    plan = answer.plan if isinstance(answer, Tiered) else answer
    if not isinstance(plan, Plan) or not (plan.chosen or plan.alternatives):
        return None
    if plan.chosen is not None:
        changes = [Message("desk.changes-training", change=change) for change in plan.chosen.changes]
        return plan.chosen, (Message("desk.priced-plan", file=job.file, tier=job.tier), *job.said, *changes)
    least = max(plan.alternatives, key=lambda way: way.gpu_spare_bytes)
    return least, (Message("desk.priced-least", file=job.file, tier=job.tier), *job.said)


def _inputs(
    request: Request, world: int, job: JobInput | None, usual: Levers
) -> tuple[ModelShape, Levers, tuple[Said, ...]]:
    """The model, the levers that files have set over the `usual` ones, and what their readers had to say."""
    engine = str(request.flags.get("engine", "")).lower()
    is_other = engine in (DDP, FSDP2, STREAM)
    config: str | Path | None = request.deepspeed
    factory, said = None, list[Said]()
    if config and is_other:
        raise ConfigError(Message("desk.two-engines", engine=engine))
    if job is not None:
        base = replace(job.levers, deepspeed_version=usual.deepspeed_version)
        shape, said = job.shape, [*job.said, *job.batch_said]
        if usual.precision != Levers().precision:
            base = replace(base, precision=usual.precision)
    elif request.file is not None:
        from tightfit.formats.llamafactory import read as llamafactory_file

        if str(request.file.path).endswith(".json"):
            raise ConfigError(Message("desk.not-llamafactory", path=request.file.path))
        factory = llamafactory_file.settings_from(request.file.read())
        said = [*factory.because, *factory.computing_because]
        if factory.ignored:
            said.append(Message("desk.not-priced", names=Listing(factory.ignored)))
        shape = load_model(request.model or factory.model, trust_trace=request.trace)
        base = llamafactory_file.to_levers(factory, shape.n_layers, usual.deepspeed_version)
        config = config or factory.deepspeed
    elif request.model is None:
        raise ConfigError(Message("job.which-model"))
    else:
        shape, base = load_model(request.model, trust_trace=request.trace), usual
    if config is None or is_other:
        return shape, base, tuple(said)
    from tightfit.formats.deepspeed.read import read_deepspeed, to_levers

    settings = read_deepspeed(config, hidden_size=shape.hidden_size, version=usual.deepspeed_version)
    if factory is not None:
        llamafactory_file.check_deepspeed(factory, settings)
    return shape, to_levers(settings, base, world=world), (*said, *settings.because)


def price_config(path: Path, known: KnownConfig, *, model: str | None, gpus: str | None) -> Priced:
    """What the training in somebody's config takes; an error says what is missing to know it. The model is looked for
    on this machine alone (a preset, an id that we know, a folder): diagnosing sends nothing."""
    from tightfit.formats.document import read_document
    from tightfit.formats.recognise import recognise

    document = read_document(path)
    kind, values = recognise(document).name, document.values
    keys = ("model", "model_name_or_path", "model_id_or_path")
    word = model or next((values[key] for key in keys if isinstance(values.get(key), str)), None)
    if word is None and not isinstance(values.get("model"), dict) and "preset" not in values:
        raise ConfigError(Message("cli.does-say-model", name=path.name))
    if word is not None:
        name = word.strip()
        here = name.lower() in PRESETS or os.path.exists(os.path.expanduser(name)) or find_checkpoint(name) is not None
        if not here:
            raise ConfigError(Message("cli.model-machine-name", word=word))
    asked: dict[str, Any] = {"model": model, "gpus": gpus}
    if kind in ("job", "llamafactory"):
        asked["file"] = str(path)
    elif kind == "deepspeed":
        asked |= {"deepspeed": str(path), "model": word}
    else:  # a trainer's own arguments in our words; what they do not say has our defaults
        asked |= {
            "model": word,
            "engine": None if known.stage is None else f"zero{known.stage}",
            "accum": known.accumulation,
            "seq": known.sequence,
            "checkpointing": None if known.checkpointing is None else "full" if known.checkpointing else "none",
            "attention": known.attention if known.attention in ("sdpa", "eager", "flash") else None,
        }
        same = ("offload_optimizer", "offload_param", "micro_batch", "precision", "method", "loss", "world")
        asked |= {name: getattr(known, name) for name in same}
    return estimated(read_request({name: value for name, value in asked.items() if value is not None}))
