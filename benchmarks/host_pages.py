"""What the RAM of a rank consists of: its resident pages by kind of mapping, phase by phase.

    python benchmarks/host_pages.py --out rows.jsonl [--only id,id] [--at-once 5] [--limit-s 140]

Rehearsals by our own worker, and runs of `measure_peaks.py`, each a process of its own, several at once on one GPU:
their times mean nothing. A row has the peak that the kernel counted, what was predicted, and at each phase the MiB of
`/proc/self/smaps`, where `/dev/zero` is pinned memory and an arena a heap of a thread. A card of 32 GB is planned for.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

MIB = 2**20
ARENA_BYTES = 64 * MIB  # glibc's `HEAP_MAX_SIZE`: a thread's heap begins at a multiple of it
HERE = Path(__file__).parent
QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": 50280,
    "hidden_size": 2560,
    "num_hidden_layers": 16,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_rank": 160,
}
REHEARSED: dict[str, tuple[dict[str, Any], str]] = {
    "mistral-z3-off-fp16-w4": (
        MISTRAL,
        "--engine zero3 --offload-optimizer cpu --offload-param cpu --precision fp16 --gpus 4x32GB",
    ),
    "mistral-z3-offopt-w4": (
        MISTRAL,
        "--engine zero3 --offload-optimizer cpu --offload-param none --gpus 4x32GB",
    ),
    "mistral-lora-z2-w1": (MISTRAL, "--engine zero2 --method lora --gpus 1x32GB"),
    "qwen-z2-w2": (QWEN, "--engine zero2 --gpus 2x32GB"),
    "qwen-z3-off-w2": (QWEN, "--engine zero3 --offload-optimizer cpu --offload-param cpu --gpus 2x32GB"),
    "mistral-fsdp2-w4": (MISTRAL, "--engine fsdp2 --gpus 4x32GB"),
    "mistral-lora-fsdp2-w2": (MISTRAL, "--engine fsdp2 --method lora --gpus 2x32GB"),
    "mamba-z2-w2": (MAMBA, "--engine zero2 --scan tightfit --gpus 2x32GB"),
    "mistral-qlora-z2-w1": (MISTRAL, "--engine zero2 --method qlora --gpus 1x32GB"),
}
USUAL = "--seq 2048 --effective-batch 4 --steps 1 --full-length --json"
BY_HAND = {"moe-z2": "h200-own.jsonl", "q32l8-qlora-z2": "h200-own.jsonl"}
"""Rows of `data/` that hold more than is predicted, run again."""


def main() -> None:
    parts = {"--worker": work, "--rehearse": rehearse, "--by-hand": by_hand}
    if len(sys.argv) > 1 and sys.argv[1] in parts:
        sys.exit(parts[sys.argv[1]](sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--limit-s", type=int, default=140)
    args = parser.parse_args()
    wanted = {word for word in args.only.split(",") if word}
    ids = [name for name in (*REHEARSED, *BY_HAND) if not wanted or name in wanted]
    until = time.monotonic() + args.limit_s
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda name: run(name, args.out, until), ids))


def run(name: str, out: Path, until: float) -> None:
    """One process; its row is appended as soon as it is there."""
    place = Path("/tmp/host-pages") / name
    place.mkdir(parents=True, exist_ok=True)
    seen = place / "seen.json"
    seen.unlink(missing_ok=True)
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", "/tmp/host-pages/extensions")
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "TORCH_EXTENSIONS_DIR": extensions, "XDG_CACHE_HOME": str(place / "cache")}
    row: dict[str, Any] = {"id": name}
    if name in REHEARSED:
        config, flags = REHEARSED[name]
        (place / "config.json").write_text(json.dumps(config))
        row["command"] = f"tightfit rehearse --model config.json {USUAL} {flags}"
        words = ["--rehearse", "--model", str(place / "config.json"), *USUAL.split(), *flags.split()]
    else:
        words = ["--by-hand", name]
    env["HOST_PAGES"] = str(seen)
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=max(1.0, until - time.monotonic()),
            env=env,
        )
        if done.stdout.startswith("{"):
            row["figures"] = json.loads(done.stdout)["figures"]
        if done.returncode:
            row["error"] = (done.stdout + done.stderr)[-1500:]
    except subprocess.TimeoutExpired:
        row["error"] = "timed out"
    if seen.exists():
        row |= json.loads(seen.read_text())
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    last = row.get("phases", [{}])[-1]
    print(name, last.get("peak"), row.get("figures", {}).get("host"), (row.get("error") or "")[-400:], flush=True)


# --- inside a process ---------------------------------------------------------------------------


class Pages:
    """What was seen, phase by phase."""

    def __init__(self) -> None:
        self.phases: list[dict[str, Any]] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        lines = [line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()]
        status = {name: int(rest.split()[0]) for name, rest in lines if rest.split()[-1:] == ["kB"]}
        named = {"resident": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon", "files": "RssFile", "shared": "RssShmem"}
        sizes = {name: round(status[field] / 1024, 1) for name, field in named.items()}
        self.phases.append({"phase": phase, **sizes, "kept_free": kept_free(), "mappings": mappings()})

    def write(self, **more: Any) -> None:
        self.mark("end")
        versions = {name: metadata.version(name) for name in ("torch", "transformers", "deepspeed")}
        Path(os.environ["HOST_PAGES"]).write_text(json.dumps({**versions, **more, "phases": self.phases}))


def mappings(largest: int = 12) -> dict[str, float]:
    """Resident MiB by kind of mapping, the largest first."""
    found: dict[str, float] = {}
    kind = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "Rss:":
            found[kind] = found.get(kind, 0) + int(words[1]) / 1024
        elif not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            kind = Path(words[5]).name if words[5:] and words[5].startswith("/") else " ".join(words[5:])
            if not kind:
                of_thread = begin % ARENA_BYTES == 0 and end - begin <= ARENA_BYTES
                kind = "arenas" if of_thread else "other anonymous, 32 MiB and more" if end - begin >= 32 * MIB else ""
            kind = kind or "other anonymous"
    ranked = sorted(found.items(), key=lambda pair: -pair[1])
    shown = {name: round(size, 1) for name, size in ranked[:largest]}
    return {**shown, "the rest": round(sum(size for _, size in ranked[largest:]), 1)}


def kept_free() -> float:
    """MiB that were freed and that the C library still holds."""

    class Mallinfo2(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks".split()]
        _fields_ += [(name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")]

    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = Mallinfo2
    return round(library.mallinfo2().fordblks / MIB, 1)


def rehearse(words: list[str]) -> int:
    from tightfit.cli import rehearse as cli
    from tightfit.runs.launch import worker_command

    ours = (sys.executable, __file__, "--worker")
    cli.worker_command = lambda folder, options: worker_command(folder, options, ours)
    return int(cli.rehearse(words))


def work(words: list[str]) -> None:
    """Our worker, watched."""
    pages = Pages()
    from tightfit.train import assemble, probe, worker
    from tightfit.train.__main__ import main as train

    pages.mark("imported")

    def watch(place: Any, name: str, phase: str) -> None:
        real = getattr(place, name)

        def watched(*given: Any, **named: Any) -> Any:
            made = real(*given, **named)
            pages.mark(phase)
            return made

        setattr(place, name, watched)

    watch(worker.places, "join", "CUDA context")
    watch(assemble, "materialise", "built")
    watch(assemble, "fill", "filled")
    watch(worker, "assemble", "engine")
    reached, said = probe.Milestones.measure, worker.Worker._say_end

    def measure(self: Any, milestone: Any) -> None:
        reached(self, milestone)
        pages.mark(milestone)

    def say_end(self: Any, *given: Any) -> None:
        orders = json.loads(Path(words[0]).read_text())
        about = {name: orders[name] for name in ("model", "levers", "buckets", "lora", "world")}
        pages.write(**about, packed=orders["data"]["packing"])
        said(self, *given)

    probe.Milestones.measure = measure  # type: ignore[method-assign]
    worker.Worker._say_end = say_end  # type: ignore[method-assign]
    train(words)


def by_hand(words: list[str]) -> int:
    pages = Pages()
    import measure_peaks
    import torch

    lines = (HERE / "data" / BY_HAND[words[0]]).read_text().splitlines()
    scenario = next(row["scenario"] for row in map(json.loads, lines) if row["id"] == words[0])
    asked = torch.cuda.mem_get_info

    def look(*given: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "mark":  # of `measure_peaks.py`
            pages.mark(frame.f_locals["name"])
        return asked(*given, **named)

    torch.cuda.mem_get_info = look
    row = measure_peaks.measure({**scenario, "steps": 2, "timed": 1}, blame=False)
    pages.write(scenario=scenario, host_rss=row["host_rss"])
    return 0


if __name__ == "__main__":
    main()
