"""`tightfit plan`: the fastest way that fits, and the files for it.

One verb answers three kinds of question: what is fastest, what a tier would do (`--tier`), and what is the most
that fits (`--max`). Each ends in a plan, which is drawn or printed as JSON, and written on request.
Everything that can fail comes before the first line of output.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from tightfit.cli.flags import ALIASES, FITS_OR_NOT, Parser, add_lever_flags, whole_number
from tightfit.desk.plan import answered, check_flags
from tightfit.desk.plan_files import Answer
from tightfit.desk.stages import each_stage
from tightfit.inputs.flags import spelt
from tightfit.job import Allowance, Schedule, Tier
from tightfit.job.fields import FREE_LEVERS, job_fields, meanings
from tightfit.job.file import JOB_FLAGS
from tightfit.planner.limits import Limit, Wanted
from tightfit.planner.tiers import Tiered
from tightfit.types import Levers, Trainer

EXAMPLE = "tightfit plan --model qwen2.5-7b --gpus 8xRTX4090 --host-ram 256GB"
EXIT_CODES = {
    **FITS_OR_NOT,
    "2": "something that you have to change, or nothing fits and --write was asked for; one sentence says what",
}
WRITES = (
    "Nothing, but with --write DIR the configs of the plan into DIR: deepspeed.json, accelerate.yaml, "
    "training_args.json, llamafactory.yaml, worker.json, launch.sh, and PLAN.md, which says what each is for."
)

FOR = (
    "who will run it: tightfit's own worker, LLaMA-Factory, or a script around Hugging Face's Trainer; only what that "
    "trainer has is used, and its behaviour is priced (tightfit; llamafactory for a file of LLaMA-Factory's)"
)
HOST_RAM = (
    "RAM of one node, 256GB say, or the part of it that this job may use, as limits.host_ram in a job file (this "
    "machine's; with --gpus: taken to be enough)"
)
FLAGS: dict[str, dict[str, tuple[str | None, str]]] = {
    "the machine": {
        "gpus": ("HARDWARE", "6x32GB, 4xRTX4090, 2x8xA100-80GB …; left out: this machine"),
        "num_gpus": ("N", "GPUs of each node to use, at most (all)"),
        "world": ("N", "GPUs to use in all, at most (all)"),
        "gpu_ids": ("0,1,…", "the GPUs of each node to use, by number (the first ones)"),
        "host_ram": ("SIZE", HOST_RAM),
        "nvme": ("SIZE", "NVMe space of one node, 2TB say (none)"),
        "nvme_path": ("DIR", "a folder on that NVMe, where offloading to it is planned"),
    },
    "the question": {
        "for": ("|".join(get_args(Trainer)), FOR),
        "effective_batch": ("N", "sequences a step over all GPUs (four a GPU)"),
        "margin": ("SHARE", "share of each card that stays free, 10%% say (4%%)"),
        "allow": (
            "A,B,…",
            f"changes of the training that may be made if nothing fits: {', '.join(get_args(Allowance))}",
        ),
        "only_stage": ("N", "of a job file with `stages`, this one alone, counted from 1 (each of them)"),
        "tier": ("NAME", f"a named corner of the levers: {', '.join(get_args(Tier))}"),
        "max": ("|".join(get_args(Wanted)), "the most that fits instead of the fastest"),
        "no_calibration": (None, "leave out what earlier runs measured against their predictions"),
        "json": (None, "one JSON object, for programs"),
    },
    "the length of the training": {
        "epochs": ("N", "passes over the data (1)"),
        "max_steps": ("N", "optimizer steps; wins over --epochs (as --epochs says)"),
        "samples": ("N", "samples in the data: hours to finish need it"),
    },
    "how it learns": {
        "learning_rate": ("RATE", "peak learning rate (1e-5; 1e-4 for adapters)"),
        "lr_scheduler": ("|".join(get_args(Schedule)), "how the learning rate falls (cosine)"),
        "warmup_steps": ("N", "steps over which the learning rate rises; or --warmup-ratio"),
        "warmup_ratio": ("SHARE", "the same as a share of all steps (0.03)"),
        "weight_decay": ("RATE", "AdamW's weight decay (0)"),
        "max_grad_norm": ("NORM", "gradient norm above which gradients are scaled down; 0: never (1)"),
        "lora_alpha": ("ALPHA", "scaling numerator of the adapters (twice the rank)"),
        "seed": ("N", "seed of data order, dropout and drawn weights (42)"),
    },
    "what is kept and said": {
        "save_steps": ("N", "steps between two checkpoints (500)"),
        "logging_steps": (
            "N",
            "steps between two lines of the log, and points of TensorBoard and wandb (a line every ten seconds; in the "
            "files for other trainers 10)",
        ),
    },
    "the files": {
        "write": ("DIR", "write configs, launch script and reasons into this folder"),
        "force": (None, "replace files that are there"),
        "launcher": ("NAME", "deepspeed, torchrun, accelerate or llamafactory (deepspeed; torchrun for fsdp2)"),
        "port": ("N", "where the ranks of a run meet (29500)"),
        "hostfile": ("FILE", "the machines of several nodes, `name slots=8` a line"),
        "transformers_version": ("V", "the transformers that will read the files (the installed one)"),
        "llamafactory_version": ("V", "the LLaMA-Factory that will read them (the installed one)"),
    },
}
"""The flags beside those of the levers, each with its metavar and its help; no metavar: a switch."""

WHOLE = frozenset(("only_stage", "num_gpus", "world", "effective_batch", "max_steps", "samples", "port"))
"""Those that take a whole number."""


NEXT = "\n\n"
"""Between the plans of two stages."""


def plan(argv: Sequence[str]) -> int:
    """The verb."""
    args = parser().parse(argv)
    check_flags(args)
    stages = each_stage(args)
    if hasattr(args, "json"):
        from tightfit.desk.plan_report import report

        made = [report(*answered(each)) for each in stages or [args]]
        tree = {"stages": made} if stages else made[0]
        print(json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    from tightfit.screen.plan import waiting

    with waiting("pricing every way …"):
        answers = [answered(each) for each in stages or [args]]
    for number, (answer, files) in enumerate(answers, start=1):
        if stages:
            print(f"{NEXT if number > 1 else ''}# Stage {number} of {len(stages)}\n")
        _draw(answer, files)
    return 0


def _draw(answer: Answer, files: Sequence[Path] | None) -> None:
    from tightfit.screen import draw_list, open_console
    from tightfit.screen import plan as screen_plan

    console = open_console()
    if isinstance(answer, list):
        screen_plan.draw_tiers(console, answer)
        draw_list(console, "The same here, since what you say yourself wins over a tier:", alike(answer))
    elif isinstance(answer, Tiered):
        screen_plan.draw_tier(console, answer)
    elif isinstance(answer, Limit):
        screen_plan.draw_limit(console, answer)
    else:
        screen_plan.draw_plan(console, answer)
    if files is not None:
        screen_plan.draw_files(console, files)


def alike(rows: Sequence[Tiered]) -> list[str]:
    """The tiers of which a job that says much itself has left no difference, a line for those that are one."""
    groups: dict[Levers, list[str]] = {}
    for row in rows:
        way = None if row.plan is None else row.plan.chosen or next(iter(row.plan.alternatives), None)
        if way is not None:
            groups.setdefault(way.levers, []).append(row.tier.name)
    return [", ".join(names) for names in groups.values() if len(names) > 1]


# --- the parser ---------------------------------------------------------------------------------


def parser() -> Parser:
    made = Parser(
        "plan",
        "Find the fastest way to run a training that fits, and write the configs for it. Only how it is computed is "
        "chosen; what changes its result is yours, unless --allow names it. Engine, offload, checkpointing, micro "
        "batch and the like are chosen, and pinned where you name them.",
        EXAMPLE,
        "[FILE.yaml] [--model MODEL] [--gpus HARDWARE] [flags]",
    )
    made.add_file("FILE.yaml", "a job file, or a LLaMA-Factory YAML; flags win over it")
    made.add_argument("--model", metavar="MODEL", help="a preset, a Hugging Face id, a folder or a config.json")
    made.add_argument("--trace", action="store_true", help="an unknown kind of model: build it on the meta device")
    add_data_flags(made)
    add_flags(made, FLAGS, WHOLE)
    made.knows_as(ALIASES)
    return made.ends_with(EXIT_CODES, WRITES)


def add_flags(
    made: argparse.ArgumentParser, table: Mapping[str, Mapping[str, tuple[str | None, str]]], whole: Collection[str]
) -> None:
    """The flags of a table like `FLAGS`, of which `whole` take whole numbers, and those of the levers."""
    for title, flags in table.items():
        group = made.add_argument_group(title)
        for name, (metavar, text) in flags.items():
            if metavar is None:
                group.add_argument(spelt(name), action="store_true", help=text)
            else:
                kind: Callable[[str], Any] = whole_number(name) if name in whole else str
                group.add_argument(spelt(name), metavar=metavar, type=kind, help=text)
    add_lever_flags(made)
    for action in made._actions:
        if action.dest in FREE_LEVERS and action.help:  # the value in brackets is estimate's: here it is chosen
            action.help = re.sub(r" \([^()]*\)$", "", action.help)


def add_data_flags(made: argparse.ArgumentParser) -> None:
    """Each field of the job's data that has a flag, with its own sentence."""
    group = made.add_argument_group("the data")
    for flag, path in JOB_FLAGS.items():
        if flag == "samples" or not (path.startswith("data.") or path == "max_samples"):
            continue
        takes, text = job_fields()[path].takes, meanings()[path].rstrip(".").replace("%", "%%")
        if takes.kind == "switch":
            group.add_argument(spelt(flag), action="store_true", help=text)
        else:
            kind = whole_number(flag) if takes.kind == "integer" else str
            metavar = "|".join(takes.words) or ("N" if takes.kind == "integer" else flag.upper())
            group.add_argument(spelt(flag), metavar=metavar, type=kind, help=text)
