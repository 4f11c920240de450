"""How fast the worker is against itself without the levers of speed, and against plain loops: on one GPU, as one of N.

    python benchmarks/fast.py prepare DIR [--only PART,PART]     # on the desk: a plan for each job and side
    python benchmarks/fast.py predict DIR > predicted.json       # on the desk: what the plans say, before anything runs
    python benchmarks/fast.py run DIR --out rows.jsonl [--only PART,PART] [--until SECONDS] [--at-once 4]     # on a GPU
    python benchmarks/fast.py page                        # docs/fast.md from benchmarks/data/h200-fast.jsonl

A job is a training as a user would ask for it; a side is a way to run it: `planned` is the plan's own choice, `eager`
the plan without compiled layers, selected parts or fused kernels, `full` with every layer recomputed, `auto` with what
layers keep on the host too; and on a single GPU the loops of `plain_loop.py`. They run in turn, in processes of their
own that are forked from one which has torch loaded, and each row has the medians of `STEPS` steps after `WARM_UP` that
do not count. Several may start together (`--at-once`), as far as the card's memory goes: each waits after its warm-up
until the others have had theirs, and then has the card to itself. Weights are one block of random numbers over and
over, since drawing billions of them takes longer than the steps. Collectives are free: the process group is torch's
fake one. A job for a smaller card runs under a cap of its size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_loop
from blocks import fill, write_or_check

GIB = 2**30
STEPS, WARM_UP = 20, 4
ROOM_GIB, PEER_GIB = 125, 60  # for all that start together; what a plain loop may hold
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "fast.md"
SETS = (
    "",
    "-later",
    "-after",
    "-last",
    "-again",
    "-groups",
    "-sequences",
    "-tensor",
    "-pipelines",
    "-experts",
    "-tiled",
    "-compressed",
    "-stream",
)
MEMORY = [HERE / "data" / f"h200-fast-memory{each}" for each in SETS]
"""Sets of rows that `fast_memory.py` predicted (`…-predicted.json`), then measured (`….jsonl`)."""
WORTH_A_WORD = ("layers", "fused")
OFF = {"compile": "off", "kernels": "plain"}
QWEN_HALF_B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
"""Qwen2.5-0.5B."""

JOBS: dict[str, dict[str, Any]] = {
    "8B LoRA, one GPU": {"model": "llama-3.1-8b", "method": "lora", "gpus": "1xH200", "effective_batch": 2},
    "8B LoRA, 24 GB": {
        "model": "llama-3.1-8b",
        "method": "lora",
        "gpus": "1xH200",
        "effective_batch": 2,
        "card_gib": 24,
    },
    "8B LoRA, 32 GB": {
        "model": "llama-3.1-8b",
        "method": "lora",
        "gpus": "1xH200",
        "effective_batch": 2,
        "card_gib": 32,
    },
    "8B LoRA, 24 GB, 8192": {
        "model": "llama-3.1-8b",
        "method": "lora",
        "gpus": "1xH200",
        "effective_batch": 1,
        "seq": 8192,
        "card_gib": 24,
    },
    "8B LoRA, 48 GB": {
        "model": "llama-3.1-8b",
        "method": "lora",
        "gpus": "1xH200",
        "effective_batch": 2,
        "card_gib": 48,
    },
    "0.5B full, one GPU": {"model": QWEN_HALF_B, "gpus": "1xH200", "effective_batch": 8},
    "7.6B full, one of 8": {"model": "qwen2.5-7b", "gpus": "8xH200", "effective_batch": 8},
    "7.6B full, one of 8, 24 GB": {"model": "qwen2.5-7b", "gpus": "8xH200", "effective_batch": 8, "card_gib": 24},
    "7.6B full, one of 8, 32 GB": {"model": "qwen2.5-7b", "gpus": "8xH200", "effective_batch": 8, "card_gib": 32},
    "7.6B full, one of 8, 48 GB": {"model": "qwen2.5-7b", "gpus": "8xH200", "effective_batch": 8, "card_gib": 48},
    "32B LoRA, one of 8": {
        "model": "qwen2.5-32b",
        "method": "lora",
        "gpus": "8xH200",
        "seq": 1024,
        "effective_batch": 8,
    },
    "32B LoRA, one of 8, FSDP2": {
        "model": "qwen2.5-32b",
        "method": "lora",
        "gpus": "8xH200",
        "seq": 1024,
        "effective_batch": 8,
        "engine": "fsdp2",
    },
    "7b_mamba full, one of 4": {"model": "7b_mamba", "gpus": "4xH200", "effective_batch": 4, "scan": "tightfit"},
}
SIDES: dict[str, dict[str, str]] = {
    "planned": {},
    "eager": OFF | {"loss": "plain"},
    "full": {"checkpointing": "full"},
    "auto": {"checkpointing": "select:auto", "compile": "layers"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "predict", "run", "page"))
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="pieces of the names of folders, which are jobs and sides")
    parser.add_argument("--limit-s", type=int, default=150)
    parser.add_argument("--peers", action="store_true", help="after a planned side on one GPU the loops by hand")
    parser.add_argument("--at-once", type=int, default=1, help="how many start together; each is timed alone")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which nothing more is begun")
    args = parser.parse_args()
    {"prepare": prepare, "predict": predict, "run": run, "page": page}[args.what](args)


def prepare(args: argparse.Namespace) -> None:
    for name, job in JOBS.items():
        for side, pins in SIDES.items():
            place = args.path / name.replace(" ", "_").replace(",", "") / side
            if is_wanted(place, args.only) and (side not in ("full", "auto") or "card_gib" in job):
                write_plan(place, {**job, **pins})


def write_plan(place: Path, wanted: dict[str, Any]) -> None:
    """The plan's files, as `tightfit plan --write` makes them. `card_gib`: the card is taken to be so small."""
    from tightfit.formats.render import render
    from tightfit.formats.target import Target
    from tightfit.job.file import hardware_of, job_from_flags, model_of
    from tightfit.planner import plan

    flags = {"attention": "sdpa", "output": "run", "host_ram": "512GB", "seq": 2048, **wanted}
    card, clip = flags.pop("card_gib", None), flags.pop("clip", None)
    place.mkdir(parents=True, exist_ok=True)
    if isinstance(flags["model"], dict):
        config = place / "config.json"
        config.write_text(json.dumps(flags["model"]))
        flags["model"] = str(config)
    job = job_from_flags(flags)
    job = job if clip is None else replace(job, clip=clip)
    hardware = hardware_of(job)
    if card is not None:
        hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=int(card * GIB)))
    answer = plan(job, model_of(job), hardware)
    if answer.chosen is None:
        sys.stderr.write(f"{place}: nothing fits\n")
        return
    for file, text in render(answer, Target()).items():
        (place / file).write_text(text)
    gpu = answer.chosen.footprint.gpu
    outside = sum(size for what, size in gpu.overhead.items() if "slack" not in what)
    (place / "cap").write_text(str(int(card * GIB) - outside if card else 0))


