"""`tightfit plan`: the fastest way that fits, and the files for it.

One verb answers three kinds of question: what is fastest, what a tier would do (`--tier`), and what is the most
that fits (`--max`). Each ends in a plan, which is drawn or printed as JSON, and written on request.
Everything that can fail comes before the first line of output.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from tightfit.cli_flags import Parser, add_lever_flags, whole_number
from tightfit.cli_plan_files import Answer, check_launcher, deepspeed_version, target_of, write_plan
from tightfit.inputs.flags import meant, spelt
from tightfit.inputs.job_fields import FREE_LEVERS
from tightfit.inputs.job_file import JOB_FLAGS, JobFile, hardware_of, job_from_flags, model_of, read_job
from tightfit.inputs.presets import PRESETS
from tightfit.job import Allowance, Job, Tier
from tightfit.planner import plan as planned
from tightfit.planner.limits import Limit, Wanted, largest_micro_batch, largest_model, longest_sequence
from tightfit.planner.tiers import Tiered, all_tiers, tiered
from tightfit.types import ConfigError, Hardware, HardwareError, ModelShape

EXAMPLE = "tightfit plan --model qwen2.5-7b --gpus 8xRTX4090 --host-ram 256GB"

_FLAGS: dict[str, dict[str, tuple[str | None, str]]] = {
    "the machine": {
        "gpus": ("HARDWARE", "6x32GB, 4xRTX4090, 2x8xA100-80GB …; left out: this machine"),
        "num_gpus": ("N", "GPUs of each node to use (all)"),
        "world": ("N", "GPUs to use in all (all)"),
        "gpu_ids": ("0,1,…", "the GPUs of each node to use, by number"),
        "host_ram": ("SIZE", "RAM of one node, 256GB say"),
        "nvme": ("SIZE", "NVMe space of one node, 2TB say"),
        "nvme_path": ("DIR", "a folder on that NVMe"),
    },
    "the question": {
        "effective_batch": ("N", "sequences a step over all GPUs (four a GPU)"),
        "margin": ("SHARE", "share of each card that stays free (4%%)"),
        "allow": (
            "A,B,…",
            f"changes of the training that may be made if nothing fits: {', '.join(get_args(Allowance))}",
        ),
        "tier": ("NAME", f"a named corner of the levers: {', '.join(get_args(Tier))}"),
        "max": ("|".join(get_args(Wanted)), "the most that fits instead of the fastest"),
        "json": (None, "one JSON object, for programs"),
    },
    "the length of the training": {
        "epochs": ("N", "passes over the data"),
        "max_steps": ("N", "optimizer steps; wins over --epochs"),
        "samples": ("N", "samples in the data: hours to finish need it"),
        "learning_rate": ("RATE", "peak learning rate (1e-5; 1e-4 for adapters)"),
    },
    "the files": {
        "write": ("DIR", "write configs, launch script and reasons into this folder"),
        "force": (None, "replace files that are there"),
        "launcher": ("NAME", "deepspeed, torchrun, accelerate or llamafactory"),
        "port": ("N", "where the ranks of a run meet (29500)"),
        "hostfile": ("FILE", "the machines of several nodes, `name slots=8` a line"),
        "transformers_version": ("V", "the transformers that will read the files (the installed one)"),
        "llamafactory_version": ("V", "the LLaMA-Factory that will read them (the installed one)"),
    },
}
"""The flags beside those of the levers, each with its metavar and its help; no metavar: a switch."""

WORKER = Path(__file__).with_name("train") / "__main__.py"
"""What a launch script starts, unless it starts LLaMA-Factory."""

COUNTS = {"gpus", "num_gpus", "world"}
"""The flags that win over a job file's number of GPUs."""

