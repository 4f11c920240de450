"""The house rules that a reader of one file cannot see."""

from __future__ import annotations

import ast
import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from house import House

import tightfit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tightfit"
FILES = sorted(PACKAGE.rglob("*.py"))

ORDER = [
    "messages",
    "types",
    "owned",
    "inputs",
    "hardware",
    "model",
    "job",
    "memory",
    "pace",
    "priced",
    "planner",
    "formats",
    "diagnose",
    "runs",
    "desk",
    "mamba",
    "train",
    "measure",
    "web",
    "start",
    "screen",
    "api",
    "__init__",
    "cli",
    "__main__",
]
"""A module may import its own room and the rooms above it. Lazy and type-only imports count."""

WORKERS = {"mamba", "measure", "train"}
"""Spawned, never imported by the desk."""

GPU_STACK = {"torch", "deepspeed", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "triton"}

QUOTED = {
    "diagnose/lines.py": "any log",
    "diagnose/oom.py": "torch",
    "runs/cause.py": "Linux",
    "train/distress.py": "torch",
}
"""Files that search for words which also stand in a text of ours → who wrote the text in which they search."""

ENVIRONMENT_DOORS = ("inputs", "hardware", "model", "train/__main__.py", "measure/__main__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def room_of_name(dotted: str) -> str:
    """`tightfit.cli.flags` → cli; a name of the package itself, such as its version → __init__."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else "__init__"


@cache
def house() -> House:
    """All of the package, parsed and walked through once; nothing of it is garbage meanwhile."""
    gc.disable()
    try:
        made = House(ROOT, "")
        assert made.nodes
    finally:
        gc.enable()
    return made


@pytest.fixture(scope="module", autouse=True)
def _let_go() -> Iterator[None]:
    """Half a million nodes would make every other test's garbage dear."""
    yield
    house.cache_clear()
    imports.cache_clear()


@cache
def imports() -> dict[Path, list[ast.Import | ast.ImportFrom]]:
    """Every import statement of every file, wherever it stands."""
    found: dict[Path, list[ast.Import | ast.ImportFrom]] = {path: [] for path in FILES}
    for name, node in house().nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found[PACKAGE / name].append(node)
    return found


@cache
def imported() -> dict[Path, list[str]]:
    """Every module that a file names in an import statement or asks for by its name."""
    found: dict[Path, list[str]] = {path: [] for path in FILES}
    for path, nodes in imports().items():
        package = ("tightfit", *path.relative_to(PACKAGE).with_suffix("").parts)[:-1]
        for node in nodes:
            if isinstance(node, ast.Import):
                found[path] += [alias.name for alias in node.names]
                continue
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found[path] += [f"tightfit.{alias.name}" for alias in node.names] if module == "tightfit" else [module]
    for name, node in house().nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            found[PACKAGE / name] += [value for value in constants if isinstance(value, str)]
    return found


def our_imports() -> list[tuple[Path, str]]:
    """Every file with every module of ours that it imports."""
    return [(path, name) for path, names in imported().items() for name in names if name.split(".")[0] == "tightfit"]


def reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in names
    return isinstance(node, ast.ImportFrom) and node.module == "os" and bool(names & {each.name for each in node.names})


def test_every_file_is_in_a_room_and_named_by_its_idea() -> None:
    assert {room_of(path) for path in FILES} == set(ORDER)
    assert not [path for path in FILES if path.stem in {"utils", "common", "helpers"}]


def test_the_root_is_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 10


@pytest.mark.thorough
def test_imports_go_one_way() -> None:
    wrong = [
        (path, name) for path, name in our_imports() if ORDER.index(room_of_name(name)) > ORDER.index(room_of(path))
    ]
    assert not wrong, "a room imports one that stands below it in ORDER"


def test_few_rooms_stand_on_one_another() -> None:
    """Whoever changes a room has to know those below it: the longest chain of them is what there is to learn."""
    below: dict[str, set[str]] = {room: set() for room in ORDER}
    for path, name in our_imports():
        below[room_of(path)].add(room_of_name(name))
    floors: dict[str, int] = {}
    for room in ORDER:
        floors[room] = 1 + max((floors[other] for other in below[room] - {room}), default=0)
    assert max(floors.values()) <= 10, floors


def test_no_module_imports_itself_by_a_detour() -> None:
    """`import_module` of a name that is computed shows nowhere; everything else does, inside functions too."""
    modules = {
        ".".join(("tightfit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in FILES
    }
    graph = {}
    for name, path in modules.items():
        found: set[str] = set()
        for node in imports()[path]:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            else:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inside if inside <= modules.keys() else {*inside, str(node.module)}
        graph[name] = (found & modules.keys()) - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules


def test_only_the_command_line_sees_what_argparse_made() -> None:
    """Every other room is asked by a typed request: see `desk/request.py`."""
    seen = {room_of(path) for path in FILES if "argparse" in imported()[path]}
    assert seen <= {"cli", "measure", "train"}, "the workers have command lines of their own; nobody else has one"


def test_the_worker_is_spawned_and_never_imported() -> None:
    desk = [(path, name) for path, name in our_imports() if room_of(path) not in WORKERS]
    assert not [(path, name) for path, name in desk if room_of_name(name) in WORKERS]


def test_mamba_knows_nothing_of_ours_but_the_words() -> None:
    known = {"mamba", "messages"}
    assert not [name for path, name in our_imports() if room_of(path) == "mamba" and room_of_name(name) not in known]


def test_the_gpu_stack_stays_with_the_worker() -> None:
    """And with `child.py`, which is started by its path and asks torch where no tool of the makers answers."""
    desk = [path for path in FILES if room_of(path) not in WORKERS]
    assert not [path for path in desk for name in imported()[path] if name.startswith("tightfit.hardware.child")]
    desk.remove(PACKAGE / "hardware" / "child.py")
    assert not [(path, name) for path in desk for name in imported()[path] if name.split(".")[0] in GPU_STACK]


@pytest.mark.thorough
def test_the_environment_enters_by_one_door() -> None:
    found = [(name, node.lineno) for name, node in house().nodes if reads_environment(node)]
    assert not [place for place in found if not place[0].startswith(ENVIRONMENT_DOORS)]


@pytest.mark.thorough
def test_nothing_is_decided_from_a_sentence_of_ours() -> None:
    """A message is known by its id and its fields."""
    found = {place.partition(":")[0] for place in house().matches()}
    assert found == set(QUOTED)


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


@pytest.mark.thorough
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
