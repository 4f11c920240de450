"""Why an attempt failed, judge_health from what real attempts have left."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from recorded_attempts import NAMES, recorded

from tightfit.diagnose.verdict import RETRYABLE
from tightfit.runs.cause import _place, config_of_plan, find_cause, is_suspicion, to_record
from tightfit.runs.events import MemoryMark, Tally
from tightfit.runs.hang import Frame, Hung, Stand
from tightfit.runs.heartbeat import DISK_FULL, Beat
from tightfit.runs.records import LastWords
from tightfit.runs.run import Failure

KINDS = {
    "bug": "code",
    "cuda": "unknown",
    "device-oom": "device-oom",
    "ecc": "hardware",
    "fragmentation": "fragmentation",
    "gpu-lost": "hardware",
    "host-oom": "host-oom",
    "host-oom-killed": "host-oom",
    "kill": "preempted",
    "nccl": "communication",
    "nccl-timeout": "communication",
    "other-process": "other-process",
    "pinned": "pinned-memory",
    "shared-memory": "shared-memory",
}


def test_every_recorded_attempt_has_a_kind() -> None:
    assert sorted(KINDS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cause_is_found_and_its_rank(name: str) -> None:
    """The other rank always complains of a lost connection, at greater length and sometimes earlier."""
    verdict = find_cause(recorded(name))
    assert (verdict.kind, verdict.rank, verdict.phase) == (KINDS[name], 1, "backward")
    assert (verdict.kind in RETRYABLE) == (name != "bug")
    assert verdict.evidence


def test_the_numbers_of_an_out_of_memory_come_along() -> None:
    oom = find_cause(recorded("device-oom")).oom
    assert oom is not None
    assert (oom.asked, oom.free) == (24 * 2**20, 16 * 2**20)
    assert oom.allocated == int(3.9 * 2**30)


def test_the_kernels_record_tells_a_kill_from_want_of_memory() -> None:
    killed, starved = find_cause(recorded("kill")), find_cause(recorded("host-oom-killed"))
    assert "not by the kernel" in str(killed.cause)
    assert any("kernel log" in str(line.source) for line in starved.evidence)
    assert not is_suspicion(starved)


def test_a_kill_is_suspicious_where_the_kernels_record_may_not_be_read() -> None:
    verdict = find_cause(recorded("kill", kernel_readable=False))
    assert verdict.kind == "host-oom"
    assert is_suspicion(verdict)


@pytest.mark.parametrize(
    ("told", "passed", "phase"),
    [
        ("step", (), "init"),  # DeepSpeed takes a step while it starts
        ("loss", ("init",), "loss"),
        ("step", ("init", "forward", "backward"), "step"),
        (None, ("init",), "forward"),
        (None, ("init", "forward"), "backward"),
        ("init", ("init", "forward", "backward"), "step"),
    ],
)
def test_the_worst_batch_that_is_tried_before_the_first_step(
    told: str | None, passed: tuple[str, ...], phase: str
) -> None:
    """Ranks say that they are still building then; the traceback, or the marks that were passed, know better."""
    known = recorded("device-oom")
    beats = tuple(dataclasses.replace(beat, stage="init", step=0) for beat in known.beats)
    tally = Tally(marks=[MemoryMark(milestone=name, predicted_bytes=1, measured_bytes=1) for name in passed])
    known = dataclasses.replace(known, beats=beats, outcome=dataclasses.replace(known.outcome, tally=tally))
    verdict = dataclasses.replace(find_cause(known), phase=told)
    assert _place(verdict, known).phase == phase


def test_numbers_that_are_none_are_the_ranks_own_words() -> None:
    known = recorded("bug")
    words = LastWords(rank=0, kind="not-finite", text="the loss of step 7 is nan: look at samples 1, 2", at=1.0, step=7)
    verdict = find_cause(dataclasses.replace(known, outcome=dataclasses.replace(known.outcome, words=(words,))))
    assert (verdict.kind, str(verdict.cause)) == ("not-finite", "The loss of step 7 is nan: look at samples 1, 2.")
    assert verdict.step == 7
    assert verdict.fixes
    words = dataclasses.replace(words, kind="loss-scale")
    verdict = find_cause(dataclasses.replace(known, outcome=dataclasses.replace(known.outcome, words=(words,))))
    assert verdict.kind == "loss-scale"


@pytest.mark.parametrize(
    "sentence",
    [
        "the disk is full (/data/run/x): make room, or name another folder with --output",
        "there is no room to write /data/run/model: free some space, or save somewhere else",
    ],
)
def test_a_full_disk_that_a_rank_could_name(sentence: str) -> None:
    known = recorded("bug")
    failure = Failure(rank=1, is_users=True, sentence=sentence, tail=(), log=None, is_disk_full=True)
    verdict = find_cause(dataclasses.replace(known, outcome=dataclasses.replace(known.outcome, failure=failure)))
    assert (verdict.kind, verdict.id) == ("disk-full", "disk-full")


def test_a_full_disk_that_took_no_word_but_the_heartbeat() -> None:
    known = recorded("kill")
    beats = (known.beats[0], dataclasses.replace(known.beats[1], last_word=DISK_FULL))
    verdict = find_cause(dataclasses.replace(known, beats=beats))
    assert (verdict.kind, verdict.rank) == ("disk-full", 1)


def test_what_the_user_has_to_change_is_said_as_it_is() -> None:
    known = recorded("bug")
    failure = Failure(rank=0, is_users=True, sentence="line 17 is not JSON: mend it", tail=(), log=None)
    verdict = find_cause(dataclasses.replace(known, outcome=dataclasses.replace(known.outcome, failure=failure)))
    assert (verdict.kind, str(verdict.cause)) == ("config", "line 17 is not JSON: mend it.")
    assert verdict.kind not in RETRYABLE


def test_a_hang_names_the_rank_that_stands_elsewhere() -> None:
    known = recorded("kill")
    beats = tuple(Beat(rank=rank, count=9, stage="forward", step=4) for rank in (0, 1))
    waiting = Frame(file="/venv/site-packages/torch/distributed/distributed_c10d.py", line=4394, name="all_gather")
    stuck = Frame(file="/home/anna/data.py", line=7, name="read")
    hung = Hung(
        silent_s=312.0,
        beats=beats,
        stands=(Stand(rank=0, main=(waiting,)), Stand(rank=1, main=(stuck,))),
    )
    verdict = find_cause(dataclasses.replace(known, outcome=dataclasses.replace(known.outcome, hung=hung)))
    assert (verdict.kind, verdict.rank, verdict.phase, verdict.confidence) == ("hang", 1, "forward", "certain")
    assert str(verdict.cause) == (
        "Rank 1 gave no sign of life for 312 s in the forward pass of step 4 (/home/anna/data.py:7 in read)."
    )
    assert [line.source for line in verdict.evidence] == [
        "heartbeats",
        "heartbeats",
        "stack of rank 0",
        "stack of rank 1",
    ]


def test_a_record_keeps_the_evidence_with_its_place() -> None:
    cause = to_record(find_cause(recorded("ecc")))
    assert cause.kind == "hardware"
    assert any(line.startswith("rank-1.log:") and "uncorrectable ECC" in line for line in cause.evidence)


def test_settings_are_read_from_the_plan_and_missed_without_it(tmp_path: Path) -> None:
    assert config_of_plan(tmp_path).stage is None
    (tmp_path / "worker.json").write_text(json.dumps({"levers": {"engine": "zero3"}}))
    assert config_of_plan(tmp_path).stage is None
