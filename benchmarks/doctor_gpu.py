"""`doctor`, `watch`, `clean` and the probes on a machine with a GPU: what they say, as JSON lines.

python benchmarks/doctor_gpu.py [STEPS]

One line each: what `doctor` and `doctor JOB` find and how long they take; the probes' total and free memory against
what torch says of the same card; `watch --once` as JSON; a short training with `watch` beside it on a terminal whose
screen is read; the events' allocator retries; `clean --dry-run`. Every part has a limit of its own, all of them
together stay under three minutes, and a part that fails says so in its line instead of ending the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from terminal import Terminal

TIGHTFIT = [sys.executable, "-m", "tightfit"]
STEP = re.compile(r"\bstep\s+\d")
JOB = "model: tiny_mamba\ndata: {path: shipped:text}\nsequence: 256\neffective_batch: 8\nmax_steps: 20\n"
RUN_S = 45.0
LOOK_S = 30.0
"""How long is waited for the run's first sign, and again for its first steps on the screen."""
CHECK = """
import json, torch
from tightfit.hardware.probes import probe_cards
held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
free, total = torch.cuda.mem_get_info(0)
card = probe_cards().cards[0]
print(json.dumps({"torch_total": total, "torch_free": free, "probe_total": card.total_bytes,
                  "probe_free": card.free_bytes, "name": card.name, "arch": card.arch,
                  "processes": None if card.processes is None else len(card.processes)}))
"""


def told(part: str, **values: Any) -> None:
    print(json.dumps({"part": part, **values}), flush=True)


def tried(part: str, work: Callable[[], dict[str, Any]]) -> None:
    began = time.monotonic()
    try:
        values = work()
    except Exception as error:  # a part that fails is news, and no reason to lose the others
        values = {"failed": f"{type(error).__name__}: {error}"[:400]}
    told(part, seconds=round(time.monotonic() - began, 2), **values)


def asked(words: list[str], limit_s: float, folder: str) -> tuple[int, Any]:
    """How a verb ended, and its JSON."""
    done = subprocess.run([*TIGHTFIT, *words], capture_output=True, text=True, timeout=limit_s, cwd=folder, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr[-400:]


def doctor(words: list[str], folder: str) -> dict[str, Any]:
    code, tree = asked(["doctor", *words, "--json"], 40, folder)
    rows = tree.get("rows", []) if isinstance(tree, dict) else []
    lights = [row["light"] for row in rows]
    return {
        "exit_code": code,
        "lights": {light: lights.count(light) for light in sorted(set(lights))},
        "not_green": [{key: row.get(key) for key in ("id", "light", "what", "fix")} for row in rows
                      if row["light"] in ("yellow", "red")],
        "gpu_rows": [row["what"] for row in rows if str(row["id"]).startswith("gpu")],
        **({} if rows else {"answer": tree}),
    }  # fmt: skip


def probes(folder: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=40, cwd=folder, check=False
    )
    if done.returncode:
        return {"failed": done.stderr[-400:]}
    seen: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**seen, "free_differs_mib": (seen["probe_free"] - seen["torch_free"]) // 2**20}


def watch_once(folder: str) -> dict[str, Any]:
    code, tree = asked(["watch", "--once", "--json"], 20, folder)
    return {"exit_code": code, "look": tree}


def training(folder: str, steps: int) -> dict[str, Any]:
    """A run with `watch` beside it: the screen while it trains, and what the events say of the allocator."""
    run = Path(folder, "run")
    words = ["train", "--model", "tiny_mamba", "--data", "shipped:text", "--seq", "256", "--effective-batch", "8"]
    with Path(folder, "train.log").open("wb") as log:
        process = subprocess.Popen(
            [*TIGHTFIT, *words, "--max-steps", str(steps), "--output", "run"],
            stdout=log, stderr=log, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            screens = watched(run, folder)
            process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            screens["stopped_after_s"] = RUN_S
        finally:
            ended(process)
    events = run / "events.jsonl"
    text = events.read_text() if events.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    made = [line for line in lines if line.get("event") == "step"]
    return {
        "exit_code": process.returncode,
        "steps": len(made),
        "alloc_retries": made[-1].get("alloc_retries") if made else None,
        "memory": made[-1].get("memory") if made else None,
        "log_tail": Path(folder, "train.log").read_text(errors="replace")[-400:] if not made else "",
        **screens,
    }


def ended(process: subprocess.Popen[bytes]) -> None:
    """As a user would end it, so that its ranks leave too; what stays is of its own session, and ended with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(5)


def watched(run: Path, folder: str) -> dict[str, Any]:
    """The screen when the first steps stand on it, and what the program has cost until then."""
    until = time.monotonic() + LOOK_S
    while not (run / "events.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.2)
    until = time.monotonic() + LOOK_S
    terminal = Terminal([*TIGHTFIT, "watch", "run"], dict(os.environ), folder, columns=120)
    try:
        while time.monotonic() < until and not STEP.search(terminal.screen.text):
            terminal.read(0.5)
        for _ in range(6):
            terminal.read(0.5)
        text = terminal.screen.text
    finally:
        terminal.process.kill()
        terminal.close()
    shows = {word: word in text for word in ("GPU 0", "memory under 90 %", "loss falling", "no OOM", "step")}
    return {"shows": shows, "screen": text.splitlines()[-40:]}


def clean(folder: str) -> dict[str, Any]:
    code, tree = asked(["clean", "--dry-run", "--json"], 20, folder)
    return {"exit_code": code, "found": tree}


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yaml").write_text(JOB)
        tried("doctor", lambda: doctor([], folder))
        tried("doctor job", lambda: doctor(["job.yaml"], folder))
        tried("probes against torch", lambda: probes(folder))
        tried("watch once", lambda: watch_once(folder))
        tried("training with watch", lambda: training(folder, steps))
        tried("clean", lambda: clean(folder))
    told("all", seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
