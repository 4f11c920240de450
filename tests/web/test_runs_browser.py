"""Runs in a real browser: the list, one run's curves, several over each other, and the way out of a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import home_of, need_a_browser, opened, says, served, step_line, within, written

from tightfit.cli import main

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def browser() -> None:
    need_a_browser()


def step(number: int, loss: float) -> dict[str, Any]:
    line = step_line(number, loss=loss, now_bytes=2**33, peak_bytes=2**34)
    line["memory"]["ranks"] = [2**34, 2**33]
    return {**line, "grad_norm": 0.5}


def legend(page: Any, chart: str) -> str:
    return str(page.text_content(f"#c-{chart} .u-legend"))


def test_from_the_list_over_the_curves_to_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in (("sweep/one", 4.0), ("sweep/two", 3.0)):
        lines = [step(n, loss / n) for n in range(1, 51)]
        lines.insert(20, {"event": "eval", "step": 20, "loss": 2.5, "perplexity": 12.0})
        failed = {
            "event": "attempt_failed", "number": 1, "kind": "device-oom", "text": "It ran out of memory.", "step": 20,
            "kept_step": 10, "action": "smaller plan", "because": "so it fits", "wait_s": 0,
        }  # fmt: skip
        written(tmp_path / name, [*lines[:21], failed, {"event": "resumed", "step": 10, "folder": "x"}, *lines[10:]])
    broken = written(tmp_path / "broken", [step(1, 5.0)], state="failed", exit_code=1)
    (broken / "logs").mkdir()
    for rank in range(2):
        (broken / "logs" / f"rank-{rank}.log").write_text(
            f"rank {rank}: CUDA out of memory. Tried to allocate 2 GiB.\n"
        )
    assert main(["plan", "--model", "1b_mamba", "--gpus", "1x24GB", "--write", str(broken / "plan")]) == 0
    zone = {"timezone_id": "Asia/Tokyo", "viewport": {"width": 1440, "height": 900}, "permissions": ["notifications"]}
    with served(cwd=tmp_path) as link, opened(within(link, "/runs"), **zone) as page:
        # The list: searched while it is typed, and what is chosen stays chosen.
        says(page, "#zone", "Asia/Tokyo, UTC+09:00")
        page.get_by_label("select sweep/two").check()
        page.get_by_label("search").fill("swe one")
        page.wait_for_url("**/runs?q=swe+one")
        page.wait_for_selector("a:text('sweep/two')", state="detached")
        page.get_by_role("button", name="Compare").click()
        says(page, "#link", "Select two to eight")
        page.get_by_label("select sweep/one").check()
        page.get_by_label("search").fill("")
        page.wait_for_selector("a:text('sweep/two')")
        assert page.get_by_label("select sweep/two").is_checked()
        # Alerts are off until they are asked for.
        alerts = page.locator("#alerts")
        assert alerts.get_attribute("aria-pressed") == "false"
        alerts.click()
        page.wait_for_selector("#alerts[aria-pressed=true]")
        alerts.click()
        # Two runs over each other.
        page.get_by_role("button", name="Compare").click()
        page.wait_for_url("**/runs/compare?**")
        says(page, "#compared", "0.0600")
        page.wait_for_selector("#c-loss canvas")
        assert legend(page, "loss").count("sweep/") == 2
        assert legend(page, "evaluation").count("sweep/") == 2
        # One of them: a crosshair over all curves, a zoom that what comes in does not undo.
        page.goto(f"{home_of(link)}/runs/view?run=0/sweep/one")
        says(page, "#marks", "Rescued after step 20:")
        says(page, "#d-norm", "at step 50")
        assert legend(page, "ranks").count("rank") == 2
        page.hover("#c-loss .u-over", position={"x": 60, "y": 40})
        says(page, "#c-norm .u-legend", "gradient norm0.5")
        box = page.locator("#c-pace .u-over").bounding_box()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 30)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 40, steps=4)
        page.mouse.up()
        page.wait_for_url("**&from=*&to=*")
        zoomed = page.url
        with (tmp_path / "sweep/one/events.jsonl").open("a") as file:
            file.write(json.dumps(step(51, 9.0)) + "\n")
        says(page, "#f-step", "51 / 100")
        page.hover("#c-loss .u-over", position={"x": 2, "y": 40})
        assert int(legend(page, "loss").split("step")[1].split("loss")[0]) > 20
        page.get_by_label("log scale").check()
        page.get_by_role("button", name="Show all").click()
        page.wait_for_url("**&log=1")
        page.goto(zoomed)
        page.wait_for_selector("#tool-whole:not([hidden])")
        # One that failed: why, the log of who fell first, and a fix that fills in the form of Plan.
        page.goto(f"{home_of(link)}/runs/view?run=0/broken")
        says(page, "#failure-title", "The GPU ran out of memory")
        page.locator("#failure li", has_text="adapters instead").get_by_role("link").click()
        page.wait_for_url("**/plan?**")
        assert (page.input_value("[name=model]"), page.input_value("[name=method]")) == ("1b_mamba", "lora")
