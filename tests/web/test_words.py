"""Both languages say everything, and the page speaks the one that is wanted."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import HTML, client

from tightfit.web.pages import TEMPLATES
from tightfit.web.words import LANGUAGES, words

HOLES = re.compile(r"\{(\w+)\}")


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            assert isinstance(key, str), f"{path}.{key} is no text: put it in quotes"
            yield from leaves(value, f"{path}.{key}")
    else:
        assert isinstance(tree, str), f"{path} is no text: put it in quotes"
        yield path, tree


def test_the_languages_have_the_same_words() -> None:
    english, chinese = dict(leaves(words("en"))), dict(leaves(words("zh")))
    assert list(english) == list(chinese)
    for key, text in english.items():
        assert sorted(HOLES.findall(text)) == sorted(HOLES.findall(chinese[key])), key
        assert bool(text) == bool(chinese[key]), key


def test_chinese_is_chinese() -> None:
    untranslated = re.compile(r"\{\w+\}|NVMe|GiB|MiB|[\s\d\W]")
    marks = re.compile(r"\.(mark|mood|placeholder)$")
    words_in = {key: untranslated.sub("", text) for key, text in leaves(words("zh")) if not marks.search(key)}
    assert [key for key, text in words_in.items() if text and not re.search(r"[\u4e00-\u9fff]", text)] == []


@pytest.mark.parametrize(
    ("asked", "header", "wanted"),
    [
        ("", "", "en"),
        ("", "zh-CN,zh;q=0.9,en;q=0.8", "zh-Hans"),
        ("", "de,fr;q=0.9", "en"),
        ("", "en;q=0.5, zh;q=0.9", "zh-Hans"),
        ("", "zh;q=0", "en"),
        ("", "zh;q=nonsense,,;;", "en"),
        ("zh", "en", "zh-Hans"),
        ("en", "zh", "en"),
        ("klingon", "zh", "zh-Hans"),
    ],
)
def test_the_language_is_the_one_that_is_wanted(asked: str, header: str, wanted: str, tmp_path: Path) -> None:
    visitor = client(tmp_path)
    params = {"lang": asked} if asked else {}
    assert f'<html lang="{wanted}">' in visitor.get("/runs", params=params, headers={"Accept-Language": header}).text


def test_a_chosen_language_stays(tmp_path: Path) -> None:
    visitor = client(tmp_path)
    assert "哪里出了问题" in visitor.get("/diagnose", params={"lang": "zh"}).text
    assert "哪里出了问题" in visitor.get("/diagnose").text
    assert "没有内容" in visitor.get("/nowhere", headers=HTML).text
    visitor.get("/diagnose", params={"lang": "en"})
    assert "What went wrong?" in visitor.get("/diagnose").text


def test_every_word_that_a_template_names_is_there() -> None:
    known = {key.lstrip(".") for key, _ in leaves(words("en"))}
    branches = {key.rsplit(".", depth)[0] for key in known for depth in range(1, key.count(".") + 1)}
    for template in TEMPLATES.glob("*.html"):
        for name in re.findall(r"\bw\.(?!said\(|say\()([a-z_]+(?:\.[a-z_]+)*)", template.read_text(encoding="utf-8")):
            plain = name.removesuffix(".format").removesuffix(".get")
            assert plain in known | branches, f"{template.name}: {name}"


def test_every_word_that_a_script_names_is_there() -> None:
    static = TEMPLATES.parent / "static"
    for script, branch in (
        ("run.js", "run"),
        ("curves.js", "run"),
        ("compare.js", "run"),
        ("alerts.js", "alerts"),
        ("diagnose.js", "diagnose"),
        ("runs.js", "runs"),
    ):
        for name in re.findall(r"\bwords\.([a-z_]+)", (static / script).read_text(encoding="utf-8")):
            assert name in words("en")[branch], f"{script}: {name}"


def test_the_names_of_the_languages() -> None:
    assert LANGUAGES == {"en": "English", "zh": "中文"}
