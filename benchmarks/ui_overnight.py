"""A page left open over night, in minutes: does the browser's page, or the server, grow or stall?

python benchmarks/ui_overnight.py [MINUTES] [--rate EVENTS_A_SECOND] [--times N]

A process writes a run's events as fast as `--rate` says, with warnings, a log and attempts among them. `tightfit ui`
looks N times as often as usual, so that a night's messages come in minutes. A real browser has the run and the list of
runs open, through a line that can be cut: from time to time it is cut, goes dead without a word (as when a laptop
sleeps), or the page is frozen as browsers do to tabs that nobody looks at. Every figure of the browser is taken after
its garbage was collected. The table at the end is the one of docs/ui.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ui_load import credentials

CHROMIUM = Path("/usr/bin/chromium")
STEPS = 50_000_000
TURNS_S = 0.05
"""The writer writes so often."""
NIGHT_S = 8 * 3600


# --- the run --------------------------------------------------------------------------------------


def write(run: Path, rate: float) -> None:
    """Let a run grow until this process is ended."""
    began, step = time.monotonic(), 0
    (run / "logs").mkdir(parents=True, exist_ok=True)
    record = {
        "command": ["tightfit", "train"], "pid": os.getpid(), "host": socket.gethostname(), "ended": None,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"), "state": "running", "exit_code": None,
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(record))
    with (run / "events.jsonl").open("a") as events, (run / "logs" / "rank-0.log").open("a") as log:
        while True:
            due = int((time.monotonic() - began) * rate)
            for number in range(step + 1, due + 1):
                events.write(step_line(number))
                if number % 100 == 0:
                    told = {"event": "warning", "at": time.time(), "text": f"the loss at step {number} is a spike"}
                    events.write(json.dumps(told) + "\n")
                    log.write(f"step {number}: {'gradient norm 1.0 ' * 8}\n")
            step = max(step, due)
            events.flush()
            log.flush()
            time.sleep(TURNS_S)


def step_line(step: int) -> str:
    """As the worker writes it."""
    loss = 1.5 + 8 / (1 + step / 1000) + (step % 97) / 970
    held = 2**33 + step % 4096 * 2**12
    return (
        f'{{"event": "step", "at": {time.time():.3f}, "step": {step}, "steps": {STEPS}, "loss": {loss:.6f}, '
        f'"grad_norm": null, "learning_rate": 0.001, "tokens_per_s": {90_000 + step % 997:.1f}, "step_s": 0.5, '
        f'"seconds_left": {STEPS - step}.0, "epoch": 0.1, "memory": {{"now_bytes": {held}, "peak_bytes": {2**34}, '
        f'"host_bytes": {2**31 + step % 512 * 2**12}}}, "loss_scale": null, "skipped": false}}\n'
    )


def written_step(run: Path) -> int:
    """The last step in the file."""
    with (run / "events.jsonl").open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        found = re.findall(rb'"step": (\d+), "steps"', file.read())
    return int(found[-1]) if found else 0


@contextmanager
def growing(run: Path, rate: float) -> Iterator[subprocess.Popen[bytes]]:
    """A run that grows, from another process."""
    run.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, __file__, "--write", str(run), "--rate", str(rate)])
    try:
        until = time.monotonic() + 20
        while not (run / "events.jsonl").exists() or not written_step(run):
            assert process.poll() is None
            assert time.monotonic() < until, "nothing was written"
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


# --- the server, and a line to it that can be cut -------------------------------------------------


@contextmanager
def serving(root: Path, times: float = 1.0, port: int | None = None) -> Iterator[tuple[str, int]]:
    """`tightfit ui`, which looks so many times as often as usual: the link, and the process's number."""
    words = ["ui", "--no-open", "--root", str(root), *(["--port", str(port)] if port else [])]
    script = (
        f"import sys\nfrom tightfit.web import hub\nhub.EVERY_S /= {times}\n"
        f"from tightfit.cli import main\nsys.exit(main({words!r}))\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            yield found[0], process.pid
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


class Wire:
    """Passes on what goes between a browser and the server, until it is cut or dies."""

    def __init__(self, port: int) -> None:
        self.to, self._open, self._dead = port, set[socket.socket](), False
        self._ear = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._ear.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._carry, args=(self._ear.accept()[0],), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self.to), timeout=5) as far:
            pair = {near: far, far: near}
            self._open |= set(pair)
            try:
                while not self._dead:
                    for each in select.select(list(pair), [], [], 0.2)[0]:
                        data = each.recv(65536)
                        if not data:
                            return
                        pair[each].sendall(data)
                while near.recv(65536):  # silent, until the browser gives it up
                    pass
            finally:
                self._open -= set(pair)

    def cut(self) -> None:
        """Every connection ends."""
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def die(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        self._dead = True

    def revive(self) -> None:
        """For new connections; the old ones stay dead."""
        self._dead = False

    def close(self) -> None:
        self._ear.close()
        self.cut()


# --- the browser ----------------------------------------------------------------------------------


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser's window, of a usual size."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            yield browser.new_context(locale="en-GB", viewport={"width": 1200, "height": 900})
        finally:
            browser.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is held at one moment."""

    heap_bytes: int
    nodes: int
    listeners: int
    documents: int
    server_bytes: int
    server_files: int
    server_threads: int
    behind_steps: int
    """By how much the page was behind the file."""


def figures(page: Any, server: int, run: Path) -> Figures:
    behind = max(0, written_step(run) - shown_step(page))
    tools = page.context.new_cdp_session(page)
    heaps, counts = [], []
    for _ in range(8):  # what one collection lets go of, the next one frees; meanwhile the page works on
        page.wait_for_timeout(50)
        tools.send("HeapProfiler.collectGarbage")
        heaps.append(int(tools.send("Runtime.getHeapUsage")["usedSize"]))
        counts.append(tools.send("Memory.getDOMCounters"))
    tools.detach()
    status = Path(f"/proc/{server}/status").read_text()
    found = {name: int(number) for name, number in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
    return Figures(
        heap_bytes=min(heaps),
        nodes=min(each["nodes"] for each in counts),
        listeners=min(each["jsEventListeners"] for each in counts),
        documents=min(each["documents"] for each in counts),
        server_bytes=found["VmRSS"] * 1024,
        server_files=len(os.listdir(f"/proc/{server}/fd")),
        server_threads=found["Threads"],
        behind_steps=behind,
    )


def shown_step(page: Any) -> int:
    text = page.text_content("#f-step").partition("/")[0].strip().replace(",", "")
    return int(text) if text.isdigit() else 0


def goes_on(page: Any, patience_s: float) -> float:
    """Seconds until the step on the page moves again."""
    began, before = time.monotonic(), shown_step(page)
    while shown_step(page) == before:
        assert time.monotonic() - began < patience_s, f"the page stalls: {page.text_content('#link')}"
        page.wait_for_timeout(100)
    return time.monotonic() - began


def frozen(page: Any, seconds: float) -> None:
    """As browsers do to a tab that nobody looks at."""
    tools = page.context.new_cdp_session(page)
    tools.send("Page.setWebLifecycleState", {"state": "frozen"})
    time.sleep(seconds)
    tools.send("Page.setWebLifecycleState", {"state": "active"})
    tools.detach()


# --- the night ------------------------------------------------------------------------------------


def through(link: str, wire: Wire, path: str) -> str:
    return f"http://127.0.0.1:{wire.port}{path}{'&' if '?' in path else '?'}{urlsplit(link).query}"


def messages_sent(link: str) -> int:
    """How many messages about the run the server has made, one a second usually: it numbers them."""
    place = urlsplit(link)
    made = http.client.HTTPConnection("127.0.0.1", place.port, timeout=20)
    made.request("GET", "/runs/stream?run=0/first", headers=credentials(link))
    answer = made.getresponse()
    while not (line := answer.readline()).startswith(b"id: "):
        assert line, "the stream has ended"
    made.close()
    return int(line.rpartition(b"-")[2])


def disturb(page: Any, wire: Wire, turn: int) -> str:
    """One of the things that happen at night, and how long the page took to go on."""
    kind = ("cut", "dead", "frozen")[turn % 3]
    if kind == "cut":
        wire.cut()
    elif kind == "dead":
        wire.die()
        page.wait_for_timeout(10_000)
        wire.revive()
    else:
        frozen(page, 10)
    return f"{kind}, went on after {goes_on(page, 90):.1f} s"


def night(minutes: float, rate: float, times: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        run = root / "first"
        with growing(run, rate), serving(root, times) as (link, server), browsing() as window:
            wire = Wire(urlsplit(link).port or 0)
            page, beside = window.new_page(), window.new_page()
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(through(link, wire, "/runs/view?run=0/first"))
            beside.goto(through(link, wire, "/runs"))
            for name in ("loss", "pace", "memory"):
                page.locator(f"details:has(#table-{name}) summary").click()
            page.wait_for_timeout(15_000)
            began, turn = time.monotonic(), 0
            every = max(60.0, minutes * 60 / 15)
            print(HEADS, flush=True)
            print(row(0.0, figures(page, server, run), ""), flush=True)
            while time.monotonic() - began < 60 * minutes:
                page.wait_for_timeout(1000 * every / 2)
                said = disturb(page, wire, turn)
                turn += 1
                page.wait_for_timeout(1000 * every / 2)
                now = (time.monotonic() - began) / 60
                print(row(now, figures(page, server, run), said), flush=True)
            assert errors == [], errors
            sent = messages_sent(link)
            nights = f"as many as in {sent / NIGHT_S:.1f} nights of {NIGHT_S // 3600} hours"
            print(f"{written_step(run):,} events, {sent:,} messages since somebody looks: {nights}")
            wire.close()


HEADS = (
    "| minute | heap, MiB | nodes | listeners | server, MiB | its files | its threads | steps behind | before that |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def row(minute: float, now: Figures, said: str) -> str:
    cells = (
        f"{minute:.0f}", f"{now.heap_bytes / 2**20:.1f}", f"{now.nodes:,}", now.listeners,
        f"{now.server_bytes / 2**20:.0f}", now.server_files, now.server_threads, f"{now.behind_steps:,}", said,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="A page left open over night, in minutes.")
    parser.add_argument("minutes", type=float, nargs="?", default=20.0)
    parser.add_argument("--rate", type=float, default=1000.0, help="events a second")
    parser.add_argument("--times", type=float, default=20.0, help="so many times as often as usual the server looks")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write is not None:
        write(given.write, given.rate)
    else:
        night(given.minutes, given.rate, given.times)


if __name__ == "__main__":
    main()
