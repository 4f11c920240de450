"""The care that `tightfit train` gives its own worker, for a program that is not ours.

Start it, stay with it, judge why it failed, and start it again: the same where the cause may pass, with another config
beside the old one where memory was missing, from the trainer's own newest checkpoint where it can go on from that.
Whatever cannot be carried over or written is a reason to stop, with the change that would help.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tightfit.diagnose.evidence import Evidence, KnownConfig, LogSource, RankExit, completed
from tightfit.diagnose.judge import judge, known_symptom
from tightfit.diagnose.settings import known_from_file
from tightfit.diagnose.verdict import Line, Verdict
from tightfit.inputs.surroundings import inherited
from tightfit.planner.step_down import Shortfall
from tightfit.runs import attempts
from tightfit.runs.attempts import AttemptRecord, Next
from tightfit.runs.build_lock import left_locks, remove
from tightfit.runs.cause import NUMBERS, is_suspicion, recorded, waits_for_a_build
from tightfit.runs.decide import LONGEST_WAIT_S, Decision, Policy, decide, without_smaller
from tightfit.runs.external.config import Edits, ExternalTraining, Knobs, batch_of, edits_of, knobs_of, written
from tightfit.runs.external.hang import Stuck
from tightfit.runs.external.ladder import rungs, would_help
from tightfit.runs.external.process import Gone, Peak, Start, Streams, start_and_stay
from tightfit.runs.external.resume import Kept, kept_by, means_of, output_of, saves_itself
from tightfit.runs.run import Signals
from tightfit.types import ConfigError, UserError

LOG = "command.log"
_PROGRESS = re.compile(rb"\b(\d{1,9})/\d{1,9} \[\d")
_TAIL_BYTES = 65_536
NO_RESULT = 1
"""The exit code where the program says 0 and what it trained is no numbers."""
LOOK_S = 0.1
_SAME_NUMBERS = "the same numbers would come again: what helps has to be changed in the training itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Another way to compute the training."""

    knobs: Knobs
    changed: tuple[str, ...]
    because: str
    crosses: bool
    """A checkpoint of the last way cannot be gone on from with its optimizer."""
    costs: tuple[str, ...] = ()
    """What it changes in the training, as the user allowed."""


class Advisor(Protocol):
    """Who knows the model, and finds the next way by its prices."""

    def smaller(
        self, external: ExternalTraining, shortfall: Shortfall, verdict: Verdict, *, same_engine: bool
    ) -> Step | None:
        """A way that is predicted to need enough less; None: there is none, or nothing is known."""
        ...

    def took(self, step: Step) -> None:
        """That one is tried next."""
        ...

    def learn(self, external: ExternalTraining, peak: Peak) -> None:
        """An attempt that did not run out of memory has held this much."""
        ...

    def wait_for_room(self, external: ExternalTraining, give_up: Callable[[], bool]) -> bool:
        """Until the GPUs have room again; False: nobody asked to wait for that, so it is not known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the user says."""

    policy: Policy = field(default_factory=Policy)
    retry_anyway: bool = False
    hang_timeout_s: float | None = None
    """None: nobody asked whether it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How it all ended."""

    code: int
    """As a shell says it."""
    state: str
    records: tuple[AttemptRecord, ...]
    verdict: Verdict | None
    because: str
    """Why there is no further attempt, where one failed."""
    files: tuple[Path, ...]
    """Configs that were written."""
    external: ExternalTraining
    """As it was started last."""
    peak: Peak


