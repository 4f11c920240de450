"""The page as tests visit it: in this process, as a process of its own, and in a real browser."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

sys.path.append(str(Path(__file__).parents[1]))  # for scripts

import warm_desk
from tightfit.web import places
from tightfit.web.guard import Site
from tightfit.web.hub import Hub
from tightfit.web.places import Finder
from tightfit.web.run_list import RunList, RunRow
from tightfit.web.serve import make_app

TOKEN = "a-token-of-the-tests"
CHROMIUM = Path("/usr/bin/chromium")
HTML = {"Accept": "text/html"}
PATIENCE_S = 120.0
"""For whatever a page is about to show: the browser counts by the clock on the wall, and the machine may be busy."""


places.FIRST_WAIT_S = PATIENCE_S  # a page that shows what is known by then is not what most tests are about


class _PatientRuns(RunList):
    """All of them are read, however busy the machine is."""

    def rows(self, patience_s: float = PATIENCE_S) -> tuple[list[RunRow], places.FoundRuns]:
        return super().rows(max(patience_s, PATIENCE_S))


def site(*roots: Path, host: str = "127.0.0.1", control: bool = False) -> Site:
    below = tuple(root.resolve() for root in roots)
    return Site(token=TOKEN, host=host, port=8741, roots=below, has_control=control)


def stranger(*roots: Path, host: str = "127.0.0.1", control: bool = False) -> TestClient:
    """Somebody without the token."""
    here = site(*roots, host=host, control=control)
    app = make_app(here, Hub(), _PatientRuns(here.roots, Finder(here.roots)))
    return TestClient(app, base_url="http://127.0.0.1:8741", follow_redirects=False)


def client(*roots: Path, control: bool = False) -> TestClient:
    """Somebody who has opened the link."""
    made = stranger(*roots, control=control)
    made.auth = ("tightfit", TOKEN)
    return made


@contextmanager
def served(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, ranks: bool = False, told: str = ""
) -> Iterator[str]:
    """A real `tightfit ui`: the printed link. Ctrl-C must end it well. `env` with a BROWSER: it is opened;
    `ranks`: what it starts is forked too; `told`: what it must have said of what was done."""
    given = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    quiet = () if env and "BROWSER" in env else ("--no-open",)
    process = warm_desk.Process("ui", *quiet, *words, cwd=cwd, env=given, ranks=ranks)
    try:
        found = re.search(r"http://\S+", process.first_line())
        assert found, process.communicate()
        yield found[0]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 0, f"exit code {process.returncode}: {errors}"
        assert re.fullmatch(told, errors, re.DOTALL), errors
    finally:
        process.kill()


def home_of(link: str) -> str:
    return link.partition("/?")[0]


def within(link: str, path: str) -> str:
    """Another page than the first one, with the link's token."""
    return f"{home_of(link)}{path}{'&' if '?' in path else '?'}{link.partition('?')[2]}"


def step_line(step: int, steps: int = 100, loss: float | None = 1.0, **held: int | None) -> dict[str, Any]:
    """As the worker writes it."""
    memory = {"now_bytes": None, "peak_bytes": None, "host_bytes": 2**29, **held}
    return {
        "event": "step", "at": 1790000000.0 + step, "step": step, "steps": steps, "loss": loss, "grad_norm": None,
        "learning_rate": 1e-3, "tokens_per_s": 1000.0, "step_s": 0.5, "seconds_left": float(steps - step),
        "epoch": 0.1, "memory": memory, "loss_scale": None, "skipped": False,
    }  # fmt: skip


def written(run: Path, lines: list[dict[str, Any]], **record: object) -> Path:
    """A run of which only files are left."""
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = {
        "command": ["tightfit", "train"], "pid": 1, "host": "elsewhere", "started": "2026-02-03T04:05:06+00:00",
        "ended": "2026-02-03T05:05:06+00:00", "state": "done", "exit_code": 0,
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps({**said, **record}))
    return run


def need_a_browser() -> None:
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    pytest.importorskip("playwright", reason="pip install playwright")


@cache
def started() -> Any:
    """The one browser of this process, for all tests; each has a window of its own."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * PATIENCE_S)
    playwright = sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
    loop = asyncio._get_running_loop()

    def end() -> None:
        asyncio._set_running_loop(loop)
        browser.close()
        playwright.stop()

    atexit.register(end)
    return browser, loop


@contextmanager
def window(**context: Any) -> Iterator[Any]:
    """Of a real browser. Its loop is that of this thread meanwhile, and no longer: others may need one too."""
    need_a_browser()
    before = asyncio._get_running_loop()
    browser, loop = started()
    asyncio._set_running_loop(loop)
    made = browser.new_context(**{"locale": "en-GB", **context})
    try:
        yield made
    finally:
        made.close()
        asyncio._set_running_loop(before)


@contextmanager
def opened(link: str, **context: Any) -> Iterator[Any]:
    """A page of a real browser, at this link. What it complains of, a breach of the policy too, fails the test."""
    complaints: list[str] = []
    with window(**context) as made:
        page = made.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.set_default_timeout(1000 * PATIENCE_S)
        enter(page, link)
        yield page
    assert complaints == [], complaints


def enter(page: Any, link: str) -> None:
    """Open a link with the token, and wait for the page that it leads to."""
    page.goto(link)
    page.wait_for_url(lambda place: "/enter?" not in place)


def follow(page: Any, name: str) -> None:
    """Click on a link, and wait until the scripts of where it leads are there: a key that is pressed before is lost."""
    with page.expect_navigation():
        page.get_by_role("link", name=name).first.click()


def says(page: Any, place: str, text: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until an element holds this text. (To wait for a function would need `eval`, which the policy forbids.)"""
    from playwright.sync_api import expect

    expect(page.locator(place)).to_contain_text(text, timeout=1000 * patience_s)
