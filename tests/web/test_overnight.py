"""A page that is left open: it neither grows nor stalls, says when it is cut off, and goes on by itself.

`benchmarks/ui_overnight.py` has the run that grows, the line that can be cut and the figures, and does it for hours.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import patience

sys.path.insert(0, str(Path(__file__).parent))

import visits
from ui_overnight import Figures, Wire, figures, frozen, goes_on, growing, serving, shown_step, through
from visits import says, served

from tightfit.web import hub

pytestmark = pytest.mark.thorough

VIEW = "/runs/view?run=0/first"
LISTED = "tbody th a"


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    with visits.window(viewport={"width": 1200, "height": 900}) as found:
        yield found


@pytest.fixture
def page(window: Any) -> Iterator[Any]:
    found = window.new_page()
    yield found
    found.close()


def seen_for(page: Any, seconds: float, rate: float, root: Path) -> list[Figures]:
    """What is held at the beginning, in the middle and at the end."""
    run = root / "first"
    with growing(run, rate), serving(root, times=20) as (link, server):
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{link.partition('/?')[0]}{VIEW}&{urlsplit(link).query}")
        for name in ("loss", "pace", "memory"):
            page.locator(f"details:has(#table-{name}) summary").click()
        while page.locator("#events li").count() < 200:  # from here on nothing becomes more
            page.wait_for_timeout(500)
        found = [figures(page, server, run)]
        for _ in range(2):
            page.wait_for_timeout(1000 * seconds / 2)
            found.append(figures(page, server, run))
        assert errors == []
        return found


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [10.0, pytest.param(120.0, marks=pytest.mark.slow)])
def test_it_neither_grows_nor_stalls(seconds: float, page: Any, tmp_path: Path) -> None:
    rate = 2000.0
    first, _, last = found = seen_for(page, seconds, rate, tmp_path)
    for now in found:
        assert now.heap_bytes < 16 * 2**20
        assert now.nodes < 20_000, "some 200 come with every message, and go"
        assert now.behind_steps < 5 * rate, "seconds"
    assert last.heap_bytes < first.heap_bytes + 2 * 2**20
    assert last.listeners <= first.listeners + 5
    assert last.documents <= first.documents
    assert last.server_bytes < first.server_bytes + 16 * 2**20
    assert last.server_files <= first.server_files + 4
    assert last.server_threads <= first.server_threads + 4


def test_a_cut_line_is_said_and_taken_up_again(page: Any, tmp_path: Path) -> None:
    with growing(tmp_path / "first", 100.0), served(cwd=tmp_path) as link:
        wire = Wire(urlsplit(link).port or 0)
        page.clock.install()
        page.goto(through(link, wire, VIEW))
        says(page, "#link", "Live.")
        wire.cut()
        says(page, "#link", "The connection is lost.")
        page.clock.fast_forward("00:06")
        says(page, "#link", "Live.")
        goes_on(page, 10)
        # As when a laptop has slept: nothing comes any more, and nobody is told.
        wire.die()
        page.clock.fast_forward("01:00")
        says(page, "#link", "The connection is lost.")
        stood = shown_step(page)
        wire.revive()
        page.clock.fast_forward("01:00")
        says(page, "#link", "Live.")
        goes_on(page, 10)
        assert shown_step(page) > stood
        wire.close()


def test_a_stream_on_which_nothing_is_said_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BEAT_S", 0.01)

    async def first() -> bytes:
        return await anext(hub.Client(asyncio.get_running_loop()).messages())

    with ThreadPoolExecutor(1) as beside:  # the browser has the loop of this thread
        assert beside.submit(asyncio.run, first()).result() == b"event: beat\ndata: {}\n\n"


@pytest.mark.slow
def test_a_line_on_which_little_is_said_is_not_taken_for_dead(page: Any, tmp_path: Path) -> None:
    with growing(tmp_path / "first", 1.0) as process, serving(tmp_path) as (link, _):
        page.goto(f"{link.partition('/?')[0]}{VIEW}&{urlsplit(link).query}")
        says(page, "#link", "Live.")
        process.kill()
        process.wait()
        says(page, "#state", "its process has gone")
        page.evaluate(
            "() => { globalThis.asked = 0; new PerformanceObserver((list) => { globalThis.asked += list.getEntries()"
            ".filter((each) => each.name.includes('/runs/stream')).length; }).observe({ type: 'resource' }); }"
        )
        page.wait_for_timeout(70_000)
        assert page.evaluate("() => globalThis.asked") == 0
        says(page, "#link", "ended")


@pytest.mark.slow
def test_a_server_that_is_started_again_is_waited_for(window: Any, page: Any, tmp_path: Path) -> None:
    with growing(tmp_path / "first", 100.0):
        with serving(tmp_path) as (link, _):
            place, port = urlsplit(link), urlsplit(link).port
            listed = window.new_page()
            page.goto(f"http://{place.netloc}{VIEW}&{place.query}")
            listed.goto(f"http://{place.netloc}/runs?{place.query}")
            says(page, "#link", "Live.")
        says(page, "#link", "The connection is lost.")
        says(listed, "#link", "The server does not answer.")
        before = shown_step(page)
        assert before > 0, "what was seen last stays"
        assert listed.locator(LISTED).count() == 1
        with serving(tmp_path, port=port) as (link, _):
            says(page, "#link", "Open the link that it printed")
            says(listed, "#link", "Open the link that it printed")
            again = window.new_page()
            again.goto(link)
            says(page, "#link", "Live.")
            goes_on(page, 10)
            assert shown_step(page) > before
            assert listed.locator("#link").is_hidden() or listed.wait_for_selector("#link", state="hidden")
            again.close()
        listed.close()


HIDE = """(hidden) => {
  Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


@pytest.mark.slow
def test_a_tab_that_nobody_looks_at_lets_go_and_comes_back(page: Any, tmp_path: Path) -> None:
    run = tmp_path / "first"
    with growing(run, 200.0), serving(tmp_path) as (link, server):
        page.goto(f"{link.partition('/?')[0]}{VIEW}&{urlsplit(link).query}")
        says(page, "#link", "Live.")
        page.evaluate(HIDE, True)
        says(page, "#link", "Paused")
        page.wait_for_timeout(500)
        stood = shown_step(page)
        page.wait_for_timeout(2000)
        assert shown_step(page) == stood
        page.evaluate(HIDE, False)
        says(page, "#link", "Live.")
        goes_on(page, 10)
        began = patience.now()
        frozen(page, 3)
        goes_on(page, 10)
        assert patience.now() - began < 10
        assert figures(page, server, run).behind_steps < 5 * 200
