"""Logs of gigabytes: what is over is passed over, and what is said stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.diagnose import reading
from tightfit.diagnose.judge import judge
from tightfit.diagnose.verdict import Evidence, LogSource

STEPS = [
    f"{{'loss': {3 - n / 10000:.4f}, 'grad_norm': 1.0, 'learning_rate': 5e-05, 'epoch': {n / 1000}}}"
    for n in range(4000)
]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.28 GiB. GPU 3 has a total capacity of 79.33 GiB"
KEY = "KeyError: 'text'"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large, in kilobytes."""
    sizes = {"LARGE_BYTES": 100_000, "HEAD_BYTES": 8_000, "TAIL_BYTES": 16_000, "SIGNS_BYTES": 4_000}
    for name, size in {**sizes, "PIECE_BYTES": 2_000, "COUNTED_BYTES": 3_000}.items():
        monkeypatch.setattr(reading, name, size)


def source_of(path: Path, lines: list[str]) -> LogSource:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return LogSource(name=path.name, path=path)


def seen_bytes(source: LogSource) -> int:
    return sum(len(piece.data) for piece in reading.pieces(source))


def test_what_the_end_shows_to_be_over_is_not_read(tmp_path: Path, small: None) -> None:
    lines = [
        *STEPS[:2000],
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        KEY,
        *STEPS[2000:],
        OOM,
    ]
    source = source_of(tmp_path / "a.log", lines)
    assert seen_bytes(source) < 40_000 < (tmp_path / "a.log").stat().st_size
    found = judge(Evidence(logs=(source,)))
    assert found.verdict is not None
    assert found.verdict.kind == "device-oom"
    assert found.verdict.evidence[-1].number == len(lines)


def test_a_log_that_does_not_go_on_is_read_whole(tmp_path: Path, small: None) -> None:
    noise = [f"[rank1]: waiting for rank 0, {n} seconds so far, and nothing has come" for n in range(4000)]
    source = source_of(tmp_path / "a.log", [*STEPS[:100], OOM, *noise])
    assert seen_bytes(source) == (tmp_path / "a.log").stat().st_size
    found = judge(Evidence(logs=(source,)))
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.evidence[-1].number) == ("device-oom", 101)


@pytest.mark.thorough
def test_the_same_is_said_with_and_without_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path / "a.log", [*STEPS, OOM])
    whole = judge(Evidence(logs=(source,)))
    for name, size in {"LARGE_BYTES": 100_000, "HEAD_BYTES": 8_000, "TAIL_BYTES": 90_000, "SIGNS_BYTES": 4_000}.items():
        monkeypatch.setattr(reading, name, size)
    assert judge(Evidence(logs=(source,))) == whole


def test_somebody_who_waits_is_told_how_far_it_is(tmp_path: Path, small: None) -> None:
    told: list[int] = []
    path = tmp_path / "a.log"
    source_of(path, STEPS)
    list(reading.pieces(LogSource(name="a.log", path=path, on_read=told.append)))
    assert told == sorted(told)
    assert told[-1] == path.stat().st_size


@pytest.mark.thorough
def test_another_encoding_is_read_whole(tmp_path: Path, small: None) -> None:
    path = tmp_path / "a.log"
    path.write_bytes("\n".join([*STEPS, OOM]).encode("utf-16"))
    found = judge(Evidence(logs=(LogSource(name="a.log", path=path),)))
    assert found.verdict is not None
    assert found.verdict.evidence[-1].number == len(STEPS) + 1
