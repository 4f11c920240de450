"""What follows from a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from recorded_attempts import recorded

from tightfit.diagnose.judge import judge
from tightfit.diagnose.verdict import Evidence, Kind, LogSource, Verdict
from tightfit.messages import id_of
from tightfit.runs.cause import find_cause
from tightfit.runs.own import OwnTrainer, Refused, Resume
from tightfit.runs.records import AttemptRecord, Cause, Next, RunFolder
from tightfit.runs.supervise import LONGEST_WAIT_S, Decision, Policy, decide, tries_in_a_row, without_smaller


def verdict(kind: Kind, cause: str = "It broke.", symptom: str = "x", **more: object) -> Verdict:
    plain = Verdict(id=symptom, kind=kind, cause=cause, confidence="likely", evidence=(), fixes=(), rank=1)
    return replace(plain, **more)  # type: ignore[arg-type]


def attempt(
    number: int,
    kind: str = "communication",
    *,
    last: int | None = 5,
    kept: int | None = 4,
    following: Next | None = None,
    plan: str = "ZeRO-1",
) -> AttemptRecord:
    cause = Cause(id="x", kind=kind, sentence="s", confidence="likely", rank=1, phase=None, evidence=())
    return AttemptRecord(
        number=number,
        started="",
        plan=plan,
        ranks=2,
        effective_batch=4,
        state="failed",
        last_step=last,
        kept_step=kept,
        cause=cause,
        next=following,
    )


def decided(found: Verdict, *records: AttemptRecord, precision: str = "bf16", **policy: object) -> Decision:
    every: Sequence[AttemptRecord] = records or (attempt(1, found.kind),)
    return decide(found, every, Policy(**policy), precision)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["code", "data", "config", "environment"])
def test_what_fails_in_the_same_way_each_time_is_not_tried_again(kind: Kind) -> None:
    assert decided(verdict(kind)).action == "stop"


@pytest.mark.parametrize("kind", ["communication", "hang", "preempted", "hardware", "shared-memory", "unknown"])
def test_what_may_pass_is_tried_with_the_same_plan(kind: Kind) -> None:
    found = decided(verdict(kind))
    assert (found.action, found.wait_s) == ("same plan", 1.0)


@pytest.mark.parametrize(
    ("name", "where", "reason", "missing"),
    [
        ("device-oom", "gpu", "memory", 8 * 2**20),
        ("fragmentation", "gpu", "fragmentation", 20 * 2**20),
        ("host-oom", "host", "memory", 64 * 2**20),
        ("host-oom-killed", "host", "memory", 0),
        ("pinned", "host", "pinned", 0),
    ],
)
def test_want_of_memory_asks_for_a_plan_that_needs_less(name: str, where: str, reason: str, missing: int) -> None:
    found = decided(find_cause(recorded(name)))
    assert found.action == "smaller plan"
    assert found.shortfall is not None
    assert (found.shortfall.where, found.shortfall.reason, found.shortfall.phase) == (where, reason, "backward")
    assert found.shortfall.missing_bytes == missing
    assert (found.shortfall.room_bytes is not None) == (where == "gpu")


def test_the_wait_grows_and_ends_growing() -> None:
    waits = []
    for count in range(1, 9):
        records = [attempt(number, last=number) for number in range(1, count + 1)]
        waits.append(decided(verdict("communication"), *records, max_attempts=99).wait_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert waits[-1] == LONGEST_WAIT_S


def test_the_same_at_the_same_step_twice_is_enough() -> None:
    again = decided(verdict("communication"), attempt(1), attempt(2))
    assert again.action == "stop"
    assert id_of(again.because) == "runs.failed-twice"
    for other in (attempt(2, last=6), attempt(2, kept=5, last=6), attempt(2, plan="ZeRO-2")):
        assert decided(verdict("communication"), attempt(1), other).action == "same plan"
    assert decided(verdict("hang"), attempt(1), attempt(2, "hang")).action == "same plan"


def test_a_smaller_plan_may_fail_in_the_same_place() -> None:
    """It is the plan that changes, and step-downs end by themselves."""
    assert decided(verdict("device-oom"), attempt(1, "device-oom"), attempt(2, "device-oom")).action == "smaller plan"


def test_attempts_that_keep_nothing_are_counted_and_those_that_do_are_not() -> None:
    stuck = [attempt(number, last=number) for number in range(1, 6)]
    assert tries_in_a_row(stuck) == 5
    found = decided(verdict("communication"), *stuck)
    assert (found.action, "5 attempts in a row" in str(found.because)) == ("stop", True)
    moving = [attempt(number, kept=number, last=number) for number in range(1, 50)]
    assert tries_in_a_row(moving) == 1
    assert decided(verdict("communication"), *moving).action == "same plan"
    back = [*moving, attempt(50, kept=10)]  # going back to an older checkpoint is no progress
    assert tries_in_a_row(back) == 2


def test_one_attempt_is_one() -> None:
    for kind in ("communication", "device-oom", "disk-full", "other-process"):
        found = decided(verdict(kind), max_attempts=1)  # type: ignore[arg-type]
        assert found.action == "stop"
        assert id_of(found.because) == "runs.one-attempt"


def test_others_on_the_gpu_are_waited_for_and_a_full_disk_is_looked_at() -> None:
    assert decided(verdict("other-process")).action == "wait"
    assert decided(verdict("disk-full")).action == "make room"
    assert decided(verdict("disk-full"), attempt(1, "disk-full"), attempt(2, "disk-full")).action == "stop"


def test_a_kill_without_a_reason_is_believed_once() -> None:
    """Where nobody may read the kernel's record, a second one in the same place is taken for want of memory."""
    found = find_cause(recorded("kill", kernel_readable=False))
    assert decided(found, attempt(1, "host-oom")).action == "same plan"
    again = decided(found, attempt(1, "host-oom"), attempt(2, "host-oom"))
    assert again.action == "smaller plan"
    assert again.shortfall is not None
    assert again.shortfall.where == "host"


