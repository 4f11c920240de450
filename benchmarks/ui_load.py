"""Ten readers of one run against the same training without readers.

python benchmarks/ui_load.py [BLOCKS]

One training on this machine's CPU, one `tightfit ui`, and three kinds of turns: ten readers, none, and a sham, which is
none as well and shows how much two equal turns differ on this machine at this time. A block has one turn of each, and
their order changes from block to block, so that a machine that gets busier does not count for or against the readers.
Of each turn the first seconds are left out: readers are connected, or the page's own reader still lingers. The readers
wait for what is streamed and throw it away: what a browser does with it is not in it.

The ratio means something where that of the sham is near 1. The processor time of the page is the other figure.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

READERS = 10
SETTLE_S, TURN_S = 10.0, 10.0
ORDERS = (("read", "none", "sham"), ("sham", "none", "read"), ("none", "read", "sham"), ("sham", "read", "none"))
TRAIN = (
    "train", "--model", "tiny_mamba", "--data", "shipped:text", "--seq", "64", "--precision", "fp32",
    "--save-every", "100000", "--max-steps", "100000", "--output", "runs/first",
)  # fmt: skip


def credentials(link: str) -> dict[str, str]:
    """The header that a browser sends which has opened the link."""
    token = urlsplit(link).query.removeprefix("token=")
    return {"Authorization": "Basic " + base64.b64encode(f"tightfit:{token}".encode()).decode()}


def reader(link: str) -> socket.socket:
    """One open page."""
    place = urlsplit(link)
    said = "".join(f"{name}: {value}\r\n" for name, value in credentials(link).items())
    ask = f"GET /runs/stream?run=0/first HTTP/1.1\r\nHost: 127.0.0.1:{place.port}\r\n{said}\r\n"
    made = socket.create_connection(("127.0.0.1", place.port or 0))
    made.sendall(ask.encode())
    return made


def drain(made: socket.socket) -> int:
    """Read until it is closed; how many bytes came."""
    came = 0
    with suppress(OSError):
        while part := made.recv(65536):
            came += len(part)
    return came


def spent_s(pid: int) -> float:
    """Processor time of a process, and of what it has started and seen end."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def turn(kind: str, link: str, page: int) -> tuple[float, float, float]:
    """From when to when it counted, and the page's share of a core in that time."""
    open_pages = [reader(link) for _ in range(READERS if kind == "read" else 0)]
    threads = [threading.Thread(target=drain, args=(made,)) for made in open_pages]
    for thread in threads:
        thread.start()
    time.sleep(SETTLE_S)
    began, before = time.time(), spent_s(page)
    time.sleep(TURN_S)
    ended, spent = time.time(), spent_s(page) - before
    for made in open_pages:
        made.shutdown(socket.SHUT_RDWR)
        made.close()
    for thread in threads:
        thread.join()
    return began, ended, spent / (ended - began)


def steps_of(events: Path) -> list[tuple[float, float]]:
    """When each step ended, and how long it took."""
    told = (json.loads(line) for line in events.read_text().splitlines() if line.endswith("}"))
    return [(each["at"], each["step_s"]) for each in told if each["event"] == "step"]


def main(count: int) -> None:
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
            blocks = []
            for number in range(count):
                order = ORDERS[number % len(ORDERS)]
                blocks.append({kind: turn(kind, found[0], page.pid) for kind in order})
                print(f"block {number + 1} of {count}", flush=True)
            steps = steps_of(events)
        finally:
            page.terminate()
            page.wait()
            training.terminate()
            training.wait()
    took = [{kind: within(steps, *span[:2]) for kind, span in block.items()} for block in blocks]
    for kind in ("read", "sham", "none"):
        every = [each for block in took for each in block[kind]]
        share = median(block[kind][2] for block in blocks)
        print(
            f"{kind}: {1000 * median(every):.1f} ms a step, median of {len(every)}; page {100 * share:.2f} % of a core"
        )
    for kind in ("read", "sham"):
        ratios = [median(block[kind]) / median(block["none"]) for block in took]
        print(f"{kind} / none by block: {', '.join(f'{each:.3f}' for each in ratios)}; median {median(ratios):.3f}")


def within(steps: list[tuple[float, float]], start: float, stop: float) -> list[float]:
    return [took for at, took in steps if start < at - took and at < stop]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
