"""The selective scan on this machine's processor: ours, transformers' own and mambapy's, forward and backward.

    python benchmarks/scan_speed.py cpu [--out rows.jsonl]      # ratios within one run, the sides in turn
    python benchmarks/scan_speed.py page                        # docs/scan.md from benchmarks/data/*scan.json*

On a GPU: benchmarks/scan_gpu.py.

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
GPU_ROWS = HERE / "data" / "h200-scan.jsonl"
OFFICIAL = HERE / "data" / "h200-official-scan.json"
PAGE = HERE.parent / "docs" / "scan.md"
TUNING = HERE / "scan_tuning.md"
PICTURE = PAGE.with_name("scan-lengths.svg")
EXPONENTIALS_PER_S = 132 * 16 * 1.755e9
"""Of an H200: processors, exponentials of each a cycle, cycles a second."""
BYTES_PER_S = 4.8e12
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
        rows, on_gpu = (
            [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in (ROWS, GPU_ROWS)
        )
        official = json.loads(OFFICIAL.read_text(encoding="utf-8"))
        PAGE.write_text(page(rows, on_gpu, official), encoding="utf-8")
        draw(on_gpu, official)
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
    "Mamba's selective scan of our own (`tightfit.mamba`): no build, and little memory. `selective_scan` takes "
    "what mamba-ssm's `selective_scan_fn` takes; `tightfit.mamba.install.install` puts the whole mixer into "
    "transformers' Mamba and FalconMamba, and `uninstall` takes it out again. On a GPU it runs kernels written in "
    "Triton, for CUDA and ROCm (on the latter they compile, for gfx942, and have not been run). The backward pass of "
    "16-bit inputs with 16 states has kernels in CUDA's own language (`scan.cu`), from sm_80 on: NVRTC, which PyTorch "
    "brings along, compiles them when they are first needed, in about a second; where it is missing, Triton's run. To "
    "`torch.compile` the mixer, the scan and the convolution are one operator each, so that a layer is one graph. "
    "`tightfit train` uses it unless `--scan` says otherwise. Written by `python benchmarks/scan_speed.py page` from "
    "`benchmarks/data/*scan.json*`."
)
GPU_METHOD = (
    "bf16 inputs, fp32 A and D, 16 states; medians of 20 runs by device events on an H200 (torch 2.11, Triton "
    "3.6), `python benchmarks/scan_gpu.py`. The official figures were measured on the same kind of card with "
    "mamba-ssm's CUDA kernels (`benchmarks/data/h200-official-scan.json`). Kept is what the forward pass leaves "
    "allocated, its output included. Time last is the order in which mamba-ssm wants its inputs; a model has "
    "channels last, and the mixer uses that."
)
ROOFLINE = (
    "**What binds it.** Each state of each channel needs an exponential a step, and a card does 16 of them a "
    "cycle and processor: the floor is the number of passes times that. There are two passes forward (the state "
    "at the start of each segment, then the outputs) and three backward (what later segments want; a state every "
    "four steps; the gradients); one less in each direction where the batch fills the card and time is not cut. Memory "
    "traffic alone would take far less. The rest is instructions: about 7 a state and step in the first pass, 11 with "
    "the outputs, 7 for what is wanted, and backward 8 for the states and 26 for the gradients, where Triton's kernel "
    "had 40. Sums over channels cost almost none of them any more: the matrix units do them, as products with ones, in "
    "tf32."
)
REACHED = (
    "Of a layer of 7b_mamba (4864 wide, 2048 tokens, bf16), with `scan.cu` in both directions, the card needs 6.2 ms "
    "with everything computed again and 4.6 ms compiled with everything kept; the host launches 97 kernels in 6.4 ms, "
    "and compiled 54 in 4.1 ms."
)
METHOD = (
    "One scan, forward and backward, of length {length} with {states} states, in fp32; the sides run in turn in one "
    "process, and the table has medians. Kept is what autograd holds between the passes beyond the inputs: our path "
    "keeps one state every so many steps and computes the others again, theirs keep every state of every step. "
    "transformers' own path is a loop over the steps whose backward pass grows with the square of the length."
)


def official_of(shape: list[int], official: list[Row], what: str) -> Row:
    return next(
        each
        for each in official
        if each["shape"] == shape and each["what"].startswith(what) and each.get("kernel") in (None, "official-cuda")
    )


def gpu_table(rows: list[Row], official: list[Row]) -> str:
    lines = [
        "| batch, channels, length | order | forward, ms | backward, ms | official, ms | ratio | floor by "
        "exponentials, ms | by memory, ms | kept, GiB | official, GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["what"] != "scan":
            continue
        batch, channels, length, states = row["shape"]
        theirs = official_of(row["shape"], official, "selective_scan_fn")
        both, other = row["forward_ms"] + row["backward_ms"], theirs["fwd_ms"] + theirs["bwd_ms"]
        steps = batch * channels * length
        # Forward: three read and one written. Backward: four read, three written.
        memory = steps * 2 * 11 / BYTES_PER_S * 1e3
        lines.append(
            f"| {batch}, {channels}, {length} | {row['order']} | {row['forward_ms']:.2f} | {row['backward_ms']:.2f} "
            f"| {other:.2f} | {both / other:.2f} | {5 * steps * states / EXPONENTIALS_PER_S * 1e3:.2f} | {memory:.2f} "
            f"| {row['kept_gib']:.3f} | {theirs['saved_GiB']:.3f} |"
        )
    return "\n".join(lines)


def mixer_table(rows: list[Row], official: list[Row]) -> str:
    lines = [
        "| batch, model, length | forward, ms | backward, ms | official, ms | ratio | kept, GiB | official, GiB "
        "| peak, GiB | official, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["what"] != "mixer":
            continue
        theirs = official_of(row["shape"], official, "mamba_inner_fn")
        both, other = row["forward_ms"] + row["backward_ms"], theirs["fwd_ms"] + theirs["bwd_ms"]
        lines.append(
            f"| {', '.join(str(size) for size in row['shape'])} | {row['forward_ms']:.2f} | {row['backward_ms']:.2f} "
            f"| {other:.2f} | {both / other:.2f} | {row['kept_gib']:.3f} | {theirs['saved_GiB']:.3f} "
            f"| {row['peak_gib']:.2f} | {theirs['peak_GiB']:.2f} |"
        )
    return "\n".join(lines)


def draw(rows: list[Row], official: list[Row]) -> None:
    """Time against length, for each path."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tightfit"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for path, label in (("transformers", "transformers' own"), ("ours", "ours")):
        points = [row for row in rows if row["what"] == "lengths" and row["path"] == path]
        times = [row["forward_ms"] + row["backward_ms"] for row in points]
        axes.plot([row["length"] for row in points], times, marker="o", label=label)
    known = {
        each["shape"][2]: each["fwd_ms"] + each["bwd_ms"]
        for each in official
        if each.get("kernel") == "official-cuda" and each["shape"][:2] == [1, 9728] and len(each["shape"]) == 4
    }
    axes.plot(sorted(known), [known[length] for length in sorted(known)], marker="s", label="official CUDA kernels")
    axes.set(xscale="log", yscale="log", xlabel="length", ylabel="forward + backward, ms")
    axes.set_title("One scan of 9728 channels and 16 states on an H200", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def page(rows: list[Row], on_gpu: list[Row], official: list[Row]) -> str:
    first = rows[0]
    ran = f"{first['cores']} cores, torch {first['versions']['torch']}, load {first['load']} when it began."
    parts = [
        "# The selective scan",
        "[中文](zh/scan.md)",
        INTRODUCTION,
        "## On a GPU",
        GPU_METHOD,
        gpu_table(on_gpu, official),
        ROOFLINE,
        "![Time against length](scan-lengths.svg)",
        "## The whole mixer",
        "From the output of the first projection to the layer's output, convolution and projections included, by "
        "Triton's kernels.",
        mixer_table(on_gpu, official),
        REACHED,
        "## On a processor",
        METHOD.format(**first),
        ran,
        table(rows),
        "## Notes of the tuning",
        TUNING.read_text(encoding="utf-8").strip(),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
