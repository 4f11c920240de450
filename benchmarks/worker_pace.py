"""Our worker against the same settings by hand: seconds a step and peak memory, on one GPU as one rank of N.

    python benchmarks/worker_pace.py prepare DIR [--only PART,PART]      # on the desk: plans, and the same by hand
    python benchmarks/worker_pace.py run DIR --out rows.jsonl [--only PART,PART] [--repeat N]             # on a GPU
    python benchmarks/worker_pace.py page                 # docs/worker-pace.md from benchmarks/data/h200-worker.jsonl

By hand is `measure_peaks.py`: a plain DeepSpeed loop and a plain FSDP2 loop, which do nothing but forward, backward
and step; and, for one GPU, Hugging Face's Trainer with the DeepSpeed file that the plan wrote. Each does `STEPS` steps
after a few that do not count; the medians are compared. Collectives are free in all of them. `--repeat N` runs the
sides in turn, ours, by hand, ours, by hand …, N times each, and compares the medians of all steps of a side: a host
that slows down for a minute slows both. A PART is a piece of a folder's name, which is the run's without commas and
with `_` for spaces.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

GIB = 2**30
STEPS, WARM_UP = 20, 3
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "worker-pace.md"

SITUATIONS: dict[str, dict[str, Any]] = {
    "0.5B full, one GPU, ZeRO-1": {
        "model": "qwen1.5-0.5b",
        "gpus": "1xH200",
        "engine": "zero1",
        "loss": "plain",
        "effective_batch": 8,
    },
    "0.5B full, one GPU, unsharded": {
        "model": "qwen1.5-0.5b",
        "gpus": "1xH200",
        "engine": "zero0",
        "effective_batch": 8,
    },
    "0.5B full, one GPU, FSDP2": {"model": "qwen1.5-0.5b", "gpus": "1xH200", "engine": "fsdp2", "effective_batch": 8},
    "7.6B full, one of 8, ZeRO-2": {
        "model": "qwen2.5-7b",
        "gpus": "8xA100-80GB",
        "host_ram": "512GB",
        "engine": "zero2",
        "offload_optimizer": "none",
    },
    "7.6B full, one of 8, ZeRO-3": {
        "model": "qwen2.5-7b",
        "gpus": "8xA100-80GB",
        "host_ram": "512GB",
        "engine": "zero3",
        "offload_optimizer": "none",
        "offload_param": "none",
    },
    "7.6B full, one of 8, FSDP2": {
        "model": "qwen2.5-7b",
        "gpus": "8xA100-80GB",
        "host_ram": "512GB",
        "engine": "fsdp2",
        "offload_param": "none",
    },
    "32B LoRA, one of 8": {
        "model": "qwen2.5-32b",
        "method": "lora",
        "seq": 1024,
        "gpus": "8x64GB",
        "host_ram": "512GB",
    },
    "7b_mamba, one of 4, ZeRO-2, our scan": {
        "model": "7b_mamba",
        "seq": 2048,
        "gpus": "4xH200",
        "host_ram": "512GB",
        "engine": "zero2",
        "offload_optimizer": "none",
        "effective_batch": 4,
        "checkpointing": "full",
        "scan": "tightfit",
        "steps": 10,
    },
    "7b_mamba, one of 4, FSDP2, our scan": {
        "model": "7b_mamba",
        "seq": 2048,
        "gpus": "4xH200",
        "host_ram": "512GB",
        "engine": "fsdp2",
        "offload_param": "none",
        "effective_batch": 4,
        "checkpointing": "full",
        "scan": "tightfit",
        "steps": 10,
    },
}


INTRODUCTION = (
    "What `tightfit train` costs beside the same settings by hand: a plain DeepSpeed loop, a plain FSDP2 loop "
    "(`benchmarks/measure_peaks.py`), and Hugging Face's Trainer with the DeepSpeed file that the plan wrote. One "
    "H200 poses as one rank of N, so nothing is communicated. Written by `python benchmarks/worker_pace.py page`; "
    "every run is in `benchmarks/data/h200-worker.jsonl`, medians of the steps that the table counts."
)
COUNTED = (
    "a step of full training counts as 6 floating-point operations a parameter and token, one of adapters as 4, and "
    "what is recomputed is not counted. A ratio above 1 means that ours is slower."
)
IN_TURN = (
    "ZeRO-3's steps, and those of a scan in Python, wait for the host's processor, whose speed changes from minute to "
    "minute. There the sides ran in turn, ours, by hand, ours, by hand, and the table has the median of all steps of a "
    "side. The medians of each round, in seconds:"
)
NOISE = (
    "One side differs from itself, round to round, by up to a seventh, so a single pair says little here: earlier ones "
    "gave 1.06 for the 7.6B job and both 1.18 and 0.96 for the 32B one. The first round of 7b_mamba has 3 steps, the "
    "second 10, seven minutes later; another pair under FSDP2, an hour later and on a slower host, has a row of its "
    "own. 1.08 and 0.96 for the same job: such a scan measures the host. A count of the operators of one step of a "
    "small Mamba under FSDP2, on a CPU, finds the same ones on both sides but for the optimizer's, which ours fuses. "
    "Its 0.2 GiB above by hand are about the bytes of the scan's time steps, which ours keeps in fp32."
)
SCAN = (
    "The scan of the 7b_mamba rows without a word about it is transformers' own, a loop over the tokens in Python "
    "whose backward pass grows with the square of the sequence. So they have 128 tokens, and say nothing about the "
    "speed of a Mamba. With our scan, on both sides, the sequence has 2048."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "page", "trainer"))
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit-s", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    if args.what == "prepare":
        prepare(args.path, args.only)
    elif args.what == "run":
        run(args)
    elif args.what == "trainer":
        print("ROW " + json.dumps(trainer(args.path)))
    else:
        PAGE.write_text(page(stored()))


def prepare(folder: Path, only: str) -> None:
    from rehearse_plans import scenario

    from tightfit.formats.render import render
    from tightfit.formats.target import Target
    from tightfit.job.file import hardware_of, job_from_flags, model_of
    from tightfit.planner import plan

    for name, situation in SITUATIONS.items():
        place = folder / name.replace(" ", "_").replace(",", "")
        if not _wanted(place, only):
            continue
        flags = {"attention": "sdpa", "output": "run", **situation}
        steps = flags.pop("steps", STEPS)
        job = job_from_flags(flags)
        answer = plan(job, model_of(job), hardware_of(job))
        assert answer.chosen is not None, name
        place.mkdir(parents=True, exist_ok=True)
        for file, text in render(answer, Target()).items():
            (place / file).write_text(text)
        by_hand = scenario(name, answer.chosen) | {"timed": steps, "steps": WARM_UP}
        by_hand.pop("cap_gib")
        (place / "by_hand.json").write_text(json.dumps(by_hand))


def _wanted(place: Path, only: str) -> bool:
    parts = [part for part in only.split(",") if part]
    return not parts or any(part in place.name for part in parts)


def run(args: argparse.Namespace) -> None:
    for place in sorted(args.path.iterdir()):
        if not _wanted(place, args.only):
            continue
        by_hand = json.loads((place / "by_hand.json").read_text())
        row: dict[str, Any] = {"id": by_hand["id"], "scenario": by_hand, "parameters": parameters(place)}
        sides: dict[str, list[dict[str, Any]]] = {"worker": [], "by_hand": []}
        for _ in range(args.repeat):
            sides["worker"].append(worker(place, by_hand["timed"], args.limit_s))
            sides["by_hand"].append(hand(place, by_hand, args.limit_s))
            print(row["id"], *(rounds[-1] for rounds in sides.values()), flush=True)
        row |= {side: together(rounds) for side, rounds in sides.items()}
        if by_hand["world"] == 1 and by_hand["engine"] == "zero1":
            row["trainer"] = child([sys.executable, __file__, "trainer", str(place)], args.limit_s)
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


def together(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """All rounds of a side as one: the steps of all of them, the highest peak."""
    if failed := [each for each in rounds if "error" in each]:
        return failed[0]
    seconds = [each for found in rounds for each in found["seconds"]]
    return {
        **rounds[-1],
        "seconds": seconds,
        "median_s": round(statistics.median(seconds), 4),
        "rounds_s": [round(statistics.median(found["seconds"]), 4) for found in rounds],
        "peak_gib": max(found["peak_gib"] for found in rounds),
    }


def parameters(place: Path) -> int:
    return int(json.loads((place / "worker.json").read_text())["model"]["parameters"])


def worker(place: Path, steps: int, limit_s: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tightfit.train", str(place / "worker.json"), "--rehearse"]
    shutil.rmtree(place / "run", ignore_errors=True)  # events are appended to what is there
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "--steps", str(steps + WARM_UP)], check=False, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"error": "timed out"}
    if done.returncode:
        return {"error": done.stderr[-1500:]}
    lines = (place / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps_seen = [event for event in events if event["event"] == "step"]
    orders = json.loads((place / "worker.json").read_text())
    return {
        "seconds": [round(event["step_s"], 4) for event in steps_seen[WARM_UP:]],
        "peak_gib": round(steps_seen[-1]["memory"]["peak_bytes"] / GIB, 3),
        "predicted_peak_gib": round(orders["predicted"]["gpu"]["peak_bytes"] / GIB, 3),
        "milestones": {
            event["milestone"]: [event["predicted_bytes"], event["measured_bytes"]]
            for event in events
            if event["event"] == "memory"
        },
        "predicted_s": orders["predicted"]["step_s"],
        "tokens_a_step_and_rank": orders["levers"]["seq"] * orders["effective_batch"] // orders["world"]["ranks"],
        "wall_s": round(time.monotonic() - began, 1),
    }


def hand(place: Path, scenario: dict[str, Any], limit_s: int) -> dict[str, Any]:
    out = place / "hand.jsonl"
    scenarios = place / "hand-scenarios.jsonl"
    scenarios.write_text(json.dumps(scenario) + "\n")
    command = [sys.executable, str(HERE / "measure_peaks.py"), str(scenarios), "--out", str(out)]
    subprocess.run([*command, "--limit-s", str(limit_s)], check=False, capture_output=True)
    row = json.loads(out.read_text().splitlines()[-1])
    if "error" in row:
        return {"error": row["error"]}
    return {"seconds": row["timed"], "peak_gib": row["peak"], "wall_s": row["wall"]}


def child(command: list[str], limit_s: int) -> dict[str, Any]:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": "timed out"}
    rows = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    found: dict[str, Any] = json.loads(rows[0]) if rows else {"error": done.stderr[-1500:]}
    return found


def trainer(place: Path) -> dict[str, Any]:
    """Hugging Face's Trainer on one GPU, with the plan's DeepSpeed file."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
    os.environ.setdefault("MASTER_PORT", "29577")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    orders = json.loads((place / "worker.json").read_text())
    fields = dict(orders["model"]["config"])
    levers = orders["levers"]
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.monotonic())

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = torch.randint(0, 1000, (levers["seq"],))
            return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        output_dir=str(place / "trainer"),
        per_device_train_batch_size=levers["micro_batch"],
        gradient_accumulation_steps=levers["accum"],
        max_steps=STEPS + WARM_UP,
        bf16=True,
        deepspeed=str(place / "deepspeed.json"),
        gradient_checkpointing=levers["checkpointing"] == "full",
        save_strategy="no",
        report_to=[],
        logging_steps=10_000,
        optim="adamw_torch_fused",
        learning_rate=1e-5,
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields), dtype="bfloat16")
    Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Clock()]).train()
    seconds = [later - earlier for earlier, later in pairwise(times)][WARM_UP - 1 :]
    peak = torch.cuda.max_memory_allocated() / GIB
    return {"median_s": round(statistics.median(seconds), 4), "peak_gib": round(peak, 3)}


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a page: what was measured, and nothing else."""
    rate = best_rate()
    return f"""# The worker's pace

