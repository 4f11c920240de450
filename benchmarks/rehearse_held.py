"""Rehearse plans, several at once on one GPU, and say who held the memory when it was highest.

    python benchmarks/rehearse_held.py PLAN PLAN … --out rows.jsonl [--at-once 4] [--limit-s 240]

Each is a folder that `tightfit plan --write` made. A row has the figures of `tightfit rehearse --json`, and the holders
of the start and of the largest batch. Several at once are told apart by their caps and have caches of their own; their
times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

HELD = "TIGHTFIT_HELD"
"""Where the worker leaves its holders."""
LATER = "TIGHTFIT_HELD_LATER"
"""1: those of the steps after the trial as well."""


def main() -> None:
    if sys.argv[1] == "--worker":
        worker(sys.argv[2:])
    if sys.argv[1] == "--one":
        sys.exit(one(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--limit-s", type=int, default=240)
    parser.add_argument("--until", type=float, default=float("inf"), help="a time after which nothing more is begun")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda plan: rehearsed(plan, args), args.plans))


def rehearsed(plan: Path, args: argparse.Namespace) -> None:
    """One row more, as soon as it is there."""
    if time.time() > args.until:
        print(plan.name, "was not begun", flush=True)
        return
    began = time.monotonic()
    cache = Path(f"/tmp/held/{plan.parent.name}-{plan.name}")
    cache.mkdir(parents=True, exist_ok=True)
    held = cache / "held.json"
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", "/tmp/held/extensions"),
        HELD: str(held),
    }
    words = ["--from-plan", str(plan), "--steps", "2", "--json"]
    if not json.loads((plan / "worker.json").read_text())["data"]["packing"]:  # random samples are never packed
        words.append("--full-length")
    row: dict[str, Any] = {"plan": plan.name, "command": f"tightfit rehearse {' '.join(words)}"}
    words = [sys.executable, __file__, "--one", *words]
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=args.limit_s, env=env)
        row |= (
            json.loads(done.stdout) if done.stdout.startswith("{") else {"error": (done.stdout + done.stderr)[-2500:]}
        )
    except subprocess.TimeoutExpired as error:
        row["error"] = f"timed out: {error.stdout!r} {error.stderr!r}"[-1500:]
    if held.exists():
        row["held"] = json.loads(held.read_text())
    row["wall_s"] = round(time.monotonic() - began, 1)
    figures = {name: off(each) for name, each in row.get("figures", {}).items() if name in ("init", "peak")}
    with args.out.open("a") as out:
        out.write(json.dumps(row) + "\n")
    print(row["plan"], row.get("verdict"), (row.get("error") or "")[-300:], figures, row["wall_s"], flush=True)


def off(figure: dict[str, Any]) -> str:
    predicted, measured = figure["predicted"], figure["measured"]
    return f"{measured / 2**30:.3f} -> {predicted / 2**30:.3f} ({predicted / measured - 1:+.2%})" if measured else "-"


def one(argv: list[str]) -> int:
    from tightfit.cli import rehearse as cli_rehearse
    from tightfit.runs.launch import worker_command

    ours = (sys.executable, __file__, "--worker")
    cli_rehearse.worker_command = lambda folder, options: worker_command(folder, options, ours)
    return cli_rehearse.rehearse(argv)


def worker(argv: list[str]) -> None:
    """Our worker, with the allocator's history written down up to the second pass of the largest batch."""
    import blame

    blame.start()
    from tightfit.train import probe
    from tightfit.train.__main__ import main as work

    began_at: list[int] = []
    reached, probed = probe.Milestones.measure, probe.probe

    def first(*words: Any, **named: Any) -> Any:
        began_at.append(len(blame.history()))
        return probed(*words, **named)

    def noting(self: Any, milestone: Any) -> None:
        reached(self, milestone)
        if milestone == "step":
            events = blame.history()
            found: dict[str, Any] = {name: metadata.version(name) for name in ("torch", "transformers")}
            found |= {"init": blame.holders(events, 0, began_at[0]), "peak": blame.holders(events, began_at[0])}
            Path(os.environ[HELD]).write_text(json.dumps(found))
            if os.environ.get(LATER) != "1":
                import torch

                torch.cuda.memory._record_memory_history(enabled=None)

    def later() -> None:
        events, held = blame.history(), Path(os.environ[HELD])
        held.write_text(json.dumps(json.loads(held.read_text()) | {"later": blame.holders(events, began_at[0])}))

    probe.Milestones.measure = noting
    probe.probe = first
    if os.environ.get(LATER) == "1":
        from tightfit.train import worker as ours

        said = ours.Worker._say_end if hasattr(ours, "Worker") else None
        if said is not None:
            ours.Worker._say_end = lambda *words: (later(), said(*words))[1]
    work(argv)


if __name__ == "__main__":
    main()
