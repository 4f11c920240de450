"""A dialect is one folder and one line: the package with a made-up one more finds it wherever dialects are walked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tightfit

pytestmark = pytest.mark.thorough

DIALECT = """
from tightfit.formats.dialect import Dialect, Launcher, PlanFile
from tightfit.job.known import KnownConfig
from tightfit.formats.rules import IN_ANY_FILE, rules


def check(sheet):
    if sheet.get("loom_threads") == 0:
        sheet.say("loom-idle", "loom_threads", "a loom without threads weaves nothing", "write 1 at least")


DIALECT = Dialect(
    name="loom",
    title="Loom's",
    one="a Loom YAML",
    keys=frozenset(("loom_threads", "loom_batch")),
    telling=("loom_threads",),
    rules=IN_ANY_FILE | rules("loom-idle!"),
    check=check,
    known=lambda values: KnownConfig(micro_batch=values.get("loom_batch")),
    files=(
        PlanFile(
            name="loom.yaml",
            what="for `loom weave`",
            write=lambda plan, target, files: f"loom_batch: {plan.chosen.levers.micro_batch}\\n",
            notes=lambda plan, target: ("Looms are slow.",),
            version=lambda plan, target: "Loom 3",
        ),
    ),
    launcher=Launcher(program="loom", reads=("loom.yaml",), command=lambda plan, target: ["exec loom weave"]),
)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with the folder and the line."""
    source = tmp_path_factory.mktemp("package")
    ours = Path(tightfit.__file__).parent
    shutil.copytree(ours, source / "tightfit")  # with its byte code, which is as good there
    formats = source / "tightfit" / "formats"
    (formats / "loom").mkdir()
    (formats / "loom" / "__init__.py").touch()
    (formats / "loom" / "dialect.py").write_text(DIALECT, encoding="utf-8")
    registry = formats / "dialect.py"
    text = registry.read_text(encoding="utf-8")
    registry.write_text(text.replace('    "launch",\n', '    "loom",\n    "launch",\n'), encoding="utf-8")
    return source


def run(package: Path, folder: Path, *words: str) -> tuple[int, str]:
    """The command line of that package."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "weaving.yaml"
    path.write_text("loom_threads: 0\nloom_batch: 3\n", encoding="utf-8")
    return path


def test_lint_recognises_and_checks_its_file(package: Path, config: Path) -> None:
    code, said = run(package, config.parent, "lint", "--json", config.name)
    report = json.loads(said)
    assert (code, report["kind"]) == (1, "loom")
    assert [(found["rule"], found["line"]) for found in report["findings"]] == [("loom-idle", 1)]


def test_lint_has_it_in_its_help(package: Path, tmp_path: Path) -> None:
    code, said = run(package, tmp_path, "lint", "--help")
    assert code == 0
    assert "a Loom YAML" in " ".join(said.split())
    assert "huggingface|loom|job" in said


def test_diagnose_reads_what_its_file_says(package: Path, config: Path) -> None:
    script = (
        "from pathlib import Path; from tightfit.formats.recognise import read_known_config; "
        f"known = read_known_config(Path({str(config)!r})); print(known.trainer, known.micro_batch)"
    )
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["loom", "3"]


def test_a_plan_becomes_its_file_and_is_started_by_it(package: Path, tmp_path: Path) -> None:
    words = "plan --model tiny_llama --gpus 1x24GB --launcher loom --write out"
    code, said = run(package, tmp_path, *words.split())
    assert code == 0, said
    assert (tmp_path / "out" / "loom.yaml").read_text(encoding="utf-8").startswith("loom_batch: ")
    page = (tmp_path / "out" / "PLAN.md").read_text(encoding="utf-8")
    assert "| `loom.yaml` | for `loom weave` |" in page
    assert "- Looms are slow." in page
    assert "- `loom.yaml`: Loom 3." in page
    script = (tmp_path / "out" / "launch.sh").read_text(encoding="utf-8")
    assert "for file in loom.yaml; do" in script
    assert script.endswith("exec loom weave\n")
    assert run(package, tmp_path, *words.split(), "--force")[0] == 0  # the second time it is known as ours
