"""The documentation says what the program does.

In docs/*.md and in the README a fenced `console` block is a command and what it prints, at 80 columns and without
colours; a file that commands read stands on the page, in a fenced block below its name (`ds_config.json`:). Every other
`tightfit …` on a page must at least be a command that works. After a change of the program,

    python tests/test_docs.py

writes the printed parts of all pages anew, and copies them into the Chinese ones.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import notes_table
import phase_pictures

import test_chinese_docs
import warm_desk
from tightfit.cli import main
from tightfit.types import Levers

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"
CHINESE = ROOT / "README.zh-CN.md"
PICTURE = DOCS / "images" / "terminal.svg"
FOOTPRINT = DOCS / "footprint.md"
PLACEHOLDERS = {"VERB", "MODEL", "HARDWARE", "FILE"}
TERMINAL = {"COLUMNS": "80", "LINES": "40", "NO_COLOR": "1"}
TORCH = ("rehearse", "data")
NOT_TERMINAL = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_FILE = re.compile(r"^`([\w.-]+\.(?:json|ya?ml))`:\n+```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

every_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


# --- reading pages ------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def examples(text: str) -> Iterator[str]:
    """The contents of the `console` blocks."""
    return (body for language, body in FENCE.findall(text) if language == "console")


def commands_in(body: str) -> list[str]:
    return [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]


def mentioned(text: str) -> list[str]:
    """Every command of ours on a page, in blocks and in running text; those with a word to fill in left out."""
    found = [
        line.partition("  #")[0].strip()
        for language, body in FENCE.findall(text)
        if language in ("bash", "sh")
        for line in body.splitlines()
        if line.startswith("tightfit ")
    ]
    found += re.findall(r"`(tightfit [a-z-][^`]*)`", without_code(text))
    return [command for command in dict.fromkeys(found) if "…" not in command and not PLACEHOLDERS & {*command.split()}]


@functools.cache
def headings(page: Path) -> set[str]:
    """Anchors, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# --- running commands ---------------------------------------------------------------------------


@contextlib.contextmanager
def plain_terminal() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(TERMINAL)
    for name in NOT_TERMINAL:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def folder_of(text: str) -> Iterator[None]:
    """A folder with the files that the page shows, to run its commands in."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, body in NAMED_FILE.findall(text):
            Path(folder, name).write_text(body, encoding="utf-8")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def run(words: list[str]) -> tuple[int, str]:
    """Exit code, and what was printed, on either stream."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main(words)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return code, printed.getvalue()


def forked(words: list[str]) -> tuple[int, str]:
    """The same of a verb whose work is done by a process that loads torch."""
    done = warm_desk.run(*words, ranks=True)
    return done.returncode, done.stdout + done.stderr


def shown(command: str) -> str:
    """What a terminal shows for a command, which may end in `| head -N` or `| grep -E PATTERN`."""
    first, *filters = command.split(" | ")
    lines = run(shlex.split(first)[1:])[1].splitlines()
    for words in map(shlex.split, filters):
        if words[0] == "head":
            lines = lines[: int(words[-1].lstrip("-"))]
        elif words[0] == "grep":
            lines = [line for line in lines if re.search(words[-1], line)]
        else:
            raise ValueError(f"{words[0]} is not known here")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def session(body: str) -> str:
    """A `console` block made anew from its commands."""
    return "\n".join(f"$ {command}\n{shown(command)}" for command in commands_in(body))


def refreshed(text: str) -> str:
    """A page with the printed parts made anew."""

    def block(match: re.Match[str]) -> str:
        return f"```console\n{session(match[2])}```" if match[1] == "console" else match[0]

    with plain_terminal(), folder_of(text):
        return FENCE.sub(block, text)


