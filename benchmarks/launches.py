"""What the host does in a step: operators, kernels, Python between them, and how long the GPU waits for it.

    python benchmarks/launches.py [--out rows.jsonl] [--only PART,PART]

Each situation is a real worker in a rehearsal, one rank of N in torch's fake group: on a GPU those of `ON_GPU`, on a
processor small ones with the same engines, where only counts mean something. On a GPU all workers start together and
then step in turn, each alone. First some steps are only timed. Then some run under a profiler that sees the device
alone, which costs the host little: kernels, the seconds in which one of them runs, and the calls in which the host
waits for the device. A last one shows the operators. `python_ms` is the time outside every operator, of the main thread
and of autograd's; `values_read`: numbers that the host reads from a tensor, for each of which it waits where the tensor
is a GPU's; `waits`: the part of a timed step in which the GPU has nothing to do. Weights are constants: no count
depends on them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GIB = 2**30
WARM_UP, TIMED, WATCHED = 4, 6, 2  # steps; one more shows the operators
LIMIT_S = 240
ONE_GPU = {"gpus": "1xH200", "host_ram": "512GB"}
ONE_OF_8 = {"gpus": "8xH200", "host_ram": "512GB", "offload_optimizer": "none", "offload_param": "none"}
SHORT: dict[str, Any] = {"seq": 2048, "loss": "plain"}
ON_GPU: dict[str, dict[str, Any]] = {
    "0.5B full, one GPU, DDP": {
        **{"model": "qwen1.5-0.5b", "engine": "ddp", "micro_batch": 2, "effective_batch": 2},
        **{**SHORT, **ONE_GPU, "checkpointing": "none"},
    },
    "0.5B full, one GPU, ZeRO-0": {
        **{"model": "qwen1.5-0.5b", "engine": "zero0", "micro_batch": 2, "effective_batch": 2},
        **{**SHORT, **ONE_GPU, "checkpointing": "none"},
    },
    "0.5B full, one GPU, FSDP2": {
        **{"model": "qwen1.5-0.5b", "engine": "fsdp2", "micro_batch": 2, "effective_batch": 2},
        **{**SHORT, **ONE_GPU, "checkpointing": "none"},
    },
    "7.6B full, one of 8, FSDP2": {
        **{"model": "qwen2.5-7b", "engine": "fsdp2", "micro_batch": 1, "effective_batch": 8},
        **{**SHORT, **ONE_OF_8, "checkpointing": "full"},
    },
    "8B LoRA, one GPU, ZeRO-0": {
        **{"model": "llama-3.1-8b", "method": "lora", "engine": "zero0", "micro_batch": 2, "effective_batch": 2},
        **{**SHORT, **ONE_GPU, "checkpointing": "none"},
    },
}
TINY = {"model": "tiny_llama", "seq": 16, "loss": "plain", "checkpointing": "none", "precision": "fp32"}
ON_CPU: dict[str, dict[str, Any]] = {
    "tiny full, alone, DDP": {**TINY, "ranks": 1, "engine": "ddp", "effective_batch": 2},
    "tiny full, alone, ZeRO-0": {**TINY, "ranks": 1, "engine": "zero0", "effective_batch": 2},
    "tiny full, alone, FSDP2": {**TINY, "ranks": 1, "engine": "fsdp2", "effective_batch": 2},
    "tiny full, one of 8, FSDP2": {**TINY, "ranks": 8, "engine": "fsdp2", "effective_batch": 8},
    "tiny full, one of 8, ZeRO-1": {**TINY, "ranks": 8, "engine": "zero1", "effective_batch": 8},
    "tiny full, one of 8, ZeRO-2": {**TINY, "ranks": 8, "engine": "zero2", "effective_batch": 8},
    "tiny LoRA, alone, DDP": {**TINY, "ranks": 1, "engine": "ddp", "effective_batch": 2, "method": "lora"},
    "tiny LoRA, alone, ZeRO-0": {**TINY, "ranks": 1, "engine": "zero0", "effective_batch": 2, "method": "lora"},
}
WAITING = ("Synchronize", "cudaMemcpy")
"""What a call's name ends with, or is, when the host waits in it. A copy to or from pageable memory waits as well, and
is an `Async` one by name: those are told from the copies on the device."""
COLUMNS = (
    "step_ms",
    "operators",
    "python_ms",
    "values_read",
    "kernels",
    "busy_ms",
    "waits",
    "synchronisations",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        watch(args.child)
        return
    import torch

    situations = ON_GPU if torch.cuda.is_available() else ON_CPU
    parts = [part for part in args.only.split(",") if part]
    chosen = {name: flags for name, flags in situations.items() if not parts or any(part in name for part in parts)}
    with tempfile.TemporaryDirectory() as folder:
        together = [chosen] if torch.cuda.is_available() else [{name: flags} for name, flags in chosen.items()]
        rows = [row for some in together for row in measure(Path(folder), some)]
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))


def measure(folder: Path, situations: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    running: dict[str, tuple[Path, Any]] = {}
    rows: list[dict[str, Any]] = []
    for name, flags in situations.items():
        place = folder / name.replace(" ", "_").replace(",", "")
        try:
            prepare(place, flags)
        except Exception as error:  # a situation that cannot be planned loses no other
            rows.append({"id": name, "error": f"{type(error).__name__}: {error}"})
            continue
        with (place / "log").open("w") as log:
            command = [sys.executable, __file__, "--child", str(place)]
            running[name] = place, subprocess.Popen(command, stdout=log, stderr=log)
    end = time.monotonic() + LIMIT_S
    for place, process in running.values():
        wait_for(place / "ready", process, end)
    for name, (place, process) in running.items():
        (place / "go").touch()
        wait_for(place / "row.json", process, end)
        row: dict[str, Any] = {"id": name, "error": (place / "log").read_text()[-2000:]}
        if (place / "row.json").exists():
            row = {"id": name, **json.loads((place / "row.json").read_text())}
        process.kill()
        process.wait()
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def wait_for(path: Path, process: Any, end: float) -> None:
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


def prepare(place: Path, situation: dict[str, Any]) -> None:
    """The files of the plan."""
    from tightfit.formats.render import render
    from tightfit.formats.target import Target
    from tightfit.job.file import hardware_of, job_from_flags, model_of
    from tightfit.planner import plan
    from tightfit.types import Gpu, Hardware

    flags = {"attention": "sdpa", "output": str(place / "run"), **situation}
    ranks = flags.pop("ranks", None)
    job = job_from_flags(flags)
    processor = Gpu(name="CPU", vendor="cpu", memory_bytes=12 * GIB)
    hardware = (
        hardware_of(job)
        if ranks is None
        else Hardware(gpu=processor, gpus_per_node=ranks, host_ram_bytes=24 * ranks * GIB)
    )
    answer = plan(job, model_of(job), hardware)
    assert answer.chosen is not None, answer
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file, text in render(answer, Target()).items():
        (place / file).write_text(text)


def watch(place: Path) -> None:
    """A worker, watched from one told step to the next."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from tightfit.train import __main__ as entry
    from tightfit.train import scratch
    from tightfit.train.events import Events

    on_gpu = torch.cuda.is_available()
    seconds: list[float] = []
    profiles: list[Any] = []
    write = Events.write
    device_alone = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    everything = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def tell(events: Events, event: str, **fields: Any) -> None:
        write(events, event, **fields)
        if event != "step":
            return
        step = fields["step"]
        if WARM_UP < step <= WARM_UP + TIMED:
            seconds.append(fields["step_s"])
        if profiles and step in (WARM_UP + TIMED + WATCHED, WARM_UP + TIMED + WATCHED + 1):
            torch.cuda.synchronize() if on_gpu else None
            profiles[-1].__exit__(None, None, None)
        if step == WARM_UP:
            (place / "ready").touch()
            while not (place / "go").exists():
                time.sleep(0.05)
        elif step in (WARM_UP + TIMED, WARM_UP + TIMED + WATCHED):
            torch.cuda.synchronize() if on_gpu else None
            profiles.append(profile(activities=device_alone if step == WARM_UP + TIMED else everything).__enter__())
        elif step == WARM_UP + TIMED + WATCHED + 1:
            found = [each.profiler.kineto_results.events() for each in profiles]
            row = count_kernels(found[0], WATCHED) if on_gpu else {}
            row |= count_operators(found[1])
            row["step_ms"] = round(1000 * statistics.median(seconds), 2)
            if on_gpu:
                row["waits"] = round(1 - row["busy_ms"] / row["step_ms"], 3)
            row["peak_gib"] = round((fields["memory"]["peak_bytes"] or 0) / GIB, 2)
            (place / "row.tmp").write_text(json.dumps(row))
            (place / "row.tmp").rename(place / "row.json")

    Events.write = tell  # type: ignore[method-assign]
    read = lambda self, name, shape, start, stop: torch.full((stop - start,), 0.01)  # noqa: E731
    scratch.Scratch.read = read  # type: ignore[method-assign]
    steps = WARM_UP + TIMED + WATCHED + 2
    entry.main([str(place / "worker.json"), "--rehearse", "--no-probe", "--steps", str(steps)])


