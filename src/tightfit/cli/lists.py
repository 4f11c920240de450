"""`tightfit models` and `tightfit gpus`: what is known by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tightfit.cli.estimate import add_hardware_flags
from tightfit.cli.flags import ANSWERED, FITS_OR_NOT, Parser, add_lever_flags
from tightfit.desk.estimate import hardware_of, price, world_of
from tightfit.desk.request import Request, flags_of, read_request
from tightfit.inputs.flags import levers_from_flags
from tightfit.messages import text
from tightfit.priced import Share, strategy_name
from tightfit.types import ZERO3, Gpu, Levers, ModelShape

PRICED_BY = (
    "method",
    "seq",
    "micro_batch",
    "precision",
    "optimizer",
    "lora_rank",
    "engine",
    "offload_optimizer",
    "offload_param",
    "checkpointing",
    "loss",
)
"""The flags of levers that mean something for every preset."""


def models_parser() -> Parser:
    made = Parser(
        "models",
        text("help.models-does"),
        "tightfit models --gpus 6x32GB --seq 2048",
        "[--gpus HARDWARE] [--seq N] [flags]",
    )
    add_hardware_flags(made)
    made.add_argument("--json", action="store_true", help=text("help.json"))
    add_lever_flags(made, PRICED_BY)
    return made.ends_with(FITS_OR_NOT)


def models(argv: Sequence[str]) -> int:
    """The presets, and on request what each would hold on one GPU."""
    args = models_parser().parse(argv)
    as_json = hasattr(args, "json")
    if set(vars(args)) <= {"json"}:
        _list_models(as_json)
    else:
        _price_models(read_request(vars(args)), as_json)
    return 0


def gpus_parser() -> Parser:
    made = Parser(
        "gpus",
        text("help.gpus-does"),
        "tightfit gpus --json",
        "[--json]",
    )
    made.add_argument("--json", action="store_true", help=text("help.json"))
    return made.ends_with(ANSWERED)


def gpus(argv: Sequence[str]) -> int:
    """The catalogue of cards."""
    args = gpus_parser().parse(argv)
    from tightfit.hardware.catalogue import CARDS

    if hasattr(args, "json"):
        cards = [_gpu_report(card.gpu) | {"devices": card.devices} for card in CARDS]
        print(json.dumps({"gpus": cards}, indent=2, default=str, ensure_ascii=False))
        return 0
    from tightfit.screen import draw_gpus, open_console

    draw_gpus(open_console(), CARDS)
    return 0


# --- models -------------------------------------------------------------------------------------


def _presets() -> list[ModelShape]:
    from tightfit.model.load import load_model
    from tightfit.model.presets import PRESETS

    return [load_model(name) for name in PRESETS]


def _list_models(as_json: bool) -> None:
    shapes = _presets()
    if as_json:
        print(
            json.dumps(
                {"models": [_model_report(shape) for shape in shapes]}, indent=2, default=str, ensure_ascii=False
            )
        )
        return
    from tightfit.screen import draw_models, open_console

    draw_models(open_console(), shapes)


def _price_models(request: Request, as_json: bool) -> None:
    hardware = hardware_of(request)
    world = world_of(request, hardware)
    flags = flags_of(request.flags)
    base = Levers(engine=ZERO3 if world > 1 else "zero0")
    shares = [Share(price(shape, levers_from_flags(flags, shape, base), world, hardware)) for shape in _presets()]
    if as_json:
        print(
            json.dumps(
                {"models": [_share_report(share) for share in shares]}, indent=2, default=str, ensure_ascii=False
            )
        )
        return
    from tightfit.screen import draw_shares, open_console

    draw_shares(open_console(), shares)


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


def _share_report(share: Share) -> dict[str, Any]:
    priced = share.priced
    return _model_report(priced.shape) | {
        "strategy": str(strategy_name(priced.levers)),
        "weights_bytes": share.weights_bytes,
        "gradients_bytes": share.gradients_bytes,
        "optimizer_bytes": share.optimizer_bytes,
        "activations_bytes": share.activations_bytes,
        "peak_bytes": priced.footprint.gpu.peak_bytes,
        "required_bytes": priced.footprint.gpu.required_bytes,
        "fits": priced.fits,
    }


# --- gpus ---------------------------------------------------------------------------------------


def _gpu_report(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "memory_bytes": gpu.memory_bytes,
        "arch": gpu.arch,
        "bf16_flops": gpu.bf16_flops,
        "fp16_flops": gpu.fp16_flops,
        "memory_bytes_per_s": gpu.memory_bytes_per_s,
        "link": gpu.link,
        "link_bytes_per_s": gpu.link_bytes_per_s,
    }
