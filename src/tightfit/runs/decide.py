"""What follows from a failure: nothing, the same again, or the least change that may help.

Pure: from the verdict, the records of all attempts and what the user allows, to a decision. Carrying it out may show
that it cannot be done, and then the run stops with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.diagnose.oom import read_oom
from tightfit.diagnose.verdict import RETRYABLE, Kind, Verdict
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
    because: str
    wait_s: float = 0.0
    shortfall: Shortfall | None = None
    """Of a smaller plan."""
    step: int | None = None
    """The one to leave out."""


def decide(verdict: Verdict, records: Sequence[AttemptRecord], policy: Policy, precision: str) -> Decision:
    """`records`: of all attempts, the failed one last, without its `next` as yet; `precision`: of its plan."""
    if verdict.kind not in RETRYABLE:
        return stop("the same would happen again")
    tries = tries_in_a_row(records)
    if tries >= policy.max_attempts:
        return stop(_given_up(policy.max_attempts))
    if verdict.kind in NUMBERS:
        return _numbers(verdict, records, policy, precision)
    if verdict.kind in _REASONS and not (is_suspicion(verdict) and not _again(verdict, records)):
        return _smaller(verdict)
    if verdict.kind == "other-process":
        return Decision(action="wait", because="the plan goes on when the GPU has room again")
    if verdict.kind == "disk-full" and not _again(verdict, records):
        return Decision(action="make room", because="what checkpoints need not keep is removed")
    if _again(verdict, records):
        return stop("it failed twice in the same way and at the same step")
    return _same_plan(records, "it may not happen again")


def tries_in_a_row(records: Sequence[AttemptRecord]) -> int:
    """How many attempts have ended since the last one that kept a new step, that one included."""
    kept = [record.kept_step or 0 for record in records]
    return next((back for back in range(1, len(kept)) if kept[-back] > max(kept[:-back])), len(kept))


def _same_plan(records: Sequence[AttemptRecord], because: str) -> Decision:
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
        return Decision(
            action="precision", because="fp16 overflows where bf16 does not, and --allow precision was said"
        )
    if step is None or "skip-data" not in policy.allow:
        ways = "--allow skip-data leaves these samples out"
        if precision == "fp16":
            ways += ", --allow precision goes on in bf16"
        return stop(f"to go on would change the training: {ways}")
    before = records[-2] if len(records) > 1 else None
    at_once = step == (last.kept_step or 0) + 1 + _left_out_since(records)
    if at_once and before is not None and before.next is not None and before.next.action == "skip data":
        return Decision(action="older checkpoint", because="the first step after the newest one always fails")
    return Decision(action="skip data", because=f"step {step:,} is left out, as --allow skip-data says", step=step)


def _left_out_since(records: Sequence[AttemptRecord]) -> int:
    """Steps that were left out after the checkpoint that the last attempt went on from."""
    kept = records[-1].kept_step
    earlier = [record for record in records[:-1] if record.kept_step == kept and record.next is not None]
    return sum(record.next is not None and record.next.action == "skip data" for record in earlier)


def _smaller(verdict: Verdict) -> Decision:
    because = "memory was missing, and a plan that needs less is taken"
    return Decision(action="smaller plan", because=because, shortfall=_missing(verdict))


def without_smaller(
    verdict: Verdict, records: Sequence[AttemptRecord], because: str, *, puzzling: bool = False
) -> Decision:
    """No plan needs less. The host is shared with others, who may want less the next time; a GPU may be, where the plan
    cannot have been what filled it (`puzzling`)."""
    shared = verdict.kind in ("host-oom", "pinned-memory")
    if (shared or puzzling) and not _again(verdict, records):
        whose = " of the host, which others use too" if shared else ", and this one was predicted to need far less"
        return _same_plan(records, f"no plan needs less{whose}: it is tried once more")
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


def stop(because: str) -> Decision:
    return Decision(action="stop", because=because)


def _given_up(most: int) -> str:
    if most == 1:
        return "--max-attempts 1 allows no second one"
    return f"{most} attempts in a row kept no new step (--max-attempts)"