def is_wanted(place: Path, only: str) -> bool:
    parts = [part for part in only.split(",") if part]
    return not parts or any(part in f"{place.parent.name}/{place.name}" for part in parts)


def places_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("worker.json"))


def predict(args: argparse.Namespace) -> None:
    told = {}
    for place in places_of(args.path):
        orders = json.loads((place / "worker.json").read_text())
        told[f"{place.parent.name}/{place.name}"] = {
            "peak_gib": round(orders["predicted"]["gpu"]["peak_bytes"] / GIB, 3),
            "step_s": orders["predicted"]["step_s"],
            "levers": {
                name: orders["levers"][name]
                for name in ("engine", "checkpointing", "compile", "kernels", "loss", "micro_batch", "accum")
            },
        }
    sys.stdout.write(json.dumps(told, indent=1) + "\n")


def run(args: argparse.Namespace, places: list[Path] | None = None) -> None:
    """`places`: the plans to run, in this order; None: all that were written, and are wanted."""
    import torch  # forked processes have it already

    assert not torch.cuda.is_initialized(), "a fork cannot share a CUDA context"
    began = time.monotonic()
    wanted = places or [place for place in places_of(args.path) if is_wanted(place, args.only)]
    sides = [(place, side) for place in wanted for side in sides_at(place, peers=args.peers)]
    for together in batches(sides, args.at_once):
        if time.monotonic() - began > args.until:
            print(*together, "were not begun", flush=True)
            continue
        started = [Side(place, side) for place, side in together]
        for side in started:
            side.wait_until_warm(args.limit_s)
        for side in started:
            row = side.measure(args.limit_s)
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            names = ("median_s", "predicted_s", "tokens_per_s", "peak_gib", "predicted_peak_gib", "host_gib", "norms")
            shown = {key: row[key] for key in names if key in row}
            print(row["job"], row["side"], shown or row["error"][-600:], row["wall_s"], flush=True)