def count_kernels(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Of `steps` steps, per step: what ran on the device, and the calls in which the host waited for it."""
    kernels, spans, waited, to_host, launches = 0, [], {}, 0, 0
    for each in events:
        name, start = each.name(), each.start_ns()
        if str(each.device_type()).endswith("CUDA"):
            kernels += 1
            to_host += "DtoH" in name
            spans.append((start, start + each.duration_ns()))
        elif name.endswith(WAITING):
            waited[name] = waited.get(name, 0) + 1
        elif "Launch" in name:
            launches += 1
    return {
        "kernels": kernels // steps,
        "launches": launches // steps,
        "busy_ms": round(together_ns(spans) / 1e6 / steps, 2),
        "synchronisations": round(sum(waited.values()) / steps, 1),
        "to_host": round(to_host / steps, 1),
        "waited_in": {name: round(times / steps, 1) for name, times in waited.items()},
    }


def count_operators(events: Iterable[Any]) -> dict[str, Any]:
    """Of one step: the outermost operators, and the time outside all of them."""
    spans, begin, end = [], None, 0
    found: dict[str, int] = {}
    read = 0
    by_thread: dict[int, list[tuple[int, int, str]]] = {}
    for each in events:
        name, start, stop = each.name(), each.start_ns(), each.start_ns() + each.duration_ns()
        if not str(each.device_type()).endswith("CPU") or "::" not in name or "autograd::" in name:
            continue
        read += name == "aten::_local_scalar_dense"
        by_thread.setdefault(each.start_thread_id(), []).append((start, stop, name))
        begin, end = start if begin is None else min(begin, start), max(end, stop)
    for ranges in by_thread.values():
        last = 0
        for start, stop, name in sorted(ranges, key=lambda each: (each[0], -each[1])):
            if start >= last:
                last = stop
                spans.append((start, stop))
                found[name] = found.get(name, 0) + 1
    most = sorted(found.items(), key=lambda each: -each[1])[:25]
    whole, inside = (end - (begin or 0)) / 1e6, together_ns(spans) / 1e6
    return {
        "operators": len(spans),
        "python_ms": round(whole - inside, 2),
        "python_share": round(1 - inside / whole, 3) if whole else None,
        "most": dict(most),
        "values_read": read,
    }


def together_ns(spans: list[tuple[int, int]]) -> int:
    """How long at least one of them lasted."""
    whole = last = 0
    for start, stop in sorted(spans):
        whole += max(0, stop - max(start, last))
        last = max(last, stop)
    return whole


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| run | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        told = [row["error"][-80:]] if "error" in row else [str(row.get(name, "-")) for name in COLUMNS]
        lines.append(f"| {row['id']} | {' | '.join(told)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
