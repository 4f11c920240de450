"""A worker that trains nothing and can be asked to stop as a real one is, or behaves badly when it is.

python stoppable.py MODE FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from tightfit.runs.processes import PARENT_FD, end_with_parent
from tightfit.train.stop import Stop, leave

MODE, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
STOPPED = 4


def write(event: str, **fields: object) -> None:
    with (FOLDER / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "at": time.time(), **fields}) + "\n")


def ready() -> None:
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))


def noted(code: int) -> None:
    """Leave by ourselves, before anybody has to kill us."""
    (FOLDER / f"left-{RANK}").write_text(str(code))
    leave(code)


def training() -> Stop:
    """In the loop, after its first step."""
    stop = Stop(noted).install()
    stop.arm()
    if RANK == 0:
        write("step", step=1, steps=9, loss=1.0)
    ready()
    return stop


def stuck() -> None:
    """In a call that comes back to Python for no signal, as a collective without the others is."""
    reading, _ = os.pipe()
    os.read(reading, 1)


def until_asked(stop: Stop) -> None:
    while not stop.is_asked:
        time.sleep(0.01)


def saves(seconds: float = 0.0, code: int = STOPPED) -> None:
    stop = training()
    until_asked(stop)
    time.sleep(seconds)
    if RANK == 0:
        write("warning", text=f"saved after {stop.why}")
    stop.deaf()
    leave(code)


def saves_slowly() -> None:
    saves(1.0)


def finishes() -> None:
    saves(0.2, 0)


def starting() -> None:
    Stop(noted).install()
    ready()
    stuck()


def hangs() -> None:
    training()
    stuck()


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    stuck()


def one_starts() -> None:
    """Rank 1 has nothing to save yet; rank 0 waits for it in a collective, and complains."""
    if RANK == 1:
        starting()
    until_asked(training())
    time.sleep(0.1)
    fails("RuntimeError: Connection closed by peer [127.0.0.1]:2")


def one_fails() -> None:
    """Rank 1 cannot save; rank 0 waits for it."""
    stop = training()
    until_asked(stop)
    if RANK == 1:
        fails("RuntimeError: no such tensor")
    stuck()


def one_dies() -> None:
    """Unasked, while rank 0 trains."""
    if RANK == 1:
        while not (FOLDER / "pid-0").exists():
            time.sleep(0.01)
        fails("RuntimeError: no such tensor")
    hangs()


def out_of_time() -> None:
    training()
    leave(STOPPED)


def fails(text: str) -> None:
    folder = FOLDER / "errors"
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{RANK}.json").write_text(json.dumps({"kind": "bug", "text": text, "time": time.time()}))
    leave(1)


if __name__ == "__main__":
    end_with_parent(int(os.environ[PARENT_FD]))
    globals()[MODE]()
