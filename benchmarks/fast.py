"""How fast the worker is against itself without the levers of speed, and against plain loops: on one GPU, as one of N.

    python benchmarks/fast.py prepare DIR [--only PART,PART]     # on the desk: a plan for each job and side
    python benchmarks/fast.py predict DIR > predicted.json       # on the desk: what the plans say, before anything runs
    python benchmarks/fast.py run DIR --out rows.jsonl [--only PART,PART] [--until SECONDS]               # on a GPU
    python benchmarks/fast.py page                        # docs/fast.md from benchmarks/data/h200-fast.jsonl

A job is a training as a user would ask for it; a side is a way to run it: `planned` is the plan's own choice, `eager`
the plan without compiled layers, selected parts or fused kernels, `full` with every layer recomputed, `auto` with what
layers keep on the host too; and on a single GPU the loops of `plain_loop.py`. They run in turn, in processes of their
own that are forked from one which has torch loaded, and each row has the medians of `STEPS` steps after `WARM_UP` that
do not count. Weights are one block of random numbers over and over, since drawing billions of them takes longer than
the steps. Collectives are free: the process group is torch's fake one. A job for a smaller card runs under a cap of its
size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_loop
from blocks import fill, write_or_check

GIB = 2**30
STEPS, WARM_UP = 20, 4
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "fast.md"
WORTH_A_WORD = ("layers", "fused")
OFF = {"compile": "off", "kernels": "plain"}
QWEN_HALF_B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
"""Qwen2.5-0.5B."""

JOBS: dict[str, dict[str, Any]] = {
    "8B LoRA, one GPU": {"model": "llama-3.1-8b", "method": "lora", "gpus": "1xH200", "effective_batch": 2},
    "8B LoRA, 24 GB": {
        "model": "llama-3.1-8b",
        "method": "lora",
        "gpus": "1xH200",
        "effective_batch": 2,
        "card_gib": 24,
    },
    "8B LoRA, 32 GB": {
        "model": "llama-3.1-8b",
        "method": "lora",
        "gpus": "1xH200",
        "effective_batch": 2,
        "card_gib": 32,
    },
    "8B LoRA, 24 GB, 8192": {
        "model": "llama-3.1-8b",
        "method": "lora",
        "gpus": "1xH200",
        "effective_batch": 1,
        "seq": 8192,
        "card_gib": 24,
    },
    "8B LoRA, 48 GB": {
        "model": "llama-3.1-8b",
        "method": "lora",
        "gpus": "1xH200",
        "effective_batch": 2,
        "card_gib": 48,
    },
    "0.5B full, one GPU": {"model": QWEN_HALF_B, "gpus": "1xH200", "effective_batch": 8},
    "7.6B full, one of 8": {"model": "qwen2.5-7b", "gpus": "8xH200", "effective_batch": 8},
    "7.6B full, one of 8, 24 GB": {"model": "qwen2.5-7b", "gpus": "8xH200", "effective_batch": 8, "card_gib": 24},
    "7.6B full, one of 8, 32 GB": {"model": "qwen2.5-7b", "gpus": "8xH200", "effective_batch": 8, "card_gib": 32},
    "7.6B full, one of 8, 48 GB": {"model": "qwen2.5-7b", "gpus": "8xH200", "effective_batch": 8, "card_gib": 48},
    "32B LoRA, one of 8": {
        "model": "qwen2.5-32b",
        "method": "lora",
        "gpus": "8xH200",
        "seq": 1024,
        "effective_batch": 8,
    },
    "32B LoRA, one of 8, FSDP2": {
        "model": "qwen2.5-32b",
        "method": "lora",
        "gpus": "8xH200",
        "seq": 1024,
        "effective_batch": 8,
        "engine": "fsdp2",
    },
    "7b_mamba full, one of 4": {"model": "7b_mamba", "gpus": "4xH200", "effective_batch": 4, "scan": "tightfit"},
}
SIDES: dict[str, dict[str, str]] = {
    "planned": {},
    "eager": OFF | {"loss": "plain"},
    "full": {"checkpointing": "full"},
    "auto": {"checkpointing": "select:auto", "compile": "layers"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "predict", "run", "page"))
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="pieces of the names of folders, which are jobs and sides")
    parser.add_argument("--limit-s", type=int, default=150)
    parser.add_argument("--peers", action="store_true", help="after each planned side the loops by hand; one GPU only")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which nothing more is begun")
    args = parser.parse_args()
    {"prepare": prepare, "predict": predict, "run": run, "page": page}[args.what](args)


def prepare(args: argparse.Namespace) -> None:
    for name, job in JOBS.items():
        for side, pins in SIDES.items():
            place = args.path / name.replace(" ", "_").replace(",", "") / side
            if is_wanted(place, args.only) and (side not in ("full", "auto") or "card_gib" in job):
                write_plan(place, {**job, **pins})


def write_plan(place: Path, wanted: dict[str, Any]) -> None:
    """The plan's files, as `tightfit plan --write` makes them. `card_gib`: the card is taken to be so small."""
    from tightfit.formats.render import render
    from tightfit.formats.target import Target
    from tightfit.job.file import hardware_of, job_from_flags, model_of
    from tightfit.planner import plan

    flags = {"attention": "sdpa", "output": "run", "host_ram": "512GB", "seq": 2048, **wanted}
    card = flags.pop("card_gib", None)
    place.mkdir(parents=True, exist_ok=True)
    if isinstance(flags["model"], dict):
        config = place / "config.json"
        config.write_text(json.dumps(flags["model"]))
        flags["model"] = str(config)
    job = job_from_flags(flags)
    hardware = hardware_of(job)
    if card is not None:
        hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=int(card * GIB)))
    answer = plan(job, model_of(job), hardware)
    if answer.chosen is None:
        sys.stderr.write(f"{place}: nothing fits\n")
        return
    for file, text in render(answer, Target()).items():
        (place / file).write_text(text)
    gpu = answer.chosen.footprint.gpu
    outside = sum(size for what, size in gpu.overhead.items() if "slack" not in what)
    (place / "cap").write_text(str(int(card * GIB) - outside if card else 0))


