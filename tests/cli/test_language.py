"""Which language the command line speaks, and who else learns of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

import warm_desk
from tightfit.cli import VERBS, main
from tightfit.inputs.flags import LEVERS
from tightfit.inputs.surroundings import choose_language, inherited
from tightfit.job.fields import meanings
from tightfit.messages import FOLDER, text
from tightfit.messages.wide import wrap

LOCALE = ("TIGHTFIT_LANG", "LC_ALL", "LC_MESSAGES", "LANG")


@pytest.fixture(autouse=True)
def _own_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.messages._spoken", "en")
    for name in LOCALE:
        monkeypatch.setenv(name, "")


def spoken() -> str:
    return "zh" if text("cli.wrong-language", name="", languages="", word="").strip().startswith("只") else "en"


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_MESSAGES": "zh_TW", "LANG": "en_US.UTF-8"}, "zh"),
        ({"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"TIGHTFIT_LANG": "zh", "LANG": "en_US.UTF-8"}, "zh"),
        ({"TIGHTFIT_LANG": "en", "LC_ALL": "zh_CN.UTF-8"}, "en"),
    ],
)
def test_the_variable_wins_over_the_locale(
    environment: Mapping[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    choose_language()
    assert spoken() == language


@pytest.mark.parametrize("words", [["--lang", "zh", "schema"], ["schema", "--lang", "zh"], ["schema", "--lang=zh"]])
def test_the_flag_stands_anywhere_and_wins(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["TIGHTFIT_LANG"] = "en"
    assert main([*words, "--table"]) == 0
    assert spoken() == "zh"
    assert inherited({})["TIGHTFIT_LANG"] == "zh"  # for the processes that are started
    assert capsys.readouterr().out.startswith("|")


def test_what_follows_the_dashes_is_another_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--", "bash", "train.sh", "--lang", "zh"]) == 0
    assert "train.sh --lang zh" in capsys.readouterr().out
    assert spoken() == "en"


@pytest.mark.parametrize(
    ("words", "variable", "said"),
    [
        (["--lang", "fr"], "", "--lang takes en or zh, not 'fr'"),
        (["schema", "--lang"], "", "--lang takes en or zh, not ''"),
        (["schema"], "chinese", "TIGHTFIT_LANG takes en or zh, not 'chinese'"),
    ],
)
def test_a_wrong_language_is_one_sentence(
    words: Sequence[str], variable: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTFIT_LANG", variable)
    assert main(words) == 2
    assert capsys.readouterr().err == f"tightfit: {said}\n"


@pytest.mark.thorough
def test_a_worker_reads_the_variable(tmp_path: Path) -> None:
    told = {**os.environ, "TIGHTFIT_LANG": "chinese"}
    process = warm_desk.Process(str(tmp_path / "worker.json"), env=told, worker=True)
    try:
        assert process.communicate()[1].endswith("TIGHTFIT_LANG takes en or zh, not 'chinese'\n")
    finally:
        process.kill()
    assert process.returncode == 2


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_the_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main([verb, "--help"])
    assert "--lang en|zh" in capsys.readouterr().out


def test_every_lever_and_every_field_of_a_job_is_explained_in_chinese() -> None:
    explained = yaml.safe_load((FOLDER / "fields.zh.yaml").read_text(encoding="utf-8"))
    assert set(explained["levers"]) == set(LEVERS)
    assert set(explained["job"]) == set(meanings())


@pytest.mark.parametrize(
    ("said", "width", "lines"),
    [
        ("the same as it ever was", 12, ["the same as", "it ever was"]),
        ("显存不足时，重新启动", 12, ["显存不足时，", "重新启动"]),
        ("加 --keep DIR 时写入 DIR", 12, ["加 --keep", "DIR 时写入", "DIR"]),
        ("一次（默认）保留", 9, ["一次（默", "认）保留"]),
    ],
)
def test_lines_are_as_wide_as_the_terminal_counts(said: str, width: int, lines: Sequence[str]) -> None:
    assert wrap(said, width).split("\n") == list(lines)
