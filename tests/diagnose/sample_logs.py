"""The logs beside this file, and what each must be taken for.

fixtures/ID.txt     sections: `=== yes` must be that symptom, `=== no` must not be it, `=== no -> OTHER` must be
                    another; ` | note` means that it is only worth knowing, ` | config: stage=3, method=lora` and
                    ` | exit: -9` add evidence
captured/ID[-N].log what programs that really failed printed: see capture.py
corpus/ID--WHAT     whole logs with cascades; a folder has a log for each rank
real_logs/N.json    logs retold after public threads, with the cause that was established there
healthy/WHAT.log    nothing is wrong, however it sounds
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tightfit.diagnose.verdict import Evidence, LogSource, RankExit
from tightfit.job.known import KnownConfig

HERE = Path(__file__).parent
FIXTURES, CAPTURED = HERE / "fixtures", HERE / "captured"
CORPUS, HEALTHY, REAL = HERE / "corpus", HERE / "healthy", HERE / "real_logs"
_HEAD = re.compile(r"^=== (yes|no)((?: \|[^|\n>]+| -> [\w-]+)*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Section:
    """One small log."""

    symptom: str
    number: int
    is_it: bool
    other: str | None
    is_note: bool
    evidence: Evidence

    def __str__(self) -> str:
        return f"{self.symptom}-{'yes' if self.is_it else 'no'}-{self.number}"


def sections(path: Path) -> list[Section]:
    _, *parts = _HEAD.split(path.read_text(encoding="utf-8"))
    found = []
    for number, (kind, marks, text) in enumerate(zip(parts[::3], parts[1::3], parts[2::3], strict=True)):
        other = re.search(r"-> ([\w-]+)", marks)
        code = re.search(r"exit: (-?\d+)", marks)
        exits = (RankExit(rank=None, code=int(code[1]), at=0.0),) if code else ()
        source = LogSource(name=path.name, text=text.strip("\n") + "\n")
        evidence = Evidence(logs=(source,), exits=exits, config=_config(marks))
        found.append(Section(path.stem, number, kind == "yes", other and other[1], "| note" in marks, evidence))
    return found


def _config(marks: str) -> KnownConfig | None:
    said = re.search(r"config: ([^|>]+?)(?: ->|$)", marks)
    if said is None:
        return None
    pairs = [pair.strip().split("=") for pair in said[1].split(",")]
    return KnownConfig(**{name: int(value) if value.isdigit() else value for name, value in pairs})


def evidence_of(path: Path) -> Evidence:
    """A log, or a folder with one for each rank."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return Evidence(logs=tuple(LogSource(name=file.name, path=file, rank=_rank(file)) for file in files))


def _rank(path: Path) -> int | None:
    found = re.search(r"rank-(\d+)", path.name)
    return int(found[1]) if found else None
