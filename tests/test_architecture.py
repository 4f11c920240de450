"""The house rules that a reader of one file cannot see."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tightfit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tightfit"
FILES = sorted(PACKAGE.rglob("*.py"))

ORDER = [
    "types",
    "owned",
    "job",
    "inputs",
    "memory",
    "pace",
    "priced",
    "planner",
    "render",
    "lint",
    "diagnose",
    "runs",
    "desk",
    "mamba",
    "train",
    "web",
    "screen",
    "api",
    "__init__",
    "cli",
    "__main__",
]
"""A module may import its own room and the rooms above it. Lazy and type-only imports count."""

WORKERS = {"mamba", "train"}
"""Spawned, never imported by the desk."""

GPU_STACK = {"torch", "deepspeed", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "triton"}

ENVIRONMENT_DOORS = ("inputs", "train/__main__.py")

files = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])


def room_of(path: Path) -> str:
    return _room(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))


def _room(module: str) -> str:
    """A room of several files beside each other: `cli_flags` → cli, `screen_plan` → screen."""
    first = module.partition("_")[0]
    return first if first in ("cli", "screen") else module


def room_of_name(dotted: str) -> str:
    """`tightfit.cli_flags` → cli; a name of the package itself, such as its version → __init__."""
    parts = dotted.split(".")
    if len(parts) == 1:
        return "__init__"
    name = _room(parts[1])
    return name if name in ORDER else "__init__"


def imported(path: Path) -> Iterator[str]:
    """Every module that the file names in an import statement, wherever it stands."""
    package = ("tightfit", *path.relative_to(PACKAGE).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            if module == "tightfit":
                yield from (f"tightfit.{alias.name}" for alias in node.names)
            else:
                yield module
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


@files
def test_every_file_is_in_a_room(path: Path) -> None:
    assert room_of(path) in ORDER


@files
def test_imports_go_one_way(path: Path) -> None:
    own = room_of(path)
    for name in imported(path):
        if name.split(".")[0] == "tightfit":
            room = room_of_name(name)
            assert ORDER.index(room) <= ORDER.index(own), f"{own} stands above {room} and may not import {name}"


@files
def test_the_desk_never_imports_the_worker(path: Path) -> None:
    own = room_of(path)
    for name in imported(path):
        if name.split(".")[0] == "tightfit" and room_of_name(name) in WORKERS:
            assert own in WORKERS, f"{own} may not import {name}: the worker is spawned"


@files
def test_mamba_knows_nothing_of_ours(path: Path) -> None:
    if room_of(path) == "mamba":
        ours = [name for name in imported(path) if name.split(".")[0] == "tightfit"]
        assert all(room_of_name(name) == "mamba" for name in ours), ours


@files
def test_the_gpu_stack_stays_with_the_worker(path: Path) -> None:
    if room_of(path) not in WORKERS:
        found = {name for name in imported(path) if name.split(".")[0] in GPU_STACK}
        assert not found, f"only {sorted(WORKERS)} may import {sorted(found)}"


@files
def test_the_environment_enters_by_one_door(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    if relative.parts[0] == ENVIRONMENT_DOORS[0] or relative.as_posix() in ENVIRONMENT_DOORS:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in names, f"line {node.lineno} reads the environment"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not names & {alias.name for alias in node.names}, f"line {node.lineno} reads the environment"


@files
def test_a_file_is_named_by_its_idea(path: Path) -> None:
    assert path.stem not in {"utils", "common", "helpers"}


def test_the_order_is_the_one_in_the_contributors_guide() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z_]+)(?:/|\.py)`", guide, flags=re.MULTILINE)
    assert listed == [room for room in ORDER if not room.startswith("__")]


def test_the_version_is_one() -> None:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    assert found[1] == tightfit.__version__


def test_public_names_exist() -> None:
    assert all(hasattr(tightfit, name) for name in tightfit.__all__)


def test_an_estimate_never_loads_the_gpu_stack() -> None:
    script = (
        "import contextlib, io, json, sys\n"
        "from tightfit.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    code = main(['estimate', '--model', 'tiny_llama', '--json'])\n"
        "assert code == 0, code\n"
        "json.loads(out.getvalue())\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & (GPU_STACK | {"numpy", "rich"})
