"""What `tightfit estimate` answers: the flags and files of a question, priced as they stand."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.desk.lever_flags import flags_of, without_effect
from tightfit.inputs.flags import levers_from_flags, spelt
from tightfit.inputs.versions import choose_deepspeed
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
class Asked:
    """What is to be priced, once flags and files are one."""

    shape: ModelShape
    levers: Levers
    world: int
    hardware: Hardware | None
    said: tuple[str, ...]


def estimated(args: argparse.Namespace) -> Priced:
    """What every GPU and the host will hold: of a job file that names no engine, under the plan that it would get."""
    job = _job(args)
    if job is not None:
        from tightfit.desk.estimate_job import planned_way

        if (found := planned_way(args, job)) is not None:
            way, said = found
            return replace(price(way.shape, way.levers, way.world, way.hardware), said=said, planned=True)
    asked = _asked(args)
    return replace(price(asked.shape, asked.levers, asked.world, asked.hardware), said=asked.said)


def comparison(args: argparse.Namespace) -> list[tuple[str, Outcome]]:
    """The same of every strategy."""
    asked = _asked(args)
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
    return [*rows, ("model parallel", "not run by us")]


def price(shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None) -> Priced:
    from tightfit import memory

    footprint = memory.estimate(shape, levers, world, hardware)
    return Priced(shape=shape, levers=levers, world=world, hardware=hardware, footprint=footprint)


# --- reading ------------------------------------------------------------------------------------


def _asked(args: argparse.Namespace) -> Asked:
    job = _job(args)
    hardware = job.hardware if job else hardware_of(args)
    world = world_of(args, hardware, job.world if job else 1)
    version, version_said = _version(args, job, hardware)
    usual, chosen = _precision(args, job, hardware)
    shape, base, said = _inputs(args, world, job, replace(usual, deepspeed_version=version))
    levers = levers_from_flags(flags_of(args), shape, base)
    if not levers.is_fsdp2:
        said += version_said
    said += (*chosen, *_chosen(args, levers, world, hardware, job), *_idle(args, shape))
    return Asked(shape=shape, levers=levers, world=world, hardware=hardware, said=said)


def _chosen(
    args: argparse.Namespace, levers: Levers, world: int, hardware: Hardware | None, job: JobInput | None
) -> tuple[str, ...]:
    """What was chosen without being asked for, and what the cards or our knowledge lack for it."""
    said = []
    named = any(hasattr(args, name) for name in ("engine", "deepspeed")) or (hasattr(args, "file") and job is None)
    if not named and world > 1 and levers.engine == "zero0" and not (job and "levers.engine" in job.explicit):
        said.append("No --engine was named, so nothing is sharded (zero0); --compare shows the others.")
    if hardware is not None and levers.precision == "bf16" and _lacks_bf16(hardware):
        said.append(f"The {hardware.gpu.name} has no bf16 of its own: --precision fp16 is what it trains in.")
    if "nvme" in (levers.offload_optimizer, levers.offload_param):
        said.append("NVMe offload was read in DeepSpeed's source and run on CPU ranks, and not measured.")
    return tuple(said)


def _idle(args: argparse.Namespace, shape: ModelShape) -> tuple[str, ...]:
    return without_effect({name: spelt(name) for name in vars(args)}, shape)


def _version(args: argparse.Namespace, job: JobInput | None, hardware: Hardware | None) -> tuple[str, tuple[str, ...]]:
    """The DeepSpeed that is priced: what was said, or the one that a plan would be for."""
    if hasattr(args, "deepspeed_version"):
        return args.deepspeed_version, ()
    if job is not None and "levers.deepspeed_version" in job.explicit:
        return job.levers.deepspeed_version, ()
    other: Trainer = "llamafactory" if hasattr(args, "file") else "tightfit"
    return choose_deepspeed(hardware, job.levers.trainer if job else other)


def _precision(
    args: argparse.Namespace, job: JobInput | None, hardware: Hardware | None
) -> tuple[Levers, tuple[str, ...]]:
    """The defaults for this card: a card without bf16 computes in fp16, unless somebody says otherwise."""
    usual = Levers()
    asked = hasattr(args, "precision") or (job is not None and "precision" in job.explicit)
    from_files = (hasattr(args, "file") and job is None) or hasattr(args, "deepspeed")
    if asked or from_files or hardware is None or not _lacks_bf16(hardware):
        return usual, ()
    said = f"No --precision was named, and the {hardware.gpu.name} has no bf16 of its own: fp16."
    return replace(usual, precision="fp16"), (said,)


def _lacks_bf16(hardware: Hardware) -> bool:
    from tightfit.hardware.catalogue import native_bf16

    return native_bf16(hardware.gpu.arch) is False


def hardware_of(args: argparse.Namespace) -> Hardware | None:
    """The machine that `--gpus` names; None: no machine, so no verdict."""
    word = getattr(args, "gpus", None)
    for flag in ("host_ram", "nvme"):
        if word is None and hasattr(args, flag):
            raise ConfigError(f"--{flag.replace('_', '-')} needs --gpus: it describes the machine that the GPUs are in")
    if word is None:
        return None
    sizes = {"host_ram": getattr(args, "host_ram", None), "nvme": getattr(args, "nvme", None)}
    if word.strip().lower() == "this":
        from tightfit.hardware.machine import this_machine

        return this_machine(**sizes)
    from tightfit.hardware.words import parse_hardware

    return parse_hardware(word, **sizes)


def world_of(args: argparse.Namespace, hardware: Hardware | None, otherwise: int = 1) -> int:
    """How many GPUs train: what was said, or all there are, or what a file names, or one."""
    there = hardware.world if hardware else None
    world: int = getattr(args, "world", there or otherwise)
    if world < 1:
        raise ConfigError(f"--world must be at least 1, not {world}")
    if there is not None and world > there:
        where = f"of --gpus {args.gpus}" if hasattr(args, "gpus") else "that there are"
        raise HardwareError(f"--world {world} is more than the {there} GPUs {where}")
    return world


def _job(args: argparse.Namespace) -> JobInput | None:
    """What the file says, if it is a job file."""
    if not hasattr(args, "file"):
        return None
    from tightfit.desk.estimate_job import is_job, read_job_input

    return read_job_input(args) if is_job(Path(args.file)) else None


def _inputs(
    args: argparse.Namespace, world: int, job: JobInput | None, usual: Levers
) -> tuple[ModelShape, Levers, tuple[str, ...]]:
    """The model, the levers that files have set over the `usual` ones, and what their readers had to say."""
    if getattr(args, "deepspeed", None) and getattr(args, "engine", "").lower() == FSDP2:
        raise ConfigError("--deepspeed and --engine fsdp2 are two engines: leave one out")
    if job is not None:
        base = replace(job.levers, deepspeed_version=usual.deepspeed_version)
        shape, said = job.shape, (*job.said, *job.batch_said)
        if usual.precision != Levers().precision:
            base = replace(base, precision=usual.precision)
    elif hasattr(args, "file"):
        return _from_llamafactory(args, world, usual)
    elif not hasattr(args, "model"):
        raise ConfigError("say which model: --model with a preset (`tightfit models`), a Hugging Face id or a folder")
    else:
        shape, base, said = _model(args.model, args), usual, ()
    if not hasattr(args, "deepspeed"):
        return shape, base, said
    from tightfit.formats.deepspeed.read import read_deepspeed, to_levers

    settings = read_deepspeed(args.deepspeed, hidden_size=shape.hidden_size, version=usual.deepspeed_version)
    return shape, to_levers(settings, base, world=world), (*said, *settings.because)


def _from_llamafactory(
    args: argparse.Namespace, world: int, usual: Levers
) -> tuple[ModelShape, Levers, tuple[str, ...]]:
    from tightfit.formats.deepspeed import read as deepspeed_file
    from tightfit.formats.llamafactory import read as llamafactory_file

    if args.file.endswith(".json"):
        raise ConfigError(f"{args.file} should be a LLaMA-Factory YAML: a DeepSpeed JSON goes after --deepspeed")
    settings = llamafactory_file.read_llamafactory(args.file)
    said = (*settings.because, *settings.computing_because)
    if settings.ignored:
        said += (f"not known to us and so not priced: {', '.join(settings.ignored)}",)
    shape = _model(getattr(args, "model", settings.model), args)
    levers = llamafactory_file.to_levers(settings, usual, n_layers=shape.n_layers)
    file = getattr(args, "deepspeed", settings.deepspeed)
    if file is None or getattr(args, "engine", "").lower() == FSDP2:
        return shape, levers, said
    deepspeed = deepspeed_file.read_deepspeed(file, hidden_size=shape.hidden_size, version=usual.deepspeed_version)
    llamafactory_file.check_deepspeed(settings, deepspeed)
    return shape, deepspeed_file.to_levers(deepspeed, levers, world=world), (*said, *deepspeed.because)


def _model(word: str, args: argparse.Namespace) -> ModelShape:
    from tightfit.model.load import load_model

    return load_model(word, trust_trace=getattr(args, "trace", False))
