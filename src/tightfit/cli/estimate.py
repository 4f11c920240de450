"""`tightfit estimate`: will it fit?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from tightfit.cli.flags import ALIASES, FITS_OR_NOT, Parser, add_lever_flags, print_json, whole_number
from tightfit.desk.estimate import compare, comparison, estimated, price
from tightfit.desk.report import estimate_report, strategy_report
from tightfit.desk.request import read_request
from tightfit.inputs.flags import check_levers
from tightfit.messages import text
from tightfit.priced import Priced, strategy_name
from tightfit.types import Levers

EXAMPLE = "tightfit estimate --model 7b_mamba --engine zero3 --gpus 6x32GB --seq 1024"


def parser() -> Parser:
    usage = "[FILE] [--model MODEL] [--gpus HARDWARE] [flags]"
    made = Parser("estimate", text("help.estimate-does"), EXAMPLE, usage)
    made.add_file("FILE", text("help.file"))
    made.add_argument("--model", metavar="MODEL", help=text("help.model"))
    made.add_argument("--deepspeed", metavar="FILE", help=text("help.deepspeed"))
    made.add_argument("--trace", action="store_true", help=text("help.trace"))
    add_hardware_flags(made)
    made.add_argument("--only-stage", metavar="N", type=whole_number("only_stage"), help=text("help.only-stage"))
    made.add_argument("--compare", action="store_true", help=text("help.compare"))
    made.add_argument("--json", action="store_true", help=text("help.json"))
    add_lever_flags(made)
    made.knows_as(ALIASES)
    return made.ends_with(FITS_OR_NOT)


def add_hardware_flags(made: argparse.ArgumentParser) -> None:
    made.add_argument("--gpus", metavar="HARDWARE", help=text("help.gpus"))
    made.add_argument("--world", metavar="N", type=whole_number("world"), help=text("help.world"))
    made.add_argument("--host-ram", metavar="SIZE", help=text("help.host-ram"))
    made.add_argument("--nvme", metavar="SIZE", help=text("help.nvme"))


def estimate(argv: Sequence[str]) -> int:
    """The verb."""
    args = parser().parse(argv)
    request, as_json = read_request(vars(args)), hasattr(args, "json")
    if hasattr(args, "compare"):
        rows = comparison(request)
        if as_json:
            print_json({"strategies": [strategy_report(name, outcome) for name, outcome in rows]})
            return 0
        from tightfit.screen import draw_comparison, open_console

        draw_comparison(open_console(), rows)
        return 0
    priced = estimated(request)
    if as_json:
        print_json(estimate_report(priced))
        return 0
    from tightfit.desk.advice import advise
    from tightfit.screen import draw_estimate, open_console

    def ask(levers: Levers) -> int:
        check_levers(levers, priced.shape)
        return price(priced.shape, levers, priced.world, priced.hardware).footprint.gpu.required_bytes

    advice = advise(priced, ask)
    # Where this does not fit: the strategies that do, with the flags that ask for them.
    tries = [priced.levers] if priced.fits is False else []
    if tries and priced.levers.loss == "plain" and not priced.shape.final_softcap:
        tries.append(replace(priced.levers, loss="fused"))
    fitting: list[Priced] = []
    for levers in tries:
        outcomes = [each for _, each in compare(priced.shape, levers, priced.world, priced.hardware)]
        fitting = [each for each in outcomes if isinstance(each, Priced) and each.fits]
        if fitting:
            break
    lines = []
    for each in fitting[:3]:
        levers, memory = each.levers, each.footprint
        flags = [f"--engine {levers.engine}"]
        if levers.loss != priced.levers.loss:
            flags.append(f"--loss {levers.loss}")
        if not levers.is_fsdp2 and levers.offload_optimizer != "none":
            flags.append(f"--offload-optimizer {levers.offload_optimizer}")
        if levers.offload_param != "none":
            flags.append(f"--offload-param {levers.offload_param}")
        sizes = {"gpu": memory.gpu.required_bytes / 2**30, "host": memory.host.peak_bytes_per_node / 2**30}
        lines.append(text("cli.fits-as", way=strategy_name(levers), flags=" ".join(flags), **sizes))
    draw_estimate(open_console(), priced, advice, lines)
    return 0
