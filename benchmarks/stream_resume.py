"""Streamed trainings on this machine's GPU that are killed by -9 in the middle, beside the same left in peace.

    python benchmarks/stream_resume.py --out rows.jsonl [--tiny] [--only PART,PART] [--at-once 5]

Each runs through `tightfit train` three times: to its end; killed, desk and worker, after a few steps; and started
again by the same command, to the end. How far apart losses and norms of both are is said: nothing, where all kernels
of the GPU add up in the same order each time. Rows are of many lengths, as a user's are. Models are drawn at random
and data is made here. `--tiny`: on any machine, to try this program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STEPS, SAVES, KILLED_AFTER, LIMIT_S = 12, 4, 6, 140
USUAL = {"vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 6, "max_position_embeddings": 4096}
HEADS = {"intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
TINY = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "head_dim": 8}
MODELS = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **USUAL, **HEADS},
    "gemma": {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **USUAL, **HEADS},
    "mamba": {"model_type": "mamba", "architectures": ["MambaForCausalLM"], **USUAL},
}
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "full, ahead": ("llama", ("--update", "ahead")),
    "full, inputs on the host": ("llama", ("--update", "waits", "--checkpointing", "full+offload")),
    "full, 8-bit moments": ("llama", ("--states", "8bit", "--allow", "states")),
    "full, fp16": ("llama", ("--precision", "fp16")),
    "full, states on an NVMe": ("llama", ("--offload-optimizer", "nvme", "--nvme", "20GB")),
    "full, Mamba": ("mamba", ("--update", "waits")),
    "LoRA": ("llama", ("--method", "lora")),
    "LoRA, selected on the host": (
        "llama",
        ("--method", "lora", "--compile", "layers", "--checkpointing", "select:mlp+offload"),
    ),
    "LoRA, Gemma": ("gemma", ("--method", "lora", "--checkpointing", "full+offload")),
    "QLoRA": ("llama", ("--method", "qlora")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="parts of the names of cases")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        folder = Path(scratch)
        for name, config in MODELS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config | (TINY if args.tiny else {})))
        counts = [" ".join(map(str, range(number))) for number in range(100)]
        lines = [{"instruction": f"Count to {number}.", "output": count} for number, count in enumerate(counts)]
        (folder / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        wanted = [name for name in CASES if any(part in name for part in args.only.split(","))]
        good = True
        with ThreadPoolExecutor(args.at_once) as pool:
            for row in pool.map(lambda name: compare(folder, name, args.tiny), wanted):
                print(json.dumps(row), flush=True)
                with args.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                good &= row["exit_codes"] == [0, -signal.SIGKILL, 0]
    return not good


def compare(folder: Path, name: str, is_tiny: bool) -> dict[str, Any]:
    began = time.monotonic()
    place = folder / "".join(filter(str.isalnum, name))
    place.mkdir()
    whole, broken = place / "whole", place / "broken"
    codes = [run(folder, name, whole, is_tiny, until=None)]
    codes += [run(folder, name, broken, is_tiny, until=after) for after in (KILLED_AFTER, None)]
    ends = [{step["step"]: (step["loss"], step["grad_norm"]) for step in read_steps(each)} for each in (whole, broken)]
    common = sorted(ends[0].keys() & ends[1].keys())
    return {
        "case": name,
        "exit_codes": codes,
        "steps": [len(read_steps(whole)), len(read_steps(broken))],
        "losses": [loss for loss, _ in ends[0].values()],
        "first_apart": next((step for step in common if ends[0][step] != ends[1][step]), None),
        "apart": max((abs(ends[1][step][0] / ends[0][step][0] - 1) for step in common), default=None),
        "wall_s": round(time.monotonic() - began, 1),
    }


def run(folder: Path, name: str, output: Path, is_tiny: bool, until: int | None) -> int:
    """To its end, or killed after step `until`; its exit code."""
    model, words = CASES[name]
    if "--nvme" in words:
        words = (*words, "--nvme-path", str(output.parent))
    command = [sys.executable, "-m", "tightfit", "train", "--model", str(folder / model), "--engine", "stream",
               "--data", str(folder / "examples.jsonl"), "--seq", "64" if is_tiny else "512",
               "--effective-batch", "8", "--micro-batch", "2", "--resident", "1", "--max-steps", str(STEPS),
               "--save-every", str(SAVES), "--learning-rate", "1e-4", "--output", str(output),
               *words]  # fmt: skip
    # Each case has the GPU for itself, as far as it knows.
    mine = {**os.environ, **{f"XDG_{each}_HOME": str(output.parent / each) for each in ("CACHE", "DATA", "STATE")}}
    log = output.parent / f"{output.name}.txt"
    with log.open("a") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True, env=mine
        )
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < LIMIT_S:
            if until is not None and any(step["step"] >= until for step in read_steps(output)):
                break
            time.sleep(0.02)
        if process.poll() is None:
            kill_all(process.pid)
        code = process.wait()
    if code not in (0, -signal.SIGKILL):
        print(name, log.read_text()[-1500:], flush=True)
    return code


def kill_all(desk: int) -> None:
    """A process and all that it started, the worker with its own session too."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int(place.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    doomed = [desk]
    for each in doomed:
        doomed += [child for child, parent in parents.items() if parent == each]
    for each in doomed:
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue


def read_steps(output: Path) -> list[dict[str, Any]]:
    path = output / "events.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:  # torn by the kill, or being written
            continue
    return [event for event in found if event.get("event") == "step"]


if __name__ == "__main__":
    sys.exit(main())