_WHOLE = ("num_gpus", "world", "effective_batch", "max_steps", "samples", "port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked, once flags and file are one."""

    job: Job
    shape: ModelShape
    hardware: Hardware
    explicit: frozenset[str]
    """The fields of the job that the user set, by dotted name."""
    said: tuple[str, ...]


def plan(argv: Sequence[str]) -> int:
    """The verb."""
    args = _parser().parse(argv)
    _check(args)
    if hasattr(args, "json"):
        from tightfit.cli_plan_report import report

        print(json.dumps(report(*_work(args)), indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    from tightfit.screen_plan import waiting

    with waiting("pricing every way …"):
        answer, files = _work(args)
    _draw(answer, files)
    return 0


def _draw(answer: Answer, files: Sequence[Path] | None) -> None:
    from tightfit import screen_plan
    from tightfit.screen import open_console

    console = open_console()
    if isinstance(answer, list):
        screen_plan.draw_tiers(console, answer)
    elif isinstance(answer, Tiered):
        screen_plan.draw_tier(console, answer)
    elif isinstance(answer, Limit):
        screen_plan.draw_limit(console, answer)
    else:
        screen_plan.draw_plan(console, answer)
    if files is not None:
        screen_plan.draw_files(console, files, WORKER.exists())


def _work(args: argparse.Namespace) -> tuple[Answer, list[Path] | None]:
    """The answer, and the files that were written for it."""
    target = target_of(args)
    request = _request(args)
    check_launcher(request.job, target)
    answer = _answer(args, request)
    return write_plan(args, request.job, target, answer)


# --- the parser ---------------------------------------------------------------------------------


def _parser() -> Parser:
    made = Parser(
        "plan",
        "Find the fastest way to run a training that fits, and write the configs for it. Only how it is computed is "
        "chosen; what changes its result is yours, unless --allow names it. Engine, offload, checkpointing, micro "
        "batch and the like are chosen, and pinned where you name them.",
        EXAMPLE,
        "[JOB.yaml] [--model MODEL] [--gpus HARDWARE] [flags]",
    )
    made.add_argument("file", nargs="?", metavar="JOB.yaml", help="a job file; flags win over it")
    made.add_argument("--model", metavar="MODEL", help="a preset, a Hugging Face id, a folder or a config.json")
    made.add_argument("--trace", action="store_true", help="an unknown kind of model: build it on the meta device")
    for title, flags in _FLAGS.items():
        group = made.add_argument_group(title)
        for name, (metavar, text) in flags.items():
            if metavar is None:
                group.add_argument(spelt(name), action="store_true", help=text)
            else:
                kind: Callable[[str], Any] = whole_number(name) if name in _WHOLE else str
                group.add_argument(spelt(name), metavar=metavar, type=kind, help=text)
    add_lever_flags(made)
    for action in made._actions:
        if action.dest in FREE_LEVERS and action.help:  # the value in brackets is estimate's: here it is chosen
            action.help = re.sub(r" \([^()]*\)$", "", action.help)
    return made


def _check(args: argparse.Namespace) -> None:
    """Flags that contradict each other."""
    given = vars(args)
    if "force" in given and "write" not in given:
        raise ConfigError("--force needs --write: it replaces files that --write would leave alone")
    if "num_gpus" in given and "world" in given:
        raise ConfigError("--num-gpus and --world say the same: leave one out")
    for name in ("num_gpus", "world"):
        if given.get(name, 1) < 1:
            raise ConfigError(f"{spelt(name)} must be at least 1, not {given[name]}")
    wanted = given.get("max")
    if wanted is None:
        return
    wanted = args.max = wanted.lower().replace("_", "-")
    if wanted not in get_args(Wanted):
        raise ConfigError(f"--max knows no {wanted!r}{meant(wanted, get_args(Wanted))}")
    asked = {"seq": ("seq",), "micro-batch": ("micro_batch", "effective_batch"), "model": ("model",)}[wanted]
    for name in (*asked, "tier", "allow"):
        if name in given:
            raise ConfigError(f"--max {wanted} and {spelt(name)} contradict each other: leave one out")


# --- reading ------------------------------------------------------------------------------------


def _request(args: argparse.Namespace) -> Request:
    given = {name: value for name, value in vars(args).items() if name in JOB_FLAGS}
    path = Path(args.file) if hasattr(args, "file") else None
    read = None if path is None else read_job(path)
    if read is None and getattr(args, "max", None) == "model":
        given["model"] = next(iter(PRESETS))  # whose place every preset takes
    job = job_from_flags(given, read.job if read else None)
    job, said = _for_max(args, job)
    hardware = _hardware(args, job, read)
    job, version_said = _versioned(job, hardware)
    shape = model_of(job, trust_trace=hasattr(args, "trace"))
    explicit = {JOB_FLAGS[name] for name in given} | {"levers.deepspeed_version"}
    if path is not None:
        explicit |= _fields_of(path)
    return Request(
        job=_placed(job, path),
        shape=shape,
        hardware=hardware,
        explicit=frozenset(explicit),
        said=(*_said_by(args, read), *said, *version_said, *_lacking(args, job, hardware)),
    )


def _for_max(args: argparse.Namespace, job: Job) -> tuple[Job, tuple[str, ...]]:
    """Without what `--max` replaces. Flags that contradict it are refused; a file's values only make way."""
    wanted = getattr(args, "max", None)
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


def _hardware(args: argparse.Namespace, job: Job, read: JobFile | None) -> Hardware:
    """What the flags name, else what the file names, else this machine; as much of it as is to be used."""
    num_gpus = getattr(args, "num_gpus", None)
    if read is not None and not COUNTS & set(vars(args)):
        num_gpus = read.num_gpus
    hardware = hardware_of(job, num_gpus)
    world = getattr(args, "world", hardware.world)
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


def _said_by(args: argparse.Namespace, read: JobFile | None) -> tuple[str, ...]:
    """What the job file's reader had to say, and which of its numbers makes way for a flag."""
    if read is None:
        return ()
    winner = next((spelt(name) for name in sorted(COUNTS) if hasattr(args, name)), None)
    if winner is None or read.num_gpus is None:
        return read.said
    kept = [sentence for sentence in read.said if not sentence.startswith("num_gpus ")]
    return (*kept, f"{winner} wins over the job file's num_gpus of {read.num_gpus}.")


def _versioned(job: Job, hardware: Hardware) -> tuple[Job, tuple[str, ...]]:
    """The job with the DeepSpeed that will run it: what it holds in memory differs between versions."""
    if "deepspeed_version" in job.levers:
        return job, ()
    version, said = deepspeed_version(hardware)
    return replace(job, levers={**job.levers, "deepspeed_version": version}), said


def _lacking(args: argparse.Namespace, job: Job, hardware: Hardware) -> tuple[str, ...]:
    """What the cards lack for what was asked, and what was said for nothing."""
    from tightfit.inputs.catalogue import native_bf16

    said = []
    if job.precision == "bf16" and native_bf16(hardware.gpu.arch) is False:
        said.append(f"The {hardware.gpu.name} has no bf16 of its own: --precision fp16 is what it trains in.")
    if hasattr(args, "hostfile") and hardware.nodes == 1:
        said.append("--hostfile is without effect: all the GPUs are in one node.")
    return tuple(said)


def _fields_of(path: Path) -> set[str]:
    """The fields that a job file sets, also those set to their defaults."""
    from tightfit.inputs.job_text import read_tree
    from tightfit.inputs.job_training import translate

    def names(tree: Mapping[str, Any], before: str = "") -> set[str]:
        found = set()
        for key, value in tree.items():
            found |= {before + key} | (names(value, f"{before}{key}.") if isinstance(value, Mapping) else set())
        return found

    return names(translate(read_tree(path), path.name).tree)


def _placed(job: Job, file: Path | None) -> Job:
    """Paths that lead somewhere from here, made absolute: the written files may lie anywhere."""

    def place(text: str | None) -> str | None:
        for folder in (Path(), *((file.parent,) if file else ())):
            path = folder / Path(text or "").expanduser()
            if text and path.exists():
                return str(path.absolute())
        return text

    model = job.model
    if isinstance(model, str) and model.strip().lower() not in PRESETS:
        model = place(model.strip()) or model
    return replace(
        job,
        model=model,
        data=replace(job.data, path=place(job.data.path)),
        saving=replace(job.saving, folder=place(job.saving.folder) or job.saving.folder),
        hardware=replace(job.hardware, nvme_path=place(job.hardware.nvme_path)),
    )


# --- answering ----------------------------------------------------------------------------------


def _answer(args: argparse.Namespace, request: Request) -> Answer:
    job, shape, hardware = request.job, request.shape, request.hardware
    if hasattr(args, "max"):
        return _most(args.max, request)
    if job.tier is not None:
        if job.tier == "all":
            if hasattr(args, "write"):
                raise ConfigError("--tier all is a comparison: name one tier to --write its files")
            return all_tiers(job, shape, hardware, request.explicit)
        answer = tiered(job.tier, job, shape, hardware, request.explicit)
        if answer.plan is None:
            raise ConfigError(answer.problem)
        return replace(answer, because=(*request.said, *answer.because))
    return planned(job, shape, hardware, request.said)


def _most(wanted: Wanted, request: Request) -> Limit:
    job, shape, hardware = request.job, request.shape, request.hardware
    if wanted == "seq":
        limit = longest_sequence(job, shape, hardware)
    elif wanted == "micro-batch":
        limit = largest_micro_batch(job, shape, hardware)
    else:
        limit = largest_model(job, hardware)
    return replace(limit, because=(*request.said, *limit.because))