def picture() -> str:
    """The README's first command as a terminal shows it, in its colours."""
    from rich.console import Console
    from rich.text import Text

    command = commands_in(next(examples(README.read_text(encoding="utf-8"))))[0]
    with plain_terminal():
        os.environ.pop("NO_COLOR")
        os.environ.update({"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "96"})
        text = run(shlex.split(command)[1:])[1]
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble((f"$ {command}\n", "bold"), Text.from_ansi(text)), end="")
    drawn = console.export_svg(title="tightfit plan", unique_id="tightfit")
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # nothing is fetched: any fixed font will do


# --- the tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, README, CHINESE], ids=lambda page: page.name)
def test_examples_show_what_the_program_prints(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert all(commands_in(body) for body in examples(text))
    assert text == refreshed(text), f"stale: run python tests/{Path(__file__).name}"


def test_the_picture_of_the_terminal_is_what_the_program_prints() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), f"stale: run python tests/{Path(__file__).name}"
    assert not re.search(r"(url\(|href=|src=)\S*http", PICTURE.read_text(encoding="utf-8")), "it fetches something"


def test_both_readmes_say_the_same() -> None:
    """Not word by word: the same commands, pages, sections and rows."""
    english, chinese = (path.read_text(encoding="utf-8") for path in (README, CHINESE))
    for part in (mentioned, lambda text: [*examples(text)]):
        assert part(english) == part(chinese)
    assert test_chinese_docs.links(README) == test_chinese_docs.links(CHINESE)
    for mark in ("\n## ", "\n|"):
        assert english.count(mark) == chinese.count(mark)


@every_page
def test_commands_work(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    with plain_terminal(), folder_of(text):
        for command in mentioned(text):
            words = shlex.split(command.partition(" > ")[0])[1:]
            code, printed = (forked if words[0] in TORCH else run)(words if len(words) > 1 else [*words, "--help"])
            assert code == 0, f"{command}: {printed}"


def test_notes_are_up_to_date() -> None:
    assert notes_table.main(["--check"]) == 0


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            dead.append(f"{page.name}: {link}")
    return dead


def test_links_lead_somewhere() -> None:
    pages = (*PAGES, README, CHINESE, ROOT / "CONTRIBUTING.md")
    assert [link for page in pages for link in dead_links(page)] == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# One\n[a](page.md#one) [b](page.md#two) [c](gone.md)", encoding="utf-8")
    assert dead_links(tmp_path / "page.md") == ["page.md: page.md#two", "page.md: gone.md"]


def test_the_index_lists_every_page() -> None:
    listed = {link.partition("#")[0] for link in LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))}
    assert {page.name for page in PAGES} - {"index.md"} <= listed


@pytest.mark.slow
def test_the_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    """From a copy: what a build leaves behind is not ours to leave in the checkout."""
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "build" / "docs"
    assert {page.with_suffix(".html").name for page in PAGES} <= {page.name for page in built.glob("*.html")}
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=.https?:", (built / "index.html").read_text("utf-8"))


@pytest.mark.parametrize("package", ["deepspeed", "transformers", "peft", "torch"])
def test_buffers_are_where_the_footprint_page_says(package: str) -> None:
    """On every line, the names after a file of the package are in that file."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    if package == "deepspeed" and version("deepspeed") != Levers().deepspeed_version:
        pytest.skip("the page is about another DeepSpeed")
    site = Path(spec.origin).parents[1]
    found = 0
    for line in FOOTPRINT.read_text(encoding="utf-8").splitlines():
        for path, names in re.findall(rf"`({package}/[\w/]+\.py)`:((?:,? `\w+`)+)", line):
            source = (site / path).read_text(encoding="utf-8")
            for name in re.findall(r"\w+", names):
                assert re.search(rf"\b{name}\b", source), f"{path} has no {name}"
                found += 1
    assert found


@pytest.mark.parametrize("name", phase_pictures.PICTURES)
def test_pictures_of_phases_are_what_the_model_says(name: str) -> None:
    path = DOCS / "images" / f"{name}.svg"
    assert path.read_text(encoding="utf-8") == phase_pictures.picture(name), "stale: run benchmarks/phase_pictures.py"
    assert f"images/{name}.svg" in FOOTPRINT.read_text(encoding="utf-8")


def test_our_own_names_on_the_footprint_page() -> None:
    text = FOOTPRINT.read_text(encoding="utf-8")
    source = ROOT / "src" / "tightfit"
    for path in re.findall(r"`((?:memory|train|inputs)/[\w/]+\.py)`", text):
        assert (source / path).exists(), path
    code = {word for path in source.rglob("*.py") for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    for name in re.findall(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]+)`", text):
        assert name in code, name


if __name__ == "__main__":
    for every in (*PAGES, README, CHINESE):
        every.write_text(refreshed(every.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
    test_chinese_docs.copy_all()