@dataclass(kw_only=True)
class Rescue:
    """Changes with every attempt."""

    external: ExternalTraining
    folder: Path
    streams: Streams
    say: Callable[[str], None]
    advisor: Advisor
    orders: Orders
    signals: Signals
    begun: Callable[[ExternalTraining], None] = lambda external: None
    """Told of every start, before it."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    """By which the program's processes are known."""
    records: list[AttemptRecord] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    peak: Peak = field(default_factory=Peak)

    def run(self) -> Ended:
        while True:
            number = len(self.records) + 1
            began = time.time()
            gone = self._attempt(number)
            state = _state(gone)
            self._clear_locks(began)
            if state != "failed":
                self.advisor.learn(self.external, gone.peak)
                found = judge(self._evidence(gone, number)).verdict if state == "done" else None
                if found is not None and found.kind in NUMBERS:
                    state = "failed"  # a model of NaNs is no result, whatever the program thinks of it
                self._close(gone, state, found)
                return self._ended(gone, state, found, _SAME_NUMBERS if state == "failed" else "")
            verdict = self._judged(gone, number)
            self._close(gone, state, verdict)
            decision, following, changed = self._next(verdict)
            self._note(decision, changed)
            if following is None or self.signals.caught:
                return self._ended(gone, state, verdict, decision.because)
            self.say(f"attempt {number} failed: {verdict.cause}")
            self.say(_told(decision, changed))
            self._wait(decision.wait_s)
            if self.signals.caught:
                return self._ended(gone, "interrupted", verdict, "it was asked to stop")
            self.external = following
            self.say(f"attempt {number + 1}: {following.command.words_shown}")

    def go_on(self) -> str:
        """Begin where a run before this one was when it was killed; where that is."""
        kept = kept_by(self.external)
        if lost := self._lost(kept):
            raise ConfigError(f"the run before this one was killed, and {lost}")
        self.external, files, where = self._resumed(self.external, Edits(), kept)
        self.files += files
        return where

    # --- one attempt ----------------------------------------------------------------------------

    def _attempt(self, number: int) -> Gone:
        place = attempts.attempt_path(self.folder, number).with_suffix("")
        place.mkdir(parents=True, exist_ok=True)
        known = knobs_of(self.external)
        record = AttemptRecord(
            number=number, started=attempts.now(), plan=self.external.command.words_shown, ranks=1,
            effective_batch=None if known.micro_batch is None else known.micro_batch * (known.accumulation or 1),
        )  # fmt: skip
        self._write(record)
        self.begun(self.external)
        start = Start(
            words=self.external.command.words,
            changes=self.external.environment,
            mark=self.mark,
            log=place / LOG,
            hang_timeout_s=self.orders.hang_timeout_s,
        )
        gone = start_and_stay(start, self.streams, self.signals)
        self.peak.host_bytes = max(self.peak.host_bytes, gone.peak.host_bytes)
        for word, size in gone.peak.gpu_bytes.items():
            self.peak.gpu_bytes[word] = max(self.peak.gpu_bytes.get(word, 0), size)
        return gone

    def _clear_locks(self, began: float) -> None:
        """A process that was killed while it compiled would keep every later start waiting."""
        if left := left_locks(inherited(self.external.environment), ours_since=began):
            self.say(remove(left))

    def _judged(self, gone: Gone, number: int) -> Verdict:
        if gone.stuck is not None:
            return _hung(gone.stuck, left_locks(inherited(self.external.environment), ours_since=0.0))
        found = judge(self._evidence(gone, number)).verdict
        if found is None:
            said = f"The command ended with exit code {gone.code}, and nothing in its output says why."
            found = Verdict(id="silent-exit", kind="unknown", cause=said, confidence="possible", evidence=(), fixes=())
        if is_suspicion(found) and gone.kernel.readable and not gone.kernel.lines:
            said = "A process was killed from outside (SIGKILL), and not by the kernel for want of memory."
            found = replace(found, kind="preempted", cause=said)
        return found

    def _evidence(self, gone: Gone, number: int) -> Evidence:
        log = attempts.attempt_path(self.folder, number).with_suffix("") / LOG
        return Evidence(
            logs=(LogSource(name=str(log.relative_to(self.folder)), path=log),),
            exits=(RankExit(rank=None, code=gone.code, at=gone.at),),
            kernel=gone.kernel.lines,
            config=known_config(self.external),
        )

    def _close(self, gone: Gone, state: str, verdict: Verdict | None) -> None:
        kept = kept_by(self.external)
        last = _last_step(attempts.attempt_path(self.folder, self.records[-1].number).with_suffix("") / LOG)
        self._write(
            replace(
                self.records[-1],
                ended=attempts.now(),
                state=state,
                exit_codes=(gone.code,),
                last_step=last,
                kept_step=None if kept is None else kept.step,
                cause=None if verdict is None else recorded(verdict),
            )
        )

    # --- what follows ---------------------------------------------------------------------------

    def _next(self, verdict: Verdict) -> tuple[Decision, ExternalTraining | None, tuple[str, ...]]:
        """What is done, the next command, and what changes; no command: it ends here."""
        if verdict.kind in NUMBERS:
            return _stop(_SAME_NUMBERS)
        decision = decide(verdict, self.records, self.orders.policy, "")
        try:
            if decision.action == "smaller plan" and decision.shortfall is not None:
                return self._smaller(decision, decision.shortfall, verdict)
            if decision.action == "wait":
                waited = self.advisor.wait_for_room(self.external, lambda: bool(self.signals.caught))
                decision = replace(decision, action="same plan", wait_s=0.0 if waited else LONGEST_WAIT_S)
            if decision.action == "same plan":
                return self._again(decision)
        except UserError as error:
            return _stop(str(error))
        if decision.action == "make room":
            return _stop("tightfit removes nothing of another program: make room on the disk, and start it again")
        return decision, None, ()

    def _again(self, decision: Decision) -> tuple[Decision, ExternalTraining | None, tuple[str, ...]]:
        """The same command, from where it can go on."""
        kept, means = kept_by(self.external), means_of(self.external)
        if lost := self._lost(kept):
            return _stop(f"the cause may pass, but {lost}")
        if means == "none" and not self.orders.retry_anyway:
            return _stop(
                "the cause may pass, but the program is not known to go on from a checkpoint: start it again, or say "
                "--retry-anyway"
            )
        following, files, where = self._resumed(self.external, Edits(), kept)
        self.files += files
        return replace(decision, because=f"{decision.because}; {where}"), following, ()

    def _smaller(
        self, decision: Decision, shortfall: Shortfall, verdict: Verdict
    ) -> tuple[Decision, ExternalTraining | None, tuple[str, ...]]:
        kept = kept_by(self.external)
        step = self._step(shortfall, verdict, kept)
        if step is None:
            other = without_smaller(verdict, self.records, self._nothing_left())
            return self._again(other) if other.action == "same plan" else (other, None, ())
        edits = edits_of(self.external, knobs_of(self.external), step.knobs)
        if lost := self._lost(kept):
            return _stop(f"{'; '.join(step.changed)} may fit, but {lost}")
        place = saves_itself(self.external) if kept is None else kept.path
        if step.crosses and place is not None and not (self.external.is_llamafactory and kept and kept.adapter):
            if not self.orders.retry_anyway:
                what = "; ".join(step.changed)
                return _stop(
                    f"what may fit ({what}) cannot go on from {place.name} with its optimizer: change that and start "
                    "anew in another folder, or say --retry-anyway to begin again"
                )
            kept, edits = None, replace(edits, trainer={**edits.trainer, "resume_from_checkpoint": None})
        following, files, where = self._resumed(self.external, edits, kept, crosses=step.crosses)
        self.files += files
        self.advisor.took(step)
        costs = f"; as allowed, {', '.join(step.costs)}" if step.costs else ""
        because = f"{step.because.rstrip('.')}{costs}; {where}"
        return replace(decision, because=because), following, step.changed

    def _lost(self, kept: Kept | None) -> str | None:
        """What a new start would throw away, and how to prevent it; None: nothing, or the user wants it so."""
        if kept is None or means_of(self.external) != "none" or self.orders.retry_anyway:
            return None
        why = "is not known to go on from a checkpoint"
        if self.external.script.calls_plain_train:
            why = "calls trainer.train() without resume_from_checkpoint and would begin at step 0"
        return (
            f"{self.external.name} {why}, and the {kept.step} steps in {kept.path} would be trained anew: hand "
            "args.resume_from_checkpoint to trainer.train() there, or say --retry-anyway to begin again"
        )

    def _step(self, shortfall: Shortfall, verdict: Verdict, kept: Kept | None) -> Step | None:
        """The planner's, where it knows the model; else a rung down. Those first that a checkpoint survives."""
        external, now = self.external, knobs_of(self.external)
        found: list[Step] = []
        for same_engine in (True, False) if kept is not None else (False,):
            step = self.advisor.smaller(external, shortfall, verdict, same_engine=same_engine)
            found += [step] if step is not None and _changes(edits_of(external, now, step.knobs)) else []
        if not found:
            allow, host = self.orders.policy.allow, shortfall.where == "host"
            found = [
                Step(
                    knobs=rung.knobs,
                    changed=rung.changed,
                    because="memory was missing, and the next scheme is tried",
                    crosses=rung.crosses,
                    costs=() if rung.cost is None else (rung.cost,),
                )
                for rung in rungs(external, now, allow, host=host)
                if _changes(edits_of(external, now, rung.knobs))
            ]
        if kept is None and saves_itself(external) is None:
            return next(iter(found), None)
        return next((step for step in found if not step.crosses), next(iter(found), None))

    def _resumed(
        self, external: ExternalTraining, edits: Edits, kept: Kept | None, *, crosses: bool = False
    ) -> tuple[ExternalTraining, tuple[Path, ...], str]:
        """The next command with its config written, the files, and where it goes on."""
        trainer = dict(edits.trainer)
        means = means_of(external)
        if kept is None or means == "none":
            where = "it begins again, since there is no checkpoint to go on from"
            if kept is not None:
                where = f"it begins again, as you asked: {external.name} does not go on from {kept.path.name}"
            if external.said("resume_from_checkpoint") is not None and "resume_from_checkpoint" not in trainer:
                where = f"it goes on from {external.said('resume_from_checkpoint')}, as before"
        elif crosses:
            trainer |= _carried(external, kept)
            where = (
                f"the adapter of step {kept.step} is kept (results go to {trainer['output_dir']}), and optimizer, "
                "schedule and data start afresh"
            )
        elif means == "by itself":
            where = f"it finds {kept.path.name} by itself"
        else:
            trainer["resume_from_checkpoint"] = str(kept.path)
            where = f"it goes on from {kept.path.name}"
        if kept is None and means == "by itself":
            where = "it goes on from what its script finds by itself"
        following, files = written(external, replace(edits, trainer=trainer))
        return following, files, where

    def _nothing_left(self) -> str:
        now, policy = knobs_of(self.external), self.orders.policy
        said = "; ".join(would_help(self.external, now, policy.allow))
        if (unknown := batch_of(self.external).because) and (self.external.is_hugging_face or self.external.files):
            said = "; ".join(part for part in (said, f"the batch is left alone, since {unknown}") if part)
            return f"nothing else is left that tightfit could change ({said}): make one of the changes below by hand"
        if not self.external.files:
            return "there is no config that tightfit could change: make one of the changes below, and start it again"
        return f"nothing is left to change in {self.external.files[0].name}{f' without leave: {said}' if said else ''}"

    # --- telling --------------------------------------------------------------------------------

    def _write(self, record: AttemptRecord) -> None:
        self.records[record.number - 1 :] = [record]
        attempts.write_attempt(self.folder, record)

    def _note(self, decision: Decision, changed: tuple[str, ...]) -> None:
        following = Next(action=decision.action, because=decision.because, changed=changed, wait_s=decision.wait_s)
        self._write(replace(self.records[-1], next=following))

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signals.caught:
            time.sleep(LOOK_S)

    def _ended(self, gone: Gone, state: str, verdict: Verdict | None, because: str) -> Ended:
        code = gone.code if gone.code >= 0 else 128 - gone.code
        if code == 0 and state == "failed":
            code = NO_RESULT
        return Ended(
            code=code,
            state=state,
            records=tuple(self.records),
            verdict=verdict,
            because=because,
            files=tuple(self.files),
            external=self.external,
            peak=self.peak,
        )


