"""A worker that trains nothing: one to be watched, and one that outlives its desk.

python lingering.py MODE WORKER_FILE [OPTIONS]
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path

from tightfit.runs.processes import PARENT_FD, end_with_parent

MODE, RANK = sys.argv[1], int(os.environ["RANK"])
FOLDER = Path(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))["saving"]["folder"])


def write(event: str, **fields: object) -> None:
    with (FOLDER / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "at": time.time(), **fields}) + "\n")


def step(number: int, steps: int, **more: object) -> None:
    memory = {"now_bytes": None, "peak_bytes": None, "host_bytes": 2**29}
    loss = 5.0 - number / 50
    write("step", step=number, steps=steps, loss=loss, tokens_per_s=1234.0, step_s=0.1, memory=memory, **more)


def watched() -> None:
    """Steps until a file named `finish` is there."""
    if RANK == 0:
        write("start")
        write("warning", text="something to know")
        number = 0
        while not (FOLDER / "finish").exists():
            number += 1
            step(number, 5000)
            time.sleep(0.05)
        (FOLDER / "model").mkdir()
        write("end", reason="finished", summary={})
        return
    while not (FOLDER / "finish").exists():
        time.sleep(0.05)


def failing() -> None:
    """Runs out of memory."""
    if RANK == 0:
        step(1, 9)
        step(2, 9)
        sys.stdout.write(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "23.64 GiB of which 1.10 GiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and "
            "100.00 MiB is reserved by PyTorch but unallocated.\n"
        )
        sys.stdout.flush()
        os._exit(1)
    time.sleep(600)


def survivor() -> None:
    """Does not notice that its desk has gone, and holds shared memory."""
    name = f"/dev/shm/torch_{os.getpid()}_{RANK}"  # noqa: S108
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, 4096)
    held = mmap.mmap(file, 4096)
    held[0] = 1
    os.close(file)
    if RANK == 0:
        step(1, 9)
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    if MODE != "survivor":
        end_with_parent(int(os.environ[PARENT_FD]))
    globals()[MODE]()
