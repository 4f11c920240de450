"""Our scan and mixer on a GPU, beside the official kernels' times and memory.

    python benchmarks/scan_gpu.py [--out rows.jsonl] [--only scan|mixer|lengths]

Medians of device events; the official figures, from an H200, are in benchmarks/data/h200-official-scan.json. Kept is
what the forward pass leaves allocated, its output included, as those figures count it. `scan_speed.py page` writes
docs/scan.md from the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from tightfit.mamba.mixer import Weights, mamba_mixer
from tightfit.mamba.scan import selective_scan

SCANS = ((1, 9728, 2048, 16), (1, 9728, 8192, 16), (8, 5120, 2048, 16), (4, 1536, 4096, 16))
"""Batch, channels, length, states."""
MIXERS = ((1, 4864, 2048), (1, 4864, 8192), (8, 2560, 2048))
"""Batch, width of the model, length; 16 states."""
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
TORCH_LENGTHS = (128, 256, 512)
"""Transformers' own takes seconds beyond these."""
ROUNDS = 20

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("scan", "mixer", "lengths"))
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    for row in rows(args.only):
        line = json.dumps({**row, "device": device, "torch": torch.__version__})
        print(line, flush=True)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def rows(only: str | None) -> Any:
    if only in (None, "scan"):
        for shape in SCANS:
            for order in ("time last", "channels last"):
                yield {"what": "scan", "shape": shape, "order": order, **measured(*scan_call(shape, order))}
    if only in (None, "mixer"):
        for shape in MIXERS:
            yield {"what": "mixer", "shape": shape, **measured(*mixer_call(shape))}
    if only in (None, "lengths"):
        for length in LENGTHS:
            call = scan_call((1, 9728, length, 16), "channels last")
            yield {"what": "lengths", "path": "ours", "length": length, **measured(*call)}
        for length in TORCH_LENGTHS:
            call = scan_call((1, 9728, length, 16), "channels last", theirs=True)
            yield {"what": "lengths", "path": "transformers", "length": length, **measured(*call, rounds=3)}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def scan_call(
    shape: tuple[int, ...], order: str, *, theirs: bool = False
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """A scan as training has it, and the tensors whose gradients are wanted."""
    batch, channels, length, states = shape
    torch.manual_seed(0)

    def wide(rows: int) -> torch.Tensor:
        if order == "time last":
            return drawn(batch, rows, length)
        return drawn(batch, length, rows).transpose(1, 2)

    given = {
        "u": wide(channels),
        "delta": wide(channels) / 2 - 4,
        "A": -torch.arange(1.0, states + 1, device="cuda").repeat(channels, 1),
        "B": wide(states),
        "C": wide(states),
        "D": torch.randn(channels, device="cuda"),
        "z": wide(channels),
        "delta_bias": torch.randn(channels, device="cuda") / 10,
    }
    given = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    if theirs:
        from transformers.models.mamba import modeling_mamba

        own = dict(given)
        u, delta = own.pop("u"), own.pop("delta")
        return lambda: modeling_mamba.mamba_selective_scan(u, delta, **own, delta_softplus=True), list(given.values())
    return lambda: selective_scan(**given, delta_softplus=True), list(given.values())  # type: ignore[return-value]


def mixer_call(shape: tuple[int, ...]) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    batch, model, length = shape
    channels, rank, states = 2 * model, -(-model // 16), 16
    torch.manual_seed(0)
    rates = torch.arange(1.0, states + 1, device="cuda")
    weights = Weights(
        conv=drawn(channels, 1, 4) / 2,
        conv_bias=drawn(channels) / 2,
        x_proj=drawn(rank + 2 * states, channels) / channels**0.5,
        dt_proj=drawn(channels, rank) / rank**0.5,
        dt_bias=drawn(channels) - 4,
        A_log=torch.log(rates).repeat(channels, 1),
        D=torch.randn(channels, device="cuda"),
        out_proj=drawn(model, channels) / channels**0.5,
        out_bias=None,
    )
    given = [getattr(weights, field.name) for field in fields(Weights) if field.name != "out_bias"]
    xz = drawn(batch, length, 2 * channels).transpose(1, 2)
    for tensor in (*given, xz):
        tensor.requires_grad_()
    return lambda: mamba_mixer(xz, weights), [xz, *given]


def measured(call: Callable[[], torch.Tensor], given: list[torch.Tensor], rounds: int = ROUNDS) -> Row:
    """Milliseconds and GiB."""
    wanted = torch.randn_like(call())
    forward, backward = [], []
    for turn in range(rounds + 3):
        torch.cuda._sleep(5_000_000)  # so that the launches are ahead of the device
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = call()
        marks[1].record()
        torch.autograd.grad(out, given, wanted)
        marks[2].record()
        torch.cuda.synchronize()
        if turn >= 3:
            forward.append(marks[0].elapsed_time(marks[1]))
            backward.append(marks[1].elapsed_time(marks[2]))
    del out
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    kept, forward_peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    torch.autograd.grad(out, given, wanted)
    return {
        "forward_ms": round(statistics.median(forward), 3),
        "backward_ms": round(statistics.median(backward), 3),
        "kept_gib": round(kept / 2**30, 4),
        "forward_peak_gib": round(forward_peak / 2**30, 4),
        "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 4),
    }


if __name__ == "__main__":
    main()