# --- numbers that are none ------------------------------------------------------------------------

NAN = verdict("not-finite", "The loss of step 7 is nan: look at samples 3, 1, 4 of the data.", step=7)
SKIP = frozenset({"skip-data"})
SKIPPED = Next(action="skip data", because="")


def test_numbers_that_are_none_stop_a_run_that_may_not_change() -> None:
    found = decided(NAN)
    assert found.action == "stop"
    assert id_of(found.because) == "runs.needs-leave"
    assert id_of(decided(NAN, precision="fp16").because) == "runs.needs-leave-fp16"


def test_where_data_may_be_left_out_it_is_that_steps() -> None:
    found = decided(NAN, attempt(1, "not-finite", last=7, kept=4), allow=SKIP)
    assert (found.action, found.step) == ("skip data", 7)


def test_fp16_gives_way_to_bf16_where_that_is_allowed() -> None:
    both = frozenset({"precision", "skip-data"})
    assert decided(NAN, precision="fp16", allow=both).action == "precision"
    assert decided(NAN, precision="bf16", allow=both).action == "skip data"
    collapse = verdict("loss-scale", "Step 7 overflowed at a loss scale of 0.5.")
    assert decided(collapse, precision="fp16", allow=frozenset({"precision"})).action == "precision"


def test_where_bf16_is_not_to_be_had_the_run_stops_with_the_reason(tmp_path: Path) -> None:
    course = SimpleNamespace(in_bf16=lambda: Refused(because="this card has none"))
    folder, nothing = RunFolder(tmp_path), cast(Any, None)
    trainer = OwnTrainer(
        course=cast(Any, course), folder=folder, show=nothing, policy=Policy(), resume=Resume(), signals=nothing
    )
    precision = decided(NAN, precision="fp16", allow=frozenset({"precision"}))
    assert precision.action == "precision"
    done = trainer.carry_out(precision, NAN, (attempt(1, NAN.kind),))
    assert (done.action, done.because) == ("stop", "this card has none")


def test_a_checkpoint_whose_every_next_step_fails_is_not_gone_on_from() -> None:
    first = attempt(1, "not-finite", last=5, kept=4, following=SKIPPED)
    second = attempt(2, "not-finite", last=6, kept=4)
    nan = verdict("not-finite", step=6)
    assert decided(nan, first, second, allow=SKIP).action == "older checkpoint"
    later = verdict("not-finite", step=9)  # another bad window, further on
    assert decided(later, first, attempt(2, "not-finite", last=9, kept=4), allow=SKIP).action == "skip data"


# --- when no plan needs less ------------------------------------------------------------------------


def test_without_a_smaller_plan_the_host_gets_one_more_chance_and_a_gpu_none() -> None:
    why = "No other way needs less."
    once, twice = [attempt(1, "host-oom")], [attempt(1, "host-oom"), attempt(2, "host-oom")]
    assert without_smaller(verdict("host-oom"), once, why).action == "same plan"
    assert without_smaller(verdict("host-oom"), twice, why) == Decision(action="stop", because=why)
    gpu = [attempt(1, "device-oom")]
    assert without_smaller(verdict("device-oom"), gpu, why) == Decision(action="stop", because=why)
    assert without_smaller(verdict("device-oom"), gpu, why, puzzling=True).action == "same plan"


CAPPED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.61 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 115.34 GiB is free. Including non-PyTorch memory, this process has 24.45 GiB memory in use. 24.00 GiB "
    "allowed; Of the allocated memory 23.12 GiB is allocated by PyTorch, and 47.90 MiB is reserved by PyTorch but "
    "unallocated."
)


def test_a_process_that_may_use_a_part_of_the_card_is_short_of_what_is_left_of_that_part() -> None:
    """The message of a real run under a cap: what is free on the card is not for this process."""
    found = judge(Evidence(logs=(LogSource(name="rank-0.log", text=CAPPED),))).verdict
    assert found is not None
    assert found.id == "memory-fraction"
    made = decided(found)
    assert made.action == "smaller plan"
    assert made.shortfall is not None
    assert made.shortfall.missing_bytes / 2**30 == pytest.approx(4.61 - (24 - 23.12 - 0.047), abs=0.01)
    assert (made.shortfall.room_bytes or 0) / 2**30 == pytest.approx(24 - 0.047, abs=0.01)
