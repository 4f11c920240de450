"""What `tightfit estimate` answers: the flags and files of a question, priced as they stand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tightfit.desk.request import Request, RequestFile, find_idle, flags_of
from tightfit.inputs.flags import levers_from_flags, spelt
from tightfit.inputs.versions import choose_deepspeed
from tightfit.messages import Listing, Message, Said, text
from tightfit.model.load import load_model
from tightfit.priced import Priced, strategy_name
from tightfit.types import (
    FSDP2,
    ZERO3,
    ConfigError,
    Engine,
    Hardware,
    HardwareError,
    Levers,
    ModelShape,
    Offload,
    Trainer,
    UserError,
)

if TYPE_CHECKING:
    from tightfit.desk.estimate_job import JobInput

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
)
"""What `--compare` sets side by side: engine, place of the optimizer, place of the weights."""


Outcome = Priced | str
"""An estimate, or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateInput:
    """What is to be priced, once flags and files are one."""

    shape: ModelShape
    levers: Levers
    world: int
    hardware: Hardware | None
    said: tuple[Said, ...]


def estimated(request: Request) -> Priced:
    """What every GPU and the host will hold: of a job file that names no engine, under the plan that it would get."""
    job = _job(request)
    if job is not None and request.file is not None:
        from tightfit.desk.estimate_job import find_planned_way

        if (found := find_planned_way(request, request.file, job)) is not None:
            way, said = found
            return replace(price(way.shape, way.levers, way.world, way.hardware), said=said, planned=True)
    asked = _resolve(request, job)
    return replace(price(asked.shape, asked.levers, asked.world, asked.hardware), said=asked.said)


def comparison(request: Request) -> list[tuple[str, Outcome]]:
    """The same of every strategy."""
    asked = _resolve(request, _job(request))
    return compare(asked.shape, asked.levers, asked.world, asked.hardware)


def compare(shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None) -> list[tuple[str, Outcome]]:
    """Every strategy with the same training; what an engine cannot do says so in its row."""
    rows: list[tuple[str, Outcome]] = []
    for engine, optimizer, param in STRATEGIES:
        tried = replace(levers, engine=engine, offload_optimizer=optimizer, offload_param=param)
        try:
            rows.append((str(strategy_name(tried)), price(shape, tried, world, hardware)))
        except UserError as error:
            rows.append((str(strategy_name(tried)), str(error)))
    return [*rows, (text("desk.model-parallel"), text("desk.not-run"))]


def price(shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None) -> Priced:
    from tightfit import memory

    footprint = memory.estimate(shape, levers, world, hardware)
    return Priced(shape=shape, levers=levers, world=world, hardware=hardware, footprint=footprint)


# --- reading ------------------------------------------------------------------------------------


def _resolve(request: Request, job: JobInput | None) -> EstimateInput:
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
        other: Trainer = "llamafactory" if request.file is not None else "tightfit"
        version, version_said = choose_deepspeed(hardware, job.levers.trainer if job else other)
    # A card without bf16 computes in fp16, unless somebody says otherwise.
    usual, chosen = replace(Levers(), deepspeed_version=version), list[Said]()
    is_others = request.file is not None and job is None
    named = "precision" in flags or "precision" in explicit or is_others or request.deepspeed is not None
    if not named and hardware is not None and _lacks_bf16(hardware):
        usual = replace(usual, precision="fp16")
        chosen.append(Message("desk.fp16-chosen", card=hardware.gpu.name))
    shape, base, said = _inputs(request, world, job, usual)
    levers = levers_from_flags(flags_of(flags), shape, base)
    # What was chosen without being asked for, and what the cards or our knowledge lack for it.
    if not levers.is_fsdp2:
        said += version_said
    has_engine = "engine" in flags or request.deepspeed is not None or is_others or "levers.engine" in explicit
    if not has_engine and world > 1 and levers.engine == "zero0":
        chosen.append(Message("desk.no-engine"))
    if hardware is not None and levers.precision == "bf16" and _lacks_bf16(hardware):
        chosen.append(Message("desk.no-bf16", card=hardware.gpu.name))
    if "nvme" in (levers.offload_optimizer, levers.offload_param):
        chosen.append(Message("desk.nvme-not-measured"))
    said += (*chosen, *find_idle({name: spelt(name) for name in flags}, shape))
    return EstimateInput(shape=shape, levers=levers, world=world, hardware=hardware, said=said)


