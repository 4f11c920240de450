"""`tightfit schema`, and the page about job files that is made with it.

    python tests/cli/test_schema.py

writes the table of docs/job.md anew, and that of docs/zh/job.md but for what a field takes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli.schema import field_table, job_schema, schema
from tightfit.job import Job
from tightfit.job.fields import FREE_LEVERS, job_fields, meanings
from tightfit.job.file import read_job
from tightfit.messages import speak
from tightfit.types import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "job.md"
CHINESE = PAGE.parent / "zh" / "job.md"
TABLE = re.compile(r"(<!-- fields.*? -->\n)(.*?)(<!-- end of fields -->)", re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def refreshed(page: str) -> str:
    """The page with its table made anew."""
    return TABLE.sub(lambda match: f"{match[1]}{field_table()}\n{match[3]}", page)


def refreshed_chinese(page: str) -> str:
    """Names, defaults and meanings are the program's; what a field takes is written on the page."""
    speak("zh")
    try:
        rows = [line.split(" | ") for line in field_table().splitlines()]
    finally:
        speak("en")
    table = TABLE.search(page)
    assert table
    takes = dict(line.split(" | ")[:2] for line in table[2].splitlines())
    made = [" | ".join([name, takes.get(name, english), *rest]) for name, english, *rest in rows]
    return page.replace(table[2], "\n".join(made) + "\n")


def properties(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, each in block.get("properties", {}).items():
        yield prefix + name, each
        yield from properties(each, f"{prefix}{name}.")


def test_it_prints_a_schema_that_describes_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema([]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["$schema"].startswith("https://json-schema.org/")
    assert printed["title"]
    assert printed["required"] == ["model"]
    found = dict(properties(printed))
    assert set(found) == set(job_fields()) | {"saving.every"}  # the one word for two fields
    assert all(each["description"].strip() for each in found.values())


def test_the_schema_has_ranges_and_words() -> None:
    found = dict(properties(job_schema()))
    assert found["sequence"]["minimum"] == 1
    assert found["limits.margin"]["exclusiveMaximum"] == 0.9
    assert found["levers.engine"]["enum"] == ["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "stream"]
    assert re.fullmatch(found["levers.checkpointing"]["pattern"], "layers:12")
    assert all(block["additionalProperties"] is False for block in found.values() if "properties" in block)


@pytest.mark.thorough
def test_the_same_bytes_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    script = "from tightfit.cli.schema import schema; schema([])"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert schema([]) == 0
    assert capsys.readouterr().out == made
    assert json.loads(made) == job_schema()


def test_the_table_has_a_row_for_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema(["--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = re.findall(r"^\| `([\w.]+)`", "\n".join(lines), re.MULTILINE)
    assert len(named) == len(set(named)) == len(lines) - 2
    assert {name.partition(".")[0] for name in named} == {each.name for each in fields(Job)}
    assert {name for name in named if name.startswith("levers.")} == {f"levers.{name}" for name in FREE_LEVERS}
    assert "| `sequence` | a whole number of at least 1 | `2048` | Tokens in a sequence. |" in lines


def test_every_field_of_a_job_has_its_sentence() -> None:
    assert set(meanings()) == {name for name in job_fields() if not name.startswith("levers.")}


def test_a_misspelt_flag_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="--table"):
        schema(["--tabel"])


@pytest.mark.thorough
def test_the_help_needs_no_pydantic() -> None:
    script = (
        "import sys, tightfit.cli, tightfit.cli.schema\n"
        "try: tightfit.cli.schema.schema(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'pydantic' not in sys.modules and 'yaml' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_has_this_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert TABLE.search(page)
    assert page == refreshed(page), f"stale: run python tests/cli/{Path(__file__).name}"
    chinese = CHINESE.read_text(encoding="utf-8")
    assert chinese == refreshed_chinese(chinese), f"stale: run python tests/cli/{Path(__file__).name}"


def test_every_file_on_the_page_is_a_job(tmp_path: Path) -> None:
    blocks = YAML.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 4
    for number, text in enumerate(blocks):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        read_job(path)


def test_the_full_example_leaves_nothing_to_say(tmp_path: Path) -> None:
    text = max(YAML.findall(PAGE.read_text(encoding="utf-8")), key=len)
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    assert read_job(path).said == ()


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    CHINESE.write_text(refreshed_chinese(CHINESE.read_text(encoding="utf-8")), encoding="utf-8")