def is_wanted(place: Path, only: str) -> bool:
    parts = [part for part in only.split(",") if part]
    return not parts or any(part in f"{place.parent.name}/{place.name}" for part in parts)


def places_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("worker.json"))


def predict(args: argparse.Namespace) -> None:
    told = {}
    for place in places_of(args.path):
        orders = json.loads((place / "worker.json").read_text())
        told[f"{place.parent.name}/{place.name}"] = {
            "peak_gib": round(orders["predicted"]["gpu"]["peak_bytes"] / GIB, 3),
            "step_s": orders["predicted"]["step_s"],
            "levers": {
                name: orders["levers"][name]
                for name in ("engine", "checkpointing", "compile", "kernels", "loss", "micro_batch", "accum")
            },
        }
    sys.stdout.write(json.dumps(told, indent=1) + "\n")


def run(args: argparse.Namespace) -> None:
    import torch  # forked processes have it already

    assert not torch.cuda.is_initialized(), "a fork cannot share a CUDA context"
    began = time.monotonic()
    for place in places_of(args.path):
        if not is_wanted(place, args.only):
            continue
        if time.monotonic() - began > args.until:
            print(place, "was not begun", flush=True)
            continue
        for side in (place.name, *(plain_loop.SIDES if args.peers and place.name == "planned" else ())):
            row = rehearse(place, side, args.limit_s)
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            names = ("median_s", "tokens_per_s", "peak_gib", "predicted_peak_gib")
            shown = {key: row[key] for key in names if key in row}
            print(row["job"], row["side"], shown or row["error"][-600:], row["wall_s"], flush=True)


