"""A lever is one field: one line in one file, and every door has it.

The package is copied, a lever that does nothing is added to its `types.py`, and the copy is asked, in a process of its
own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tightfit

PACKAGE = Path(tightfit.__file__).parent
BEFORE = "    frozen_layers: int = lever("
LEVER = """    echo: Literal["quiet", "loud"] = lever("quiet", "how loud it is (quiet)", "what saves memory")
    depth: int = lever(3, "how deep it is (3)", "what saves memory", flag="deep", least=1, most=9, also=("fathoms",))
"""
ASK = """
import contextlib, io, json, sys
from pathlib import Path

from tightfit.cli import main
from tightfit.job.file import levers_of, model_of, pinned, read_job
from tightfit.train.config import read_worker_config
from tightfit.types import UserError

folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
from visits import client

said = {}


def ask(name, *words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code
    said[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue()}


for verb in ("estimate", "plan", "train"):
    ask(f"{verb} --help", verb, "--help")
ask("schema", "schema")
ask("table", "schema", "--table")
ask("completion", "completion", "bash")
ask("estimate", "estimate", "--model", "tiny_llama", "--echo", "LOUD", "--fathoms", "7", "--json")
ask("wrong word", "estimate", "--model", "tiny_llama", "--echo", "loudly")
ask("too deep", "estimate", "--model", "tiny_llama", "--deep", "10")
job = folder / "job.yaml"
job.write_text("model: tiny_llama\\nhardware: {gpus: 1x24GB, host_ram: 64GB}\\nlevers: {echo: loud, deep: 5}\\n")
read = read_job(job).job
levers = levers_of(read, model_of(read))
said["job"] = {"echo": levers.echo, "depth": levers.depth, "pinned": sorted(pinned(read))}
wrong = folder / "wrong.yaml"
wrong.write_text("model: tiny_llama\\nlevers: {deep: 10}\\n")
try:
    read_job(wrong)
except UserError as error:
    said["wrong job"] = str(error)
ask("plan", "plan", str(job), "--no-calibration", "--json", "--write", str(folder / "plan"))
orders = read_worker_config(folder / "plan" / "worker.json").levers
said["worker"] = {"echo": orders.echo, "depth": orders.depth}
written = json.loads((folder / "plan" / "worker.json").read_text())
del written["levers"]["echo"], written["levers"]["deep"]
(folder / "plan" / "worker.json").write_text(json.dumps(written))
orders = read_worker_config(folder / "plan" / "worker.json").levers
said["older worker"] = {"echo": orders.echo, "depth": orders.depth}
visitor = client(folder)
said["page"] = visitor.get("/plan?model=tiny_llama&gpus=1&card=24GB&echo=loud&deep=4").text
said["answer"] = visitor.get("/plan/answer.json?model=tiny_llama&gpus=1&card=24GB&echo=loud&deep=4").json()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one_lever")
    copy = folder / "src" / "tightfit"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    types = copy / "types.py"
    text = types.read_text()
    assert text.count(BEFORE) == 1
    types.write_text(text.replace(BEFORE, LEVER + BEFORE))
    asked = subprocess.run(
        [sys.executable, "-c", ASK, str(folder), str(Path(__file__).with_name("web"))],
        env={**os.environ, "PYTHONPATH": str(copy.parent), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["estimate", "plan", "train"])
def test_it_has_flags_with_help(said: dict[str, Any], verb: str) -> None:
    text = " ".join(said[f"{verb} --help"]["out"].split())
    default = " (quiet)" if verb == "estimate" else ""  # where the plan chooses, there is none
    assert f"--echo quiet|loud how loud it is{default} --deep N how deep it is" in text
    assert text.index("what saves memory:") < text.index("--echo") < text.index("DeepSpeed's buffers:")


@pytest.mark.thorough
def test_the_shell_completes_its_words(said: dict[str, Any]) -> None:
    assert re.search(r"echo_choices=\(\W*quiet\W+loud\W*\)", said["completion"]["out"])


def test_it_is_in_the_schema_of_a_job_file(said: dict[str, Any]) -> None:
    levers = json.loads(said["schema"]["out"])["properties"]["levers"]["properties"]
    assert levers["echo"] == {"type": "string", "enum": ["quiet", "loud"], "description": "How loud it is."}
    assert levers["deep"] == {"type": "integer", "minimum": 1, "maximum": 9, "description": "How deep it is."}
    assert "| `levers.echo` | quiet or loud | the plan chooses | How loud it is. |" in said["table"]["out"]


def test_it_is_said_and_reported(said: dict[str, Any]) -> None:
    levers = json.loads(said["estimate"]["out"])["levers"]
    assert (levers["echo"], levers["deep"]) == ("loud", 7)


def test_what_it_does_not_take_is_one_sentence(said: dict[str, Any]) -> None:
    assert (said["wrong word"]["code"], said["too deep"]["code"]) == (2, 2)
    assert "--echo knows no 'loudly': did you mean loud?" in said["wrong word"]["err"]
    assert "--deep must be at most 9, not 10" in said["too deep"]["err"]
    assert said["wrong job"] == "levers.deep in wrong.yaml must be at most 9, not 10"


def test_a_job_file_pins_it(said: dict[str, Any]) -> None:
    assert said["job"] == {"echo": "loud", "depth": 5, "pinned": ["depth", "echo"]}
    levers = json.loads(said["plan"]["out"])["chosen"]["levers"]
    assert (levers["echo"], levers["deep"]) == ("loud", 5)


def test_the_worker_is_told(said: dict[str, Any]) -> None:
    assert said["worker"] == {"echo": "loud", "depth": 5}
    assert said["older worker"] == {"echo": "quiet", "depth": 3}, "a plan that was written before there was one"


def test_the_page_asks_for_it(said: dict[str, Any]) -> None:
    assert '<select id="echo" name="echo">' in said["page"]
    assert '<option value="loud" selected>' in said["page"]
    assert '<input id="deep" name="deep" type="text" inputmode="numeric" value="4"' in said["page"]
    assert '<label for="deep">Deep</label>' in said["page"]
    assert said["answer"]["chosen"]["levers"]["echo"] == "loud"
