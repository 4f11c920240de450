"""The Plan view in a real browser."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import home_of, need_a_browser, opened, says, served

pytestmark = pytest.mark.thorough

IMAGES = Path(__file__).parents[2] / "docs" / "images"
QUERY = "model=1b_mamba&gpus=2&card=24GB&host-ram=64GB&seq=1024"
WAIT_S = 120.0
WIDE, NARROW = {"width": 1280, "height": 1000}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need_a_browser()
    with served(cwd=tmp_path_factory.mktemp("ui")) as found:
        yield found


@pytest.fixture(scope="module")
def page(link: str) -> Iterator[Any]:
    """One browser for all; what it complains of fails the last test."""
    with opened(link, viewport=WIDE, permissions=["clipboard-read", "clipboard-write"]) as found:
        found.set_default_timeout(1000 * WAIT_S)
        # Whatever scrolls down to the map of sizes has it computed, for a minute of a processor; test_frontier.py does.
        found.route("**/plan/frontier?*", lambda route: route.fulfill(body="<p data-whole='1'></p>"))
        yield found


def at(page: Any, link: str, query: str) -> None:
    page.goto(f"{home_of(link)}/plan?{query}")


def changes(page: Any, place: str, before: str) -> None:
    from playwright.sync_api import expect

    expect(page.locator(place)).not_to_have_text(before, timeout=1000 * WAIT_S)
    expect(page.locator("#answer")).not_to_have_attribute("aria-busy", "true", timeout=1000 * WAIT_S)


def test_a_slider_that_is_moved_by_keyboard_changes_bars_and_verdict(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    says(page, "#verdict", "Fits", WAIT_S)
    before, bars = page.text_content("#verdict"), page.inner_html(".way .bars")
    page.focus("#seq-slider")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#seq") == "1536"
    changes(page, "#verdict", before)
    assert page.inner_html(".way .bars") != bars
    assert "seq=1536" in page.url
    assert page.evaluate("() => document.activeElement.id") == "seq-slider", "the focus stays"
    says(page, ".copy code >> nth=0", "--seq 1536", WAIT_S)
    page.focus("#gpus-slider")
    page.keyboard.press("ArrowLeft")
    says(page, "#verdict", "on the GPU", WAIT_S)
    page.go_back()
    says(page, "#verdict", "on each of 2 GPUs", WAIT_S)
    assert page.input_value("#gpus") == "2"


def test_the_phases_are_shown_on_hover_and_by_keyboard(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    page.hover(".way .bars >> nth=0")
    says(page, "#pop", "backward", WAIT_S)
    page.hover("h1")
    assert page.is_hidden("#pop")
    page.focus("#way0-phases > summary")
    page.keyboard.press("Enter")
    assert page.is_visible("#way0-phases .phase-table >> nth=0")


def test_a_cell_of_the_map_sets_both(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    page.focus("#cell-512-2")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("seq=512.*micro-batch=2"))
    says(page, ".copy code >> nth=0", "--seq 512 --micro-batch 2", WAIT_S)
    page.wait_for_selector("#cell-512-2[aria-current=true]")


def test_what_makes_no_sense_is_said_and_the_last_answer_stays(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    page.fill("#card", "notacard")
    page.keyboard.press("Tab")
    says(page, "#problem", "We know no card", WAIT_S)
    assert page.locator("#answer.stale .way").count() > 0
    page.fill("#card", "80GB")
    page.keyboard.press("Enter")
    says(page, "#verdict", "80.0 GiB", WAIT_S)
    assert page.locator(".stale").count() == 0


def test_the_boxes_search_take_counts_and_configs_and_say_what_is_wrong(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    page.click("#model")
    page.keyboard.type("qwen3 8")
    lines = page.locator("#model-options [role=option]")
    assert [line.split("B")[0] for line in lines.all_text_contents()] == ["Qwen/Qwen3-8"]
    page.keyboard.press("ArrowUp")
    assert page.get_attribute("#model", "aria-activedescendant") == "model-options-0"
    page.keyboard.press("Enter")
    says(page, ".head", "Qwen/Qwen3-8B (8.19B)", WAIT_S)
    page.click("#model")
    page.keyboard.type("mistr")
    assert "looked up when you press Enter" in page.inner_text(".combo-none")
    page.keyboard.press("Escape")
    assert page.input_value("#model") == "Qwen/Qwen3-8B"
    page.click("#card")
    page.keyboard.type("4xRTX4090")
    page.keyboard.press("Tab")
    says(page, ".copy code >> nth=0", "--gpus 4xRTX4090", WAIT_S)
    assert (page.input_value("#gpus"), page.input_value("#card")) == ("4", "RTX4090")
    page.fill("#seq", "many")
    page.keyboard.press("Tab")
    says(page, ".wrong", "“Sequence length” takes a whole number", WAIT_S)
    assert page.get_attribute("#seq", "aria-describedby") == "wrong"
    page.fill("#seq", "512")
    page.keyboard.press("Tab")
    says(page, ".copy code >> nth=0", "--seq 512", WAIT_S)
    assert page.locator(".wrong, [aria-invalid]").count() == 0
    page.evaluate('() => navigator.clipboard.writeText(\'{\\n"model_type": "qwen3", "nonsense": 1}\')')
    page.focus("#model")
    page.keyboard.press("Control+V")
    says(page, ".wrong", "the config has no hidden_size", WAIT_S)


def test_what_would_make_it_fit_is_one_click(page: Any, link: str) -> None:
    at(page, link, "model=1b_mamba&gpus=1&card=8GB&host-ram=8GB&engine=zero2&lang=en")
    says(page, "#verdict", "Does not fit", WAIT_S)
    page.click("a.allow[data-allow=lora]")
    says(page, "#verdict", "Fits with a change", WAIT_S)
    assert page.is_checked("input[name=allow][value=lora]")


def test_a_rival_is_compared_chosen_and_given_up_again(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    best, rival = page.locator(".way h3 >> nth=0").inner_text(), page.locator(".way h3 >> nth=1").inner_text()
    page.click(".rival a.compare >> nth=0")
    says(page, "#compare caption >> nth=0", "One GPU at its fullest moment", WAIT_S)
    assert "compare=" in page.url
    page.get_by_role("link", name=f"Choose this: {rival}", exact=True).click()
    says(page, ".way h3 >> nth=0", rival, WAIT_S)
    assert page.input_value("#engine") != ""
    page.click(".freed a")
    says(page, ".way h3 >> nth=0", best, WAIT_S)
    assert page.input_value("#engine") == ""
    page.click("#compare a.compare")
    page.wait_for_selector("#compare", state="detached")
    page.click("a.how-long")
    assert page.evaluate("() => document.activeElement.id") == "max-steps"
    page.keyboard.type("1000")
    page.keyboard.press("Tab")
    says(page, ".fact-hours", "minutes", WAIT_S)


def test_a_config_is_pasted(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    page.click("#paste summary")
    page.fill("#config", "{")
    page.keyboard.press("Tab")
    says(page, "#problem", "not JSON", WAIT_S)
    page.fill(
        "#config",
        '{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, '
        '"vocab_size": 999, "intermediate_size": 2048, "torch_dtype": "bfloat16"}',
    )
    page.keyboard.press("Tab")
    says(page, ".head", "llama 512×6", WAIT_S)
    page.reload()
    says(page, ".head", "llama 512×6", WAIT_S)


def test_copying_and_downloading(page: Any, link: str, tmp_path: Path) -> None:
    at(page, link, QUERY + "&lang=en")
    page.click("#use > summary")
    page.click(".copier >> nth=0")
    says(page, ".copier >> nth=0", "Copied")
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == "tightfit plan --model 1b_mamba --gpus 2x24GB --host-ram 64GB --seq 1024 --write plan"
    page.keyboard.press("Escape")
    assert page.is_hidden(".use-panel")
    page.click("a.copy-link")
    says(page, "a.copy-link", "Copied")
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == f"{home_of(link)}/plan?model=1b_mamba&gpus=2&card=24GB&host-ram=64GB&seq=1024"
    with page.expect_download() as coming:
        page.click("a.picture")
    coming.value.save_as(tmp_path / "plan.png")
    head = (tmp_path / "plan.png").read_bytes()[:24]
    assert (head[:8], int.from_bytes(head[16:20], "big")) == (b"\x89PNG\r\n\x1a\n", 2400)
    with page.expect_download() as coming:
        page.click("a.zip")
    coming.value.save_as(tmp_path / "plan.zip")
    assert "tightfit-plan/worker.json" in zipfile.ZipFile(tmp_path / "plan.zip").namelist()
    with page.expect_download() as coming:
        page.click("a.saver")
    coming.value.save_as(tmp_path / "saved.html")
    saved = page.context.new_page()
    saved.goto((tmp_path / "saved.html").as_uri())
    assert "Fits" in saved.text_content(".verdict .headline")
    assert saved.locator(".ways svg[role=img]").count() >= 2
    saved.close()


def test_the_other_language_keeps_the_question(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    page.focus("#seq-slider")
    page.keyboard.press("ArrowRight")
    says(page, ".copy code >> nth=0", "--seq 1536", WAIT_S)
    page.click(".languages a[hreflang=zh]")
    says(page, "#verdict", "放得下", WAIT_S)
    assert page.input_value("#seq") == "1536"
    assert page.locator(".reasons [lang=en]").count() == 0
    page.click(".languages a[hreflang=en]")
    says(page, "#verdict", "Fits", WAIT_S)


def test_a_narrow_dark_window_needs_no_sideways_scrolling(page: Any, link: str) -> None:
    page.set_viewport_size(NARROW)
    page.emulate_media(color_scheme="dark")
    at(page, link, QUERY + "&lang=en")
    says(page, "#verdict", "Fits", WAIT_S)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= NARROW["width"]
    page.set_viewport_size(WIDE)
    page.emulate_media(color_scheme="light")


def test_another_trainer_gets_another_answer_and_its_own_files(page: Any, link: str) -> None:
    at(page, link, "model=qwen2.5-7b&method=lora&gpus=1&card=RTX4090&lang=en")
    says(page, ".copy code >> nth=1", "tightfit train --plan", WAIT_S)
    page.select_option("#for", "llamafactory")
    says(page, ".copy code >> nth=1", "bash plan/launch.sh", WAIT_S)
    assert "for=llamafactory" in page.url
    from playwright.sync_api import expect

    expect(page.locator("#files-list")).not_to_contain_text("worker.json", timeout=1000 * WAIT_S)
    says(page, "#files-list", "llamafactory.yaml", WAIT_S)


def test_a_tier_and_the_most_that_fits(page: Any, link: str) -> None:
    at(page, link, QUERY + "&lang=en")
    page.get_by_role("button", name="Find the longest that fits").click()
    says(page, ".copy code >> nth=0", "--seq 85248", WAIT_S)
    says(page, "#verdict", "Fits", WAIT_S)
    assert page.evaluate("() => document.activeElement.dataset.max") == "seq", "the focus stays"
    page.go_back()
    says(page, ".copy code >> nth=0", "--seq 1024", WAIT_S)
    page.select_option("#tier", "stage3")
    says(page, ".reasons >> nth=1", "Tier stage3", WAIT_S)
    assert "tier=stage3" in page.url
    page.fill("#card", "notacard")
    page.get_by_role("button", name="Find the longest that fits").click()
    says(page, "#problem", "We know no card", WAIT_S)


def pictures() -> None:
    """`python tests/web/test_plan_browser.py`: the pictures of the Plan view in docs/ui.md."""
    import tempfile

    with tempfile.TemporaryDirectory() as work, served(cwd=Path(work)) as link, opened(link, viewport=WIDE) as page:
        question = "model=meta-llama/Llama-3.1-8B-Instruct&method=lora&seq=2048&gpus=4&card=RTX4090&host-ram=128GB"
        at(page, link, f"{question}&max-steps=2000&lang=en")
        page.wait_for_selector(".heat .otherwise, .heat .over", timeout=1000 * WAIT_S)
        page.screenshot(path=IMAGES / "ui-plan.png")
        page.locator("#frontier").scroll_into_view_if_needed()  # it is computed while somebody looks
        page.wait_for_selector(".frontier[data-whole='1']", timeout=10_000 * WAIT_S)
        page.locator("#frontier").screenshot(path=IMAGES / "ui-frontier.png")
        page.locator(".way:not(.chosen) a", has_text="Compare").first.click()
        page.wait_for_selector("#compare")
        page.locator("#compare").screenshot(path=IMAGES / "ui-compare-ways.png")
        at(page, link, "model=qwen2.5-7b&gpus=1&card=RTX4090&host-ram=32GB&lang=en")
        page.wait_for_selector(".remedies a.allow", timeout=1000 * WAIT_S)
        page.screenshot(path=IMAGES / "ui-nothing-fits.png")
        page.set_viewport_size(NARROW)
        at(page, link, f"{question}&max-steps=2000&lang=en")
        says(page, "#verdict", "Fits", WAIT_S)
        page.screenshot(path=IMAGES / "ui-phone.png")


if __name__ == "__main__":
    pictures()