[中文](zh/worker-pace.md)

{INTRODUCTION}

| run | steps | s a step | tokens/s a GPU | of the card's measured bf16 rate | peak, GiB | planned, GiB \
| against by hand | against Trainer |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(_line(row, rate) for row in rows)}

The rate is that of the best bf16 product measured on the card, {rate / 1e12:.0f} TFLOP/s; {COUNTED}

{IN_TURN}

| run | ours | by hand |
|---|---|---|
{chr(10).join(_rounds(row) for row in rows if len(row["worker"].get("rounds_s", [])) > 1)}

{NOISE}

{SCAN}
"""


def best_rate() -> float:
    measured = json.loads((HERE / "data" / "h200-rates.json").read_text())["gemm"]
    return 1e12 * max(max(row["tflops"]) for row in measured if row["dtype"] == "torch.bfloat16")


def _line(row: dict[str, Any], rate: float) -> str:
    ours = row["worker"]
    tokens = ours["tokens_a_step_and_rank"] / ours["median_s"]
    share = (4 if row["scenario"].get("lora") else 6) * row["parameters"] * tokens / rate
    off = ours["peak_gib"] / ours["predicted_peak_gib"] - 1
    ratios = [
        f"{ours['median_s'] / row[name]['median_s']:.3f}" if name in row else "-" for name in ("by_hand", "trainer")
    ]
    steps = len(ours.get("seconds", [])) or row["scenario"]["timed"]
    return (
        f"| {row['id']} | {steps} | {ours['median_s']:.3f} | {tokens:,.0f} | {share:.{0 if share >= 0.01 else 1}%} "
        f"| {ours['peak_gib']:.2f} | {ours['predicted_peak_gib']:.2f} ({off:+.1%}) | {' | '.join(ratios)} |"
    )


def _rounds(row: dict[str, Any]) -> str:
    sides = (", ".join(f"{each:.3f}" for each in row[side]["rounds_s"]) for side in ("worker", "by_hand"))
    return f"| {row['id']} | {' | '.join(sides)} |"


def stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "data" / "h200-worker.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
