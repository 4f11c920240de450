"""Loss curves with compressed communication beside the exact one: a small model on real CPU ranks.

    python benchmarks/compression.py run DIR         train every way that benchmarks/data/compression.jsonl has not yet
    python benchmarks/compression.py page            the curves and the table of docs/compression.md
    python benchmarks/compression.py page --check    exit 1 if the table is stale

What a rank sends in a step is counted where it hands a tensor to torch: of an all-reduce twice its bytes, of a
reduce-scatter, an all-gather or an exchange all that is not the rank's own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from blocks import write_parts

RANKS, TAIL = 2, 20
DATA = Path(__file__).parent / "data" / "compression.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "compression.md"
PICTURES = PAGE.parent / "images"
RATE = 3e-3
MODELS = {"tiny_llama": 150}
"""With the steps of each."""
WAYS = {
    "exact, ddp": {"engine": "ddp"},
    "powersgd": {"engine": "ddp", "compress": "powersgd"},
    "onebit": {"engine": "ddp", "compress": "onebit"},
    "exact, zero3": {"engine": "zero3", "persistence_threshold": 0},
    "zeropp": {"engine": "zero3", "persistence_threshold": 0, "compress": "zeropp"},
}
BESIDE = {"powersgd": "exact, ddp", "onebit": "exact, ddp", "zeropp": "exact, zero3"}
USUAL = {"precision": "fp32", "seq": 64, "effective_batch": 8, "micro_batch": 4, "data": "shipped:text"}
SENT = "sent.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "rank", "page"))
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    args = parser.parse_args()
    if args.what == "page":
        rows = read_rows()
        if not args.check:
            draw(rows)
        return write_parts(PAGE, {"curves": table(rows)}, __file__, check=args.check)
    run(args.path.resolve()) if args.what == "run" else work(args.path)
    return 0


# --- the runs -------------------------------------------------------------------------------------


def run(folder: Path) -> None:
    from tightfit.formats.render import render
    from tightfit.formats.target import Target
    from tightfit.job.file import job_from_flags
    from tightfit.planner import plan
    from tightfit.types import Gpu, Hardware

    processor = Gpu(name="CPU", vendor="cpu", memory_bytes=12 << 30)
    there = read_rows()
    for model, steps in MODELS.items():
        for way, levers in WAYS.items():
            if (model, way) in there:
                continue
            place = folder / f"{model}-{way.replace(', ', '-')}"
            place.mkdir(parents=True, exist_ok=True)
            flags = {**USUAL, **levers, "model": model, "max_steps": steps, "learning_rate": RATE}
            flags |= {"output": str(place / "run")} | ({"scan": "tightfit"} if "mamba" in model else {})
            found = plan(
                job_from_flags(flags), None, Hardware(gpu=processor, gpus_per_node=RANKS, host_ram_bytes=24 << 30)
            )
            for name, text in render(found, Target()).items():
                (place / name).write_text(text)
            start(place)
            events = [json.loads(line) for line in (place / "run" / "events.jsonl").read_text().splitlines()]
            losses = [round(each["loss"], 5) for each in events if each["event"] == "step"]
            sent = json.loads((place / SENT).read_text())
            row = {"model": model, "way": way, "ranks": RANKS, "steps": steps, "sent_bytes": sent, "losses": losses}
            with DATA.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(model, way, losses[0], losses[-1], sent, flush=True)


def start(place: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, __file__, "rank", str(place)]
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(RANKS)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"{place} failed")


def work(place: Path) -> None:
    """One rank, whose messages are counted."""
    import torch.distributed as dist

    from tightfit.train.__main__ import main as train
    from tightfit.train.loop import Loop

    total, inside, after = 0.0, 0, []
    share = (RANKS - 1) / RANKS

    def counting(collective: Callable[..., Any], count: Callable[..., float]) -> Callable[..., Any]:
        def send(*words: Any, **named: Any) -> Any:
            nonlocal total, inside
            tensors = [*words, *named.values()]
            total += 0.0 if inside else count(*(each.nbytes for each in tensors if hasattr(each, "nbytes")))
            inside += 1
            try:
                return collective(*words, **named)
            finally:
                inside -= 1

        return send

    by_name: dict[str, Callable[..., float]] = {
        "all_reduce": lambda size, *_: 2 * share * size,
        "all_to_all_single": lambda got, given: share * given,
        "all_gather_into_tensor": lambda got, given: share * got,
        "all_gather_single": lambda got, given: share * got,
        "reduce_scatter_tensor": lambda got, given: share * given,
    }
    for name, count in by_name.items():
        if hasattr(dist, name):  # the names of some releases
            wrapped = counting(getattr(dist, name), count)
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, wrapped)
    agree = Loop._agree

    def note(loop: Loop, loss: float) -> Any:
        after.append(total)
        if len(after) == loop.steps and loop.place.leads:
            sent = [later - earlier for earlier, later in pairwise(after)]
            (place / SENT).write_text(json.dumps({"first": sent[0], "last": median(sent[-TAIL:])}))
        return agree(loop, loss)

    Loop._agree = note  # type: ignore[method-assign]
    train([str(place / "worker.json"), "--no-probe", "--resume", "none"])


# --- the page -------------------------------------------------------------------------------------


def read_rows() -> dict[tuple[str, str], Any]:
    lines = DATA.read_text().splitlines() if DATA.exists() else []
    return {(row["model"], row["way"]): row for row in map(json.loads, lines)}


def table(rows: dict[tuple[str, str], Any]) -> str:
    lines = [
        f"| model | way | sent by a rank in a step, KB | of the exact | mean loss of the last {TAIL} | exact | apart |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for way, beside in BESIDE.items():
            mine, exact = rows[model, way], rows[model, beside]
            sent, whole = mine["sent_bytes"]["last"], exact["sent_bytes"]["last"]
            loss, right = mean(mine["losses"][-TAIL:]), mean(exact["losses"][-TAIL:])
            cells = [model, f"`{way}`", f"{sent / 1e3:,.0f}", f"{sent / whole:.1%}", f"{loss:.4f}", f"{right:.4f}"]
            lines.append(f"| {' | '.join(cells)} | {loss / right - 1:+.2%} |")
    return "\n".join(lines)


def draw(rows: dict[tuple[str, str], Any]) -> None:
    """The loss of every way by step, a picture a model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tightfit"
    from matplotlib import pyplot

    for model, steps in MODELS.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.2))
        for way in WAYS:
            if way != "exact, zero3":  # it lies on the other one
                axes.plot(range(1, steps + 1), rows[model, way]["losses"], label=way, linewidth=1)
        axes.set(xlabel="step", ylabel="loss")
        axes.set_title(f"{model} on {RANKS} CPU ranks", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(PICTURES / f"compression-{model}.svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
