"""How soon the Plan view follows a slider: bars that are priced at once, and the exact answer.

    python benchmarks/slider.py [STOPS]

One `tightfit ui`, three questions that are often asked, and the slider of the sequence, which goes from stop to stop:

- bars: the ways that are shown, priced for the new stop.
- bars meanwhile: the same while the exact answer to the stop is searched for, which is what happens on the page.
- exact: every way is priced, at a stop that was never asked for.
- known: the same where the page has asked ahead, as it does for the next stops once a slider rests.
- let go: exact, after two other stops were asked for and given up a moment before.

Milliseconds as a reader of the page would wait for them, without drawing; the median of the stops and the worst. They
mean something on an idle machine. On any machine: the ratio to a fixed loop, which is timed in the same run.
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from urllib.parse import quote, urlsplit

from ui_load import credentials

QUESTIONS = {
    "8B LoRA, 1 x RTX 4090": "model=llama-3.1-8b&gpus=1&card=RTX4090&method=lora&host-ram=128GB",
    "7B full, 8 x RTX 4090": "model=qwen2.5-7b&gpus=8&card=RTX4090&host-ram=256GB",
    "32B LoRA, 4 x RTX 4090": "model=qwen2.5-32b&gpus=4&card=RTX4090&method=lora&host-ram=256GB",
}
STOPS = (1024, 1536, 2048, 3072, 4096, 6144, 8192)  # those of the page's own slider
GIVEN_UP_S = 0.06  # what the page waits before it asks
KINDS = ("bars", "bars meanwhile", "exact", "known", "let go")


class Page:
    """One reader of the page."""

    def __init__(self, link: str) -> None:
        place = urlsplit(link)
        self.host, self.port = place.hostname or "127.0.0.1", place.port or 80
        self.headers = credentials(link)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=120)

    def ask(self, path: str) -> tuple[float, str]:
        """Seconds until the whole answer was there, and the answer."""
        began, made = time.perf_counter(), self.connect()
        made.request("GET", path, headers=self.headers)
        told = made.getresponse()
        text = told.read().decode()
        assert told.status == 200, (told.status, path)
        return time.perf_counter() - began, text

    def give_up(self, path: str) -> None:
        made = self.connect()
        made.request("GET", path, headers=self.headers)
        time.sleep(GIVEN_UP_S)
        made.close()


def time_loop() -> float:
    """Seconds of a loop that is always the same, the best of five."""

    def loop() -> float:
        began, known = time.perf_counter(), dict[int, int]()
        for number in range(200_000):
            known[number % 1000] = known.get(number % 1000, 0) + number
        return time.perf_counter() - began

    return min(loop() for _ in range(5))


def move(page: Page, question: str, stops: tuple[int, ...]) -> dict[str, list[float]]:
    """The seconds of each kind. A share of a stop makes it one that nobody has asked for yet."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    like = page.ask(f"/plan/answer?{question}&seq={stops[0] - 16}")[1]
    for stop in stops:
        address = re.search(r'data-address="([^"]*)"', like)
        assert address is not None
        before = quote(address[1].replace("&amp;", "&"), safe="")

        def ask_bars(at: int, before: str = before) -> float:
            took, text = page.ask(f"/plan/guess?{question}&seq={at}&like={before}")
            assert "class=" in text, "nothing was guessed"
            return took

        found["bars"].append(ask_bars(stop + 16))
        searching = threading.Thread(target=page.ask, args=(f"/plan/answer?{question}&seq={stop + 32}",))
        searching.start()
        time.sleep(GIVEN_UP_S)
        found["bars meanwhile"].append(ask_bars(stop + 48))
        searching.join()
        took, like = page.ask(f"/plan/answer?{question}&seq={stop}")
        found["exact"].append(took)
        found["known"].append(page.ask(f"/plan/answer?{question}&seq={stop}")[0])
        for other in (64, 80):
            page.give_up(f"/plan/answer?{question}&seq={stop + other}")
        found["let go"].append(page.ask(f"/plan/answer?{question}&seq={stop + 96}")[0])
    return found


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """A real `tightfit ui` of the runs below a folder: its link."""
    command = [sys.executable, "-m", "tightfit", "ui", "--no-open", "--root", str(root)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=env)
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        server.terminate()
        server.wait(timeout=30)


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as link:
        page, loop_s = Page(link), time_loop()
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; the loop takes {1000 * loop_s:.0f} ms\n")
        print("| question | what | median ms | worst ms | median, in loops |\n|---|---|---|---|---|")
        for name, question in QUESTIONS.items():
            for kind, seconds in move(page, question, STOPS[:count]).items():
                middle = median(seconds)
                figures = f"{1000 * middle:.0f} | {1000 * max(seconds):.0f} | {middle / loop_s:.1f}"
                print(f"| {name} | {kind} | {figures} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else len(STOPS))
