"""Streamed trainings on this machine's GPU that are killed by -9 in the middle, beside the same left in peace.

    python benchmarks/stream_resume.py --out rows.jsonl [--tiny] [--only full,lora]

Each runs through `tightfit train` three times: to its end; killed, desk and worker, after a few steps; and started
again by the same command, to the end. The losses and norms of both have to be the same, to the last bit. Models are
drawn at random and data is made here. `--tiny`: on any machine, to try this program.
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
from pathlib import Path
from typing import Any

STEPS, SAVES, KILLED_AFTER, LIMIT_S = 12, 4, 6, 200
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
         "vocab_size": 32_000, "tie_word_embeddings": False}  # fmt: skip
BIG = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
       "num_attention_heads": 16, "num_key_value_heads": 4}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {
    "full": ("--update", "ahead"),
    "waits": ("--update", "waits", "--checkpointing", "full+offload"),
    "8bit": ("--states", "8bit", "--allow", "states"),
    "lora": ("--method", "lora"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    same = True
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(LLAMA | (TINY if args.tiny else BIG)))
        lines = [
            {"instruction": f"Count to {number}.", "output": " ".join(map(str, range(number)))} for number in range(200)
        ]
        (folder / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name in args.only.split(","):
            row = compare(folder, name, args.tiny)
            print(json.dumps(row), flush=True)
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            same &= bool(row["same"])
    return not same


def compare(folder: Path, name: str, is_tiny: bool) -> dict[str, Any]:
    began = time.monotonic()
    whole, broken = folder / f"{name}-whole", folder / f"{name}-broken"
    codes = [run(folder, name, whole, is_tiny, until=None)]
    codes += [run(folder, name, broken, is_tiny, until=after) for after in (KILLED_AFTER, None)]
    ends = [{step["step"]: (step["loss"], step["grad_norm"]) for step in read_steps(each)} for each in (whole, broken)]
    return {
        "case": name,
        "exit_codes": codes,
        "steps": [len(read_steps(whole)), len(read_steps(broken))],
        "losses": [loss for loss, _ in ends[0].values()],
        "again": [loss for loss, _ in ends[1].values()],
        "same": ends[0] == ends[1] and len(ends[0]) == STEPS and len(read_steps(broken)) > STEPS,
        "wall_s": round(time.monotonic() - began, 1),
    }


def run(folder: Path, name: str, output: Path, is_tiny: bool, until: int | None) -> int:
    """To its end, or killed after step `until`; its exit code."""
    command = [sys.executable, "-m", "tightfit", "train", "--model", str(folder / "config.json"), "--engine", "stream",
               "--data", str(folder / "examples.jsonl"), "--seq", "64" if is_tiny else "1024",
               "--effective-batch", "8", "--micro-batch", "2", "--resident", "1", "--max-steps", str(STEPS),
               "--save-every", str(SAVES), "--learning-rate", "1e-4", "--output", str(output),
               *CASES[name]]  # fmt: skip
    with (folder / f"{output.name}.txt").open("a") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True)
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < LIMIT_S:
            if until is not None and any(step["step"] >= until for step in read_steps(output)):
                break
            time.sleep(0.02)
        if process.poll() is None:
            kill_all(process.pid)
        code = process.wait()
    if code not in (0, -signal.SIGKILL):
        print((folder / f"{output.name}.txt").read_text()[-3000:], flush=True)
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


def read_events(output: Path) -> list[dict[str, Any]]:
    try:
        lines = (output / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # torn by the kill, or being written
            continue
    return found


def read_steps(output: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(output) if event.get("event") == "step"]


if __name__ == "__main__":
    sys.exit(main())
