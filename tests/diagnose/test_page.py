"""The pages say what the catalogue and the program say. After a change of either,

    python tests/diagnose/test_page.py

writes docs/symptoms.md, its Chinese twin in docs/zh, and the printed parts of docs/diagnose.md, anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from tightfit.cli import main
from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.page import TITLES, symptom_page
from tightfit.diagnose.verdict import RETRYABLE
from tightfit.messages import LANGUAGES, Language

DOCS = Path(__file__).parents[2] / "docs"
SYMPTOMS: dict[Language, Path] = {"en": DOCS / "symptoms.md", "zh": DOCS / "zh" / "symptoms.md"}
DIAGNOSE = DOCS / "diagnose.md"
FILE = re.compile(r"^`([\w.-]+)`:\n+```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^```text\n\$ (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shown(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(shlex.split(command)[1:])
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def refreshed(text: str) -> str:
    """The page with what its commands print, in a folder with the files that it shows."""
    here = Path.cwd()
    before = dict(os.environ)
    os.environ |= {"COLUMNS": "80", "LINES": "40", "NO_COLOR": "1"}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, body in FILE.findall(text):
                Path(folder, name).write_text(body, encoding="utf-8")
            os.chdir(folder)
            return SESSION.sub(lambda found: f"```text\n$ {found[1]}\n{shown(found[1])}```", text)
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_of_symptoms_is_the_catalogue(language: Language) -> None:
    page = symptom_page(catalogue(), language)
    assert SYMPTOMS[language].read_text(encoding="utf-8") == page, "stale: run this file"


def test_the_examples_are_what_is_printed() -> None:
    text = DIAGNOSE.read_text(encoding="utf-8")
    assert SESSION.search(text)
    assert text == refreshed(text), "stale: run this file"
    assert not any(printed.startswith("tightfit: ") for _, printed in SESSION.findall(text)), "an example fails"


def test_every_kind_has_a_title() -> None:
    assert {symptom.kind for symptom in catalogue().symptoms} <= set(TITLES)
    assert set(TITLES) >= RETRYABLE


if __name__ == "__main__":
    for language, page in SYMPTOMS.items():
        page.write_text(symptom_page(catalogue(), language), encoding="utf-8")
    DIAGNOSE.write_text(refreshed(DIAGNOSE.read_text(encoding="utf-8")), encoding="utf-8")