def sides_at(place: Path, *, peers: bool) -> tuple[str, ...]:
    has_peers = peers and place.name == "planned" and "one_GPU" in place.parent.name
    return (place.name, *(plain_loop.SIDES if has_peers else ()))


def batches(sides: list[tuple[Path, str]], at_once: int) -> list[list[tuple[Path, str]]]:
    """As many together as were asked for and as the card's memory holds."""
    found: list[list[tuple[Path, str]]] = []
    held = 0.0
    for place, side in sides:
        orders = json.loads((place / "worker.json").read_text())
        holds = PEER_GIB if side in plain_loop.SIDES else orders["predicted"]["gpu"]["required_bytes"] / GIB
        if not found or len(found[-1]) == at_once or held + holds > ROOM_GIB:
            found.append([])
            held = 0.0
        found[-1].append((place, side))
        held += holds
    return found


class Side:
    """A worker or a loop, in a fork of this process. It stops after its warm-up, until it is told to go on."""

    def __init__(self, place: Path, side: str) -> None:
        if side not in plain_loop.SIDES:
            shutil.rmtree(place / "run", ignore_errors=True)  # events are appended to what is there
        self.place, self.side, self.began = place, side, time.monotonic()
        self.log, self.found = place / f"{side}.txt", place / f"{side}.json"
        self.warm, self.go = place / f"{side}.warm", place / f"{side}.go"
        self.pinned = place / f"{side}.pinned"  # what the system counts as locked or pinned, after a step
        for path in (self.found, self.warm, self.go, self.pinned):
            path.unlink(missing_ok=True)
        self.cap = int((place / "cap").read_text())
        self.orders = json.loads((place / "worker.json").read_text())
        self.drawn: list[list[float]] = []
        self.is_running = True
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._work()
            except BaseException:
                traceback.print_exc()  # into the log
            finally:
                os._exit(1)

    def _work(self) -> None:
        os.setsid()
        with self.log.open("w") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if self.side in plain_loop.SIDES:
            looped = plain_loop.loop(self.orders, self.side, STEPS + WARM_UP, self._after_step)
            self.found.write_text(json.dumps(looped))
            os._exit(0)
        from tightfit.train.__main__ import main as work
        from tightfit.train.events import Events

        write = Events.write

        def tell(events: Events, event: str, **fields: Any) -> None:
            write(events, event, **fields)
            if event == "step":
                self._after_step(fields["step"])

        Events.write = tell  # type: ignore[method-assign]
        repeat_weights()
        words = [str(self.place / "worker.json"), "--rehearse", "--steps", str(STEPS + WARM_UP)]
        work([*words, "--cap-bytes", str(self.cap)] if self.cap else words)

    def _after_step(self, step: int) -> None:
        if step == WARM_UP:
            lines = Path("/proc/self/status").read_text().splitlines()
            self.pinned.write_text("; ".join(line for line in lines if line.startswith(("VmPin", "VmLck", "VmHWM"))))
            self.warm.touch()
            while not self.go.exists():
                time.sleep(0.02)

    def _has_ended(self) -> bool:
        if self.is_running and os.waitpid(self.pid, os.WNOHANG) != (0, 0):
            self.is_running = False
        return not self.is_running

    def _wait(self, until: Any, limit_s: float) -> None:
        began = asked = time.monotonic()
        while not self._has_ended() and not until():
            if time.monotonic() - asked > 1:
                asked = time.monotonic()
                self.drawn.append(ask_clock_and_power())
            if time.monotonic() - began > limit_s:
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.05)

    def wait_until_warm(self, limit_s: float) -> None:
        self._wait(self.warm.exists, limit_s)

    def measure(self, limit_s: float) -> dict[str, Any]:
        self.drawn = []
        self.go.touch()
        self._wait(lambda: False, limit_s)
        events = [json.loads(line) for line in _lines(self.place / "run" / "events.jsonl")]
        steps = [event for event in events if event["event"] == "step"]
        orders = self.orders
        row: dict[str, Any] = {
            "job": self.place.parent.name,
            "side": self.side,
            "wall_s": round(time.monotonic() - self.began, 1),
            "clock_and_power": self.drawn[-6:],
        }
        if self.side in plain_loop.SIDES:
            looped = json.loads(self.found.read_text()) if self.found.exists() else {"seconds": []}
            seconds, peak = looped["seconds"][WARM_UP:], looped.get("peak_bytes", 0)
        else:
            seconds = [round(event["step_s"], 4) for event in steps[WARM_UP:]]
            peak = steps[-1]["memory"]["peak_bytes"] if steps else 0
            row |= {
                "levers": orders["levers"],
                "cap_bytes": self.cap,
                "predicted_s": orders["predicted"]["step_s"],
                "predicted_peak_gib": round(orders["predicted"]["gpu"]["peak_bytes"] / GIB, 3),
                "loss": [event["loss"] for event in steps],
                "norms": [event["grad_norm"] for event in steps],
                "host_gib": round(max((event["memory"]["host_bytes"] or 0 for event in steps), default=0) / GIB, 2),
                "predicted_host_gib": round(orders["predicted"]["host"]["peak_bytes_per_rank"] / GIB, 2),
                "pinned": self.pinned.read_text() if self.pinned.exists() else "",
                "said": [str(event.get("text", "")) for event in events if event["event"] in ("warning", "note")],
            }
        if len(seconds) < STEPS:
            return row | {"error": self.log.read_text()[-1500:]}
        tokens = orders["levers"]["seq"] * orders["effective_batch"] // orders["world"]["ranks"]
        median = statistics.median(seconds)
        return row | {
            "seconds": seconds,
            "median_s": round(median, 4),
            "tokens_per_s": round(tokens / median),
            "peak_gib": round(peak / GIB, 3),
        }