def rehearse(place: Path, side: str, limit_s: int) -> dict[str, Any]:
    """One side, in a fork of this process."""
    shutil.rmtree(place / "run", ignore_errors=True)  # events are appended to what is there
    log, found, began = place / f"{side}.txt", place / "loop.json", time.monotonic()
    found.unlink(missing_ok=True)
    cap, orders = int((place / "cap").read_text()), json.loads((place / "worker.json").read_text())
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with log.open("w") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if side in plain_loop.SIDES:
            found.write_text(json.dumps(plain_loop.loop(orders, side, STEPS + WARM_UP)))
            os._exit(0)
        from tightfit.train.__main__ import main as work

        repeat_weights()
        words = [str(place / "worker.json"), "--rehearse", "--steps", str(STEPS + WARM_UP)]
        work([*words, "--cap-bytes", str(cap)] if cap else words)
        os._exit(1)
    drawn: list[list[float]] = []
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() - began > len(drawn) + 1:  # once a second
            drawn.append(ask_clock_and_power())
        if time.monotonic() - began > limit_s:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.1)
    events = [json.loads(line) for line in _lines(place / "run" / "events.jsonl")]
    steps = [event for event in events if event["event"] == "step"]
    row: dict[str, Any] = {
        "job": place.parent.name,
        "side": side,
        "wall_s": round(time.monotonic() - began, 1),
        "clock_and_power": drawn[-6:],
    }
    if side in plain_loop.SIDES:
        looped = json.loads(found.read_text()) if found.exists() else {"seconds": []}
        seconds, peak = looped["seconds"][WARM_UP:], looped.get("peak_bytes", 0)
    else:
        seconds = [round(event["step_s"], 4) for event in steps[WARM_UP:]]
        peak = steps[-1]["memory"]["peak_bytes"] if steps else 0
        row |= {
            "levers": orders["levers"],
            "cap_bytes": cap,
            "predicted_s": orders["predicted"]["step_s"],
            "predicted_peak_gib": round(orders["predicted"]["gpu"]["peak_bytes"] / GIB, 3),
            "loss": [event["loss"] for event in steps],
            "said": [str(event.get("text", "")) for event in events if event["event"] in ("warning", "note")],
        }
    if len(seconds) < STEPS:
        return row | {"error": log.read_text()[-1500:]}
    tokens = orders["levers"]["seq"] * orders["effective_batch"] // orders["world"]["ranks"]
    median = statistics.median(seconds)
    return row | {
        "seconds": seconds,
        "median_s": round(median, 4),
        "tokens_per_s": round(tokens / median),
        "peak_gib": round(peak / GIB, 3),
    }


def ask_clock_and_power() -> list[float]:
    """Of the multiprocessors in MHz, and of the card in W: a step at its power limit runs at a lower clock."""
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout
        return [float(word) for word in told.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []


def repeat_weights() -> None:
    """Numbers of the usual size, so that products draw the power that they draw with real ones."""
    import torch

    from tightfit.train import assemble

    block = (torch.randn(assemble.PIECE_ELEMENTS) * 0.02).bfloat16()

    class Repeated:
        def __init__(self, *_: Any) -> None: ...

        def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Any:
            if name.endswith("A_log"):  # the rates of a scan
                return torch.arange(1.0, shape[1] + 1).log().repeat(shape[0])[start:stop]
            if len(shape) == 1:
                return torch.full((stop - start,), -4.6 if "dt_proj" in name else 0.0 if "bias" in name else 1.0)
            repeated = torch.cat([block] * -(-(stop - start) // len(block))) if stop - start > len(block) else block
            return repeated[: stop - start]

    assemble.Scratch = Repeated  # type: ignore[assignment, misc]


def page(args: argparse.Namespace) -> None:
    """docs/fast.md from what was measured."""
    old = PAGE.read_text(encoding="utf-8")
    new = fill(old, {"speed": speed_table(), "memory": memory_table()}, PAGE)
    sys.exit(write_or_check(PAGE, old, new, __file__, check=False))


def speed_table() -> str:
    lines = ["| job | side | way | s a step | tokens/s | peak, GiB | predicted, GiB |", "|---|---|---|---|---|---|---|"]
    for line in _lines(HERE / "data" / "h200-fast.jsonl"):
        row = json.loads(line)
        levers = row.get("levers", {})
        way = [levers[name] for name in ("engine", "checkpointing") if name in levers]
        way += [f"{name} {levers[name]}" for name in ("compile", "kernels", "loss") if levers.get(name) in WORTH_A_WORD]
        held = f"{row['predicted_peak_gib']:.2f}" if levers else "-"
        lines.append(
            f"| {row['job'].replace('_', ' ')} | {row['side']} | {', '.join(way) or '-'} | {row['median_s']:.4f} "
            f"| {row['tokens_per_s']:,} | {row['peak_gib']:.2f} | {held} |"
        )
    return "\n".join(lines)


def memory_table() -> str:
    lines = ["| run | measured, GiB | predicted, GiB | error |", "|---|---|---|---|"]
    told = json.loads((HERE / "data" / "h200-fast-memory-predicted.json").read_text())["rows"]
    for line in _lines(HERE / "data" / "h200-fast-memory.jsonl"):
        row = json.loads(line)
        if "peak_gib" in row:
            said = told[row["job"]]["peak_gib"]
            name = row["job"].replace("_", " ")
            lines.append(f"| {name} | {row['peak_gib']:.3f} | {said:.3f} | {said / row['peak_gib'] - 1:+.2%} |")
    return "\n".join(lines)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
