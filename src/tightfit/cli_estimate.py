"""`tightfit estimate`: will it fit?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.cli_flags import Parser, add_lever_flags, flags_of, whole_number, without_effect
from tightfit.inputs.flags import check_levers, flags_from_levers, levers_from_flags, spelt
from tightfit.priced import Priced, strategy_name
from tightfit.types import (
    ConfigError,
    Engine,
    Hardware,
    HardwareError,
    Levers,
    ModelShape,
    Offload,
    Phase,
    UserError,
)

if TYPE_CHECKING:
    from tightfit.cli_estimate_job import JobInput
    from tightfit.inputs.deepspeed_file import DeepSpeedSettings

EXAMPLE = "tightfit estimate --model 7b_mamba --engine zero3 --gpus 6x32GB --seq 1024"

STRATEGIES: tuple[tuple[Engine, Offload, Offload], ...] = (
    ("zero0", "none", "none"),
    ("zero1", "none", "none"),
    ("zero2", "none", "none"),
    ("zero3", "none", "none"),
    ("zero2", "cpu", "none"),
    ("zero3", "cpu", "none"),
    ("zero3", "cpu", "cpu"),
    ("fsdp2", "none", "none"),
    ("fsdp2", "cpu", "cpu"),
)
"""What `--compare` sets side by side: engine, place of the optimizer, place of the weights."""


Outcome = Priced | str
"""An estimate, or why there is none."""


def parser() -> Parser:
    made = Parser(
        "estimate",
        "Say what every GPU and the host will hold, phase by phase, before anything runs.",
        EXAMPLE,
        "[FILE] [--model MODEL] [--gpus HARDWARE] [flags]",
    )
    made.add_argument("file", nargs="?", metavar="FILE", help="a job file or a LLaMA-Factory YAML; flags win")
    made.add_argument("--model", metavar="MODEL", help="a preset, a Hugging Face id, a folder or a config.json")
    made.add_argument("--deepspeed", metavar="FILE", help="a DeepSpeed JSON; flags win over it")
    made.add_argument("--trace", action="store_true", help="an unknown kind of model: build it on the meta device")
    add_hardware_flags(made)
    made.add_argument("--compare", action="store_true", help="every strategy side by side")
    made.add_argument("--json", action="store_true", help="one JSON object, for programs")
    add_lever_flags(made)
    return made


def add_hardware_flags(made: argparse.ArgumentParser) -> None:
    made.add_argument("--gpus", metavar="HARDWARE", help="6x32GB, 4xRTX4090, 2x8xA100-80GB …, or `this` machine")
    made.add_argument("--world", metavar="N", type=whole_number("world"), help="GPUs to train on (all of --gpus, or 1)")
    made.add_argument("--host-ram", metavar="SIZE", help="RAM of one node, 256GB say")
    made.add_argument("--nvme", metavar="SIZE", help="NVMe space of one node, 2TB say")


def estimate(argv: Sequence[str]) -> int:
    """The verb."""
    args = parser().parse(argv)
    job = _job(args)
    hardware = job.hardware if job else hardware_of(args)
    world = world_of(args, hardware, job.world if job else 1)
    usual, chosen = _precision(args, job, hardware)
    shape, base, said = _inputs(args, world, job, usual)
    levers = levers_from_flags(flags_of(args), shape, base)
    as_json = getattr(args, "json", False)
    if getattr(args, "compare", False):
        _show_comparison(compare(shape, levers, world, hardware), as_json)
    else:
        said += (*chosen, *_chosen(args, levers, world, hardware, job), *_idle(args, shape))
        _show(replace(price(shape, levers, world, hardware), said=said), as_json)
    return 0


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
    from tightfit.inputs.catalogue import native_bf16

    return native_bf16(hardware.gpu.arch) is False


def price(shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None) -> Priced:
    from tightfit import memory

    footprint = memory.estimate(shape, levers, world, hardware)
    return Priced(shape=shape, levers=levers, world=world, hardware=hardware, footprint=footprint)


# --- reading ------------------------------------------------------------------------------------


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
        from tightfit.inputs.machine import this_machine

        return this_machine(**sizes)
    from tightfit.inputs.hardware import parse_hardware

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
    from tightfit.cli_estimate_job import is_job, read_job_input

    return read_job_input(args) if is_job(Path(args.file)) else None


def _inputs(
    args: argparse.Namespace, world: int, job: JobInput | None, usual: Levers
) -> tuple[ModelShape, Levers, tuple[str, ...]]:
    """The model, the levers that files have set over the `usual` ones, and what their readers had to say."""
    if getattr(args, "deepspeed", None) and getattr(args, "engine", "").lower() == "fsdp2":
        raise ConfigError("--deepspeed and --engine fsdp2 are two engines: leave one out")
    if job is not None:
        shape, base, said = job.shape, job.levers, job.said
        if usual.precision != Levers().precision:
            base = replace(base, precision=usual.precision)
    elif hasattr(args, "file"):
        return _from_llamafactory(args, world)
    elif not hasattr(args, "model"):
        raise ConfigError("say which model: --model with a preset (`tightfit models`), a Hugging Face id or a folder")
    else:
        shape, base, said = _model(args.model, args), usual, ()
    if not hasattr(args, "deepspeed"):
        return shape, base, said
    from tightfit.inputs.deepspeed_file import to_levers

    settings = _read_deepspeed(args.deepspeed, args, shape)
    return shape, to_levers(settings, base, world=world), (*said, *settings.because)


def _from_llamafactory(args: argparse.Namespace, world: int) -> tuple[ModelShape, Levers, tuple[str, ...]]:
    from tightfit.inputs import deepspeed_file, llamafactory_file

    if args.file.endswith(".json"):
        raise ConfigError(f"{args.file} should be a LLaMA-Factory YAML: a DeepSpeed JSON goes after --deepspeed")
    settings = llamafactory_file.read_llamafactory(args.file)
    said = settings.because
    if settings.ignored:
        said += (f"not known to us and so not priced: {', '.join(settings.ignored)}",)
    shape = _model(getattr(args, "model", settings.model), args)
    levers = llamafactory_file.to_levers(settings, Levers(), n_layers=shape.n_layers)
    file = getattr(args, "deepspeed", settings.deepspeed)
    if file is None or getattr(args, "engine", "").lower() == "fsdp2":
        return shape, levers, said
    deepspeed = _read_deepspeed(file, args, shape)
    llamafactory_file.check_deepspeed(settings, deepspeed)
    return shape, deepspeed_file.to_levers(deepspeed, levers, world=world), (*said, *deepspeed.because)


def _model(word: str, args: argparse.Namespace) -> ModelShape:
    from tightfit.inputs.models import load_model

    return load_model(word, trust_trace=getattr(args, "trace", False))


def _read_deepspeed(path: str | Path, args: argparse.Namespace, shape: ModelShape) -> DeepSpeedSettings:
    from tightfit.inputs.deepspeed_file import read_deepspeed

    version: str = getattr(args, "deepspeed_version", Levers().deepspeed_version)
    return read_deepspeed(path, hidden_size=shape.hidden_size, version=version)


# --- showing ------------------------------------------------------------------------------------


def _show(priced: Priced, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report(priced), indent=2))
        return
    from tightfit.cli_advice import advise
    from tightfit.screen import draw_estimate, open_console

    def ask(levers: Levers) -> int:
        check_levers(levers, priced.shape)
        return price(priced.shape, levers, priced.world, priced.hardware).footprint.gpu.required_bytes

    draw_estimate(open_console(), priced, advise(priced, ask), _fitting(priced))


def _fitting(priced: Priced, most: int = 3) -> list[str]:
    """Where this does not fit: the strategies that do, with the flags that ask for them."""
    if priced.fits is not False:
        return []
    tries = [priced.levers]
    if priced.levers.loss == "plain" and not priced.shape.final_softcap:
        tries.append(replace(priced.levers, loss="fused"))
    fitting: list[Priced] = []
    for levers in tries:
        rows = compare(priced.shape, levers, priced.world, priced.hardware)
        fitting = [outcome for _, outcome in rows if isinstance(outcome, Priced) and outcome.fits]
        if fitting:
            break
    return [
        f"{strategy_name(each.levers)}: {_strategy_flags(each.levers, priced.levers)}; needs "
        f"{each.footprint.gpu.required_bytes / 2**30:.1f} GiB a GPU and "
        f"{each.footprint.host.peak_bytes_per_node / 2**30:.0f} GiB of host RAM a node."
        for each in fitting[:most]
    ]


def _strategy_flags(levers: Levers, asked: Levers) -> str:
    flags = [f"--engine {levers.engine}"]
    if levers.loss != asked.loss:
        flags.append(f"--loss {levers.loss}")
    if levers.engine != "fsdp2" and levers.offload_optimizer != "none":
        flags.append(f"--offload-optimizer {levers.offload_optimizer}")
    if levers.offload_param != "none":
        flags.append(f"--offload-param {levers.offload_param}")
    return " ".join(flags)


def _show_comparison(rows: Sequence[tuple[str, Outcome]], as_json: bool) -> None:
    if as_json:
        listed = [_strategy_report(name, outcome) for name, outcome in rows]
        print(json.dumps({"strategies": listed}, indent=2))
        return
    from tightfit.screen import draw_comparison, open_console

    draw_comparison(open_console(), rows)


def compare(shape: ModelShape, levers: Levers, world: int, hardware: Hardware | None) -> list[tuple[str, Outcome]]:
    """Every strategy with the same training; what an engine cannot do says so in its row."""
    rows: list[tuple[str, Outcome]] = []
    for engine, optimizer, param in STRATEGIES:
        tried = replace(levers, engine=engine, offload_optimizer=optimizer, offload_param=param)
        try:
            rows.append((strategy_name(tried), price(shape, tried, world, hardware)))
        except UserError as error:
            rows.append((strategy_name(tried), str(error)))
    return [*rows, ("model parallel", "not run by us")]


def report(priced: Priced) -> dict[str, Any]:
    """The contract with programs: the keys here are promised, further ones may come."""
    gpu, host = priced.footprint.gpu, priced.footprint.host
    return {
        "model": {
            "name": priced.shape.name,
            "parameters": priced.shape.parameters,
            "trainable_parameters": priced.footprint.trainable_parameters,
        },
        "levers": flags_from_levers(priced.levers) | {"world": priced.world},
        "card": _card_report(priced.hardware) if priced.hardware else None,
        "gpu": {
            "peak_bytes": gpu.peak_bytes,
            "peak_phase": gpu.peak_phase,
            "init_peak_bytes": gpu.init_peak_bytes,
            "required_bytes": gpu.required_bytes,
            "overhead": dict(gpu.overhead),
            "phases": {name: _phase_report(phase) for name, phase in gpu.phases.items()},
        },
        "host": {
            "peak_bytes_per_rank": host.peak_bytes_per_rank,
            "peak_bytes_per_node": host.peak_bytes_per_node,
            "nvme_bytes_per_node": host.nvme_bytes_per_node,
            "phases": {name: _phase_report(phase) for name, phase in host.phases.items()},
        },
        "fits": priced.fits,
        "because": [*priced.shape.notes, *priced.because],
    }


def _phase_report(phase: Phase) -> dict[str, Any]:
    return {"total_bytes": phase.total_bytes, "components": dict(phase.components)}


def _card_report(hardware: Hardware) -> dict[str, Any]:
    return {
        "name": hardware.gpu.name,
        "memory_bytes": hardware.gpu.memory_bytes,
        "nodes": hardware.nodes,
        "gpus_per_node": hardware.gpus_per_node,
        "host_ram_bytes": hardware.host_ram_bytes,
        "nvme_bytes": hardware.nvme_bytes,
    }


def _strategy_report(name: str, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, str):
        return {"strategy": name, "fits": None, "problem": outcome}
    gpu, host = outcome.footprint.gpu, outcome.footprint.host
    return {
        "strategy": name,
        "engine": outcome.levers.engine,
        "offload_optimizer": outcome.levers.offload_optimizer,
        "offload_param": outcome.levers.offload_param,
        "peak_bytes": gpu.peak_bytes,
        "init_peak_bytes": gpu.init_peak_bytes,
        "required_bytes": gpu.required_bytes,
        "host_bytes_per_node": host.peak_bytes_per_node,
        "fits": outcome.fits,
    }
