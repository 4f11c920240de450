"""A worker that does no training: it writes what a worker writes, and behaves badly where it is told to.

python stand_in.py MODE worker.json [options]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tightfit.runs.processes import PARENT_FD, end_with_parent

MODE, RANK = sys.argv[1], int(os.environ["RANK"])
FOLDER = Path(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))["saving"]["folder"])


def write(event: str, **fields: object) -> None:
    with (FOLDER / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "at": time.time(), **fields}) + "\n")


def leave(kind: str, text: str, code: int) -> None:
    folder = FOLDER / "errors"
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{RANK}.json").write_text(json.dumps({"kind": kind, "text": text, "time": time.time()}))
    os._exit(code)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def hang() -> None:
    while True:
        time.sleep(0.05)


def steps(count: int) -> None:
    for step in range(1, count + 1):
        memory = {"now_bytes": 2**30, "peak_bytes": 3 * 2**30, "host_bytes": 2**29}
        write(
            "step",
            step=step,
            steps=count,
            loss=5.0 - step / 10,
            tokens_per_s=1000.0 + step,
            step_s=0.5,
            seconds_left=float(count - step),
            memory=memory,
            loss_scale=4096.0,
            skipped=False,
        )


def good() -> None:
    if RANK:
        return
    write("start")
    write("progress", what="data", done=1, total=2)
    write("progress", what="data", done=2, total=2)
    write("proof", name="ranks", ok=True, text="two ranks started by tightfit")
    write("proof", name="engine", ok=False, text="the engine is another")
    for milestone in ("init", "forward", "backward", "step"):
        write("memory", milestone=milestone, predicted_bytes=2**30, measured_bytes=2**30 + 2**28, ranks=[1, 2])
    write("probe", seconds=1.5, peak_bytes=2**31)
    steps(6)
    write("eval", step=6, loss=4.0, perplexity=54.6)
    write("warning", text="something to know")
    write("surprise", about="a newer worker")
    (FOLDER / "model").mkdir()
    (FOLDER / "model" / "config.json").write_text("{}")
    write("saved", folder=str(FOLDER / "model"), bytes=2)
    write("end", reason="finished", summary={"steps": 6, "more": None})


def torn() -> None:
    if RANK:
        return
    with (FOLDER / "events.jsonl").open("ab", buffering=0) as file:
        file.write(b'{"event": "step", "step": 1, "lo')
        time.sleep(0.2)
        file.write(b'ss": NaN, "new_key": [1]}\nnot json at all\n\xff\xfe\n[1, 2]\n{"event": 7}\n')
        file.write(b'{"event": "step", "step": "two"}\n{"event": "step", "step": 3, "loss": 1.5}')


def user() -> None:
    leave("user", "line 17 of data.jsonl is not JSON: mend it", 2)


def user_one() -> None:
    if RANK == 1:
        user()
    hang()


def user_echo() -> None:
    """Rank 1 fails; rank 0 has heard so from it and leaves first, without a word."""
    if RANK == 1:
        folder = FOLDER / "errors"
        folder.mkdir(exist_ok=True)
        record = {"kind": "user", "text": "the words of rank 1: mend it", "time": time.time()}
        (folder / "rank-1.json").write_text(json.dumps(record))
        time.sleep(0.5)
        os._exit(2)
    while not (FOLDER / "errors" / "rank-1.json").exists():
        time.sleep(0.01)
    os._exit(2)


def user_late() -> None:
    steps(2)
    user()


def die() -> None:
    if RANK == 1:
        say("Traceback (most recent call last):")
        say("RuntimeError: \x1b[31mno such tensor\x1b[0m")
        leave("bug", "RuntimeError: no such tensor", 1)
    hang()


def silent() -> None:
    if RANK == 1:
        say("the last thing that rank 1 said")
        os._exit(7)
    hang()


def killed() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    leave("bug", "RuntimeError: Connection closed by peer [127.0.0.1]:2", 1)


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (FOLDER / f"ready-{RANK}").touch()
    if RANK == 1:
        while not (FOLDER / "ready-0").exists():
            time.sleep(0.01)
        leave("bug", "gone", 1)
    hang()


def children() -> None:
    """A data loader that outlives its rank, unless somebody ends it."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-E", "-c", code])
    (FOLDER / f"child-{RANK}").write_text(str(child.pid))
    if RANK == 1:
        while not (FOLDER / "child-0").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        leave("bug", "gone", 1)
    hang()


def chatty() -> None:
    for _ in range(2000):
        say("x" * 2000)
    good()


def running() -> None:
    """Takes a step and stays."""
    if RANK == 0:
        steps(1)
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    hang()


def saved(step: int) -> None:
    from stored import store

    folder = store(FOLDER, step)
    write("checkpoint", step=step, folder=folder.name, bytes=2**30, seconds=9.0, blocked_s=0.5, background=True)


def resuming() -> None:
    """Goes on from the older of two checkpoints."""
    if RANK:
        return
    write("start")
    write("passed_over", folder="step-00000200", text="model.safetensors is missing")
    changed = ["2 ranks instead of 4"]
    write("resumed", step=100, folder="step-00000100", from_engine="zero2", from_world=4, changed=changed)
    write("step", step=101, loss=2.0)
    saved(102)
    write("checkpoint_failed", step=104, text="the disk is full")
    write("end", reason="finished", summary={})


def stopped() -> None:
    """Has saved what it has, and leaves as it was asked."""
    if RANK == 0:
        steps(2)
        saved(2)
    os._exit(4)


def failing() -> None:
    """Dies behind a checkpoint."""
    if RANK == 0:
        steps(2)
        saved(2)
        leave("bug", "RuntimeError: no such tensor", 1)
    hang()


def starting() -> None:
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    hang()


def options() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    more = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")
    told = {name: os.environ.get(name) for name in (*names, *more, "TOKENIZERS_PARALLELISM", "TIGHTFIT_LAUNCHER")}
    record = {"told": told, "arguments": sys.argv[3:], "cwd": str(Path.cwd())}
    while not (FOLDER / "run.json").exists():  # another node makes it
        time.sleep(0.02)
    (FOLDER / f"told-{RANK}.json").write_text(json.dumps(record))
    good()


if __name__ == "__main__":
    end_with_parent(int(os.environ[PARENT_FD]))
    globals()[MODE]()
