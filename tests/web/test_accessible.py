"""The page for those who use a keyboard, a screen reader or other colours: axe-core looks at every view in a real
browser, and what it cannot see is tried by keyboard. The page's policy stays in force.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import home_of, need_a_browser, opened, says, served, step_line, within, written

pytestmark = pytest.mark.thorough

CAPTURED = Path(__file__).parents[1] / "diagnose" / "captured"
WAIT_S = 120.0
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
FITS = "/plan?model=1b_mamba&gpus=2&card=24GB&host-ram=64GB&seq=1024"
UNFIT = "/plan?model=1b_mamba&gpus=1&card=8GB&host-ram=8GB&engine=zero2"
LOOKS = {
    "light": ("light", WIDE),
    "dark": ("dark", NARROW),
    "light-narrow": ("light", NARROW),
    "dark-wide": ("dark", WIDE),
}
RULES = {
    "resultTypes": ["violations"],
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]},
}
FAILED = {
    "schema": 1, "number": 1, "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:01:00+00:00",
    "plan": "ZeRO-2: micro batch 4 × 1 on 2 ranks", "ranks": 2, "effective_batch": 8, "state": "failed",
    "exit_codes": [1], "first_step": 0, "last_step": 3, "kept_step": 2,
    "cause": {
        "id": "oom-logits", "kind": "device-oom", "sentence": "The GPU ran out of memory for the logits.",
        "confidence": "certain", "rank": 1, "phase": "loss", "evidence": ["rank-1.log:17: torch.OutOfMemoryError"],
    },
    "next": {"action": "smaller plan", "because": "it did not fit", "changed": ["4 × 1 → 2 × 2"], "wait_s": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ui")


@pytest.fixture(scope="module")
def link(root: Path) -> Iterator[str]:
    need_a_browser()
    steps = [step_line(n, now_bytes=2**33, peak_bytes=2**34) for n in range(1, 30)]
    going = written(root / "going", [*steps, {"event": "warning", "text": "oh"}], ended=None, state="running")
    (going / "logs").mkdir()
    (going / "logs" / "rank-0.log").write_text("a line of the log that is rather long\n" * 100)
    failed = written(root / "failed", steps, state="failed", exit_code=1)
    (failed / "attempts").mkdir()
    (failed / "attempts" / "001.json").write_text(json.dumps(FAILED))
    (failed / "checkpoints" / "step-00000005").mkdir(parents=True)
    with served(cwd=root) as found:
        yield found


@pytest.fixture(scope="module")
def page(link: str) -> Iterator[Any]:
    """One browser for all; what it complains of fails the last test."""
    with opened(within(link, "/runs")) as found:
        found.set_default_timeout(1000 * WAIT_S)
        yield found


def complaints(page: Any) -> list[str]:
    """What axe finds, a line for each place."""
    pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options=RULES).response["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


def see(page: Any, look: str, place: str, language: str = "en") -> None:
    scheme, window = LOOKS[look]
    page.set_viewport_size(window)
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{place}{'&' if '?' in place else '?'}lang={language}")


def open_all(page: Any) -> None:
    page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")


def every_look(quick: str) -> pytest.MarkDecorator:
    """Any two of light or dark, wide or narrow, English or Chinese meet; `make test` looks at one of the four."""
    languages = {"light": "en", "dark": "zh", "light-narrow": "zh", "dark-wide": "en"}
    marks = {look: [] if look == quick else [pytest.mark.slow] for look in languages}
    return pytest.mark.parametrize(
        ("look", "language"), [pytest.param(*each, marks=marks[each[0]]) for each in languages.items()]
    )


@every_look("light")
def test_axe_finds_nothing_on_a_plan_that_fits(page: Any, link: str, look: str, language: str) -> None:
    see(page, look, home_of(link) + FITS, language)
    page.wait_for_selector(".heat[role=grid] .over, .heat[role=grid] .otherwise")
    if look != "light":  # once a scheme
        open_all(page)
    assert complaints(page) == []


@every_look("dark")
def test_axe_finds_nothing_where_nothing_fits(page: Any, link: str, look: str, language: str) -> None:
    see(page, look, home_of(link) + UNFIT, language)
    page.wait_for_selector(".remedies a.allow")
    assert complaints(page) == []
    page.fill("#card", "notacard")
    page.keyboard.press("Tab")
    page.wait_for_selector("#problem .notice.bad")
    assert complaints(page) == []


@every_look("light")
def test_axe_finds_nothing_on_a_run_that_goes_on(page: Any, link: str, look: str, language: str) -> None:
    for path, place in (("/runs?group=1", "tr.group"), ("/runs/compare?run=0/going&run=0/failed", "#c-loss canvas")):
        see(page, look, home_of(link) + path, language)
        page.wait_for_selector(place)
        assert complaints(page) == []
    axe_finds_nothing_on_a_run(page, link, look, language, "going", "#memory tr")


@every_look("dark")
def test_axe_finds_nothing_on_a_run_that_failed(page: Any, link: str, look: str, language: str) -> None:
    axe_finds_nothing_on_a_run(page, link, look, language, "failed", "#failure h2")


def axe_finds_nothing_on_a_run(page: Any, link: str, look: str, language: str, run: str, place: str) -> None:
    see(page, look, f"{home_of(link)}/runs/view?run=0/{run}", language)
    page.wait_for_selector(place)
    open_all(page)
    page.wait_for_selector("#table-memory tbody tr >> nth=0")
    assert complaints(page) == []


@every_look("dark")
def test_axe_finds_nothing_on_a_diagnosis(page: Any, link: str, look: str, language: str) -> None:
    see(page, look, home_of(link) + "/diagnose", language)
    assert complaints(page) == []
    page.keyboard.press("Tab")
    page.locator("#diagnose button[type=submit]").click()
    page.wait_for_selector("#answer .notice.bad")
    assert complaints(page) == []
    page.fill("#log", (CAPTURED / "host-alloc.log").read_text())
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#cause")
    assert complaints(page) == []


@pytest.mark.slow
def test_axe_finds_nothing_where_nobody_is_let_in_or_nothing_is(page: Any, link: str, tmp_path: Path) -> None:
    window = page.context.browser.new_context(locale="en-GB")
    stranger = window.new_page()
    stranger.goto(home_of(link) + "/plan")
    assert "token" in stranger.text_content("main")
    assert complaints(stranger) == []
    stranger.goto(link)
    for path in ("/nowhere", "/plan?seq=abc"):
        stranger.goto(home_of(link) + path)
        assert stranger.locator(".notice.bad").count() == 1
        assert complaints(stranger) == []
    stranger.goto(home_of(link) + FITS)
    with stranger.expect_download() as coming:
        stranger.click("a.saver")
    coming.value.save_as(tmp_path / "saved.html")
    stranger.goto((tmp_path / "saved.html").as_uri())
    assert complaints(stranger) == []
    window.close()


# --- the keyboard ---------------------------------------------------------------------------------

FOCUSED = """() => {
  const it = document.activeElement, seen = it.type === 'file' ? it.labels[0] : it;  // a button of its own stands there
  const box = seen.getBoundingClientRect(), style = getComputedStyle(seen);
  const over = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  const all = [...document.querySelectorAll('*')];
  return {
    place: all.indexOf(it), tag: it.tagName, id: it.id, cell: it.classList.contains('cell'),
    ring: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
    inside: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
    covered: !(over && (seen.contains(over) || over.contains(seen) || over.closest('label'))),
  };
}"""


def stops(page: Any, most: int = 120) -> list[dict[str, Any]]:
    """Where the Tab key leads, until it leaves the page."""
    found: list[dict[str, Any]] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        now = page.evaluate(FOCUSED)
        if now["tag"] == "BODY" or (found and now["place"] == found[0]["place"]):
            return found
        found.append(now)
    raise AssertionError("the Tab key finds no end")


@pytest.mark.parametrize(
    ("look", "path"),
    [
        ("light", FITS),
        ("dark", UNFIT),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("dark", FITS),
                ("light", UNFIT),
                ("light", "/runs"),
                ("dark", "/runs/view?run=0/going"),
                ("light", "/diagnose"),
                ("dark", "/runs"),
                ("light", "/runs/view?run=0/going"),
                ("dark", "/diagnose"),
            )
        ),
    ],
)
def test_the_tab_key_goes_through_the_page_in_order(page: Any, link: str, look: str, path: str) -> None:
    # The map of sizes is drawn while somebody looks, and would push away what the Tab key has just reached.
    page.route("**/plan/frontier?*", lambda route: route.fulfill(body="<p data-whole='1'></p>"))
    see(page, look, home_of(link) + path)
    if path == FITS:
        page.wait_for_selector(".heat[role=grid] .over, .heat[role=grid] .otherwise")
    if "view" in path:
        page.wait_for_selector("#memory tr")
    found = stops(page)
    page.unroute("**/plan/frontier?*")
    assert [each["place"] for each in found] == sorted(each["place"] for each in found)
    assert [each for each in found if not each["ring"]] == []
    assert [each for each in found if not each["inside"]] == []
    assert [each for each in found if each["covered"]] == []
    assert sum(each["cell"] for each in found) == path.startswith("/plan")


def test_arrows_move_in_the_map(page: Any, link: str) -> None:
    see(page, "light", home_of(link) + FITS)
    page.wait_for_selector(".heat[role=grid] .over, .heat[role=grid] .otherwise")
    page.focus("#heat .cell[tabindex='0']")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-current')") == "true"
    where = "() => [document.activeElement.dataset.seq, document.activeElement.dataset.micro].join(' ')"
    page.keyboard.press("Control+Home")
    first = page.evaluate(where)
    for key in ("ArrowLeft", "ArrowUp"):  # there is nothing beyond
        page.keyboard.press(key)
        assert page.evaluate(where) == first
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    seq, micro = page.evaluate(where).split()
    assert (int(seq), int(micro)) == (2 * int(first.split()[0]), 2)
    page.keyboard.press("End")
    assert int(page.evaluate(where).split()[0]) > int(seq)
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#cell-{seq}-{micro}[aria-current=true]")
    assert page.evaluate(where) == f"{seq} {micro}", "the focus stays in the map"
    assert page.locator("#heat .cell[tabindex='0']").count() == 1


def test_what_was_allowed_by_keyboard_keeps_the_focus(page: Any, link: str) -> None:
    see(page, "light", home_of(link) + UNFIT)
    page.focus("a.allow[data-allow=lora]")
    page.keyboard.press("Enter")
    says(page, "#verdict", "Fits with a change", WAIT_S)
    assert page.evaluate("() => document.activeElement.value") == "lora"


# --- what is read out -----------------------------------------------------------------------------

LISTEN = """(place) => {
  globalThis.heard = [];
  const it = document.querySelector(place);
  new MutationObserver(() => { if (it.textContent) globalThis.heard.push(it.textContent); })
    .observe(it, { childList: true, characterData: true, subtree: true });
}"""
HEARD = "() => globalThis.heard"


def test_a_slider_that_moves_is_answered_once_and_short(page: Any, link: str) -> None:
    see(page, "light", home_of(link) + FITS)
    says(page, "#verdict", "Fits", WAIT_S)
    page.evaluate(LISTEN, "#said")
    page.focus("#seq-slider")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(80)
    says(page, "#said", "GiB", WAIT_S)
    page.wait_for_timeout(1500)
    heard = page.evaluate(HEARD)
    assert len(heard) == 1, heard
    assert heard[0].startswith("Fits: ")
    assert len(heard[0]) < 80
    assert page.locator("[aria-live], [role=status], [role=alert]").count() == 1
    assert page.get_attribute("#seq-slider", "aria-valuetext") == "4096"


def test_a_run_that_goes_on_does_not_chatter(page: Any, link: str, root: Path) -> None:
    run = written(root / "run", [step_line(n) for n in range(1, 5)], ended=None, state="running")
    see(page, "light", f"{home_of(link)}/runs/view?run=0/run")
    says(page, "#said", "running on another machine")
    page.evaluate(LISTEN, "#said")
    page.locator("details:has(#table-loss) summary").click()
    page.wait_for_selector("#table-loss tbody tr")
    page.evaluate("() => { globalThis.kept = document.querySelector('#table-loss tbody tr'); }")
    for step in range(5, 7):
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(step_line(step)) + "\n")
        says(page, "#f-step", str(step))
    page.wait_for_selector("#table-loss tbody tr:nth-child(6)")
    assert page.evaluate("() => globalThis.kept.isConnected"), "a reader keeps the place in the table"
    assert page.evaluate(HEARD) == []
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "state": "failed", "exit_code": 1}))
    says(page, "#said", "failed, exit code 1, on elsewhere. The run has ended.")
    assert len(page.evaluate(HEARD)) == 1
    assert page.title().startswith("✗ run")


def test_a_verdict_is_read_as_the_focus_comes_to_it(page: Any, link: str) -> None:
    see(page, "light", home_of(link) + "/diagnose")
    page.fill("#log", (CAPTURED / "host-alloc.log").read_text())
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#cause")
    from playwright.sync_api import expect

    expect(page.locator("#answer")).to_be_focused()
    assert "The host refused memory" in page.evaluate(
        "() => document.getElementById(document.activeElement.getAttribute('aria-labelledby')).textContent"
    )


@pytest.mark.parametrize("language", ["en", pytest.param("zh", marks=pytest.mark.slow)])
def test_every_drawing_has_its_figures_as_text(page: Any, link: str, language: str) -> None:
    see(page, "light", home_of(link) + FITS, language)
    assert page.get_attribute("html", "lang") == {"en": "en", "zh": "zh-Hans"}[language]
    for bar in page.locator(".ways svg[role=img]").all():
        said = bar.get_attribute("aria-labelledby").split()
        assert "GiB" in page.text_content(f"#{said[1]}")
    assert page.locator(".ways .phase-table").count() == page.locator(".ways svg[role=img]").count()
    see(page, "light", f"{home_of(link)}/runs/view?run=0/going", language)
    page.wait_for_selector("#memory tr")
    for name in ("loss", "pace", "memory"):
        page.wait_for_selector(f"#d-{name}:not(:empty)", state="attached")
        page.locator(f"details:has(#table-{name}) summary").click()
        page.wait_for_selector(f"#table-{name} tbody tr:nth-child(29)")


def test_nothing_moves_for_who_wants_no_motion(page: Any, link: str) -> None:
    page.emulate_media(reduced_motion="reduce")
    see(page, "light", home_of(link) + FITS)
    page.focus("#gpus-slider")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference")


def test_what_is_shown_on_hover_goes_with_escape(page: Any, link: str) -> None:
    see(page, "light", home_of(link) + FITS)
    page.hover(".way .bars >> nth=0")
    says(page, "#pop", "backward", WAIT_S)
    page.keyboard.press("Escape")
    assert page.is_hidden("#pop")


@pytest.mark.parametrize(
    "path",
    [
        FITS,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (UNFIT, "/runs", "/diagnose")),
        "/runs/view?run=0/failed",
    ],
)
def test_four_times_as_large_it_needs_no_sideways_scrolling(page: Any, link: str, path: str) -> None:
    """A window of 1,280 at 400 %."""
    page.goto(home_of(link) + path)
    page.set_viewport_size({"width": 320, "height": 256})
    page.wait_for_timeout(300)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 320
