"""Somebody else's command as a trainer: started as it is, judged by its output, and started again.

The same where the cause may pass, with another config beside the old one where memory was missing, from the trainer's
own newest checkpoint where it can resume from that. Whatever cannot be carried over or written is a reason to stop,
with the change that would help.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tightfit.diagnose.evidence import Evidence, LogSource, RankExit
from tightfit.diagnose.judge import judge, known_symptom
from tightfit.diagnose.verdict import Line, Verdict
from tightfit.formats.settings import known_from_file
from tightfit.inputs.surroundings import inherited
from tightfit.job.known import KnownConfig, completed
from tightfit.planner.step_down import Shortfall
from tightfit.runs import attempts
from tightfit.runs.attempts import AttemptRecord
from tightfit.runs.build_lock import left_locks, remove
from tightfit.runs.cause import NUMBERS, blame_build_lock, rule_out_memory
from tightfit.runs.decide import LONGEST_WAIT_S, Decision, stop, without_smaller
from tightfit.runs.events import AttemptFailed
from tightfit.runs.external.config import Edits, ExternalTraining, batch_of, edits_of, knobs_of, written
from tightfit.runs.external.hang import Stuck
from tightfit.runs.external.ladder import NextConfig, rungs, would_help
from tightfit.runs.external.process import CommandStart, Gone, MemoryPeak, Streams, start_and_stay
from tightfit.runs.external.resume import Kept, kept_by, means_of, output_of, saves_itself
from tightfit.runs.run import Outcome, Signals, State
from tightfit.runs.supervise import Attempt, Orders
from tightfit.runs.tally import Tally
from tightfit.types import ConfigError, UserError

LOG = "command.log"
_PROGRESS = re.compile(rb"\b(\d{1,9})/\d{1,9} \[\d")
_TAIL_BYTES = 65_536
NO_RESULT = 1
"""The exit code where the program says 0 and what it trained is no numbers."""


class Advisor(Protocol):
    """Who knows the model, and finds the next way by its prices."""

    def smaller(
        self, external: ExternalTraining, shortfall: Shortfall, verdict: Verdict, *, same_engine: bool
    ) -> NextConfig | None:
        """A way that is predicted to need enough less; None: there is none, or nothing is known."""
        ...

    def took(self, step: NextConfig) -> None:
        """That one is tried next."""
        ...

    def learn(self, external: ExternalTraining, peak: MemoryPeak) -> None:
        """An attempt that did not run out of memory has held this much."""
        ...

    def wait_for_room(self, external: ExternalTraining, give_up: Callable[[], bool]) -> bool:
        """Until the GPUs have room again; False: nobody asked to wait for that, so it is not known."""
        ...


@dataclass(kw_only=True)
class ExternalTrainer:
    """Changes with every attempt."""

    external: ExternalTraining
    """As it was started last."""
    folder: Path
    streams: Streams
    say: Callable[[str], None]
    advisor: Advisor
    orders: Orders
    signals: Signals
    retry_anyway: bool = False
    """Start again even where no checkpoint can be resumed."""
    begun: Callable[[ExternalTraining], None] = lambda external: None
    """Told of every start, before it."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    """By which the program's processes are known."""
    following: ExternalTraining | None = None
    """What is started next."""
    files: list[Path] = field(default_factory=list)
    """Configs that were written."""
    peak: MemoryPeak = field(default_factory=MemoryPeak)
    exit_code: int = 0
    """Of the last start, as a shell says it."""
    ranks: int = 1
    """Processes that are started; what they start themselves is theirs."""
    precision: str = ""
    """Nobody asks: it is never changed."""

    @property
    def words(self) -> str:
        return self.external.command.words_shown

    @property
    def effective_batch(self) -> int | None:
        known = knobs_of(self.external)
        return None if known.micro_batch is None else known.micro_batch * (known.accumulation or 1)

    @property
    def kept_step(self) -> int | None:
        kept = kept_by(self.external)
        return None if kept is None else kept.step

    def go_on(self) -> str:
        """Begin where a run before this one was when it was killed; where that is."""
        kept = kept_by(self.external)
        if lost := self._lost(kept):
            raise ConfigError(f"the run before this one was killed, and {lost}")
        where = self._resume(Edits(), kept)
        self._take()
        return where

    # --- one attempt ----------------------------------------------------------------------------

    def attempt(self, number: int) -> Attempt:
        place = attempts.attempt_path(self.folder, number).with_suffix("")
        place.mkdir(parents=True, exist_ok=True)
        self.begun(self.external)
        start = CommandStart(
            words=self.external.command.words,
            changes=self.external.environment,
            mark=self.mark,
            log=place / LOG,
            hang_timeout_s=self.orders.hang_timeout_s,
        )
        began = time.time()
        gone = start_and_stay(start, self.streams, self.signals)
        self.peak.host_bytes = max(self.peak.host_bytes, gone.peak.host_bytes)
        for word, size in gone.peak.gpu_bytes.items():
            self.peak.gpu_bytes[word] = max(self.peak.gpu_bytes.get(word, 0), size)
        # A process that was killed while it compiled would keep every later start waiting.
        if left := left_locks(inherited(self.external.environment), ours_since=began):
            self.say(remove(left))
        state, verdict = self._judge(gone, place / LOG)
        no_result = gone.code == 0 and state == "failed"
        self.exit_code = NO_RESULT if no_result else gone.code if gone.code >= 0 else 128 - gone.code
        return Attempt(
            outcome=Outcome(state=state, exit_code=self.exit_code, failure=None, tally=Tally()),
            exit_codes=(gone.code,),
            verdict=verdict,
            last_step=_last_step(place / LOG),
        )

    def _judge(self, gone: Gone, log: Path) -> tuple[State, Verdict | None]:
        interrupted = gone.asked is not None and gone.code != 0
        if gone.stuck is not None and not interrupted:
            return "failed", _describe_hang(
                gone.stuck, left_locks(inherited(self.external.environment), ours_since=0.0)
            )
        failed = gone.code != 0 and not interrupted
        if not failed:
            self.advisor.learn(self.external, gone.peak)
        if interrupted:
            return "interrupted", None
        evidence = Evidence(
            logs=(LogSource(name=str(log.relative_to(self.folder)), path=log),),
            exits=(RankExit(rank=None, code=gone.code, at=gone.at),),
            kernel=gone.kernel.lines,
            config=_config_of(self.external),
        )
        found = judge(evidence).verdict
        if not failed:  # a model of NaNs is no result, whatever the program thinks of it
            return ("failed" if found is not None and found.kind in NUMBERS else "done"), found
        if found is None:
            said = f"The command ended with exit code {gone.code}, and nothing in its output says why."
            found = Verdict(id="silent-exit", kind="unknown", cause=said, confidence="possible", evidence=(), fixes=())
        return "failed", rule_out_memory(found, gone.kernel)

    # --- what follows ---------------------------------------------------------------------------

    def carry_out(
        self, decision: Decision, verdict: Verdict, records: Sequence[AttemptRecord]
    ) -> tuple[Decision, tuple[str, ...]]:
        if verdict.kind in NUMBERS:
            same = "the same numbers would come again: what helps has to be changed in the training itself"
            return stop(same), ()
        if decision.action == "smaller plan" and decision.shortfall is not None:
            return self._smaller(decision, decision.shortfall, verdict, records)
        if decision.action == "wait":
            waited = self.advisor.wait_for_room(self.external, lambda: bool(self.signals.caught))
            decision = replace(decision, action="same plan", wait_s=0.0 if waited else LONGEST_WAIT_S)
        if decision.action == "same plan":
            return self._again(decision), ()
        if decision.action == "make room":
            why = "tightfit removes nothing of another program: make room on the disk, and start it again"
            return stop(why), ()
        return decision, ()

    def _again(self, decision: Decision) -> Decision:
        """The same command, from where it can resume."""
        kept, means = kept_by(self.external), means_of(self.external)
        if lost := self._lost(kept):
            return stop(f"the cause may pass, but {lost}")
        if means == "none" and not self.retry_anyway:
            return stop(
                "the cause may pass, but the program is not known to go on from a checkpoint: start it again, or say "
                "--retry-anyway"
            )
        where = self._resume(Edits(), kept)
        return replace(decision, because=f"{decision.because}; {where}")

    def _smaller(
        self, decision: Decision, shortfall: Shortfall, verdict: Verdict, records: Sequence[AttemptRecord]
    ) -> tuple[Decision, tuple[str, ...]]:
        kept = kept_by(self.external)
        step = self._step(shortfall, verdict, kept)
        if step is None:
            other = without_smaller(verdict, records, self._nothing_left())
            return (self._again(other) if other.action == "same plan" else other), ()
        edits = edits_of(self.external, knobs_of(self.external), step.knobs)
        if lost := self._lost(kept):
            return stop(f"{'; '.join(step.changed)} may fit, but {lost}"), ()
        place = saves_itself(self.external) if kept is None else kept.path
        if step.crosses and place is not None and not (self.external.is_llamafactory and kept and kept.adapter):
            if not self.retry_anyway:
                what = "; ".join(step.changed)
                why = (
                    f"what may fit ({what}) cannot go on from {place.name} with its optimizer: change that and start "
                    "anew in another folder, or say --retry-anyway to begin again"
                )
                return stop(why), ()
            kept, edits = None, replace(edits, trainer={**edits.trainer, "resume_from_checkpoint": None})
        where = self._resume(edits, kept, crosses=step.crosses)
        self.advisor.took(step)
        costs = f"; as allowed, {', '.join(step.costs)}" if step.costs else ""
        return replace(decision, because=f"{step.because.rstrip('.')}{costs}; {where}"), step.changed

    def _lost(self, kept: Kept | None) -> str | None:
        """What a new start would throw away, and how to prevent it; None: nothing, or the user wants it so."""
        if kept is None or means_of(self.external) != "none" or self.retry_anyway:
            return None
        why = "is not known to go on from a checkpoint"
        if self.external.script.calls_plain_train:
            why = "calls trainer.train() without resume_from_checkpoint and would begin at step 0"
        return (
            f"{self.external.name} {why}, and the {kept.step} steps in {kept.path} would be trained anew: hand "
            "args.resume_from_checkpoint to trainer.train() there, or say --retry-anyway to begin again"
        )

    def _step(self, shortfall: Shortfall, verdict: Verdict, kept: Kept | None) -> NextConfig | None:
        """The planner's, where it knows the model; else a rung down. Those first that a checkpoint survives."""
        external, now = self.external, knobs_of(self.external)

        def changes(step: NextConfig) -> bool:
            edits = edits_of(external, now, step.knobs)
            return bool(edits.trainer or edits.deepspeed or edits.accelerate)

        engines = (True, False) if kept is not None else (False,)
        asked = (self.advisor.smaller(external, shortfall, verdict, same_engine=same) for same in engines)
        found = [step for step in asked if step is not None and changes(step)]
        if not found:
            allow, host = self.orders.policy.allow, shortfall.where == "host"
            found = list(filter(changes, rungs(external, now, allow, host=host)))
        first = next(iter(found), None)
        if kept is None and saves_itself(external) is None:
            return first
        return next((step for step in found if not step.crosses), first)

    def _resume(self, edits: Edits, kept: Kept | None, *, crosses: bool = False) -> str:
        """Make the next command, with its config written; where it resumes, in words."""
        external, trainer = self.external, dict(edits.trainer)
        means = means_of(external)
        if kept is None or means == "none":
            where = "it begins again, since there is no checkpoint to go on from"
            if kept is not None:
                where = f"it begins again, as you asked: {external.name} does not go on from {kept.path.name}"
            if external.said("resume_from_checkpoint") is not None and "resume_from_checkpoint" not in trainer:
                where = f"it goes on from {external.said('resume_from_checkpoint')}, as before"
        elif crosses:
            trainer |= _carry_adapter(external, kept)
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
        self.following, files = written(external, replace(edits, trainer=trainer))
        self.files += files
        return where

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

    def after_failure(self, failed: AttemptFailed, changed: tuple[str, ...]) -> None:
        if failed.action == "stop":  # how it ends is said at the end
            return
        self.say(f"attempt {failed.number} failed: {failed.text}")
        what = f"{'; '.join(changed)}. " if changed else ""
        wait = f" (after {failed.wait_s:.0f} s)" if failed.wait_s else ""
        self.say(f"{what}{str(failed.because)[0].upper()}{str(failed.because)[1:]}{wait}.")

    def before_next(self, number: int, changed: tuple[str, ...]) -> None:
        self._take()
        self.say(f"attempt {number}: {self.external.command.words_shown}")

    def _take(self) -> None:
        assert self.following is not None, "a decision that is not to stop has made one"
        self.external, self.following = self.following, None


def _describe_hang(stuck: Stuck, locks: Sequence[Path]) -> Verdict:
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
        named = blame_build_lock(found, "The command", locks)
        return replace(named, kind="environment") if locks else named  # it would wait again
    return found


def _carry_adapter(external: ExternalTraining, kept: Kept) -> dict[str, Any]:
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


def _config_of(external: ExternalTraining) -> KnownConfig:
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
