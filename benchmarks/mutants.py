"""Puts small faults into a copy of the code, one at a time, and looks whether `make test` would notice.

    python benchmarks/mutants.py sample TREE --seed 19 --each 16 > benchmarks/mutants.jsonl   # draws them
    python benchmarks/mutants.py run TREE benchmarks/mutants.jsonl                           # tries those not yet tried
    python benchmarks/mutants.py run TREE FILE --afresh                                      # all, on other code

TREE is a copy (`git archive`), for it is written to. A mutant is kept as its line before and after, with the function
around it, so the same one is found again where the file was moved; one whose line was rewritten is `gone` and counts
nowhere. A test that runs past its share of the processor's time has noticed as well.

`benchmarks/mutants.jsonl` was drawn at commit 4585f7f with seed 19, 16 in each room; what has been rewritten since
stands there as the same fault in the code of now. `verdict` is that of the rebuilt house, `before` that of the commit.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOMS = {
    "memory": (["memory/*.py"], ["memory/test_rows", "memory/test_weights", "memory/test_*", "planner/test_notes"]),
    "planner": (["planner/*.py"], ["planner/test_notes", "planner/test_tiers", "planner/test_*"]),
    "checkpoints": (
        ["train/checkpoint*.py", "train/deepspeed_checkpoint.py", "train/saved_model.py", "runs/checkpoints.py"],
        [
            "runs/test_checkpoints",
            "train/test_saved_model",
            "train/test_damage",
            "*/test_*checkpoint*",
            "*/test_*resume",
        ],
    ),
    "supervisor": (["runs/supervise.py"], ["runs/test_decide", "runs/test_supervise_matrix", "runs/test_supervis*"]),
}
"""What is broken, and which of the tests should see it: the quickest first."""

CPU_S, WALL_S = 1800, 3600

FLIPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def mutate(node: ast.AST) -> tuple[str, str] | None:
    """The kind of the fault and the node's new text; None where the node has none."""
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare):
        changed.ops[0] = FLIPS[type(node.ops[0])]()
        return "comparison", f"({ast.unparse(changed)})"
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in FLIPS:
        changed.op = FLIPS[type(node.op)]()
        return "operator", f"({ast.unparse(changed)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return "constant", str(not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not", f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) not in ("None", "False"):
        return "return", "return None"
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or isinstance(node, (ast.AugAssign, ast.Raise)):
        return "removed", "pass"
    return None


def mutants_of(path: Path) -> Iterator[dict[str, str]]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in (each for statement in function.body for each in ast.walk(statement)):
            found = mutate(node) if getattr(node, "lineno", 0) == getattr(node, "end_lineno", None) else None
            if found:
                line = lines[node.lineno - 1].encode()  # type: ignore[attr-defined]
                before, after = line[: node.col_offset].decode(), line[node.end_col_offset :].decode()  # type: ignore[attr-defined]
                if '"' not in before + after:  # inside an f-string the columns mean something else before Python 3.12
                    new = f"{before}{found[1]}{after}"
                    yield {"function": function.name, "kind": found[0], "old": line.decode(), "new": new}


def sample(tree: Path, seed: int, each: int) -> None:
    package = tree / "src" / "tightfit"
    for room, (patterns, _) in ROOMS.items():
        files = sorted(file for pattern in patterns for file in package.glob(pattern))
        every = [
            {"room": room, "file": str(file.relative_to(tree)), **one} for file in files for one in mutants_of(file)
        ]
        for mutant in random.Random(seed).sample(every, each):  # noqa: S311
            print(json.dumps(mutant))


def locate(tree: Path, mutant: dict[str, str]) -> tuple[Path, int] | None:
    """Where the line stands now: in the file of then, or wherever it moved to."""
    everywhere = (tree / "src" / "tightfit").rglob("*.py")
    for path in [tree / mutant["file"], *sorted(everywhere, key=lambda each: each.name != Path(mutant["file"]).name)]:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        start = next((at for at, line in enumerate(lines) if f"def {mutant['function']}(" in line), None)
        if start is not None and mutant["old"] in lines[start:]:
            return path, lines.index(mutant["old"], start)
    return None


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))


def attempt(tree: Path, mutant: dict[str, str], start: list[str]) -> str:
    place = locate(tree, mutant)
    if place is None:
        return "gone"
    path, at = place
    kept = path.read_text(encoding="utf-8")
    lines = kept.splitlines()
    lines[at] = mutant["new"]
    found = [file for name in ROOMS[mutant["room"]][1] for file in sorted((tree / "tests").glob(f"{name}.py"))]
    tests = list(dict.fromkeys(map(str, found)))
    command = [
        *start,
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=WALL_S, check=False, preexec_fn=limit
        )
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        path.write_text(kept, encoding="utf-8")
    return {0: "survived", 1: "killed", 2: "killed"}.get(done.returncode, "hung" if done.returncode < 0 else "broken")


def run(tree: Path, record: Path, afresh: bool, start: list[str]) -> None:
    """Room by turns, so that a run which is stopped has seen something of each."""
    mutants = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    turns = sorted(range(len(mutants)), key=lambda at: sum(m["room"] == mutants[at]["room"] for m in mutants[:at]))
    for at in turns:
        if afresh or "verdict" not in mutants[at]:
            mutants[at]["verdict"] = attempt(tree, mutants[at], start)
            record.write_text("".join(json.dumps(each) + "\n" for each in mutants), encoding="utf-8")
            print(mutants[at]["verdict"], mutants[at]["room"], mutants[at]["new"].strip(), file=sys.stderr, flush=True)
    for room in ROOMS:
        verdicts = [
            each["verdict"] for each in mutants if each["room"] == room and each.get("verdict", "gone") != "gone"
        ]
        killed = sum(verdict != "survived" for verdict in verdicts)
        print(f"{room:12} {killed} of {len(verdicts)} killed", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    drawing = verbs.add_parser("sample")
    drawing.add_argument("tree", type=Path)
    drawing.add_argument("--seed", type=int, default=19)
    drawing.add_argument("--each", type=int, default=16)
    trying = verbs.add_parser("run")
    trying.add_argument("tree", type=Path)
    trying.add_argument("record", type=Path)
    trying.add_argument("--afresh", action="store_true", help="those that have a verdict as well")
    trying.add_argument("--start", default="", metavar="COMMAND", help="what starts the tests, such as 'nice -n 15'")
    options = parser.parse_args()
    tree = options.tree.resolve()
    if options.verb == "sample":
        sample(tree, options.seed, options.each)
    else:
        run(tree, options.record, options.afresh, options.start.split())


if __name__ == "__main__":
    main()
