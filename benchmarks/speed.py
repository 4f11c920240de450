"""How fast the footprint model answers, how fast the search for a plan, and how fast the whole command.

    python benchmarks/speed.py

Three figures of one evaluation: the first of a fresh process, the mean over a planner's sweep that meets every
combination for the first time, and the same sweep again. Then the search of typical jobs, each in a fresh process:
how many candidates it priced, and its seconds. Then the command `tightfit estimate --json` from a
local config against a process that only imports the desk's dependencies, run by turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median

from tightfit.inputs.flags import check_levers
from tightfit.memory import estimate
from tightfit.model.load import load_model
from tightfit.model.presets import PRESETS
from tightfit.types import Checkpointing, Levers, ModelShape, UserError

MODELS = ("qwen2.5-7b", "7b_mamba")
WORLD = 8
SEQUENCES = (512, 1024, 2048, 4096, 8192)
PLACES = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
CHECKPOINTING = (Checkpointing(layers=0), Checkpointing(layers=None), Checkpointing(layers=8))
IMPORTS = "import pydantic, yaml, rich"

SEARCHES = (
    ("qwen2.5-7b", "full", "8xRTX4090"),
    ("llama-3.1-8b", "lora", "1xRTX4090"),
    ("7b_mamba", "full", "6x32GB"),
    ("qwen2.5-32b", "lora", "8xK100-64GB"),
    ("qwen2.5-32b", "full", "2x24GB"),
)
"""The last does not fit: what it takes to say what would."""

SEARCH = """
import json, sys
from tightfit import plan
from tightfit.job import Job, Machine
model, method, gpus = sys.argv[1:]
answer = plan(Job(model=model, method=method, hardware=Machine(gpus=gpus, host_ram="512GB"))).plan
print(json.dumps([answer.considered, answer.search_s, answer.fits]))
"""

FIRST_CALL = """
import time
from tightfit.model.load import load_model
from tightfit.memory import estimate
from tightfit.types import Levers
shape = load_model({model!r})
began = time.process_time()
estimate(shape, Levers(engine={engine!r}), {world})
print(time.process_time() - began)
"""


def sweep(shape: ModelShape) -> Iterator[Levers]:
    """What a planner would ask of one model."""
    engines = ("zero0", "zero1", "zero2", "zero3", "fsdp2")
    for engine, (optimizer, param), checkpointing, micro, loss, sequence in product(
        engines, PLACES, CHECKPOINTING, (1, 2, 4), ("plain", "fused"), SEQUENCES
    ):
        levers = Levers(
            engine=engine,
            offload_optimizer=optimizer,
            offload_param=param,
            checkpointing=checkpointing,
            micro_batch=micro,
            loss=loss,
            sequence=sequence,
        )
        try:
            check_levers(levers, shape)
        except UserError:
            continue
        yield levers


def evaluate(shape: ModelShape, asked: list[Levers]) -> float:
    """Mean seconds of one evaluation, of this process's own time: other work on the machine does not count."""
    began = time.process_time()
    for levers in asked:
        estimate(shape, levers, WORLD)
    return (time.process_time() - began) / len(asked)


def first_call(model: str, engine: str) -> float:
    code = FIRST_CALL.format(model=model, engine=engine, world=WORLD)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def search(model: str, method: str, gpus: str, runs: int = 3) -> tuple[int, float, bool]:
    """Candidates priced, the least seconds of some runs, and whether anything fits."""
    command = [sys.executable, "-c", SEARCH, model, method, gpus]
    done = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(runs)]
    answers = [json.loads(each.stdout) for each in done]
    return answers[0][0], min(seconds for _, seconds, _ in answers), answers[0][2]


def whole_process(runs: int = 9) -> tuple[float, float]:
    """Median seconds of `tightfit estimate --json` and of the imports alone, run by turns."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(PRESETS["qwen2.5-7b"].config), encoding="utf-8")
        flags = ["--engine", "zero3", "--world", "8", "--gpus", "8x80GB", "--json"]
        command = [sys.executable, "-m", "tightfit", "estimate", "--model", str(config), *flags]
        imports = [sys.executable, "-c", IMPORTS]
        times: dict[str, list[float]] = {"estimate": [], "imports": []}
        for _ in range(runs):
            for name, words in (("estimate", command), ("imports", imports)):
                began = time.perf_counter()
                subprocess.run(words, capture_output=True, check=True)
                times[name].append(time.perf_counter() - began)
    return median(times["estimate"]), median(times["imports"])


def main() -> None:
    for model in MODELS:
        shape = load_model(model)
        asked = list(sweep(shape))
        fresh, warm = evaluate(shape, asked), evaluate(shape, asked)
        print(f"{model}: {len(asked)} combinations, {fresh * 1e6:.0f} µs each, {warm * 1e6:.0f} µs asked again")
        colds = {engine: first_call(model, engine) for engine in ("zero0", "zero2", "zero3", "fsdp2")}
        print("  first call of a process: " + ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in colds.items()))
    for job in SEARCHES:
        considered, seconds, fits = search(*job)
        print(f"{' '.join(job)}: {considered} candidates, {seconds:.2f} s{'' if fits else ', nothing fits'}")
    command, imports = whole_process()
    print(f"tightfit estimate --json: {command * 1e3:.0f} ms, {command / imports:.2f} × `{IMPORTS}`")


if __name__ == "__main__":
    main()
