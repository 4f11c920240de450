"""The examples: their plans are what the program writes now, their pages say what it prints, and they run.

    python tests/examples/test_examples.py

writes the printed parts of the pages anew; `python examples/write_plans.py` writes the plans.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import smoke
import write_plans

import test_docs as docs
import tightfit
import warm_desk
from tightfit.cli import VERBS
from tightfit.inputs.flags import flags_from_levers
from tightfit.memory import estimate
from tightfit.types import UserError

EXAMPLES = Path(smoke.__file__).parent
PAGES = [EXAMPLES / "README.md", *(EXAMPLES / name / "README.md" for name in smoke.EXAMPLES)]
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|tmp|root|home|Users|mnt)\b")
NOT_TRAINED = ("qwen-32b-lora-on-8-dcus",)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)


@contextlib.contextmanager
def within(folder: Path) -> Iterator[None]:
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


MEASURED = EXAMPLES.parent / "benchmarks/data/h200-examples.jsonl"


@pytest.mark.parametrize(
    "row", [json.loads(line) for line in MEASURED.read_text().splitlines()], ids=lambda row: row["plan"]
)
def test_what_was_measured_is_of_the_plan_that_stands_there(row: dict[str, Any]) -> None:
    """A plan that has changed was not measured, and a page says what was. Our own worker was, with the levers of the
    plan, also where that is for another trainer."""
    folder = EXAMPLES.parent / row["plan"]
    measured = row["figures"]["peak"]["measured"]
    page = (EXAMPLES / Path(row["plan"]).parts[1] / "README.md").read_text(encoding="utf-8")
    if "since_changed" in row:
        assert re.search(rf"n earlier plan.*measured {measured / 2**30:.1f}\b", page)
        return
    if (folder / "worker.json").exists():
        worker = json.loads((folder / "worker.json").read_text(encoding="utf-8"))
        levers = worker["levers"] | {"buckets": worker["buckets"]}
        predicted = worker["predicted"]["gpu"]["peak_bytes"]
    else:
        words = {"gpus": "8xK100-64GB", "deepspeed_version": row["levers"]["deepspeed_version"]}
        theirs = tightfit.estimate(folder / "llamafactory.yaml", **words).priced
        pinned = row["levers"]["buckets"]["pin_memory"]  # nothing is offloaded, so the file has nothing to pin
        buckets = asdict(theirs.levers.buckets) | {"pin_memory": pinned}
        levers = flags_from_levers(theirs.levers) | {"buckets": buckets}
        ours = replace(theirs.levers, trainer="tightfit", padded=False)
        predicted = estimate(theirs.shape, ours, theirs.world, theirs.hardware).gpu.peak_bytes
    assert {name: levers[name] for name in row["levers"]} == row["levers"]  # there may be more levers since
    said = rf"predicted {predicted / 2**30:.1f}(?: GiB at the peak)?, measured {measured / 2**30:.1f}\b"
    assert re.search(said, page), said


def refreshed(page: Path) -> str:
    """The page with the printed parts made anew, in the example's folder."""

    def block(match: re.Match[str]) -> str:
        return f"```console\n{docs.session(match[2])}```" if match[1] == "console" else match[0]

    with docs.plain_terminal(), within(page.parent):
        return docs.FENCE.sub(block, page.read_text(encoding="utf-8"))


def commands_of(page: Path) -> list[str]:
    """Every command of ours on a page."""
    text = page.read_text(encoding="utf-8")
    shown = [command for body in docs.examples(text) for command in docs.commands_in(body)]
    return [command.partition(" | ")[0] for command in [*shown, *docs.mentioned(text)]]


def parse(words: Sequence[str]) -> None:
    """As the verb reads its command line, and no further."""
    verb, *rest = words
    module = import_module(VERBS[verb])
    if not rest:  # a verb that is only named
        return
    if verb == "run":
        rest = rest[: rest.index("--")]  # what follows is another program's
    module.parser().parse(rest[1:] if verb == "data" else rest)


