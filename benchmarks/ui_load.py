"""Ten readers of one run against the same training without readers.

python benchmarks/ui_load.py [PAIRS]

One training on this machine's CPU, one `tightfit ui`, and ten readers that come and go in turns: so both kinds of
seconds belong to the same processes, and whatever else the machine does falls on both alike. Of each turn the first
seconds are left out, in which readers are connected, or the page's own reader still lingers. The readers take what is
streamed and throw it away: what a browser does with it is not in it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

READERS = 10
WITH_S, WITHOUT_S = 12.0, 18.0
SETTLE_WITH_S, SETTLE_WITHOUT_S = 2.0, 10.0
TRAIN = (
    "train", "--model", "tiny_mamba", "--data", "shipped:text", "--seq", "64", "--precision", "fp32",
    "--save-every", "100000", "--max-steps", "100000", "--output", "runs/first",
)  # fmt: skip


def read(link: str, leave: threading.Event, taken: list[int]) -> None:
    """One open page."""
    place = urlsplit(link)
    cookie = f"tightfit_{place.port}={place.query.removeprefix('token=')}"
    ask = f"GET /runs/stream?run=0/first HTTP/1.1\r\nHost: 127.0.0.1:{place.port}\r\nCookie: {cookie}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", place.port or 0)) as made:
        made.sendall(ask.encode())
        made.settimeout(0.2)
        while not leave.is_set():
            try:
                data = made.recv(65536)
            except TimeoutError:
                continue
            if not data:
                break
            taken[0] += len(data)


def turns(link: str, pairs: int) -> tuple[list[tuple[float, float, bool]], int]:
    """When it was read and when not: (from, to, whether), and how many bytes the readers got."""
    found, taken = [], [0]
    for number in range(pairs):
        leave = threading.Event()
        readers = [threading.Thread(target=read, args=(link, leave, taken)) for _ in range(READERS)]
        for reader in readers:
            reader.start()
        time.sleep(SETTLE_WITH_S)
        began = time.time()
        time.sleep(WITH_S - SETTLE_WITH_S)
        found.append((began, time.time(), True))
        leave.set()
        for reader in readers:
            reader.join()
        time.sleep(SETTLE_WITHOUT_S)
        began = time.time()
        time.sleep(WITHOUT_S - SETTLE_WITHOUT_S)
        found.append((began, time.time(), False))
        print(f"pair {number + 1} of {pairs}", flush=True)
    return found, taken[0]


def steps_of(events: Path) -> list[tuple[float, float]]:
    """When each step ended, and how long it took."""
    told = (json.loads(line) for line in events.read_text().splitlines() if line.endswith("}"))
    return [(each["at"], each["step_s"]) for each in told if each["event"] == "step"]


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "runs").mkdir()
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        tightfit = [sys.executable, "-m", "tightfit"]
        with (work / "out").open("wb") as out:
            training = subprocess.Popen([*tightfit, *TRAIN], stdout=out, stderr=out, cwd=work, env=env)
        page = subprocess.Popen(
            [*tightfit, "ui", "--no-open", "--root", "runs"], stdout=subprocess.PIPE, text=True, cwd=work, env=env
        )
        try:
            assert page.stdout is not None
            found = re.search(r"http://\S+", page.stdout.readline())
            assert found
            events = work / "runs" / "first" / "events.jsonl"
            while not events.exists() or len(steps_of(events)) < 50:
                assert training.poll() is None, (work / "out").read_text()
                time.sleep(0.5)
            spans, taken = turns(found[0], pairs)
            steps = steps_of(events)
        finally:
            page.terminate()
            page.wait()
            training.terminate()
            training.wait()
    both = {}
    for read_then in (True, False):
        own = [(start, stop) for start, stop, whether in spans if whether is read_then]
        both[read_then] = [took for at, took in steps if any(start < at - took and at < stop for start, stop in own)]
        name = f"{READERS} readers" if read_then else "no reader"
        print(f"{name}: {1000 * median(both[read_then]):.1f} ms a step in the median of {len(both[read_then])}")
    ratio = median(both[True]) / median(both[False])
    halves = []
    for first in range(0, len(spans) - 1, 2):
        pair = [
            median([took for at, took in steps if start < at - took and at < stop])
            for start, stop, _ in spans[first : first + 2]
        ]
        halves.append(pair[0] / pair[1])
    print(f"ratio {ratio:.3f}; by pair {', '.join(f'{each:.3f}' for each in halves)}; readers got {taken:,} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
