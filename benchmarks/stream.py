"""How fast layers that come from the host are, on a card that is too small for them, against DeepSpeed's ZeRO-3.

    python benchmarks/stream.py prepare DIR                                    # on the desk: a plan for each side
    python benchmarks/stream.py run DIR --out rows.jsonl [--only PART,PART]    # on a GPU, under a cap of its size

The sides of a job run in turn, as in `fast.py`. `offload`: ZeRO-3 with weights, and what trains them, on the host;
`free`: without a cap. What physics allows stands beside each (`limits`): arithmetic at the card's measured rate, bytes
over the measured link, and what an optimizer on the host reads and writes of its memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import fast
from fast_memory import GEMMA_9B, LLAMA_3B

MATRIX_FLOPS, LINK_BYTES, HOST_BYTES = 704e12, 55e9, 168e9  # measured on this machine; host memory by `host_adam.c`
LORA = {"method": "lora", "gpus": "1xH200", "host_ram": "125GiB"}
FULL = {"gpus": "1xH200", "host_ram": "125GiB"}
OFFLOAD = {"engine": "zero3", "offload_param": "cpu"}
STREAM = {"engine": "stream"}
JOBS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "3B full, 24 GB": (
        {**FULL, "model": LLAMA_3B | {"num_hidden_layers": 28}, "seq": 8192, "effective_batch": 4, "card_gib": 24},
        {"stream": STREAM, "offload": {**OFFLOAD, "offload_optimizer": "cpu"}},
    ),
    "8B LoRA, 12 GB": (
        {**LORA, "model": "llama-3.1-8b", "effective_batch": 8, "card_gib": 12},
        {"stream": STREAM, "offload": OFFLOAD, "free": {"card_gib": None}},
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="pieces of the names of folders, which are jobs and sides")
    parser.add_argument("--limit-s", type=int, default=150)
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which nothing more is begun")
    args = parser.parse_args()
    fast.STEPS, fast.WARM_UP = 4, 2  # seconds each, and alike
    if args.what == "run":
        args.peers, args.at_once = False, 1
        fast.run(args)
        return
    for name, (job, sides) in JOBS.items():
        for side, pins in sides.items():
            place = args.path / name.replace(" ", "_").replace(",", "") / side
            if not fast.is_wanted(place, args.only):
                continue
            fast.write_plan(place, {**job, **pins})
            if (place / "worker.json").exists():
                sys.stdout.write(f"{name}, {side}: {describe(place)}\n")


def describe(place: Path) -> str:
    orders = json.loads((place / "worker.json").read_text())
    levers, gpu = orders["levers"], orders["predicted"]["gpu"]
    names = ("checkpointing", "micro_batch", "accum", "resident", "states", "compile", "kernels", "loss")
    said = ", ".join(f"{name} {levers[name]}" for name in names if name in levers)
    return f"{orders['predicted']['step_s']:.2f} s, {gpu['peak_bytes'] / fast.GIB:.2f} GiB; {said}"


if __name__ == "__main__":
    main()