def ask_clock_and_power() -> list[float]:
    """Of the multiprocessors in MHz, and of the card in W: a step at its power limit runs at a lower clock."""
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout
        return [float(word) for word in told.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []


def repeat_weights() -> None:
    """Numbers of the usual size, so that products draw the power that they draw with real ones."""
    import torch

    from tightfit.train import assemble

    block = (torch.randn(assemble.PIECE_ELEMENTS) * 0.02).bfloat16()

    class Repeated:
        def __init__(self, *_: Any) -> None: ...

        def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Any:
            if name.endswith("A_log"):  # the rates of a scan
                return torch.arange(1.0, shape[1] + 1).log().repeat(shape[0])[start:stop]
            if len(shape) == 1:
                return torch.full((stop - start,), -4.6 if "dt_proj" in name else 0.0 if "bias" in name else 1.0)
            repeated = torch.cat([block] * -(-(stop - start) // len(block))) if stop - start > len(block) else block
            return repeated[: stop - start]

    assemble.Scratch = Repeated  # type: ignore[assignment, misc]


def page(args: argparse.Namespace) -> None:
    """docs/fast.md from what was measured."""
    old = PAGE.read_text(encoding="utf-8")
    new = fill(old, {"speed": speed_table(), "memory": memory_table()}, PAGE)
    sys.exit(write_or_check(PAGE, old, new, __file__, check=False))


def speed_table() -> str:
    lines = ["| job | side | way | s a step | tokens/s | peak, GiB | predicted, GiB |", "|---|---|---|---|---|---|---|"]
    for line in _lines(HERE / "data" / "h200-fast.jsonl"):
        row = json.loads(line)
        levers = row.get("levers", {})
        way = [levers[name] for name in ("engine", "checkpointing") if name in levers]
        way += [f"{name} {levers[name]}" for name in ("compile", "kernels", "loss") if levers.get(name) in WORTH_A_WORD]
        held, told = (f"{row[name]:.2f}" if name in row else "-" for name in ("peak_gib", "predicted_peak_gib"))
        side = f"{row['side']}, weights of zeros" if "weights" in row else row["side"]
        lines.append(
            f"| {row['job'].replace('_', ' ')} | {side} | {', '.join(way) or '-'} | {row['median_s']:.4f} "
            f"| {row['tokens_per_s']:,} | {held} | {told} |"
        )
    return "\n".join(lines)


def memory_table() -> str:
    lines = ["| run | measured, GiB | predicted, GiB | error |", "|---|---|---|---|"]
    for rows in MEMORY:
        told = json.loads(Path(f"{rows}-predicted.json").read_text())["rows"]
        for line in _lines(Path(f"{rows}.jsonl")):
            row = json.loads(line)
            if "peak_gib" in row:
                said, job = told[row["job"]]["peak_gib"], row["job"].replace("_", " ")
                lines.append(f"| {job} | {row['peak_gib']:.3f} | {said:.3f} | {said / row['peak_gib'] - 1:+.2%} |")
    return "\n".join(lines)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
