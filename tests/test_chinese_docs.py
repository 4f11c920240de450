"""Every page has a Chinese one that says the same: docs/NAME.md and docs/zh/NAME.md, README.md and README.zh-CN.md.

Not word by word: the same headings, tables, pictures, links, figures and words in backticks. Fenced blocks are equal to
the letter, so what `tests/test_docs.py` runs for the English page holds for the Chinese one. So are the rows of tables
that stand below `<!-- rows of the English page -->`, which scripts write; their heads are Chinese.

    python tests/test_chinese_docs.py

copies such blocks and rows of all English pages into the Chinese ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ENGLISH = [*sorted(DOCS.glob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
FIGURE = re.compile(r"\d[\d.,]*\d")
TABLE = re.compile(r"(<!-- rows of the English page -->\n)?(^\|.*\n\|.*\n)((?:^\|.*\n?)*)", re.MULTILINE)


def chinese(page: Path) -> Path:
    return page.parent / "zh" / page.name if page.parent == DOCS else page.with_name("README.zh-CN.md")


def english(page: Path) -> Path:
    return DOCS / page.name if page.parent == DOCS / "zh" else page.with_name(page.name.replace(".zh-CN", ""))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> list[str]:
    """As GitHub and our site make them."""
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for _, title in HEADING.findall(prose(page))]


def table_lengths(page: Path) -> list[int]:
    return [match[3].count("\n") for match in TABLE.finditer(prose(page))]


def links(page: Path) -> set[tuple[str, str, int]]:
    """Kind, target and the number of the heading there; to the English page where the target has two languages."""
    found = set()
    for picture, link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            found.add((picture, link, 0))
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        place = anchors(target).index(anchor) + 1 if anchor else 0
        found.add((picture, str(english(target)), place))
    return found - {("", str(english(page)), 0)}


def code(page: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", prose(page)))


def figures(page: Path) -> set[str]:
    return set(FIGURE.findall(re.sub(r"\]\([^)]*\)", "]", prose(page))))


def copied(page: Path) -> str:
    """The Chinese page with the fenced blocks of the English one, and with its rows where the page asks for them."""
    blocks = [match[0] for match in FENCE.finditer(page.read_text(encoding="utf-8"))]
    text = chinese(page).read_text(encoding="utf-8")
    assert len(FENCE.findall(text)) == len(blocks), f"{chinese(page)} lacks a block, or has one too many"
    rows = [match[3] for match in TABLE.finditer(prose(page))]
    without = FENCE.sub("```\n```", text)
    assert len(TABLE.findall(without)) == len(rows), f"{chinese(page)} lacks a table, or has one too many"
    filled = TABLE.sub(lambda match: _filled(match, rows.pop(0)), without)
    return FENCE.sub(lambda _: blocks.pop(0), filled)


def _filled(match: re.Match[str], rows: str) -> str:
    return f"{match[1]}{match[2]}{rows}" if match[1] else match[0]


def copy_all() -> None:
    for page in ENGLISH:
        if chinese(page).exists():
            chinese(page).write_text(copied(page), encoding="utf-8")


every_page = pytest.mark.parametrize(
    "page", [page for page in ENGLISH if chinese(page).exists()], ids=lambda page: str(page.relative_to(ROOT))
)


def test_every_page_has_a_chinese_one() -> None:
    assert [page.name for page in ENGLISH if not chinese(page).exists()] == []
    assert {english(page) for page in (DOCS / "zh").glob("*.md")} <= set(ENGLISH)


@every_page
def test_blocks_and_rows_are_those_of_the_english_page(page: Path) -> None:
    assert chinese(page).read_text(encoding="utf-8") == copied(page), f"stale: run python tests/{Path(__file__).name}"


@pytest.mark.thorough
@every_page
def test_both_pages_are_built_alike(page: Path) -> None:
    other = chinese(page)
    assert [len(level) for level, _ in HEADING.findall(prose(page))] == [
        len(level) for level, _ in HEADING.findall(prose(other))
    ]
    assert table_lengths(page) == table_lengths(other)
    assert links(page) == links(other)


@every_page
def test_names_and_figures_are_the_same(page: Path) -> None:
    assert code(page) == code(chinese(page))
    assert figures(page) <= figures(chinese(page))


@every_page
def test_each_page_leads_to_the_other_language(page: Path) -> None:
    for one, other, word in ((page, chinese(page), "中文"), (chinese(page), page, "English")):
        first = one.read_text(encoding="utf-8").split("\n\n")[1]
        path = re.fullmatch(rf"\[{word}\]\((\S+)\)", first)
        assert path, f"{one} has no link to the other language below its title"
        assert (one.parent / path[1]).resolve() == other


if __name__ == "__main__":
    copy_all()
