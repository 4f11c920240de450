"""`tightfit plan`: the fastest way that fits, and the files for it.

One verb answers three kinds of question: what is fastest, what a tier would do (`--tier`), and what is the most
that fits (`--max`). Each ends in a plan, which is drawn or printed as JSON, and written on request.
Everything that can fail comes before the first line of output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

from tightfit.cli.flags import (
    ALIASES,
    FITS_OR_NOT,
    GROUPS,
    Parser,
    add_lever_flags,
    print_json,
    whole_number,
    without_default,
)
from tightfit.desk.plan import answered
from tightfit.desk.request import each_stage, read_request
from tightfit.inputs.flags import spelt
from tightfit.job import Allowance, Schedule, Tier, Wanted
from tightfit.job.fields import FREE_LEVERS, job_fields, meanings
from tightfit.job.file import JOB_FLAGS
from tightfit.messages import Listing, Message, explain_field, text
from tightfit.types import Levers, Trainer

EXAMPLE = "tightfit plan --model qwen2.5-7b --gpus 8xRTX4090 --host-ram 256GB"
FLAGS: dict[str, dict[str, tuple[str | None, Message]]] = {
    "the machine": {
        "gpus": ("HARDWARE", Message("help.plan-gpus")),
        "num_gpus": ("N", Message("help.num-gpus")),
        "world": ("N", Message("help.plan-world")),
        "gpu_ids": ("0,1,…", Message("help.gpu-ids")),
        "host_ram": ("SIZE", Message("help.plan-host-ram")),
        "nvme": ("SIZE", Message("help.nvme")),
        "nvme_path": ("DIR", Message("help.nvme-path")),
    },
    "the question": {
        "for": ("|".join(get_args(Trainer)), Message("help.for")),
        "effective_batch": ("N", Message("help.effective-batch")),
        "margin": ("SHARE", Message("help.margin")),
        "allow": ("A,B,…", Message("help.allow", allowance=Listing(get_args(Allowance)))),
        "only_stage": ("N", Message("help.plan-only-stage")),
        "tier": ("NAME", Message("help.tier", tier=Listing(get_args(Tier)))),
        "max": ("|".join(get_args(Wanted)), Message("help.max")),
        "no_calibration": (None, Message("help.no-calibration")),
        "json": (None, Message("help.json")),
    },
    "the length of the training": {
        "epochs": ("N", Message("help.epochs")),
        "max_steps": ("N", Message("help.max-steps")),
        "samples": ("N", Message("help.samples")),
    },
    "how it learns": {
        "learning_rate": ("RATE", Message("help.learning-rate")),
        "lr_scheduler": ("|".join(get_args(Schedule)), Message("help.lr-scheduler")),
        "warmup_steps": ("N", Message("help.warmup-steps")),
        "warmup_ratio": ("SHARE", Message("help.warmup-ratio")),
        "weight_decay": ("RATE", Message("help.weight-decay")),
        "max_grad_norm": ("NORM", Message("help.max-grad-norm")),
        "lora_alpha": ("ALPHA", Message("help.lora-alpha")),
        "seed": ("N", Message("help.seed")),
    },
    "what is kept and said": {
        "save_steps": ("N", Message("help.save-steps")),
        "logging_steps": ("N", Message("help.logging-steps")),
    },
    "the files": {
        "write": ("DIR", Message("help.write")),
        "force": (None, Message("help.force")),
        "launcher": ("NAME", Message("help.launcher")),
        "port": ("N", Message("help.port")),
        "hostfile": ("FILE", Message("help.hostfile")),
        "transformers_version": ("V", Message("help.transformers-version")),
        "llamafactory_version": ("V", Message("help.llamafactory-version")),
    },
}
"""The flags beside those of the levers, each with its metavar and its help; no metavar: a switch."""

WHOLE = frozenset(("only_stage", "num_gpus", "world", "effective_batch", "max_steps", "samples", "port"))
"""Those that take a whole number."""


def plan(argv: Sequence[str]) -> int:
    """The verb."""
    args = parser().parse(argv)
    request = read_request(vars(args))
    stages = each_stage(request)
    if hasattr(args, "json"):
        from tightfit.desk.report import answer_report

        made = [answer_report(*answered(each)) for each in stages or [request]]
        tree = {"stages": made} if stages else made[0]
        print_json(tree, allow_nan=False)
        return 0
    from tightfit.screen.plan import waiting

    with waiting(text("cli.pricing-every-way")):
        answers = [answered(each) for each in stages or [request]]
    from tightfit.screen import draw_list, open_console
    from tightfit.screen import plan as screen_plan

    console = open_console()
    for number, (answer, files) in enumerate(answers, start=1):
        if stages:
            title = text("cli.stage-of", number=number, all=len(stages))
            print("\n\n" * (number > 1) + f"# {title}\n")
        if isinstance(answer, list):
            screen_plan.draw_tiers(console, answer)
            groups: dict[Levers, list[str]] = {}  # tiers of which a job that says much itself has left no difference
            for row in answer:
                way = None if row.plan is None else row.plan.chosen or next(iter(row.plan.alternatives), None)
                if way is not None:
                    groups.setdefault(way.levers, []).append(row.tier.name)
            alike = [", ".join(names) for names in groups.values() if len(names) > 1]
            draw_list(console, text("cli.same-here-since"), alike)
        else:
            screen_plan.draw_answer(console, answer)
        if files is not None:
            screen_plan.draw_files(console, files)
    return 0


# --- the parser ---------------------------------------------------------------------------------


def parser() -> Parser:
    usage = "[FILE.yaml] [--model MODEL] [--gpus HARDWARE] [flags]"
    made = Parser("plan", text("help.plan-does"), EXAMPLE, usage)
    made.add_file("FILE.yaml", text("help.plan-file"))
    made.add_argument("--model", metavar="MODEL", help=text("help.model"))
    made.add_argument("--trace", action="store_true", help=text("help.trace"))
    add_data_flags(made)
    add_flags(made, FLAGS, WHOLE)
    made.knows_as(ALIASES)
    return made.ends_with({**FITS_OR_NOT, "2": Message("help.plan-exit-2")}, Message("help.plan-writes"))


def add_flags(
    made: argparse.ArgumentParser, table: Mapping[str, Mapping[str, tuple[str | None, Message]]], whole: Collection[str]
) -> None:
    """The flags of a table like `FLAGS`, of which `whole` take whole numbers, and those of the levers."""
    for title, flags in table.items():
        group = made.add_argument_group(str(GROUPS[title]))
        for name, (metavar, about) in flags.items():
            if metavar is None:
                group.add_argument(spelt(name), action="store_true", help=str(about))
            else:
                kind: Callable[[str], Any] = whole_number(name) if name in whole else str
                group.add_argument(spelt(name), metavar=metavar, type=kind, help=str(about))
    add_lever_flags(made)
    for action in made._actions:
        if action.dest in FREE_LEVERS and action.help:  # the value in brackets is estimate's: here it is chosen
            action.help = without_default(action.help)


def add_data_flags(made: argparse.ArgumentParser) -> None:
    """Each field of the job's data that has a flag, with its own sentence."""
    group = made.add_argument_group(text("help.the-data"))
    for flag, path in JOB_FLAGS.items():
        if flag == "samples" or not (path.startswith("data.") or path == "max_samples"):
            continue
        takes = job_fields()[path].takes
        about = explain_field("job", path, meanings()[path]).rstrip(".。").replace("%", "%%")
        if takes.kind == "switch":
            group.add_argument(spelt(flag), action="store_true", help=about)
        else:
            kind = whole_number(flag) if takes.kind == "integer" else str
            metavar = "|".join(takes.words) or ("N" if takes.kind == "integer" else flag.upper())
            group.add_argument(spelt(flag), metavar=metavar, type=kind, help=about)
