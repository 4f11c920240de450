"""`tightfit estimate`, `models` and `gpus`: will it fit, and what is known by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tightfit.cli.flags import ALIASES, CONNECTIONS, HARDWARE, Parser, add_lever_flags, pick, print_json
from tightfit.desk.estimate import compare, comparison, estimated, hardware_of, price, world_of
from tightfit.desk.report import estimate_report, strategy_report
from tightfit.desk.request import flags_of, read_request
from tightfit.hardware.catalogue import CARDS
from tightfit.inputs.flags import check_levers, levers_from_flags
from tightfit.messages import text
from tightfit.model.load import load_model
from tightfit.model.presets import PRESETS
from tightfit.priced import Priced, Share, strategy_name
from tightfit.types import ZERO3, Levers, ModelShape

PRICED_BY = (
    *("method", "seq", "micro_batch", "precision", "optimizer", "lora_rank", "engine"),
    *("offload_optimizer", "offload_param", "checkpointing", "loss"),
)
"""The flags of levers that mean something for every preset."""
GPU = (
    *("name", "vendor", "memory_bytes", "arch", "bf16_flops", "fp16_flops", "memory_bytes_per_s"),
    *("link", "link_bytes_per_s"),
)
"""What is told of a card."""


def parser() -> Parser:
    example = "tightfit estimate --model 7b_mamba --engine zero3 --gpus 6x32GB --seq 1024"
    made = Parser("estimate", "[FILE] [--model MODEL] [--gpus HARDWARE] [flags]", example)
    made.add_file("FILE")
    made.takes(f"model=MODEL deepspeed=FILE trace {HARDWARE} {CONNECTIONS} only_stage=N compare json")
    add_lever_flags(made)
    made.knows_as(ALIASES)
    return made.ends_with("0", "2", well="fits-or-not")


def estimate(argv: Sequence[str]) -> int:
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
    if tries and priced.levers.loss == "plain":
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


def models_parser() -> Parser:
    usage = "[--gpus HARDWARE] [--seq N] [flags]"
    made = Parser("models", usage, "tightfit models --gpus 6x32GB --seq 2048")
    made.takes(f"{HARDWARE} json")
    add_lever_flags(made, PRICED_BY)
    return made.ends_with("0", "2", well="fits-or-not")


def models(argv: Sequence[str]) -> int:
    """The presets, and on request what each would hold on one GPU."""
    args = models_parser().parse(argv)
    shapes = [load_model(name) for name in PRESETS]
    if set(vars(args)) <= {"json"}:
        if hasattr(args, "json"):
            print_json({"models": [_model_report(shape) for shape in shapes]})
            return 0
        from tightfit.screen import draw_models, open_console

        draw_models(open_console(), shapes)
        return 0
    request = read_request(vars(args))
    hardware = hardware_of(request)
    world = world_of(request, hardware)
    flags, base = flags_of(request.flags), Levers(engine=ZERO3 if world > 1 else "zero0")
    shares = [Share(price(shape, levers_from_flags(flags, shape, base), world, hardware)) for shape in shapes]
    if hasattr(args, "json"):
        listed = [
            {
                **_model_report(share.priced.shape),
                "strategy": strategy_name(share.priced.levers),
                **pick(share, "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes"),
                **pick(share.priced.footprint.gpu, "peak_bytes", "required_bytes"),
                "fits": share.priced.fits,
            }
            for share in shares
        ]
        print_json({"models": listed})
        return 0
    from tightfit.screen import draw_shares, open_console

    draw_shares(open_console(), shares)
    return 0


def gpus_parser() -> Parser:
    made = Parser("gpus", "[--json]", "tightfit gpus --json")
    made.takes("json")
    return made.ends_with("0", "2")


def gpus(argv: Sequence[str]) -> int:
    """The catalogue of cards."""
    args = gpus_parser().parse(argv)
    if hasattr(args, "json"):
        cards = [{**pick(card.gpu, *GPU), "devices": card.devices} for card in CARDS]
        print_json({"gpus": cards})
        return 0
    from tightfit.screen import draw_gpus, open_console

    draw_gpus(open_console(), CARDS)
    return 0


def _model_report(shape: ModelShape) -> dict[str, Any]:
    named = pick(shape, "name", "model_type", "parameters")
    return {**named, "layers": shape.n_layers, **pick(shape, "hidden_size", "vocab_size", "notes")}