@pytest.mark.thorough
@pytest.mark.parametrize("planned", write_plans.PLANS, ids=lambda planned: f"{planned.example}/{planned.folder}")
def test_a_plan_is_what_the_program_writes_now(planned: write_plans.Planned) -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in planned.path.iterdir()}
    assert there == write_plans.files_of(planned), "stale: run python examples/write_plans.py"
    assert os.access(planned.path / "launch.sh", os.X_OK)


@pytest.mark.parametrize("planned", write_plans.PLANS, ids=lambda planned: f"{planned.example}/{planned.folder}")
def test_a_page_says_how_its_plan_was_written(planned: write_plans.Planned) -> None:
    command = " ".join(f"tightfit plan job.yaml {planned.flags} --write {planned.folder}".split())
    assert command in commands_of(EXAMPLES / planned.example / "README.md")


@pytest.mark.thorough
def test_commands_of_the_pages_can_be_parsed() -> None:
    wrong, commands = [], [(page, command) for page in PAGES for command in commands_of(page)]
    for page, command in commands:
        try:
            parse(shlex.split(command)[1:])
        except UserError as error:
            wrong.append(f"{page.parent.name}: {command}: {error}")
    assert {page.parent.name for page, _ in commands} >= set(smoke.EXAMPLES)
    assert wrong == []


def test_links_of_the_pages_lead_somewhere() -> None:
    assert [wrong for page in PAGES for wrong in docs.dead_links(page)] == []


def test_every_folder_is_an_example_and_is_listed() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/job.yaml")}
    assert folders == set(smoke.EXAMPLES) == {planned.example for planned in write_plans.PLANS}
    listed = docs.LINK.findall((EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert {f"{name}/README.md" for name in folders} <= set(listed)


def test_no_file_names_a_place_on_a_machine() -> None:
    for path in EXAMPLES.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            assert not MACHINE_PATH.search(path.read_text(encoding="utf-8")), path


@pytest.mark.thorough
@every_page
def test_a_page_shows_what_the_program_prints(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == refreshed(page), f"stale: run python tests/examples/{Path(__file__).name}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", NOT_TRAINED)
def test_an_example_is_written_for_another_trainer(
    name: str, tmp_path: Path, quick_start: None, capsys: pytest.CaptureFixture[str]
) -> None:
    smoke.smoke(name, tmp_path)
    said = capsys.readouterr().out
    assert "✗" not in said
    assert "no errors, no warnings" in said
    assert re.search(r"Fits: needs .* on each of 8 GPUs", said)


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's commands are forked, and import nothing anew."""

    def start(command: Sequence[str], *, cwd: Path, env: dict[str, str], **_: object) -> Any:
        assert list(command[:3]) == [sys.executable, "-m", "tightfit"]
        return warm_desk.run(*command[3:], cwd=cwd, env=env, timeout=600, ranks=True)

    monkeypatch.setattr(smoke, "subprocess", SimpleNamespace(run=start, DEVNULL=subprocess.DEVNULL))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "lora-on-4-to-12gb" else [pytest.mark.slow])
        for name in smoke.EXAMPLES
        if name not in NOT_TRAINED
    ],
)
def test_an_example_runs_with_a_tiny_model(
    name: str, tmp_path: Path, quick_start: None, capsys: pytest.CaptureFixture[str]
) -> None:
    smoke.smoke(name, tmp_path)
    said = capsys.readouterr().out
    assert "✗" not in said
    plans = [EXAMPLES / name / plan / "worker.json" for plan in smoke.EXAMPLES[name].plans]
    engines = [json.loads(plan.read_text(encoding="utf-8"))["levers"]["engine"] for plan in plans]
    runs, sharded = len(engines), len([each for each in engines if each not in ("ddp", "zero0")])
    assert len(re.findall(r"^Trained \S+ for 3 steps", said, re.MULTILINE)) == runs
    assert len(re.findall(r"is sharded: .* \(50%\)", said)) == sharded
    assert len(re.findall(r"^\$ tightfit export", said, re.MULTILINE)) == runs


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(refreshed(each), encoding="utf-8")
    docs.test_chinese_docs.copy_all()
