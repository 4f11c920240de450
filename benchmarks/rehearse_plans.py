"""Plans, rehearsed: each as one rank of N on a GPU that is capped to the card that the plan was made for.

    python benchmarks/rehearse_plans.py scenarios > scenarios.jsonl      # on the desk: plan, and say what to run
    python benchmarks/measure_peaks.py scenarios.jsonl --out rows.jsonl --fork     # on a GPU
    python benchmarks/rehearse_plans.py report rows.jsonl                 # the plan's figures beside the measured

The cap is the promised card less what lies outside PyTorch's allocator: the driver's context and the
communicator. A run that needs more dies of OOM. Mamba plans need a scan kernel and wait for ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tightfit.job.file import hardware_of, job_from_flags, model_of
from tightfit.model.load import find_config
from tightfit.model.presets import PRESETS
from tightfit.planner import Way, plan

GIB = 2**30

SITUATIONS: dict[str, dict[str, Any]] = {
    "0.5B LoRA on 4 GB": {"model": "qwen1.5-0.5b", "method": "lora", "gpus": "1x4GB", "host_ram": "32GB"},
    "0.5B LoRA on 8 GB": {"model": "qwen1.5-0.5b", "method": "lora", "gpus": "1x8GB", "host_ram": "32GB"},
    "1.8B LoRA on 4 GB": {"model": "qwen1.5-1.8b", "method": "lora", "gpus": "1x4GB", "host_ram": "32GB"},
    "1.8B LoRA on 8 GB": {"model": "qwen1.5-1.8b", "method": "lora", "gpus": "1x8GB", "host_ram": "32GB"},
    "1.8B LoRA on 12 GB": {"model": "qwen1.5-1.8b", "method": "lora", "gpus": "1x12GB", "host_ram": "32GB"},
    "1.8B LoRA on 24 GB": {"model": "qwen1.5-1.8b", "method": "lora", "gpus": "1x24GB", "host_ram": "64GB"},
    "8B LoRA on one RTX 4090": {"model": "llama-3.1-8b", "method": "lora", "gpus": "1xRTX4090", "host_ram": "64GB"},
    "7B full on 8 RTX 4090": {"model": "qwen2.5-7b", "gpus": "8xRTX4090", "host_ram": "512GB"},
    "7B full on 4 x 80 GB": {"model": "qwen2.5-7b", "gpus": "4xA100-80GB", "host_ram": "512GB"},
    "27B LoRA on 4 x 24 GB": {"model": "gemma-3-27b", "method": "lora", "gpus": "4x24GB", "host_ram": "256GB"},
    "32B LoRA on 8 x 64 GB": {
        "model": "qwen2.5-32b",
        "method": "lora",
        "seq": 1024,
        "gpus": "8xK100-64GB",
        "host_ram": "512GB",
        "deepspeed_version": "0.14.2",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scenarios", "report"))
    parser.add_argument("rows", type=Path, nargs="?")
    args = parser.parse_args()
    if args.what == "scenarios":
        for name, flags in SITUATIONS.items():
            sys.stdout.write(json.dumps(scenario(name, chosen(flags))) + "\n")
    else:
        report(args.rows)


def chosen(flags: dict[str, Any]) -> Way:
    job = job_from_flags({"attention": "sdpa", **flags})
    shape = model_of(job)
    way = plan(job, shape, hardware_of(job)).chosen
    assert way is not None, flags
    return way


def scenario(name: str, way: Way) -> dict[str, Any]:
    """The plan in the words of `measure_peaks.py`."""
    levers, buckets = way.levers, way.levers.buckets
    outside = sum(size for what, size in way.footprint.gpu.overhead.items() if "slack" not in what)
    made: dict[str, Any] = {
        "id": name,
        "config": config_of(way.shape.name),
        "world": way.world,
        "engine": levers.engine,
        "seq": levers.sequence,
        "micro": levers.micro_batch,
        "accum": levers.accumulation,
        "dtype": levers.precision,
        "loss": levers.loss,
        "attention": levers.attention,
        "cap_gib": round((way.hardware.gpu.memory_bytes - outside) / GIB, 4),
        "promised_gib": round(way.hardware.gpu.memory_bytes / GIB, 3),
        "predicted": {
            "peak_gib": round(way.footprint.gpu.peak_bytes / GIB, 3),
            "required_gib": round(way.footprint.gpu.required_bytes / GIB, 3),
        },
    }
    if "mamba" in made["config"]["model_type"]:
        made["scan"] = levers.scan
    if levers.checkpointing.layers == 0:
        made["ckpt"] = False
    elif levers.checkpointing.layers is not None:
        made["ckpt_layers"] = levers.checkpointing.layers
    if levers.checkpointing.offload:
        made["ckpt_offload"] = True
    if levers.lora is not None:
        made["lora"] = levers.lora.rank
    if levers.method == "qlora":
        made["quant"] = 4
    for part in ("offload_optimizer", "offload_param"):
        if getattr(levers, part) != "none":
            made[part] = True
    if levers.engine.startswith("zero"):
        made["zero"] = {
            "reduce_bucket_size": buckets.reduce_bucket,
            "allgather_bucket_size": buckets.allgather_bucket,
        }
        if buckets.overlap_comm is not None:
            made["zero"]["overlap_comm"] = buckets.overlap_comm
    if levers.engine == "zero3":
        made["zero"] |= {
            "stage3_prefetch_bucket_size": buckets.prefetch_bucket,
            "stage3_param_persistence_threshold": buckets.persistence_threshold,
            "stage3_max_live_parameters": buckets.max_live_parameters,
            "stage3_max_reuse_distance": buckets.max_reuse_distance,
        }
    return made


def config_of(preset: str) -> dict[str, Any]:
    assert preset in PRESETS
    return dict(find_config(preset).config)


def report(rows: Path) -> None:
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        wanted = row["scenario"]
        if "peak" not in row:
            print(f"{row['id']:28} FAILED {row['error'][-160:]}")
            continue
        predicted = wanted["predicted"]["peak_gib"]
        off = row["peak"] / predicted - 1
        print(
            f"{row['id']:28} card {wanted['promised_gib']:6.2f}  cap {wanted['cap_gib']:6.2f}  "
            f"peak {row['peak']:6.2f}  predicted {predicted:6.2f} ({off:+.1%})  "
            f"retries {row['retries']}  step {row['median_s']} s"
        )


if __name__ == "__main__":
    main()
