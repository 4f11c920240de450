"""Write the plans of the examples anew: python examples/write_plans.py

Each is what the command in the example's README writes. A test compares them with what the program writes now.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from tightfit.cli import main

HERE = Path(__file__).parent
LLAMAFACTORY = "--for llamafactory --llamafactory-version 0.9.2 --transformers-version 4.49.0"


class Planned(NamedTuple):
    """A folder of files that a plan has written."""

    example: str
    folder: str
    """Below the example's own."""
    flags: str = ""
    """What the command says beside the job file."""

    @property
    def path(self) -> Path:
        return HERE / self.example / self.folder


PLANS = (
    Planned("mamba-7b-on-6x32gb", "plan"),
    Planned("mamba-7b-on-4-to-8x24gb", "plan/4-gpus"),
    Planned("mamba-7b-on-4-to-8x24gb", "plan/6-gpus", "--gpus 6xRTX4090 --effective-batch 48"),
    Planned("mamba-7b-on-4-to-8x24gb", "plan/8-gpus", "--gpus 8xRTX4090 --effective-batch 64"),
    Planned("lora-on-4-to-12gb", "plan/4gb", "--gpus 1x4GB"),
    Planned("lora-on-4-to-12gb", "plan/8gb"),
    Planned("lora-on-4-to-12gb", "plan/12gb", "--gpus 1x12GB"),
    Planned("qwen-32b-lora-on-8-dcus", "plan", LLAMAFACTORY),
    Planned("gemma-27b-ablations", "plan/first", "--ablation profile_and_history --gpu-ids 0,1,2,3"),
    Planned(
        "gemma-27b-ablations",
        "plan/second",
        "--ablation profile_and_history_and_context --gpu-ids 4,5,6,7 --port 29501",
    ),
)


def files_of(planned: Planned) -> dict[str, str]:
    """Name → text of all files that belong into the folder, as the program writes them now."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "plan")
        job = HERE / planned.example / "job.yaml"
        # What was measured on this machine must not show in files that all machines get.
        words = ["plan", str(job), *planned.flags.split(), "--write", str(folder), "--no-calibration"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(words)
        if code != 0:
            raise SystemExit(f"{planned.example}: {printed.getvalue()}")
        files = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}
    if planned.example == "qwen-32b-lora-on-8-dcus":
        files["alpaca.json"] = sums()
    return files


def sums(most: int = 6) -> str:
    """A few samples in alpaca's layout: LLaMA-Factory has no shipped data of ours to read."""
    samples = [
        {
            "instruction": f"What is {left} plus {right}?",
            "input": "",
            "output": f"{left} plus {right} is {left + right}.",
        }
        for left in range(most)
        for right in range(most)
    ]
    return json.dumps(samples, indent=1) + "\n"


def write(planned: Planned) -> None:
    shutil.rmtree(planned.path, ignore_errors=True)
    planned.path.mkdir(parents=True)
    for name, text in files_of(planned).items():
        path = planned.path / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    print(f"{planned.example}/{planned.folder}: {len(list(planned.path.iterdir()))} files")


if __name__ == "__main__":
    for each in PLANS:
        write(each)
