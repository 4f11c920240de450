"""The page in a real browser. Whatever the browser complains of, a breach of the content policy too, is a failure."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from visits import follow, home_of, need_a_browser, opened, says, served, step_line, within, written

import patience
import warm_desk
from tightfit.cli import main

pytestmark = pytest.mark.thorough

CAPTURED = Path(__file__).parents[1] / "diagnose" / "captured"
TRAIN = (
    "train", "--model", "tiny_mamba", "--data", "shipped:text", "--seq", "64", "--precision", "fp32",
    "--save-every", "10",
)  # fmt: skip
WAIT_MS = 180_000
PLAN = "/plan?model=tiny_mamba&gpus=1&card=24GB&host-ram=64GB"


@pytest.fixture(autouse=True)
def browser() -> None:
    need_a_browser()


@contextmanager
def training(work: Path, steps: int, folder: str = "first", rate: str = "1e-3") -> Iterator[warm_desk.Process]:
    """A real run on this machine's CPU, below `runs`."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(work / "cache")}
    words = (*TRAIN, "--engine", "zero1", "--max-steps", str(steps), "--learning-rate", rate)
    process = warm_desk.Process(*words, "--output", f"runs/{folder}", cwd=work, env=env, ranks=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.kill()


def test_a_real_run_is_followed_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with (
        served("--root", "runs", cwd=tmp_path) as link,
        opened(within(link, "/runs")) as page,
        training(tmp_path, 20) as process,
    ):
        page.get_by_role("link", name="first").click(timeout=WAIT_MS)  # it appears by itself
        page.wait_for_selector("#state[data-state=running]", timeout=WAIT_MS)
        says(page, "#f-step", "/ 20", WAIT_MS / 1000)
        assert page.locator("#memory tr").count() >= 1
        page.wait_for_selector("#state[data-state=done]", timeout=WAIT_MS)
        assert process.wait(60) == 0, process.communicate()
        says(page, "#f-step", "20 / 20")
        says(page, "#link", "ended")
        assert "at step 1, " in page.text_content("#d-loss")
        assert page.locator("#checkpoints tr").count() >= 1
        assert "✓ yes" in page.text_content("#checkpoints")
        assert "checkpoint at step" in page.text_content("#events")
        (log,) = (tmp_path / "runs").rglob("rank-0.log")
        says(page, "#log", log.read_text())
        page.locator("details:has(#table-loss) summary").click()
        page.wait_for_selector("#table-loss tbody tr:nth-child(20)")
        told = [json.loads(line) for line in (tmp_path / "runs/first/events.jsonl").read_text().splitlines()]
        losses = {str(each["step"]): f"{each['loss']:.4f}" for each in told if each["event"] == "step"}
        rows = page.eval_on_selector_all(
            "#table-loss tbody tr", "rows => rows.map(r => [r.cells[0].textContent, r.cells[1].textContent])"
        )
        assert dict(rows) == losses
        follow(page, "Runs")
        assert "20 / 20" in page.text_content("tbody")


def test_a_log_is_pasted_and_dropped(tmp_path: Path) -> None:
    log = CAPTURED / "host-alloc.log"
    with served(cwd=tmp_path) as link, opened(within(link, "/runs")) as page:
        follow(page, "Diagnose")
        page.get_by_label("Log", exact=True).fill(log.read_text())
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#cause")
        assert "The host refused memory" in page.text_content("#cause")
        assert page.evaluate("document.activeElement.id") == "answer"
        page.get_by_role("button", name="Clear").click()
        assert page.text_content("#answer").strip() == ""
        page.get_by_role("button", name="Diagnose").click()
        assert "There is no log yet" in page.text_content("#answer")
        page.set_input_files("#file", str(log))
        page.wait_for_selector("#cause")
        evil = '<img src=x onerror="document.title=1"><script>document.title=2</script> CUDA out of memory. {{ 7*7 }}\n'
        page.get_by_label("Log", exact=True).fill(f"torch.OutOfMemoryError: {evil}")
        page.get_by_role("button", name="Diagnose").click()
        says(page, "#answer", "onerror")
        assert "tightfit" in page.title()
        assert page.locator("#answer img").count() == 0


def test_a_log_that_is_too_long_is_a_sentence(tmp_path: Path) -> None:
    long = tmp_path / "long.log"
    with long.open("wb") as file:
        file.truncate(2 * 2**30)
    with served(cwd=tmp_path) as link, opened(within(link, "/diagnose")) as page:
        page.set_input_files("#file", str(long))
        page.wait_for_selector("#answer .notice.bad")
        assert "longer than 64 MiB" in page.text_content("#answer")


def test_the_language_is_switched(tmp_path: Path) -> None:
    written(tmp_path / "run", [step_line(n) for n in range(1, 20)])
    with served(cwd=tmp_path) as link, opened(within(link, "/runs")) as page:
        follow(page, "中文")
        assert page.get_attribute("html", "lang") == "zh-Hans"
        assert page.text_content("h1") == "运行"
        follow(page, "run")
        says(page, "#d-loss", "第 1 步")
        assert "已完成" in page.text_content("#state")
        follow(page, "English")
        says(page, "#d-loss", "at step 1,")
        assert page.url.endswith("run=0%2Frun&lang=en")


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
@pytest.mark.slow
def test_a_narrow_window(scheme: str, tmp_path: Path) -> None:
    name = "a-very-long-name-of-a-run-with-all-of-its-settings-in-it-lr3e-4-bs128-seq4096-seed1234"
    run = written(tmp_path / name, [step_line(n, 9_000_000, now_bytes=2**33, peak_bytes=2**34) for n in range(1, 9)])
    (run / "attempts").mkdir()
    record = {
        "schema": 1, "number": 1, "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:01:00+00:00",
        "plan": "ZeRO-2, optimizer on CPU: micro batch 4 × 1 on 2 ranks", "ranks": 2, "effective_batch": 8,
        "state": "failed", "exit_codes": [1, -9], "first_step": 0, "last_step": 3, "kept_step": 2,
        "cause": {
            "id": "oom-logits", "kind": "device-oom", "sentence": "The GPU ran out of memory for the logits.",
            "confidence": "certain", "rank": 1, "phase": "loss", "evidence": ["rank-1.log:17: torch.OutOfMemoryError"],
        },
        "next": {
            "action": "smaller plan", "because": "it did not fit", "changed": ["micro batch 4 × 1 → 2 × 2"],
            "wait_s": 0,
        },
    }  # fmt: skip
    (run / "attempts" / "001.json").write_text(json.dumps(record))
    narrow = {"viewport": {"width": 360, "height": 700}, "color_scheme": scheme}
    with served(cwd=tmp_path) as link, opened(within(link, "/runs"), **narrow) as page:
        home = home_of(link)
        for path in ("/runs", f"/runs/view?run=0/{name}", "/diagnose", PLAN, "/nowhere"):
            if path != "/nowhere":  # that one is an error, and browsers say so
                page.goto(home + path)
            page.wait_for_timeout(1200 if "view" in path else 100)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
        page.goto(f"{home}/runs/view?run=0/{name}")
        page.wait_for_selector("#attempts tr")
        assert "ran out of memory for the logits" in page.text_content("#attempts")
        assert "micro batch 4 × 1 → 2 × 2" in page.text_content("#attempts")
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")


def test_the_keyboard_and_a_screen_reader_find_their_way(tmp_path: Path) -> None:
    written(tmp_path / "run", [step_line(n) for n in range(1, 20)])
    with served(cwd=tmp_path) as link, opened(within(link, "/runs")) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "q"
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "run" and page.evaluate(
                "document.activeElement.closest('tbody') !== null"
            ):
                break
        page.keyboard.press("Enter")
        says(page, "#d-loss", "at step")
        for path in ("/runs", "/runs/view?run=0/run", "/diagnose", PLAN):
            page.goto(home_of(link) + path)
            assert page.locator("h1").count() == 1
            assert page.locator("main, header, footer, nav").count() == 4
            unnamed = page.eval_on_selector_all(
                "input:not([type=hidden]), select, textarea, button, a, [role=img], section",
                "all => all.filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label')"
                " || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML)",
            )
            assert unnamed == [], path
            twice = page.evaluate(
                "(ids => ids.filter((id, i) => ids.indexOf(id) !== i))"
                "([...document.querySelectorAll('[id]')].map(e => e.id))"
            )
            assert twice == [], path
            assert page.locator("[role=status], [aria-live]").count() >= 1 or path == PLAN


@pytest.mark.slow
def test_a_page_that_stays_open_does_not_grow(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [step_line(1, 50_000)], ended=None, state="running")
    with served(cwd=tmp_path) as link, opened(within(link, "/runs/view?run=0/run")) as page:
        says(page, "#d-loss", "at step 1,")
        counts = []
        for part in range(5):
            with (run / "events.jsonl").open("a") as file:
                for step in range(part * 2000 + 2, part * 2000 + 2002):
                    file.write(json.dumps(step_line(step, 50_000, loss=1 / step)) + "\n")
                for number in range(100):
                    file.write(json.dumps({"event": "warning", "text": f"warning {part} {number}"}) + "\n")
            last = f"{part * 2000 + 2001:,}"
            says(page, "#d-loss", f"at step {last};")
            says(page, "#events", f"warning {part} 99")
            counts.append(page.evaluate("document.querySelectorAll('*').length"))
        assert max(counts[2:]) - min(counts[2:]) < 10
        assert page.locator("#events li").count() == 200
        assert "One point is" in page.text_content("#d-loss")


def test_torn_and_vanishing_folders_are_sentences(tmp_path: Path) -> None:
    run = tmp_path / "torn"
    (run / "checkpoints" / "step-00000005").mkdir(parents=True)
    (run / "plan").mkdir()
    (run / "plan" / "worker.json").write_text('{"schema": ')
    (run / "run.json").write_text("{")
    (run / "attempts").mkdir()
    (run / "attempts" / "001.json").write_text("[]")
    (run / "events.jsonl").write_bytes(b'\xff\xfe{"event": "step", "st')
    with served(cwd=tmp_path) as link, opened(within(link, "/runs/view?run=0/torn")) as page:
        page.wait_for_selector("#state[data-state=unknown]")
        assert "no manifest.json" in page.text_content("#checkpoints")
        with (run / "events.jsonl").open("a") as file:
            file.write('\n{"event": "step", "step": 1, "steps": 5, "loss": 2.5}\n')
        says(page, "#f-loss", "2.5000")
        (run / "events.jsonl").unlink()
        run.rename(tmp_path / "moved")
        says(page, "#link", "no such file or directory")
        assert page.text_content("#f-loss") == "2.5000"


@pytest.mark.slow
def test_a_million_events_in_the_browser(tmp_path: Path) -> None:
    run = written(tmp_path / "long", [])
    pattern = json.dumps(step_line(7_654_321, 1_000_000, 7654.5)).replace('"step": 7654321', '"step": @')
    (head, _, rest), number = pattern.partition("@"), 0
    middle, _, end = rest.partition("7654.5")
    with (run / "events.jsonl").open("w") as file:
        for number in range(1, 1_000_001):
            file.write(f"{head}{number}{middle}{5 - number / 250_000:.6f}{end}\n")
    with served(cwd=tmp_path) as link, opened(within(link, "/runs")) as page:
        began = patience.now()
        follow(page, "long")
        says(page, "#d-loss", "at step 1,000,000")
        took = patience.now() - began
        assert took < 10, took  # below 2 s on a machine that does nothing else
        assert "Reading the events" in page.text_content("#link")
        says(page, "#link", "ended", WAIT_MS / 1000)
        assert "One point is 1,024 steps." in page.text_content("#d-loss")


def seen(page: Any, name: str, **more: Any) -> None:
    """A picture for the documentation."""
    page.screenshot(path=str(Path(__file__).parents[2] / "docs" / "images" / f"ui-{name}.png"), **more)


def pictures() -> None:
    """`python tests/web/test_browser.py`: the pictures of docs/ui.md, of real runs and a real log."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name, rate in (("first", "1e-3"), ("rates/3e-4", "3e-4"), ("rates/3e-3", "3e-3")):
            with training(work, 150, name, rate) as process:
                process.wait(900)
        log = (CAPTURED.parent / "corpus" / "oom-logits--a-file-a-rank" / "rank-3.log").read_text()
        asked = ["--model", "qwen1.5-0.5b", "--gpus", "1x24GB", "--host-ram", "64GB"]
        broken = written(
            work / "runs" / "too-large", [], state="failed", exit_code=1, command=["tightfit", "train", *asked]
        )
        (broken / "logs").mkdir()
        (broken / "logs" / "rank-3.log").write_text(log)
        assert main(["plan", *asked, "--write", str(broken / "plan")]) == 0
        view = {"viewport": {"width": 1000, "height": 640}}
        with served("--root", "runs", cwd=work) as link, opened(within(link, "/runs"), **view) as page:
            page.get_by_label("group by").check()
            page.wait_for_selector("tr.group")
            seen(page, "runs")
            page.get_by_label("group by").uncheck()
            for name in ("rates/3e-4", "rates/3e-3"):
                page.get_by_label(f"select {name}").check()
            page.get_by_role("button", name="Compare").click()
            page.wait_for_selector("#c-loss canvas")
            page.wait_for_timeout(1000)
            seen(page, "compare")
            page.goto(f"{home_of(link)}/runs/view?run=0/too-large")
            page.wait_for_selector("#failure-title")
            seen(page, "failed")
            page.goto(f"{home_of(link)}/runs/view?run=0/first")
            says(page, "#link", "ended")
            page.wait_for_timeout(500)
            seen(page, "run")
            page.goto(home_of(link) + "/diagnose")
            page.get_by_label("Log", exact=True).fill((CAPTURED / "host-alloc.log").read_text())
            page.evaluate("document.getElementById('log').rows = 6")
            page.keyboard.press("Control+Enter")
            page.wait_for_selector("#cause")
            seen(page, "diagnose")


if __name__ == "__main__":
    pictures()
