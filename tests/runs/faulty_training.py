"""`tightfit train` with the real worker on two CPU ranks, faults put into it, and what came of that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm_desk
from tightfit.runs.processes import PROC
from tightfit.runs.records import AttemptRecord, read_attempts

EVERY, STEPS = 2, 6
JOB = (
    *("--model", "tiny_llama", "--seq", "32", "--precision", "fp32", "--effective-batch", "4"),
    *("--save-every", str(EVERY), "--output", "run"),
)
LIMIT_S = 900


@dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    folder: Path
    code: int
    out: str
    err: str

    @property
    def records(self) -> tuple[AttemptRecord, ...]:
        return read_attempts(self.folder)

    @property
    def actions(self) -> list[str]:
        return [record.next.action for record in self.records if record.next is not None]

    @property
    def events(self) -> list[dict[str, Any]]:
        found = []
        for line in (self.folder / "events.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # torn by a kill
                continue
        return found

    @property
    def losses(self) -> dict[int, float]:
        """Of each step; of one that was made again, what came last."""
        return {event["step"]: event["loss"] for event in self.events if event["event"] == "step"}

    @property
    def model(self) -> bytes:
        return (self.folder / "model/model.safetensors").read_bytes()

    def left_behind(self) -> list[str]:
        """Processes that still have to do with it, its lock, and notes of what it reserved."""
        found = [str(path) for path in (self.folder / "lock", self.folder / "heartbeats") if path.exists()]
        found += map(str, (self.folder.parent / "cache").rglob("reservations/*.json"))
        for entry in PROC.glob("[0-9]*"):
            try:
                held = [os.readlink(entry / "cwd"), *(os.readlink(each) for each in (entry / "fd").iterdir())]
            except OSError:
                continue
            if any(each.startswith(f"{self.folder}/") or each == str(self.folder) for each in held):
                found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes().decode(errors='replace')}")
        return found


def train(folder: Path, *words: str, faults: str = "", place: Path | None = None) -> Trained:
    """A run in a folder of its own; `place`: where its own folder is to be."""
    output = (place or folder) / "run"
    process = begin(folder, *words, "--output", str(output), faults=faults)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode is not None
    return Trained(output, process.returncode, out, err)


def begin(folder: Path, *words: str, faults: str = "") -> warm_desk.Process:
    """With a cache of its own."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TIGHTFIT_FAULTS": faults,
        "COLUMNS": "100",
    }
    steps = () if "--max-steps" in words else ("--max-steps", str(STEPS))
    return warm_desk.Process("train", *JOB, *steps, *words, cwd=folder, env=env, ranks=True)


def same_course(trained: Trained, reference: Trained) -> None:
    """The losses of an undisturbed run: bit for bit where the plan stayed, and otherwise within rounding."""
    assert sorted(trained.losses) == sorted(reference.losses)
    if "smaller plan" in trained.actions:
        for step, loss in reference.losses.items():
            assert abs(trained.losses[step] - loss) <= 1e-5 * abs(loss)
    else:
        assert trained.losses == reference.losses
        assert trained.model == reference.model


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk that can be filled; only root may make one."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def may_mount() -> bool:
    return os.geteuid() == 0 and sys.platform == "linux"


def may_limit_memory() -> bool:
    """Whether a memory group can be made, as root can where the system lets it."""
    groups = Path("/sys/fs/cgroup")
    place = groups / "memory" if (groups / "memory").is_dir() else groups
    return os.geteuid() == 0 and os.access(place, os.W_OK) and not _is_read_only(place)


def _is_read_only(place: Path) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def remove_groups() -> None:
    """Memory groups that faults have made and that are empty now."""
    for place in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        for group in place.glob("tightfit-fault-*"):
            group.rmdir()
