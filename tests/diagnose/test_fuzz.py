"""No input whatever makes it crash, and large ones are read quickly and in little memory."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from diagnose_speed import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_logs import CAPTURED, CORPUS, HEALTHY

from tightfit.diagnose import scan
from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.gate import Expression
from tightfit.diagnose.judge import judge
from tightfit.diagnose.verdict import Diagnosis, Evidence, LogSource

LOGS = [path.read_bytes() for folder in (CAPTURED, CORPUS, HEALTHY) for path in sorted(folder.glob("*.log"))]
MIB = 2**20


def judge_health(data: bytes, folder: Path) -> Diagnosis:
    path = folder / "fuzz.log"
    path.write_bytes(data)
    found = judge(Evidence(logs=(LogSource(name="fuzz.log", path=path),)))
    for verdict in (found.verdict, *found.also):
        if verdict is not None:
            assert str(verdict.cause)
            assert all(len(str(line.text)) < 1000 for line in verdict.evidence)
    return found


def relaxed() -> settings:
    return settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.thorough
@relaxed()
@given(st.binary(max_size=5000))
def test_random_bytes(tmp_path: Path, data: bytes) -> None:
    assert judge_health(data, tmp_path) == judge_health(data, tmp_path)


@pytest.mark.thorough
@relaxed()
@given(st.sampled_from(LOGS), st.randoms(use_true_random=False))
def test_true_logs_torn_and_shuffled(tmp_path: Path, log: bytes, chance: random.Random) -> None:
    lines = log.splitlines(keepends=True)
    cut = chance.randrange(len(log) + 1)
    chance.shuffle(lines)
    flipped = bytes(byte ^ (chance.random() < 0.01) * 32 for byte in log)
    for damaged in (log[:cut], log[cut:], b"".join(lines), flipped):
        found = judge_health(damaged, tmp_path)
        if found.verdict is None:  # nothing went wrong: there may still be something worth knowing
            assert {catalogue().by_id[verdict.id].role for verdict in found.also} <= {"note"}


@pytest.mark.thorough
@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_numbers_that_no_machine_has(tmp_path: Path, digits: int) -> None:
    number = "9" * digits
    text = (
        f"[rank{number}]: step {number} loss {number}\n 1%|#| {number}/{number} [00:01<00:01]\n"
        f"RuntimeError: CUDA out of memory. Tried to allocate {number}.{number} GiB (GPU {number}; {number} GiB total "
        f"capacity; {number} GiB already allocated)\nfailed (exitcode: 1) local_rank: {number} (pid: 1)\n"
        f"vocab_size: {number}\nInstantaneous batch size per device = {number}\n{number}-13-01 10:00:00\n"
    )
    verdict = judge_health(text.encode(), tmp_path).verdict
    assert verdict is not None
    assert verdict.kind == "device-oom"


@pytest.mark.thorough
def test_the_same_answer_each_time() -> None:
    """Whatever order a process keeps its sets in."""
    log = str(CORPUS / "oom-logits--eight-ranks-and-a-watchdog.log")
    answers = {
        subprocess.run(
            [sys.executable, "-m", "tightfit", "diagnose", log, "--json"],
            env={"PYTHONHASHSEED": seed}, capture_output=True, check=False,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(answers) == 1
    assert json.loads(answers.pop())["verdict"]["id"] == "oom-logits"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["healthy", "alarming", "broken"])
def test_large_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of a hundred lines one is taken apart at most, and of ten one is tried with an expression: that, and not how
    busy the machine is, makes a hundred megabytes a matter of seconds (benchmarks/diagnose_speed.py)."""
    path = tmp_path / "large.log"
    write(path, kind, 8 * MIB)
    done: Counter[str] = Counter()

    def count(owner: object, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (done.update([name]), real(*given))[1])

    count(scan, "message_of")
    count(Expression, "search")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = judge(Evidence(logs=(LogSource(name="large.log", path=path),)))
    lines = path.read_bytes().count(b"\n")
    assert done["message_of"] < lines / 100
    assert done["search"] < lines / 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
    assert (found.verdict is not None) == (kind == "broken")
