"""The selective scan on this machine's processor: ours, transformers' own and mambapy's, forward and backward.

    python benchmarks/scan_speed.py cpu [--out rows.jsonl]      # ratios within one run, the sides in turn
    python benchmarks/scan_speed.py page                        # docs/scan.md from benchmarks/data/cpu-scan.jsonl

mambapy is taken where it is installed. Kept is what autograd holds between the passes, less the inputs themselves.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROWS = HERE / "data" / "cpu-scan.jsonl"
PAGE = HERE.parent / "docs" / "scan.md"
LENGTH, STATES, CHANNELS = 1024, 16, (256, 2048)
ROUNDS = {"ours": 5, "mambapy": 3, "transformers": 1}

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cpu", "page"))
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--channels", type=int, nargs="*", default=CHANNELS)
    args = parser.parse_args()
    if args.what == "page":
        PAGE.write_text(
            page([json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]), encoding="utf-8"
        )
        return
    rows = [cpu(channels, args.length) for channels in args.channels]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(table(rows))


def cpu(channels: int, length: int) -> Row:
    import torch

    torch.manual_seed(0)
    inputs = make(channels, length)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides()}
    for turn in range(max(ROUNDS.values())):
        for name, run in sides().items():
            if turn < ROUNDS[name]:
                found[name].append(measured(run, inputs))
    return {
        "channels": channels,
        "length": length,
        "states": STATES,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "sides": {
            name: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
            for name, runs in found.items()
        },
    }


def make(channels: int, length: int) -> dict[str, Any]:
    import torch

    shapes = {"u": (1, channels, length), "delta": (1, channels, length), "B": (1, STATES, length)}
    shapes |= {"C": (1, STATES, length), "z": (1, channels, length), "D": (channels,), "delta_bias": (channels,)}
    made = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
    made["A"] = (-torch.arange(1.0, STATES + 1).expand(channels, STATES)).contiguous().requires_grad_()
    return made


def sides() -> dict[str, Callable[[dict[str, Any]], Any]]:
    from transformers.models.mamba import modeling_mamba

    from tightfit.mamba import selective_scan

    def theirs(inputs: dict[str, Any], *, mambapy: bool) -> Any:
        own = dict(inputs)
        return modeling_mamba.mamba_selective_scan(
            own.pop("u"), own.pop("delta"), **own, delta_softplus=True, use_mambapy=mambapy
        )

    found: dict[str, Callable[[dict[str, Any]], Any]] = {
        "ours": lambda inputs: selective_scan(**inputs, delta_softplus=True)
    }
    if importlib.util.find_spec("mambapy") is not None:
        found["mambapy"] = lambda inputs: theirs(inputs, mambapy=True)
    found["transformers"] = lambda inputs: theirs(inputs, mambapy=False)
    return found


def measured(run: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]) -> dict[str, float]:
    import torch

    given = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    kept: dict[int, int] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    began = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = run(inputs)
    between = time.perf_counter()
    out.sum().backward()
    ended = time.perf_counter()
    for tensor in inputs.values():
        tensor.grad = None
    return {"forward_s": between - began, "backward_s": ended - between, "kept_bytes": sum(kept.values())}


def table(rows: list[Row]) -> str:
    lines = [
        "| channels | path | forward, s | backward, s | both, against ours | kept, MiB | against ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = row["sides"]["ours"]
        for name, side in row["sides"].items():
            both = (side["forward_s"] + side["backward_s"]) / (ours["forward_s"] + ours["backward_s"])
            kept = side["kept_bytes"] / max(1, ours["kept_bytes"])
            lines.append(
                f"| {row['channels']} | {name} | {side['forward_s']:.3f} | {side['backward_s']:.3f} | {both:.1f} "
                f"| {side['kept_bytes'] / 2**20:.1f} | {kept:.1f} |"
            )
    return "\n".join(lines)


INTRODUCTION = (
    "Mamba's selective scan of our own (`tightfit.mamba`): no build, and little memory. `selective_scan` takes what "
    "mamba-ssm's `selective_scan_fn` takes; `tightfit.mamba.install.install` puts the whole mixer into transformers' "
    "Mamba and FalconMamba, and `uninstall` takes it out again. On a GPU it runs kernels written in Triton: their "
    "results are tested through Triton's interpreter and they compile for sm_90 and gfx942, but they have not been "
    "run or timed on a GPU yet. Written by `python benchmarks/scan_speed.py page` from "
    "`benchmarks/data/cpu-scan.jsonl`."
)
METHOD = (
    "One scan, forward and backward, of length {length} with {states} states, in fp32; the sides run in turn in one "
    "process, and the table has medians. Kept is what autograd holds between the passes beyond the inputs: our path "
    "keeps one state every so many steps and computes the others again, theirs keep every state of every step. "
    "transformers' own path is a loop over the steps whose backward pass grows with the square of the length."
)


def page(rows: list[Row]) -> str:
    first = rows[0]
    ran = f"{first['cores']} cores, torch {first['versions']['torch']}, load {first['load']} when it began."
    return (
        "\n\n".join(
            ["# The selective scan", INTRODUCTION, "## On a processor", METHOD.format(**first), ran, table(rows)]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
