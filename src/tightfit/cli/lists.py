"""`tightfit models` and `tightfit gpus`: what is known by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightfit.cli.estimate import add_hardware_flags
from tightfit.cli.flags import ANSWERED, FITS_OR_NOT, Parser, add_lever_flags, print_json
from tightfit.desk.estimate import hardware_of, price, world_of
from tightfit.desk.request import flags_of, read_request
from tightfit.inputs.flags import levers_from_flags
from tightfit.messages import text
from tightfit.priced import Share, strategy_name
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


def models_parser() -> Parser:
    example, usage = "tightfit models --gpus 6x32GB --seq 2048", "[--gpus HARDWARE] [--seq N] [flags]"
    made = Parser("models", text("help.models-does"), example, usage)
    add_hardware_flags(made)
    made.add_argument("--json", action="store_true", help=text("help.json"))
    add_lever_flags(made, PRICED_BY)
    return made.ends_with(FITS_OR_NOT)


def models(argv: Sequence[str]) -> int:
    """The presets, and on request what each would hold on one GPU."""
    args = models_parser().parse(argv)
    from tightfit.model.load import load_model
    from tightfit.model.presets import PRESETS

    if set(vars(args)) <= {"json"}:
        shapes = [load_model(name) for name in PRESETS]
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
    shapes = [load_model(name) for name in PRESETS]
    shares = [Share(price(shape, levers_from_flags(flags, shape, base), world, hardware)) for shape in shapes]
    if hasattr(args, "json"):
        sizes = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
        listed = [
            {
                **_model_report(share.priced.shape),
                "strategy": str(strategy_name(share.priced.levers)),
                **{name: getattr(share, name) for name in sizes},
                "peak_bytes": share.priced.footprint.gpu.peak_bytes,
                "required_bytes": share.priced.footprint.gpu.required_bytes,
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
    made = Parser("gpus", text("help.gpus-does"), "tightfit gpus --json", "[--json]")
    made.add_argument("--json", action="store_true", help=text("help.json"))
    return made.ends_with(ANSWERED)


def gpus(argv: Sequence[str]) -> int:
    """The catalogue of cards."""
    args = gpus_parser().parse(argv)
    from tightfit.hardware.catalogue import CARDS

    if hasattr(args, "json"):
        cards = [{name: getattr(card.gpu, name) for name in GPU} | {"devices": card.devices} for card in CARDS]
        print_json({"gpus": cards})
        return 0
    from tightfit.screen import draw_gpus, open_console

    draw_gpus(open_console(), CARDS)
    return 0


def _model_report(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "model_type": shape.model_type,
        "parameters": shape.parameters,
        "layers": shape.n_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "notes": list(map(str, shape.notes)),
    }
