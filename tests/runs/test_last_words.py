"""The record that a rank leaves, and that what follows is decided from its values alone, whatever its words are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_attempts import recorded

from tightfit.runs.cause import FailedAttempt, find_cause
from tightfit.runs.records import AttemptRecord, LastWords, read_last_words, write_last_words
from tightfit.runs.run import first_failure
from tightfit.runs.supervise import Decision, Policy, decide

MIB = 2**20
WORDS = LastWords(
    rank=1, kind="device-oom", text="CUDA out of memory", at=100.0, phase="backward", step=3, asked=24 * MIB,
    allocated=int(3.9 * 2**30), free=16 * MIB,
)  # fmt: skip
ATTEMPT = AttemptRecord(number=1, started="", plan="x", ranks=2, effective_batch=4, last_step=2, kept_step=2)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_last_words(tmp_path, WORDS)
    write_last_words(tmp_path, LastWords(rank=0, kind="bug", text="KeyError: 'x'", at=99.0))
    assert read_last_words(tmp_path / "errors", 0.0) == (
        LastWords(rank=0, kind="bug", text="KeyError: 'x'", at=99.0),
        WORDS,
    )
    assert read_last_words(tmp_path / "errors", 99.5) == (WORDS,)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (
            {"kind": "out_of_memory", "text": "CUDA", "time": 7},
            LastWords(rank=0, kind="out_of_memory", text="CUDA", at=7),
        ),
        ({"text": "a\x1b[31m b", "time": 7.5}, LastWords(rank=0, kind="crash", text="a [31m b", at=7.5)),
        (
            {"kind": "x", "text": "y", "time": 7, "phase": "lunch", "step": -1, "asked": "much"},
            LastWords(rank=0, kind="x", text="y", at=7),
        ),
        ({"kind": "x", "text": "y", "time": 7, "step": True, "free": 1.5}, LastWords(rank=0, kind="x", text="y", at=7)),
        ({"kind": "x", "text": 7, "time": 7}, None),
        ({"kind": "x", "text": "y", "time": "noon"}, None),
        ([], None),
    ],
)
def test_records_of_earlier_releases_and_damaged_ones(tmp_path: Path, said: object, found: LastWords | None) -> None:
    (tmp_path / "rank-0.json").write_text(json.dumps(said))
    (tmp_path / "rank-1.json").write_text('{"kind": "x", "te')
    assert read_last_words(tmp_path, 0.0) == (() if found is None else (found,))


# --- what follows ---------------------------------------------------------------------------------


def decision(
    known: FailedAttempt, words: LastWords, log: Path | None = None, allow: frozenset[str] = frozenset()
) -> Decision:
    """`log`: instead of those that were recorded."""
    starts = known.starts if log is None else [replace(start, log=log) for start in known.starts]
    others = tuple(each for each in known.outcome.words if each.rank != words.rank)
    every = (*others, words)
    exits = tuple(replace(gone, start=starts[gone.start.rank]) for gone in known.outcome.exits)
    outcome = replace(known.outcome, words=every, exits=exits, failure=first_failure(exits, starts, every))
    return decide(find_cause(replace(known, starts=starts, outcome=outcome)), [ATTEMPT], Policy(allow=allow), "bf16")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("device-oom", WORDS),
        ("host-oom", replace(WORDS, kind="host-oom", asked=64 * MIB, allocated=None, free=None)),
        ("pinned", replace(WORDS, kind="pinned-memory", asked=None, allocated=None, free=None)),
    ],
)
def test_a_want_of_memory_is_decided_by_the_record_whatever_text_and_log_say(
    tmp_path: Path, name: str, words: LastWords
) -> None:
    known, log = recorded(name), tmp_path / "rank.log"
    by_the_log = decision(known, replace(words, kind="bug", phase=None, asked=None, allocated=None, free=None))
    assert by_the_log.action == "smaller plan"
    assert decision(known, words) == by_the_log
    log.write_text("Traceback (most recent call last):\nMishapError: the well of memory has run dry\n")
    assert decision(known, replace(words, text="said in quite another way"), log) == by_the_log


def test_numbers_in_the_record_go_before_those_in_a_log() -> None:
    found = decision(recorded("device-oom"), replace(WORDS, asked=100 * MIB, free=40 * MIB, phase="loss"))
    assert found.shortfall is not None
    assert (found.shortfall.missing_bytes, found.shortfall.phase) == (60 * MIB, "loss")


@pytest.mark.parametrize(
    "text", ["the loss of step 7 is nan", "step 9 of 12 went astray", "there is no number any more"]
)
def test_the_step_that_is_left_out_is_the_records(text: str) -> None:
    words = LastWords(rank=0, kind="not-finite", text=text, at=1.0, phase="step", step=7)
    found = decision(recorded("bug"), words, allow=frozenset({"skip-data"}))
    assert (found.action, found.step) == ("skip data", 7)


@pytest.mark.parametrize("text", ["the disk is full (/a): make room", "nothing fits in any more"])
def test_a_full_disk_is_known_by_its_kind(text: str) -> None:
    words = LastWords(rank=1, kind="disk-full", text=text, at=1.0)
    assert decision(recorded("bug"), words).action == "make room"
    assert decision(recorded("bug"), replace(words, kind="user")).action == "stop"
