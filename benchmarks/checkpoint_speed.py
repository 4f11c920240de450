"""What a checkpoint costs: ours beside torch.save and torch.distributed.checkpoint (DCP), and what it steals on a GPU.

    python benchmarks/checkpoint_speed.py cpu [--bytes 1e9] [--rounds 3] [--json] [--out rows.jsonl]     # two ranks
    python benchmarks/checkpoint_speed.py prepare DIR [--only PART,PART]         # on the desk: plans for the next one
    python benchmarks/checkpoint_speed.py gpu DIR --out rows.jsonl [--only PART,PART]    # one GPU as one rank of many
    python benchmarks/checkpoint_speed.py page                                   # docs/checkpoint-speed.md from rows

`cpu` starts two real processes over gloo (`checkpoint_ranks.py`) and lets all sides save and load the same states in
turn; `gpu` runs `checkpoint_gpu.py` once for each prepared plan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

GIB = 2**30
RANKS = 2
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "checkpoint-speed.md"
CPU_ROWS = HERE / "data" / "cpu-checkpoints.jsonl"
GPU_ROWS = HERE / "data" / "h200-checkpoints.jsonl"

Row = dict[str, Any]

SYNCED = {
    "ours": "yes",
    "torch.save, halves, then fsync": "yes",
    "torch.save, rank 0 all, then fsync": "yes",
    "DCP": "yes",
    "ours, no fsync": "no",
    "torch.save, halves": "no",
    "torch.save, rank 0 all": "no",
    "DCP, no fsync": "no",
}
LOADS = ("ours, verified", "ours, not verified", "torch.load, halves", "DCP load")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cpu", "rank", "prepare", "gpu", "one", "page"))
    parser.add_argument("path", type=Path, nargs="?", help="of the plans, or where `cpu` writes its checkpoints")
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit-s", type=int, default=900)
    args = parser.parse_args()
    if args.what == "rank":
        rank(args)
    elif args.what == "cpu":
        row = cpu(args)
        print(json.dumps(row) if args.json else cpu_tables(row))
        kept(row, args.out)
    elif args.what == "prepare":
        from checkpoint_gpu import prepare

        prepare(args.path, args.only)
    elif args.what == "gpu":
        gpu(args)
    elif args.what == "one":
        from checkpoint_gpu import measure

        print("ROW " + json.dumps(measure(args.path)))
    else:
        PAGE.write_text(page(stored(CPU_ROWS), stored(GPU_ROWS)), encoding="utf-8")


def kept(row: Row, out: Path | None) -> None:
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def stored(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# --- two ranks on the CPU ------------------------------------------------------------------------


def rank(args: argparse.Namespace) -> None:
    from checkpoint_ranks import run_rank

    row = run_rank(args.path, int(args.bytes), args.rounds)
    if row is not None:
        print("ROW " + json.dumps(row))


def cpu(args: argparse.Namespace) -> Row:
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-speed-", dir=args.path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "rank", str(folder), "--bytes", str(args.bytes), "--rounds", str(args.rounds)]
    load_before = os.getloadavg()[0]
    started = [
        subprocess.Popen(command, env={**os.environ, **meeting, "RANK": str(number)}, stdout=subprocess.PIPE, text=True)
        for number in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=args.limit_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if any(process.returncode for process in started):
        sys.exit("a rank failed: what it said is above")
    found = json.loads(next(line[4:] for line in said[0].splitlines() if line.startswith("ROW ")))
    return {
        "bytes": found["parameters"] * 14,
        "ranks": RANKS,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
        **found,
    }


def cpu_tables(row: Row) -> str:
    wall, worked = _medians(row["wall_s"]), _medians(row["cpu_s"])
    copy = wall["a copy in memory"]
    saves = [
        f"| {name} | {fsync} | {wall[name]:.2f} | {wall[name] / wall[_ours(fsync)]:.2f} "
        f"| {worked[name]:.2f} | {worked[name] / worked[_ours(fsync)]:.2f} |"
        for name, fsync in SYNCED.items()
    ]
    behind = []
    for name in ("ours, in the background", "DCP, async_save"):
        blocks = row["wall_s"][f"{name}: blocks"]
        later = statistics.median(blocks[1:] or blocks)
        behind.append(f"| {name} | {blocks[0]:.2f} | {later:.2f} | {later / copy:.1f} | {wall[name]:.2f} |")
    loads = [
        f"| {name} | "
        + " | ".join(
            f"{of[f'{name}: {cache}']:.2f} | {of[f'{name}: {cache}'] / of[f'ours, not verified: {cache}']:.2f}"
            for of, cache in ((wall, "warm"), (worked, "warm"), (wall, "cold"))
        )
        + " |"
        for name in LOADS
    ]
    return "\n".join(
        [
            "| saving | fsync | s | against ours | processor s | against ours |",
            "|---|---|---|---|---|---|",
            *saves,
            "",
            "| saving in the background | blocks, s, first time | later | later, in copies | until written, s |",
            "|---|---|---|---|---|",
            *behind,
            f"| a copy into memory that is there | {copy:.2f} | {copy:.2f} | 1.0 | - |",
            "",
            "| loading | s, cached | against ours | processor s | against ours | s, not cached | against ours |",
            "|---|---|---|---|---|---|---|",
            *loads,
        ]
    )


def _ours(fsync: str) -> str:
    """What a side is set against: ours with the same promise."""
    return "ours" if fsync == "yes" else "ours, no fsync"


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in seconds.items()}


# --- one GPU -------------------------------------------------------------------------------------


def gpu(args: argparse.Namespace) -> None:
    """Each plan in a process of its own: an engine does not give back what it took."""
    from checkpoint_gpu import wanted

    for place in sorted(each for each in args.path.iterdir() if (each / "worker.json").exists()):
        if not wanted(place, args.only):
            continue
        command = [sys.executable, __file__, "one", str(place)]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=args.limit_s)
            said, problem = done.stdout, done.stderr[-3000:] if done.returncode else None
        except subprocess.TimeoutExpired as error:
            said, problem = (error.stdout or b"").decode(), "timed out"
        rows = [line[4:] for line in said.splitlines() if line.startswith("ROW ")]
        row: Row = json.loads(rows[-1]) if rows else {}
        if problem is not None:
            row["error"] = problem
        row = {"id": place.name, **row}
        print(json.dumps(row), flush=True)
        kept(row, args.out)


# --- the page ------------------------------------------------------------------------------------

INTRODUCTION = (
    "What a checkpoint of ours costs beside `torch.save` and `torch.distributed.checkpoint` (DCP). Written by "
    "`python benchmarks/checkpoint_speed.py page` from `benchmarks/data/cpu-checkpoints.jsonl` and, where it is there, "
    "`benchmarks/data/h200-checkpoints.jsonl`."
)
SIDES = (
    "The states are bf16 weights, fp32 copies and two moments of a small Llama, half of each on either rank. Ours is "
    "the worker's own `Saver` and `resume.load`, with an engine that only holds the tensors. `torch.save, halves` "
    "writes a file a rank, which only the same number of ranks can read; for `rank 0 all` the whole states lie on rank "
    "0 already, and no gathering is counted. Ours hashes what it writes (xxh3), `torch.save` and DCP have the CRC-32 "
    "of their zip files. DCP and ours fsync by default and `torch.save` does not; each is shown with and without, and "
    "set against ours with the same promise. Ours without fsync exists in the benchmark only."
)
RULES = (
    "Sides run in turn, each round beginning with another one; the tables have medians. Seconds are those of the "
    "slower rank. Before each measurement the folder is removed and everything that waits for the disk is written. "
    "Cached: the files were read once before. Not cached: their pages were dropped, though a virtual disk may have a "
    "cache of its own. A load ends with the values in the tensors of the training. Processor seconds are those of "
    "both ranks, without what the kernel does for them in its own threads."
)
POSING = (
    "One GPU poses as rank 0, through the worker's own path; it saves its share to a local disk and reads it back. "
    "Nobody else writes to that disk, so a real machine with as many ranks has less of it for each; and whether pages "
    "were really dropped before a load that is not cached depends on that machine. "
    "*Blocked* is until training goes on; *slower steps* is what the steps beside it took more than usual, in seconds. "
    "Planned is by the footprint as it is now. The buffer of the ZeRO-3 run was made with its first save and was not "
    "registered with the GPU; what that cost made the worker take it early and register it, as in the FSDP2 run, whose "
    "figures come from two calls."
)


def page(cpu_rows: list[Row], gpu_rows: list[Row]) -> str:
    """The rows as a page: what was measured, and nothing else."""
    parts = [
        "# What a checkpoint costs",
        "[中文](zh/checkpoint-speed.md)",
        INTRODUCTION,
        "## Two ranks, no GPU",
        SIDES,
        RULES,
    ]
    for row in cpu_rows:
        parts += [_said(row), cpu_tables(row)]
    measured = [row for row in gpu_rows if "error" not in row]
    if measured:
        parts += ["## One GPU as one rank of many", POSING, gpu_tables(measured)]
    return "\n\n".join(parts) + "\n"


def _said(row: Row) -> str:
    before, after = row["load"]
    busy = (
        f"The machine was not idle: its load was {before} before the ranks began and {after} when they ended. So "
        "seconds differ much from round to round (the rows have all of them), and processor seconds less."
    )
    return (
        f"{row['bytes'] / 1e9:.2f} GB, {row['ranks']} ranks, {row['rounds']} rounds, {row['cores']} cores, torch "
        f"{row['versions']['torch']}.{' ' + busy if before > 1 else ''}"
    )


def gpu_tables(rows: list[Row]) -> str:
    seconds = [
        "| run | share, GB | step, s | buffer made, s | slower steps | sync save, s | blocked, s, first and second "
        "| slower steps | written, s |"
    ]
    copies = ["| run | copy | made ready, s | s, first, second, third |", "|---|---|---|---|"]
    memory = [
        "| run | peak of a step, GiB | of a save, GiB | planned for a save, GiB | save over rest, MiB "
        "| host beyond the buffer, sync and background, MiB |",
        "|---|---|---|---|---|---|",
    ]
    loads = ["| run | load, s, not cached | cached | GPU over rest, MiB | host, MiB |", "|---|---|---|---|---|"]
    seconds.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        name, sync, behind, load = row["id"].replace("_", " "), row["sync"], row["behind"], row["loads"]
        seconds.append(
            f"| {name} | {row['share_bytes'] / 1e9:.2f} | {row['step_s']:.3f} | {_made(row)} | {sync['seconds']:.2f} "
            f"| {_each(behind, 'blocked_s')} | {_each(behind, 'slower_s')} | {_each(behind, 'written_s')} |"
        )
        for kind, taken in row.get("stagings", {}).items():
            took = ", ".join(f"{each:.2f}" for each in taken["seconds"])
            copies.append(f"| {name} | {kind} | {taken['ready_s']:.2f} | {took} |")
        host = [sync["host_grown_bytes"], *(beyond_buffer(behind))]
        memory.append(
            f"| {name} | {_gib(row['step']['gpu_peak_bytes'])} | {_gib(sync['gpu_peak_bytes'])} "
            f"| {_gib(row['predicted_save_bytes'])} | {_mib(sync['gpu_over_rest_bytes'])} "
            f"| {', '.join(map(_mib, host))} |"
        )
        loads.append(
            f"| {name} | {load['cold']['seconds']:.2f} | {load['warm']['seconds']:.2f} "
            f"| {_mib(load['cold']['gpu_over_rest_bytes'])} | {_mib(load['cold']['host_grown_bytes'])} |"
        )
    return "\n\n".join("\n".join(lines) for lines in (seconds, copies, memory, loads))


def beyond_buffer(behind: list[Row]) -> list[int]:
    """The buffer comes with the first save in the background, and stays."""
    first, *later = behind
    made = first["staging_bytes"] if first["host_grown_bytes"] > first["staging_bytes"] else 0  # else before the save
    return [first["host_grown_bytes"] - made, *(each["host_grown_bytes"] for each in later)]


def _made(row: Row) -> str:
    """How long the buffer took beside the first steps, and how much slower these were."""
    if "preparing" not in row:
        return "with the first save | -"
    return f"{row['preparing']['seconds']:.2f} | {row['preparing']['slower_s']:.2f}"


def _each(rows: list[Row], key: str) -> str:
    return ", ".join(f"{row[key]:.2f}" for row in rows)


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / GIB:.2f}"


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"


if __name__ == "__main__":
    main()
