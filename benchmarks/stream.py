"""How fast layers that come from the host are, on a card that is too small for them, against DeepSpeed's ZeRO-3.

    python benchmarks/stream.py prepare DIR                                    # on the desk: a plan for each side
    python benchmarks/stream.py predict DIR > predicted.json                   # on the desk, before anything runs
    python benchmarks/stream.py run DIR --out rows.jsonl [--only PART,PART] [--until 480] [--at-once 3]    # on a GPU
    python benchmarks/stream.py products --out rows.jsonl                      # on a GPU

The sides run in turn, as in `fast.py`, in the order of `ORDER`: what tells most comes first, and each row is kept and
shown as soon as it is there, so that a call which is cut off has been of use. `stream`: as it is planned, which for 3B
is with updates ahead of the norm; `waits`: with updates that wait for it; `clipped`: ahead, where every step is
clipped, and so made again. `offload`: ZeRO-3 with weights, and what trains them, on the host; `guide`: the same as
guides configure it, one sequence at a time, every layer recomputed, the plain loss; `free`: without a cap; `nvme`: what
48 GiB of RAM do not hold of the optimizer's states is on a disk. Weights are random, and their gradients are larger
than those of a training: the 3B job clips at 100, so that no step is clipped but those of `clipped`; `norms` in its
rows say whether that was so. `products`: at what rate the card computes those of a layer of the 32B one after the
other, until the limit of its power has brought its clock down (`benchmarks/data/h200-products.jsonl`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import fast
from fast_memory import GEMMA_9B, LLAMA_3B

LORA = {"method": "lora", "gpus": "1xH200", "host_ram": "125GiB"}
FULL = {"gpus": "1xH200", "host_ram": "125GiB"}
OFFLOAD = {"engine": "zero3", "offload_param": "cpu"}
STREAM = {"engine": "stream"}
GUIDE = {**OFFLOAD, "micro_batch": 1, "checkpointing": "full", "loss": "plain"}
ON_NVME = {"offload_optimizer": "nvme", "nvme": "50GB", "nvme_path": "/tmp/tightfit-nvme", "host_ram": "48GiB"}
JOBS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "3B full, 24 GB": (
        {
            **FULL,
            "model": LLAMA_3B | {"num_hidden_layers": 28},
            "seq": 8192,
            "effective_batch": 4,
            "card_gib": 24,
            "clip": 100.0,
        },
        {
            "stream": STREAM,
            "waits": {**STREAM, "update": "waits"},
            "clipped": {**STREAM, "update": "ahead", "clip": 1e-3},
            "nvme": {**STREAM, **ON_NVME},
            "offload": {**OFFLOAD, "offload_optimizer": "cpu"},
        },
    ),
    "8B LoRA, 12 GB": (
        {**LORA, "model": "llama-3.1-8b", "effective_batch": 8, "card_gib": 12},
        {"stream": STREAM, "offload": OFFLOAD, "guide": GUIDE, "free": {"card_gib": None}},
    ),
    "7.6B full, 24 GB": (
        {**FULL, "model": "qwen2.5-7b", "effective_batch": 32, "card_gib": 24, "states": "bf16"},
        {"stream": STREAM},
    ),
    "Gemma-2-9B LoRA, 12 GB": (
        {**LORA, "model": GEMMA_9B | {"num_hidden_layers": 42}, "seq": 4096, "effective_batch": 4, "card_gib": 12},
        {"stream": STREAM},
    ),
    "32B LoRA, 24 GB": (
        {**LORA, "model": "qwen2.5-32b", "seq": 1024, "effective_batch": 16, "card_gib": 24},
        {"stream": STREAM, "offload": OFFLOAD},
    ),
}

PRODUCT_TOKENS, PRODUCT_S = 16 * 1024, 1.5
PRODUCTS = [
    *((wide, inner, False) for wide, inner in ((27_648, 5120), (5120, 27_648), (5120, 5120), (1024, 5120))),
    *((wide, inner, True) for wide, inner in ((5120, 27_648), (27_648, 5120), (5120, 5120))),
]

ORDER = [
    *(("3B full, 24 GB", side) for side in ("stream", "offload")),
    *(("8B LoRA, 12 GB", side) for side in ("offload", "stream")),
    *(("32B LoRA, 24 GB", side) for side in ("stream", "offload")),
    ("Gemma-2-9B LoRA, 12 GB", "stream"),
    ("7.6B full, 24 GB", "stream"),
    ("3B full, 24 GB", "waits"),
    ("3B full, 24 GB", "clipped"),
    ("3B full, 24 GB", "nvme"),
    ("8B LoRA, 12 GB", "free"),
    ("8B LoRA, 12 GB", "guide"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "predict", "run", "products"))
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="pieces of the names of folders, which are jobs and sides")
    parser.add_argument("--limit-s", type=int, default=150)
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which nothing more is begun")
    parser.add_argument("--at-once", type=int, default=1, help="how many start together; each is timed alone")
    args = parser.parse_args()
    if args.what == "products":
        measure_products(args.out)
        return
    fast.STEPS, fast.WARM_UP = 4, 2  # seconds each, and alike
    places = {(name, side): args.path / name.replace(" ", "_").replace(",", "") / side for name, side in ORDER}
    wanted = {each: place for each, place in places.items() if fast.is_wanted(place, args.only)}
    if args.what == "run":
        args.peers = False
        fast.run(args, [place for place in wanted.values() if (place / "worker.json").exists()])
    elif args.what == "predict":
        told = {f"{place.parent.name}/{place.name}": describe(place) for place in wanted.values()}
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
    else:
        for (name, side), place in wanted.items():
            job, sides = JOBS[name]
            fast.write_plan(place, {**job, **sides[side]})
            if (place / "worker.json").exists():
                sys.stdout.write(f"{name}, {side}: {describe(place)}\n")


def describe(place: Path) -> dict[str, Any]:
    orders = json.loads((place / "worker.json").read_text())
    levers, told = orders["levers"], orders["predicted"]
    names = ("engine", "checkpointing", "micro_batch", "accum", "resident", "update", "states", "compile", "loss")
    return {
        "step_s": round(told["step_s"], 3),
        "peak_gib": round(told["gpu"]["peak_bytes"] / fast.GIB, 3),
        "host_gib": round(told["host"]["peak_bytes_per_rank"] / fast.GIB, 2),
        "levers": {name: levers[name] for name in names if name in levers},
    }


def measure_products(out: Path) -> None:
    """Of 16 × 1024 tokens."""
    import torch

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02

    for wide, inner, is_backward in PRODUCTS:
        tokens, weight = draw(PRODUCT_TOKENS, inner), draw(inner, wide) if is_backward else draw(wide, inner).t()
        torch.matmul(tokens, weight)
        torch.cuda.synchronize()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < PRODUCT_S:
            for _ in range(10):
                torch.matmul(tokens, weight)
            torch.cuda.synchronize()
            count += 10
        each_s = (time.perf_counter() - began) / count
        row = {
            "tokens": PRODUCT_TOKENS,
            "out": wide,
            "in": inner,
            "backward": is_backward,
            "ms": round(each_s * 1e3, 3),
        }
        row["tflops"] = round(2 * PRODUCT_TOKENS * wide * inner / each_s / 1e12, 1)
        print(row, flush=True)
        with out.open("a") as sink:
            sink.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
