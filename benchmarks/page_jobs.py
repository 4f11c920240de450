"""How many clicks five jobs take on the page, done by somebody who has opened it for the first time.

    python benchmarks/page_jobs.py

A real `tightfit ui`, a real browser, and nothing but the page. A click, a choice from a list and a field that is filled
in count as one each. Each job ends with what it is for: a file on the disk, a figure that is read, a link in the
clipboard. Before there were the card, boxes that search and the fixes of a failed run, the same jobs took 7, 5, 7, 2
and 2, of which the fourth ended at a link that fitted no other machine, and the last at a cause without a way on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from playwright.sync_api import Page, expect, sync_playwright
from slider import serve

CHROMIUM = "/usr/bin/chromium"
WAIT_MS = 120_000
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB."


class Visitor:
    def __init__(self, page: Page) -> None:
        self.page, self.done = page, list[str]()

    def click(self, place: str) -> None:
        self.done.append(f"click {place}")
        self.page.click(place)

    def choose(self, place: str, value: str) -> None:
        self.done.append(f"choose {value} in {place}")
        self.page.select_option(place, value)

    def fill(self, place: str, value: str) -> None:
        self.done.append(f"type {value} into {place}")
        self.page.fill(place, value)
        self.page.keyboard.press("Tab")

    def read(self, place: str, wanted: str) -> str:
        """What stands there when it has `wanted` in it."""
        found = self.page.locator(place).first
        expect(found).to_contain_text(re.compile(wanted), timeout=WAIT_MS)
        return " ".join((found.text_content() or "").split())


def write_config(visitor: Visitor) -> str:
    visitor.choose("#for", "llamafactory")
    visitor.fill("#model", "qwen2.5-32b")
    visitor.fill("#card", "4xRTX4090")
    said = visitor.read("#verdict", "needs .*on each of 4 GPUs")
    with visitor.page.expect_download(timeout=WAIT_MS) as coming:
        visitor.click("#answer:not([aria-busy=true]) a.zip")
    names = ZipFile(coming.value.path()).namelist()
    assert "tightfit-plan/llamafactory.yaml" in names, names
    return said


def find_longest(visitor: Visitor) -> str:
    visitor.click("button.most[data-max=seq]")
    expect(visitor.page.locator("#seq")).not_to_have_value("2048", timeout=WAIT_MS)
    return f"{visitor.page.input_value('#seq')} tokens"


def find_hours(visitor: Visitor) -> str:
    visitor.fill("#samples", "52000")
    visitor.fill("#epochs", "3")
    return visitor.read("#verdict", r"to finish\s*[\d.]+ (hours|days)")


def share(visitor: Visitor) -> str:
    visitor.click("#answer:not([aria-busy=true]) .copy-link")
    visitor.page.wait_for_function("() => navigator.clipboard.readText().then((text) => text.includes('/plan?'))")
    link = str(visitor.page.evaluate("() => navigator.clipboard.readText()"))
    assert "token" not in link
    return link


def mend_a_run(visitor: Visitor) -> str:
    visitor.click("nav a[href^='/runs']")
    visitor.click("a:has-text('died')")
    cause = visitor.read("#failure-title", "ran out of memory")
    visitor.click(".remedies a.button")
    return f"{cause[:60]}… → {visitor.read('#verdict', 'Fits')}"


JOBS = {
    "which config for 32B LoRA on 4 x RTX 4090 with LLaMA-Factory": write_config,
    "the longest sequence on my card": find_longest,
    "how long will it take": find_hours,
    "share a plan": share,
    "my run died, what now": mend_a_run,
}


def write_failed_run(root: Path) -> None:
    run = root / "died"
    command = ["tightfit", "train", "--model", "llama-3.1-8b", "--method", "lora", "--gpus", "2x24GB", "--seq", "4096"]
    plan = [sys.executable, "-m", "tightfit", "plan", *command[2:], "--write", str(run / "plan")]
    subprocess.run(plan, check=True, stdout=subprocess.DEVNULL)
    record = {
        "command": command, "pid": 1, "host": "elsewhere", "started": "2026-01-01T00:00:00+00:00",
        "ended": "2026-01-01T00:01:00+00:00", "state": "failed", "exit_code": 1,
    }  # fmt: skip
    cause = {
        "id": "device-oom", "kind": "device-oom", "sentence": "The GPU ran out of memory in the backward.",
        "confidence": "certain", "rank": 1, "phase": "backward", "evidence": [f"rank-1.log:17: {OOM}"],
    }  # fmt: skip
    attempt = {
        "schema": 1, "number": 1, "started": record["started"], "ended": record["ended"], "plan": "DDP", "ranks": 2,
        "effective_batch": 8, "state": "failed", "exit_codes": [1, 1], "first_step": 0, "last_step": 3, "kept_step": 2,
        "cause": cause, "next": None,
    }  # fmt: skip
    (run / "attempts").mkdir()
    (run / "attempts" / "001.json").write_text(json.dumps(attempt))
    (run / "run.json").write_text(json.dumps(record))
    (run / "events.jsonl").write_text("")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        root = Path(folder)
        write_failed_run(root)
        browser: Any = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with serve(root) as link:
            print("| job | clicks and fields | seconds | what came out |\n|---|---|---|---|")
            for name, job in JOBS.items():
                context = browser.new_context(
                    viewport={"width": 1440, "height": 900},
                    locale="en-GB",
                    permissions=["clipboard-read", "clipboard-write"],
                )
                page = context.new_page()
                page.goto(link)
                page.wait_for_selector("#answer:not([aria-busy=true]) .found", timeout=WAIT_MS)
                visitor, began = Visitor(page), time.perf_counter()
                said = job(visitor)
                print(f"| {name} | {len(visitor.done)} | {time.perf_counter() - began:.0f} | {said} |", flush=True)
                context.close()


if __name__ == "__main__":
    main()
