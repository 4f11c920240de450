"""The examples with tiny models, on a machine without a GPU: python examples/smoke.py NAME|all

Each takes the example's own job file and the levers of its plan, and makes them small: a model of the same family that
a CPU can train, short sequences, three steps. What runs is what the example runs: plan, train (two ranks under
DeepSpeed) and export; for LLaMA-Factory plan, lint and the dry run. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).parent
STEPS = 3
TOLD = ("✓", "✗", "step ", "Trained ", "saved ", "the ", "  merged")
"""How the lines begin that are shown of a training and an export."""
LEVERS = ("engine", "offload_optimizer", "offload_param", "loss")
"""What is taken from the example's plan as it is."""
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
LLAMAFACTORY = ["--launcher", "llamafactory", "--llamafactory-version", "0.9.2", "--transformers-version", "4.49.0"]


class Small(NamedTuple):
    """How an example is made small."""

    model: str
    """A preset, or a family of which a tiny model is made, with weights."""
    plans: tuple[str, ...]
    """The plans whose levers are taken, in the example's folder; several run side by side."""
    ablations: tuple[str, ...] = ()
    """One for each plan, where the job has a recipe."""
    sequence: int = 64
    llamafactory: bool = False


EXAMPLES = {
    "mamba-7b-on-6x32gb": Small("tiny_mamba", ("plan",)),
    "mamba-7b-on-4-to-8x24gb": Small("tiny_mamba", ("plan/4-gpus",)),
    "lora-on-4-to-12gb": Small("qwen2", ("plan/8gb",)),
    "qwen-32b-lora-on-8-dcus": Small("qwen2", ("plan",), llamafactory=True),
    "gemma-27b-ablations": Small(
        "gemma3_text",
        ("plan/first", "plan/second"),
        ("profile_and_history", "profile_and_history_and_context"),
        sequence=256,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*EXAMPLES, "all"], metavar="NAME|all", help=", ".join(EXAMPLES))
    asked = parser.parse_args().name
    for name in EXAMPLES if asked == "all" else [asked]:
        with tempfile.TemporaryDirectory() as folder:
            print(f"== {name} (silent until it is done; the first time DeepSpeed compiles, for minutes)", flush=True)
            smoke(name, Path(folder))


def smoke(name: str, folder: Path) -> None:
    """One example in an empty folder."""
    small = EXAMPLES[name]
    model = small.model if small.model.startswith("tiny_") else tiny(small.model, folder / f"tiny_{small.model}")
    jobs = [shrunk(name, small, number, model) for number in range(len(small.plans))]
    paths = [folder / f"job-{number}.yaml" for number in range(len(jobs))]
    for path, job in zip(paths, jobs, strict=True):
        path.write_text(yaml.safe_dump(job), encoding="utf-8")
    if small.llamafactory:
        render(paths[0])
        return
    with ThreadPoolExecutor() as several:  # as the two jobs of one machine run
        for said in several.map(train, paths):
            print(said, flush=True)


def shrunk(name: str, small: Small, number: int, model: str) -> dict[str, Any]:
    """The example's job, with everything small that makes it long; what it trains and how stays."""
    job: dict[str, Any] = yaml.safe_load((HERE / name / "job.yaml").read_text(encoding="utf-8"))
    job |= {"model": model, "sequence": small.sequence, "effective_batch": 8, "max_steps": STEPS}
    if small.llamafactory:  # one card would do for the tiny model, and eight are what is shown
        stage = json.loads((HERE / name / small.plans[number] / "deepspeed.json").read_text(encoding="utf-8"))
        engine = f"zero{stage['zero_optimization']['stage']}"
        job["levers"] = {"engine": engine, "micro_batch": 1, "accum": 1}
    else:
        levers = json.loads((HERE / name / small.plans[number] / "worker.json").read_text(encoding="utf-8"))["levers"]
        # The tiny models have four layers, which run as they are written and so send nothing but inputs to the host.
        recomputed = re.sub(r"layers:\d+", "layers:2", levers["checkpointing"])
        recomputed = re.sub(r"^(select:[^+]*)\+offload", r"\1", recomputed)
        job["levers"] = {key: levers[key] for key in LEVERS} | {"checkpointing": recomputed}
    for gone in ("limits", "epochs", "saving", "evaluation", *(() if small.llamafactory else ("hardware",))):
        job.pop(gone, None)
    if small.ablations:
        job["data"]["ablation"] = small.ablations[number]
    return job


def tiny(family: str, folder: Path) -> str:
    """A model of the family with random weights and a tokenizer, as if it came from Hugging Face."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, utils

    from tightfit.train.data.tokens import byte_tokenizer

    utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def train(job: Path) -> str:
    """Plan, train, export; what was said."""
    plan, run = job.with_name(f"{job.stem}-plan"), job.with_name(f"{job.stem}-run")
    said = [
        tightfit(job.parent, "plan", job.name, "--write", plan.name, "--no-calibration", told=("Levers", "        -"))
    ]
    said.append(tightfit(job.parent, "train", "--plan", plan.name, "--output", run.name, told=TOLD))
    said.append(tightfit(job.parent, "export", run.name, "--to", f"{job.stem}-model", told=TOLD))
    return "\n".join(said)


def render(job: Path) -> None:
    """Plan and write for LLaMA-Factory, look the files over, and ask whether they fit."""
    folder = job.parent
    words = ["plan", job.name, "--write", "plan", "--no-calibration", *LLAMAFACTORY]
    print(tightfit(folder, *words, told=("Levers", "        -", "Written")), flush=True)
    versions = ["--llamafactory-version", "0.9.2", "--deepspeed-version", "0.14.2"]
    print(tightfit(folder, "lint", "plan/llamafactory.yaml", *versions), flush=True)
    command = ["llamafactory-cli", "train", "llamafactory.yaml"]
    print(tightfit(folder / "plan", "run", "--dry-run", "--gpus", "8xK100-64GB", "--", *command), flush=True)


def tightfit(folder: Path, *words: str, told: tuple[str, ...] = ("",)) -> str:
    """The command and those of its lines that begin so; the end of everything where it fails."""
    ran = subprocess.run(
        [sys.executable, "-m", "tightfit", *words],
        cwd=folder,
        env=os.environ | alone(folder) | ({} if "--gpus" in words else WITHOUT_GPU),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise SystemExit(f"$ tightfit {' '.join(words)}\n{ran.stdout}{ran.stderr}")
    lines = [line for line in ran.stdout.splitlines() if line.startswith(told)]
    return "\n".join([f"$ tightfit {' '.join(words)}", *lines])


def alone(folder: Path) -> dict[str, str]:
    """No network, a cache of its own, but for what DeepSpeed compiles: that would cost a minute each time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # PyTorch's own name for it: one that two versions of Python share is compiled again by each in turn.
    compiled = cache / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    return {
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": "120",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(compiled)),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


if __name__ == "__main__":
    main()
