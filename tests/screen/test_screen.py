"""What people see. The footprint here is made by hand, so that the picture alone is under test."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from tightfit.desk.advice import RULES, advise
from tightfit.hardware.catalogue import CARDS
from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import levers_from_flags
from tightfit.model.load import load_model
from tightfit.priced import GIB, Priced, Share, amounts, billions, strategy_name, verdict
from tightfit.screen import FILLS, bar, draw_comparison, draw_estimate, draw_gpus, draw_models, draw_shares
from tightfit.types import Footprint, GpuFootprint, HostFootprint, Levers, Phase, PhaseName

HELD: Mapping[PhaseName, Mapping[str, float]] = {
    "init": {"weights": 2.0, "gathered_weights": 1.0},
    "forward": {"weights": 2.0, "gathered_weights": 1.5, "optimizer_states": 4.0, "activations": 1.0},
    "loss": {"weights": 2.0, "optimizer_states": 4.0, "activations": 1.0, "logits": 3.0},
    "backward": {"weights": 2.0, "gradients": 2.5, "optimizer_states": 4.0, "activations": 1.0, "recompute": 5.5},
    "step": {"weights": 2.0, "gradients": 2.5, "optimizer_states": 4.0, "temporaries": 2.0},
}


def footprint(scale: float = 1.0) -> Footprint:
    phases = {
        name: Phase(name, {part: round(size * scale * GIB) for part, size in parts.items()})
        for name, parts in HELD.items()
    }
    peak = phases["backward"].total_bytes
    overhead = {"allocator slack": round(0.4 * scale * GIB), "context": round(0.6 * scale * GIB)}
    return Footprint(
        gpu=GpuFootprint(
            phases=phases,
            peak_phase="backward",
            peak_bytes=peak,
            init_peak_bytes=phases["init"].total_bytes,
            required_bytes=peak + sum(overhead.values()),
            overhead=overhead,
        ),
        host=HostFootprint(phases={}, peak_bytes_per_rank=6 * GIB, peak_bytes_per_node=24 * GIB),
        trainable_parameters=load_model("7b_mamba").parameters,
        because=("A reason.",),
    )


def priced(gpus: str | None = "4x32GB", host_ram: str | None = None, scale: float = 1.0) -> Priced:
    return Priced(
        shape=load_model("7b_mamba"),
        levers=Levers(engine="zero3"),
        world=4,
        hardware=parse_hardware(gpus, host_ram=host_ram) if gpus else None,
        footprint=footprint(scale),
        said=("A file said so.",),
    )


def seen(draw: object, *args: object, width: int = 80, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, highlight=False, markup=False)
    draw(console, *args)  # type: ignore[operator]
    return out.getvalue()


def test_the_verdict_is_a_sentence() -> None:
    assert str(verdict(priced())) == "Fits: needs 16.0 of the 32.0 GiB on each of 4 GPUs, 16.0 GiB to spare."
    assert str(verdict(priced("4x12GB"))) == (
        "Does not fit: needs 16.0 of the 12.0 GiB on each of 4 GPUs, 4.0 GiB too much."
    )
    assert str(verdict(priced(host_ram="16GB"))) == (
        "Does not fit: the GPUs have room, but the host needs 24.0 of 16.0 GiB of RAM."
    )
    assert str(verdict(replace(priced(None), world=1))).startswith("Needs 16.0 GiB on the GPU.")


@pytest.mark.parametrize(
    ("gpus", "host_ram", "fits"),
    [
        ("4x32GB", None, True),
        ("4x16GB", None, True),
        ("4x15.9GB", None, False),
        ("4x32GB", "16GB", False),
        (None, None, None),
    ],
)
def test_fits(gpus: str | None, host_ram: str | None, fits: bool | None) -> None:
    assert priced(gpus, host_ram).fits is fits


def test_amounts_tell_different_sizes_apart() -> None:
    assert amounts(round(21.94 * GIB), round(31.2 * GIB)) == ["21.9", "31.2"]
    assert amounts(round(31.24 * GIB), round(31.2 * GIB)) == ["31.24", "31.20"]
    assert amounts(GIB // 64) == ["0.02"]


def test_counts_as_people_say_them() -> None:
    assert [billions(n) for n in (6_922_702_592, 463_987_712, 853_120, 12)] == ["6.92B", "464M", "853k", "12"]


def test_a_bar_ends_where_its_total_does() -> None:
    parts = [(("a", ""), 10), (("b", ""), 30), (("c", ""), 1)]
    assert bar(parts, 100, 100, None).plain == "a" * 10 + "b" * 30 + "c" + " " * 59
    line = bar(parts, 100, 51, 20).plain
    assert len(line) == 51
    assert line.index("│") == 10
    assert line.replace("│", "").rstrip() == "a" * 5 + "b" * 15
    assert bar([], 0, 10, None).plain == " " * 10


def test_fills_can_be_told_apart_without_colour() -> None:
    fills = [fill for fill, _ in FILLS.values()]
    assert len(set(fills)) == len(fills)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [40, 80, 100, 200])
@pytest.mark.parametrize("gpus", ["4x32GB", "4x12GB", "4xRTX4090", None])
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e3])
def test_no_line_is_wider_than_the_terminal(width: int, gpus: str | None, scale: float) -> None:
    shown = priced(gpus, scale=scale)
    text = seen(draw_estimate, shown, advise(shown), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_the_picture() -> None:
    text = seen(draw_estimate, priced(), advise(priced()))
    lines = text.splitlines()
    assert "\x1b" not in text
    assert lines[0] == "7b_mamba: 6.92B parameters (6,922,702,592), all trained"
    for phase in HELD:
        assert sum(line.startswith(f"{phase:<9}") for line in lines) == 1
    backward = next(line for line in lines if line.startswith("backward"))
    assert backward.rstrip().endswith("15.00 ←")
    for part in (name.replace("_", " ") for name in HELD["backward"]):
        assert f"{FILLS[part][0]} {part}" in text
    assert "Start-up: 3.0 GiB" in text
    assert "Host RAM: 24.0 GiB per node, 6.0 per process." in text
    assert "A reason." in text
    assert "A file said so." in text


def test_a_start_that_needs_more_than_the_training_is_shown() -> None:
    base = footprint()
    start = Phase("init", {"weights": 20 * GIB})
    gpu = replace(
        base.gpu,
        phases={**base.gpu.phases, "init": start},
        init_peak_bytes=start.total_bytes,
        required_bytes=start.total_bytes + GIB,
    )
    text = seen(draw_estimate, replace(priced(), footprint=replace(base, gpu=gpu)), [])
    assert "but in init                   20.00" in text
    assert "more than a step of training" in text


def test_colours_only_on_a_terminal() -> None:
    assert "\x1b[" in seen(draw_estimate, priced(), [], colour=True)


def test_the_three_largest_parts_each_with_a_lever() -> None:
    advice = advise(priced())
    assert [sentence.split(",")[0] for sentence in advice] == ["recompute", "optimizer states", "gradients"]
    assert "--offload-optimizer cpu" in advice[1]


@pytest.mark.parametrize(
    ("component", "levers", "names", "leaves_out"),
    [
        ("weights", Levers(engine="zero2"), "--engine zero3", "--offload-param"),
        ("weights", Levers(engine="zero3"), "--offload-param cpu", "--engine"),
        ("weights", Levers(engine="zero3", offload_param="cpu"), "--method qlora", "--offload"),
        ("gradients", Levers(engine="zero0"), "--engine zero2", "--offload"),
        ("optimizer states", Levers(engine="zero0"), "--engine zero1", "--offload"),
        ("optimizer states", Levers(engine="fsdp2"), "--offload-param cpu", "--offload-optimizer"),
        ("optimizer states", Levers(engine="zero2", offload_optimizer="cpu"), "--optimizer adamw8bit", "--offload"),
        ("logits", Levers(), "--loss fused", "--seq"),
        ("logits", Levers(loss="fused", micro_batch=4), "--micro-batch 2 with --accum 2", "--loss"),
        ("logits", Levers(loss="fused"), "--seq", "--loss"),
        (
            "activations",
            levers_from_flags({"checkpointing": "none"}, load_model("7b_mamba")),
            "--checkpointing full",
            "+",
        ),
        ("activations", Levers(), "--checkpointing full+offload", "--seq"),
    ],
)
def test_a_lever_that_is_pulled_is_not_advised(component: str, levers: Levers, names: str, leaves_out: str) -> None:
    base = footprint()
    phases = {**base.gpu.phases, "backward": Phase("backward", {component: GIB})}
    shown = replace(priced(), levers=levers, footprint=replace(base, gpu=replace(base.gpu, phases=phases)))
    (sentence,) = advise(shown)
    assert names in sentence
    assert leaves_out not in sentence


def test_every_part_with_a_fill_has_advice() -> None:
    assert set(RULES) == set(FILLS)


def test_every_part_unknown_to_the_picture_is_still_drawn() -> None:
    base = footprint()
    phases = {**base.gpu.phases, "backward": Phase("backward", {"something_new": GIB})}
    shown = replace(priced(), footprint=replace(base, gpu=replace(base.gpu, phases=phases)))
    assert "% something new" in seen(draw_estimate, shown, advise(shown))


def test_the_comparison_keeps_a_row_for_what_we_do_not_run() -> None:
    text = seen(draw_comparison, [("ZeRO-3, optimizer + weights on CPU", priced()), ("FSDP2", "cannot be")])
    assert "FSDP2: cannot be" in text
    assert max(map(len, text.splitlines())) <= 80
    row = next(line for line in text.splitlines() if line.startswith("ZeRO-3"))
    assert row.split()[-5:] == ["15.00", "3.00", "16.00", "24.00", "yes"]


def test_shares_are_each_at_their_largest() -> None:
    share = Share(priced())
    sizes = (share.weights_bytes, share.gradients_bytes, share.optimizer_bytes, share.activations_bytes)
    assert [size / GIB for size in sizes] == [3.5, 2.5, 4.0, 6.5]
    assert max(map(len, seen(draw_shares, [share]).splitlines())) <= 80


@pytest.mark.thorough
def test_lists_are_at_most_80_wide() -> None:
    shapes = [load_model("3b_mamba_lite"), load_model("gemma-3-27b")]
    for text in (seen(draw_models, shapes), seen(draw_gpus, CARDS)):
        assert max(map(len, text.splitlines())) <= 80
    assert "really 0.87B" in seen(draw_models, shapes)


def test_strategies_by_name() -> None:
    assert str(strategy_name(Levers())) == "unsharded"
    assert str(strategy_name(Levers(engine="zero2", offload_optimizer="cpu"))) == "ZeRO-2, optimizer on CPU"
    both = Levers(engine="zero3", offload_optimizer="nvme", offload_param="cpu")
    assert str(strategy_name(both)) == "ZeRO-3, optimizer on NVMe, weights on CPU"