def _state(gone: Gone) -> str:
    if gone.asked is not None and gone.code != 0:
        return "interrupted"
    return "done" if gone.code == 0 and gone.stuck is None else "failed"


def _hung(stuck: Stuck, locks: Sequence[Path]) -> Verdict:
    """What was seen from outside, in the words of the catalogue's own hang."""
    lines = [Line(source=f"process {pid}", number=None, text=place) for pid, place in stuck.stands]
    found = replace(
        known_symptom("stuck", KnownConfig()),
        cause=(
            f"The command printed nothing for {stuck.silent_s:.0f} s, and none of its processes used the CPU or a GPU."
        ),
        confidence="likely",
        evidence=(*lines, Line(source="stacks", number=None, text=stuck.how)),
    )
    if stuck.waits_for_a_build or (locks and not stuck.told):
        named = waits_for_a_build(found, "The command", locks)
        return replace(named, kind="environment") if locks else named  # it would wait again
    return found


def _stop(because: str) -> tuple[Decision, None, tuple[str, ...]]:
    return Decision(action="stop", because=because), None, ()


def _told(decision: Decision, changed: tuple[str, ...]) -> str:
    what = f"{'; '.join(changed)}. " if changed else ""
    wait = f" (after {decision.wait_s:.0f} s)" if decision.wait_s else ""
    return f"{what}{decision.because[0].upper()}{decision.because[1:]}{wait}."