def _lacks_bf16(hardware: Hardware) -> bool:
    from tightfit.hardware.catalogue import native_bf16

    return native_bf16(hardware.gpu.arch) is False


def hardware_of(request: Request) -> Hardware | None:
    """The machine that `--gpus` names; None: no machine, so no verdict."""
    word = request.flags.get("gpus")
    for flag in ("host_ram", "nvme"):
        if word is None and flag in request.flags:
            raise ConfigError(Message("desk.needs-gpus", flag=spelt(flag)))
    if word is None:
        return None
    sizes = {"host_ram": request.flags.get("host_ram"), "nvme": request.flags.get("nvme")}
    if word.strip().lower() == "this":
        from tightfit.hardware.machine import this_machine

        return this_machine(**sizes)
    from tightfit.hardware.words import parse_hardware

    return parse_hardware(word, **sizes)


def world_of(request: Request, hardware: Hardware | None, otherwise: int = 1) -> int:
    """How many GPUs train: what was said, or all there are, or what a file names, or one."""
    there = hardware.world if hardware else None
    world = (there or otherwise) if request.world is None else request.world
    if world < 1:
        least = Message("inputs.at-least", least=1)
        raise ConfigError(Message("inputs.flag-must-be", flag="--world", must=least, value=world))
    if there is not None and world > there:
        raise HardwareError(
            Message("desk.world-beyond", world=world, there=there, gpus=request.flags["gpus"])
            if "gpus" in request.flags
            else Message("desk.world-beyond-all", world=world, there=there)
        )
    return world


def _job(request: Request) -> JobInput | None:
    """What the file says, if it is a job file."""
    if request.file is None:
        return None
    from tightfit.desk.estimate_job import is_job, read_job_input

    return read_job_input(request, request.file) if is_job(request.file) else None


def _inputs(
    request: Request, world: int, job: JobInput | None, usual: Levers
) -> tuple[ModelShape, Levers, tuple[Said, ...]]:
    """The model, the levers that files have set over the `usual` ones, and what their readers had to say."""
    if request.deepspeed and _names_fsdp2(request):
        raise ConfigError(Message("desk.two-engines"))
    said: tuple[Said, ...] = ()
    if job is not None:
        base = replace(job.levers, deepspeed_version=usual.deepspeed_version)
        shape, said = job.shape, (*job.said, *job.batch_said)
        if usual.precision != Levers().precision:
            base = replace(base, precision=usual.precision)
    elif request.file is not None:
        return _from_llamafactory(request, request.file, world, usual)
    elif request.model is None:
        raise ConfigError(Message("job.which-model"))
    else:
        shape, base = load_model(request.model, trust_trace=request.trace), usual
    if request.deepspeed is None:
        return shape, base, said
    from tightfit.formats.deepspeed.read import read_deepspeed, to_levers

    settings = read_deepspeed(request.deepspeed, hidden_size=shape.hidden_size, version=usual.deepspeed_version)
    return shape, to_levers(settings, base, world=world), (*said, *settings.because)


def _from_llamafactory(
    request: Request, file: RequestFile, world: int, usual: Levers
) -> tuple[ModelShape, Levers, tuple[Said, ...]]:
    from tightfit.formats.deepspeed import read as deepspeed_file
    from tightfit.formats.llamafactory import read as llamafactory_file

    if str(file.path).endswith(".json"):
        raise ConfigError(Message("desk.not-llamafactory", path=file.path))
    found = file.found
    if isinstance(found, UserError):  # for its own words about what cannot be read
        settings = llamafactory_file.read_llamafactory(file.path)
    else:
        settings = llamafactory_file.settings_from(found.values, file.path)
    said: tuple[Said, ...] = (*settings.because, *settings.computing_because)
    if settings.ignored:
        said += (Message("desk.not-priced", names=Listing(settings.ignored)),)
    shape = load_model(request.model or settings.model, trust_trace=request.trace)
    levers = llamafactory_file.to_levers(settings, usual, n_layers=shape.n_layers)
    config = request.deepspeed or settings.deepspeed
    if config is None or _names_fsdp2(request):
        return shape, levers, said
    deepspeed = deepspeed_file.read_deepspeed(config, hidden_size=shape.hidden_size, version=usual.deepspeed_version)
    llamafactory_file.check_deepspeed(settings, deepspeed)
    return shape, deepspeed_file.to_levers(deepspeed, levers, world=world), (*said, *deepspeed.because)


def _names_fsdp2(request: Request) -> bool:
    return str(request.flags.get("engine", "")).lower() == FSDP2
