"""`tightfit plan`: the fastest way that fits, and the files for it.

One verb answers three kinds of question: what is fastest, what a tier would do (`--tier`), and what is the most
that fits (`--max`). Each ends in a plan, which is drawn or printed as JSON, and written on request.
Everything that can fail comes before the first line of output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from tightfit.cli.flags import (
    ALIASES,
    CONNECTIONS,
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
from tightfit.messages import Listing, explain_field, text
from tightfit.types import Cluster, Levers, Trainer

FLAGS = {
    "the machine": "gpus=HARDWARE num_gpus=N world=N gpu_ids=0,1,… host_ram=SIZE nvme=SIZE nvme_path=DIR "
    + CONNECTIONS,
    "the question": f"for={'|'.join(get_args(Trainer))} effective_batch=N margin=SHARE allow=A,B,… only_stage=N "
    f"tier=NAME max={'|'.join(get_args(Wanted))} no_calibration json",
    "the length of the training": "epochs=N max_steps=N samples=N",
    "how it learns": f"learning_rate=RATE lr_scheduler={'|'.join(get_args(Schedule))} warmup_steps=N "
    "warmup_ratio=SHARE weight_decay=RATE max_grad_norm=NORM lora_alpha=ALPHA seed=N",
    "what is kept and said": "save_steps=N logging_steps=N",
}
"""Beside those of the levers, what every verb that plans takes."""
FILES = (
    f"write=DIR force target={'|'.join(get_args(Cluster))} launcher=NAME port=N hostfile=FILE transformers_version=V "
    "llamafactory_version=V"
)


def plan(argv: Sequence[str]) -> int:
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


def parser() -> Parser:
    usage = "[FILE.yaml] [--model MODEL] [--gpus HARDWARE] [flags]"
    made = job_parser("plan", usage, "tightfit plan --model qwen2.5-7b --gpus 8xRTX4090 --host-ram 256GB", "FILE.yaml")
    add_flags(made, {**FLAGS, "the files": FILES})
    return made.ends_with("0", "2", well="fits-or-not")


def job_parser(verb: str, usage: str, example: str, file: str, **fields: object) -> Parser:
    """A parser that takes a job: its file, its model, and each field of its data, with the field's own sentence."""
    fields |= {"allowance": Listing(get_args(Allowance)), "tier": Listing(get_args(Tier))}
    made = Parser(verb, usage, example, like="plan", **fields)
    made.add_file(file)
    made.takes("model=MODEL trace")
    group = made.add_argument_group(made.explain("the data"))
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
    return made


def add_flags(made: Parser, table: Mapping[str, str]) -> None:
    """The flags of a table like `FLAGS`, those of the levers, and other names for them."""
    for title, flags in table.items():
        made.takes(flags, title)
    add_lever_flags(made)
    for action in made._actions:
        if action.dest in FREE_LEVERS and action.help:  # the value in brackets is estimate's: here it is chosen
            action.help = without_default(action.help)
    made.knows_as(ALIASES)