def _changes(edits: Edits) -> bool:
    return bool(edits.trainer or edits.deepspeed or edits.accelerate)


def _carried(external: ExternalTraining, kept: Kept) -> dict[str, Any]:
    """The adapter goes on in a folder of its own: what lies in the old one belongs to another way to compute."""
    folder = output_of(external)
    assert folder is not None
    base, number = re.sub(r"\.tightfit-\d+$", "", str(folder).rstrip("/")), 2
    while Path(f"{base}.tightfit-{number}").exists():
        number += 1
    made: dict[str, Any] = {"adapter_name_or_path": str(kept.path), "output_dir": f"{base}.tightfit-{number}"}
    if kept.max_steps is not None and kept.max_steps > kept.step:
        made["max_steps"] = kept.max_steps - kept.step
    if external.said("resume_from_checkpoint") is not None:
        made["resume_from_checkpoint"] = None
    return made


def known_config(external: ExternalTraining) -> KnownConfig:
    """What the fixes of a diagnosis should fit."""
    now = knobs_of(external)
    known = KnownConfig(
        stage=now.stage,
        offload_optimizer=now.offload_optimizer,
        offload_param=now.offload_param,
        pin_memory=now.pin_memory,
        micro_batch=now.micro_batch,
        accumulation=now.accumulation,
        sequence=now.sequence,
        checkpointing=now.checkpointing,
        trainer="huggingface" if external.is_hugging_face and not external.files else None,
    )
    for path in external.files:
        try:
            known = completed(known, known_from_file(path))
        except UserError:
            continue
    return known


def _last_step(log: Path) -> int | None:
    """What the last progress bar of a trainer says."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            found = _PROGRESS.findall(file.read())
    except OSError:
        return None
    return int(found[-1]) if found else None
