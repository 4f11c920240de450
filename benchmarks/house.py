"""Counts what makes the house hard to enter: names, single-use functions, engines written out, import floors.

    python benchmarks/house.py                      # this checkout
    python benchmarks/house.py OLDER                # another checkout (its root, or its src/tightfit)
    python benchmarks/house.py OLDER NEWER          # before → after
    python benchmarks/house.py --list matches       # the places behind a figure, and --under train for one room's

How each figure is decided:

used once    a function or method whose name starts with one underscore, and whose name is read exactly once in its file
             apart from its own body
participle   the first or the last word of a function's name ends in "ed" or is an irregular participle, unless the name
             starts with a word that makes it a question or an order (is_, has_, check_, …) or ends in a unit (_bytes)
doubled      a class name that is defined in two or more places
engines      files in which "fsdp2" or "zero3" stands as a whole string
matches      two or more words that are searched for in a text (startswith, in, replace, re, …) while a string of the
             package elsewhere contains them: so we wrote what we read. A rule of thumb: what other programs say, and
             we quote, is listed as well; a table of patterns that is compiled in a loop is not seen
floors       the longest chain of rooms that import one another; lazy and type-only imports count
silent       a test function that neither asserts nor names a function of tests/ that does. Items whose assertion is
             never reached, because it stands in a loop over nothing, cannot be seen from outside
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

IRREGULAR = set(
    "begun bound bought broken brought built caught chosen cut done drawn driven fallen fed felt foretold forgotten "
    "found given gone grown heard held hidden hung kept known laid led left lent lost made meant met paid read_back "
    "retold run_out said seen sent set_aside shown shut sold spelt spent split spoken stood stuck sunk taken taught "
    "thought told thrown understood undone woken won worn written".split()
)
NOT_PARTICIPLES = set("need speed feed embed seed shed bed exceed proceed deepspeed unneeded fixed red".split())
VERBS = set(
    "is has was are were can may must should check read write load refuse draw add end export place cut leave warn "
    "append say project was_ get test find keep list count parse split pad name describe take".split()
)
MATCHERS = set("startswith endswith replace removeprefix removesuffix find index count partition rpartition".split())
NOUNS = set("bytes s share steps steps_s sizes states things memory".split())
RE_CALLS = set("compile match search fullmatch sub findall finditer split".split())
ASSERTING = set("raises warns fail assert_close check_returncode gradcheck expect".split())
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_participle(name: str) -> bool:
    words = name.strip("_").split("_")
    if words[0] in VERBS or words[-1] in NOUNS:
        return False
    return any(
        word in IRREGULAR or (word.endswith("ed") and word not in NOT_PARTICIPLES)
        for word in words[:: max(len(words) - 1, 1)]
    )


def texts_in(node: ast.AST) -> Iterator[str]:
    yield from (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def find_patterns(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a call or a comparison that are looked for in a text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        called = node.func
        is_re = isinstance(called.value, ast.Name) and called.value.id == "re" and called.attr in RE_CALLS
        if is_re or called.attr in MATCHERS:
            yield from node.args[:1]
    elif (
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], (ast.In, ast.NotIn))
        and not isinstance(node.comparators[0], (ast.Tuple, ast.Set))
    ):
        yield node.left


def sentence_of(text: str) -> str:
    """The longest run of two or more plain words in a text or a pattern, or nothing."""
    plain = re.sub(r"\\[sbdwSBDW][+*?]?", " ", text)
    runs = re.findall(r"[A-Za-z][a-z']+(?: [A-Za-z][a-z']*)+", plain)
    return max(runs, key=len, default="")


class House:
    """One source tree, parsed once."""

    def __init__(self, path: Path, under: str) -> None:
        root = path / "src" / "tightfit"
        self.package = root if root.is_dir() else path
        self.under = under
        self.trees = {
            file.relative_to(self.package).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
            for file in sorted(self.package.rglob("*.py"))
        }

    @cached_property
    def nodes(self) -> list[tuple[str, ast.AST]]:
        return [(name, node) for name, tree in self.trees.items() for node in ast.walk(tree)]

    def mine(self, name: str) -> bool:
        return name.startswith(self.under)

    @cached_property
    def functions(self) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        return [(name, node) for name, node in self.nodes if isinstance(node, FUNCTIONS) and self.mine(name)]

    def used_once(self) -> list[str]:
        uses = Counter((name, word) for name, node in self.nodes for word in _names_read(node))
        private = [(name, node) for name, node in self.functions if re.match("_[^_]", node.name)]
        own = {id(node): sum(node.name in _names_read(each) for each in ast.walk(node)) for _, node in private}
        return [f"{n}:{e.lineno} {e.name}" for n, e in private if uses[n, e.name] - own[id(e)] == 1]

    def participles(self) -> list[str]:
        return [f"{name}:{node.lineno} {node.name}" for name, node in self.functions if is_participle(node.name)]

    def doubled(self) -> list[str]:
        places = defaultdict(list)
        for name, node in self.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name}:{node.lineno}")
        shared = {name: where for name, where in places.items() if len(where) > 1}
        return [f"{name}: {' '.join(at)}" for name, at in sorted(shared.items()) if any(map(self.mine, at))]

    def engines(self) -> list[str]:
        return sorted(
            {n for n, e in self.nodes if isinstance(e, ast.Constant) and e.value in ("fsdp2", "zero3") and self.mine(n)}
        )

    def loads(self) -> list[str]:
        return [
            f"{name}:{number}"
            for name in filter(self.mine, self.trees)
            for number, line in enumerate((self.package / name).read_text(encoding="utf-8").splitlines(), 1)
            if "json.loads(" in line
        ]

    def matches(self) -> list[str]:
        read = [(name, part) for name, node in self.nodes for part in find_patterns(node)]
        read_ids = {id(each) for _, part in read for each in ast.walk(part)}
        read_ids |= {id(node.value) for _, node in self.nodes if isinstance(node, ast.Expr)}  # documentation
        strings = [
            each.value
            for _, each in self.nodes
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in read_ids
        ]
        catalogue = sorted((self.package / "messages").glob("*.txt"))
        said = "\n".join([*strings, *(file.read_text(encoding="utf-8") for file in catalogue)])
        return [
            f"{name}:{part.lineno} {sentence!r}"  # type: ignore[attr-defined]
            for name, part in read
            for sentence in map(sentence_of, texts_in(part))
            if sentence and sentence in said and self.mine(name)
        ]

    def floors(self) -> tuple[list[str], list[str]]:
        """The longest chain of rooms, lowest first, and the rooms that import each other in a circle."""
        rooms = {name.split("/")[0].removesuffix(".py") for name in self.trees}
        below: dict[str, set[str]] = {room: set() for room in rooms}
        for name, node in self.nodes:
            room = name.split("/")[0].removesuffix(".py")
            for dotted in _imports(name, node):
                parts = dotted.split(".")
                target = parts[1] if len(parts) > 1 and parts[1] in rooms else "__init__"
                if parts[0] == "tightfit" and target != room:
                    below[room].add(target)
        chains: dict[str, list[str]] = {}
        circles: list[str] = []

        def chain(room: str, above: tuple[str, ...]) -> list[str]:
            if room in above:
                circles.append(" → ".join([*above[above.index(room) :], room]))
                return []
            if room not in chains:
                longest = max((chain(each, (*above, room)) for each in sorted(below[room])), key=len, default=[])
                chains[room] = [*longest, room]
            return chains[room]

        return max((chain(room, ()) for room in sorted(rooms)), key=len), circles

    def silent(self) -> list[str]:
        tests = self.package.parents[1] / "tests"
        functions: dict[str, list[ast.AST]] = defaultdict(list)
        items = []
        for file in sorted(tests.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, FUNCTIONS):
                    functions[node.name].append(node)
                    if node.name.startswith("test_") and file.name.startswith("test_"):
                        items.append((f"{file.relative_to(tests)}:{node.lineno} {node.name}", node))
        loud = {name for name, bodies in functions.items() if any(map(_asserts, bodies))}
        calls = {name: {word for body in bodies for word in _words(body)} for name, bodies in functions.items()}
        while more := {name for name in calls.keys() - loud if calls[name] & loud}:
            loud |= more
        return [where for where, node in items if not _asserts(node) and not _words(node) & loud]

    def figures(self) -> dict[str, list[str] | int]:
        sources = [file for file in self.package.rglob("*.py") if self.mine(file.relative_to(self.package).as_posix())]
        chain, circles = self.floors()
        return {
            "lines": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in sources),
            "files": len(sources),
            "root": [file.name for file in self.package.glob("*.py")],
            "engines": self.engines(),
            "functions": len(self.functions),
            "used once": self.used_once(),
            "participles": self.participles(),
            "doubled": self.doubled(),
            "json.loads": self.loads(),
            "matches": self.matches(),
            "floors": chain,
            "circles": circles,
            "silent": self.silent(),
        }


def _names_read(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    return tuple(alias.name for alias in node.names) if isinstance(node, ast.ImportFrom) else ()


def _imports(name: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = ["tightfit", *name.split("/")[:-1]]
    base = package[: len(package) - node.level + 1] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    return [f"tightfit.{alias.name}" for alias in node.names] if module == "tightfit" else [module]


def _words(node: ast.AST) -> set[str]:
    """Every name in a function: what it calls, and the fixtures that it asks for."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


def _asserts(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Assert) or set(_names_read(each)) & ASSERTING for each in ast.walk(node))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--list", metavar="FIGURE", help="the places behind one figure, in the last tree")
    parser.add_argument("--under", default="", metavar="ROOM", help="count only what stands in this folder or file")
    options = parser.parse_args()
    counted = [House(tree.resolve(), options.under).figures() for tree in options.trees]
    if options.list:
        places = counted[-1][options.list]
        print(*(places if isinstance(places, list) else [places]), sep="\n")
        return
    for name in counted[0]:
        values = [each[name] for each in counted]
        sizes = [len(value) if isinstance(value, list) else value for value in values]
        print(f"{name:12}", " → ".join(f"{size:>6,}" for size in sizes))


if __name__ == "__main__":
    main()
