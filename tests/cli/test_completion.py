"""`tightfit completion`, asked by a real shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import warm_desk
from tightfit.cli import VERBS
from tightfit.cli.completion import SHELLS

ASK = """
source "$1"; shift
COMP_WORDS=(tightfit "$@"); COMP_CWORD=$#
_shtab_tightfit
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str) -> str:
    done = warm_desk.run("completion", shell)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "tightfit"
    path.write_text(script("bash"), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("diag",), {"diagnose"}),
        (("plan", "--offload-p"), {"--offload-param"}),
        (("plan", "--engine", "zero"), {"zero0", "zero1", "zero2", "zero3"}),
        (("explain", "--j"), {"--json"}),
    ],
)
def test_bash_completes(bash: Path, words: tuple[str, ...], offered: set[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    command = ["bash", "-c", ASK, "ask", str(bash), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == offered


@pytest.mark.thorough
@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_is_told_every_verb(shell: str) -> None:
    told = script(shell)
    assert all(verb in told for verb in VERBS)


def test_a_shell_that_is_not_known() -> None:
    done = warm_desk.run("completion", "bsh")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tightfit: completion knows no shell 'bsh': did you mean bash?\n"
