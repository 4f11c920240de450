"""What follows from a failure: nothing, the same again, or the least change that may help.

Pure: from the verdict, the records of all attempts and what the user allows, to a decision. Carrying it out may show
that it cannot be done, and then the run stops with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.diagnose.oom import read_oom
from tightfit.diagnose.verdict import RETRYABLE, Kind, Verdict
from tightfit.messages import Message, Said
from tightfit.planner.step_down import Reason, Shortfall
from tightfit.runs.attempts import Action, AttemptRecord
from tightfit.runs.cause import NUMBERS, is_suspicion

MAX_ATTEMPTS = 5
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
_REASONS: dict[Kind, Reason] = {
    "device-oom": "memory",
    "fragmentation": "fragmentation",
    "host-oom": "memory",
    "pinned-memory": "pinned",
}
"""Kinds that a plan can do something about, and how the planner calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user allows."""

    max_attempts: int = MAX_ATTEMPTS
    """Starts in a row that keep no new step; 1: none is made again."""
    allow: frozenset[str] = frozenset()
    """Costly changes by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    action: Action
    because: Said
    wait_s: float = 0.0
    shortfall: Shortfall | None = None
    """Of a smaller plan."""
    step: int | None = None
    """The one to leave out."""


def decide(verdict: Verdict, records: Sequence[AttemptRecord], policy: Policy, precision: str) -> Decision:
    """`records`: of all attempts, the failed one last, without its `next` as yet; `precision`: of its plan."""
    if verdict.kind not in RETRYABLE:
        return stop(Message("runs.same-again"))
    tries = tries_in_a_row(records)
    if tries >= policy.max_attempts:
        return stop(
            Message("runs.one-attempt")
            if policy.max_attempts == 1
            else Message("runs.attempts-in-vain", most=policy.max_attempts)
        )
    if verdict.kind in NUMBERS:
        return _numbers(verdict, records, policy, precision)
    if verdict.kind in _REASONS and not (is_suspicion(verdict) and not _again(verdict, records)):
        return Decision(action="smaller plan", because=Message("runs.needs-less"), shortfall=_missing(verdict))
    if verdict.kind == "other-process":
        return Decision(action="wait", because=Message("runs.when-room"))
    if verdict.kind == "disk-full" and not _again(verdict, records):
        return Decision(action="make room", because=Message("runs.leftovers-go"))
    if _again(verdict, records):
        return stop(Message("runs.failed-twice"))
    return _same_plan(records, Message("runs.may-pass"))


def tries_in_a_row(records: Sequence[AttemptRecord]) -> int:
    """How many attempts have ended since the last one that kept a new step, that one included."""
    kept = [record.kept_step or 0 for record in records]
    return next((back for back in range(1, len(kept)) if kept[-back] > max(kept[:-back])), len(kept))


def _same_plan(records: Sequence[AttemptRecord], because: Said) -> Decision:
    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (tries_in_a_row(records) - 1))
    return Decision(action="same plan", because=because, wait_s=wait_s)


def _again(verdict: Verdict, records: Sequence[AttemptRecord]) -> bool:
    """Whether the attempt before, with the same plan, ended at the same step for the same cause, and kept nothing."""
    if len(records) < 2:
        return False
    before, last = records[-2:]
    return (
        before.cause is not None
        and before.cause.kind == verdict.kind
        and (before.reached, before.kept_step) == (last.reached, last.kept_step)
        and before.plan == last.plan
    )


def _numbers(verdict: Verdict, records: Sequence[AttemptRecord], policy: Policy, precision: str) -> Decision:
    """What ruined the numbers would do so again: the same plan alone cannot help."""
    step, last = verdict.step, records[-1]
    if precision == "fp16" and "precision" in policy.allow:
        return Decision(action="precision", because=Message("runs.bf16-allowed"))
    if step is None or "skip-data" not in policy.allow:
        is_fp16 = precision == "fp16"
        return stop(Message("runs.needs-leave-fp16") if is_fp16 else Message("runs.needs-leave"))
    before = records[-2] if len(records) > 1 else None
    # steps that were left out after the checkpoint that the last attempt went on from
    kept = records[-1].kept_step
    earlier = [record for record in records[:-1] if record.kept_step == kept and record.next is not None]
    at_once = step == (last.kept_step or 0) + 1 + sum(
        record.next is not None and record.next.action == "skip data" for record in earlier
    )
    if at_once and before is not None and before.next is not None and before.next.action == "skip data":
        return Decision(action="older checkpoint", because=Message("runs.first-step-fails"))
    return Decision(action="skip data", because=Message("runs.step-left-out", step=step), step=step)


def without_smaller(
    verdict: Verdict, records: Sequence[AttemptRecord], because: Said, *, puzzling: bool = False
) -> Decision:
    """No plan needs less. The host is shared with others, who may want less the next time; a GPU may be, where the plan
    cannot have been what filled it (`puzzling`)."""
    shared = verdict.kind in ("host-oom", "pinned-memory")
    if (shared or puzzling) and not _again(verdict, records):
        return _same_plan(records, Message("runs.host-once-more") if shared else Message("runs.once-more"))
    return stop(because)


def _missing(verdict: Verdict) -> Shortfall:
    reason, numbers = _REASONS.get(verdict.kind, "memory"), verdict.oom
    if verdict.kind not in ("device-oom", "fragmentation"):
        # torch's words, where no rank's
        said = (numbers, *(read_oom(str(line.text)).numbers for line in verdict.evidence))
        asked = next((each.asked for each in said if each is not None and each.asked is not None), 0)
        return Shortfall(where="host", missing_bytes=asked, phase=verdict.phase, reason=reason)
    if numbers is None:
        return Shortfall(where="gpu", phase=verdict.phase, reason=reason)
    free = numbers.left or 0
    missing = (numbers.asked or 0) - (free if reason == "memory" else 0)
    room = None if numbers.allocated is None or numbers.left is None else numbers.allocated + free
    return Shortfall(where="gpu", missing_bytes=max(0, missing), phase=verdict.phase, reason=reason, room_bytes=room)


def stop(because: Said) -> Decision:
    return Decision(action="stop", because=because)
