"""Somebody else's command as a trainer: started as it is, judged by its output, and started again.

The same where the cause may pass, with another config beside the old one where memory was missing, from the trainer's
own newest checkpoint where it can resume from that. Whatever cannot be carried over or written is a reason to stop,
with the change that would help.

Hugging Face's Trainer writes `checkpoint-N` folders, `trainer_state.json` near the end of each. A process that is
killed while it writes leaves half of one, so every file whose length can be known is measured.
"""

from __future__ import annotations

import re
import struct
import time
import uuid
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tightfit.diagnose.judge import judge, known_symptom
from tightfit.diagnose.verdict import Evidence, Line, LogSource, RankExit, Verdict
from tightfit.formats.recognise import read_known_config
from tightfit.inputs.records import parse_json, read_json
from tightfit.inputs.surroundings import inherited
from tightfit.job.known import KnownConfig, completed
from tightfit.messages import Listing, Message, Said, bare, text
from tightfit.planner.step_down import Shortfall
from tightfit.runs.build_lock import clear, find_left_locks
from tightfit.runs.cause import NUMBERS, blame_build_lock, rule_out_memory
from tightfit.runs.events import AttemptFailed, Tally
from tightfit.runs.external import config
from tightfit.runs.external.config import Edits, ExternalTraining, NextConfig, knobs_of
from tightfit.runs.external.process import Gone, MemoryPeak, start_and_stay
from tightfit.runs.external.script import RESUME, Resumes
from tightfit.runs.records import AttemptRecord, attempt_path
from tightfit.runs.run import Outcome, Signals, State, read_tail
from tightfit.runs.supervise import LONGEST_WAIT_S, Attempt, Decision, Policy, stop, without_smaller
from tightfit.types import ConfigError, UserError

LOG = "command.log"
_PROGRESS = re.compile(rb"\b(\d{1,9})/\d{1,9} \[\d")
_TAIL_BYTES = 65_536
NO_RESULT = 1  # the exit code where the program says 0 and what it trained is no numbers
_FOLDER = re.compile(r"checkpoint-(\d+)$")
_STATE = "trainer_state.json"
_PLACES = ("output_dir", "save_dir", "checkpoint_dir", "output", "save")
_LATEST = "latest"


class Advisor(Protocol):
    """Who knows the model, and finds the next way by its prices."""

    def smaller(
        self, external: ExternalTraining, shortfall: Shortfall, verdict: Verdict, *, same_engine: bool
    ) -> NextConfig | None:
        """A way that is predicted to need enough less; None: there is none, or nothing is known."""

    def took(self, step: NextConfig) -> None:
        """That one is tried next."""

    def learn(self, external: ExternalTraining, peak: MemoryPeak) -> None:
        """An attempt that did not run out of memory has held this much."""

    def wait_for_room(self, external: ExternalTraining, give_up: Callable[[], bool]) -> bool:
        """Until the GPUs have room again; False: nobody asked to wait for that, so it is not known."""


@dataclass(kw_only=True)
class ExternalTrainer:
    external: ExternalTraining  # as it was started last
    folder: Path
    streams: tuple[BinaryIO, BinaryIO]  # where its output and its errors go on to
    say: Callable[[str], None]
    advisor: Advisor
    policy: Policy
    signals: Signals
    retry_anyway: bool = False  # start again even where no checkpoint can be resumed
    begun: Callable[[ExternalTraining], None] = lambda external: None  # told of every start, before it
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)  # by which the program's processes are known
    following: ExternalTraining | None = None  # what is started next
    files: list[Path] = field(default_factory=list)  # configs that were written
    peak: MemoryPeak = field(default_factory=MemoryPeak)
    exit_code: int = 0  # of the last start, as a shell says it
    ranks: int = 1  # processes that are started; what they start themselves is theirs
    precision: str = ""  # nobody asks: it is never changed

    @property
    def course(self) -> ExternalTrainer:
        return self

    @property
    def words(self) -> str:
        return self.external.command.line

    @property
    def effective_batch(self) -> int | None:
        known = knobs_of(self.external)
        return None if known.micro_batch is None else known.micro_batch * (known.accumulation or 1)

    @property
    def kept_step(self) -> int | None:
        kept = kept_by(self.external)
        return None if kept is None else kept.step

    def go_on(self) -> Message:
        """Begin where a run before this one was when it was killed; where that is."""
        kept = kept_by(self.external)
        if lost := self._describe_loss(kept):
            raise ConfigError(Message("external.killed-before", why=lost))
        where = self._resume(Edits(), kept)
        self._take()
        return where

    def attempt(self, number: int) -> Attempt:
        place = attempt_path(self.folder, number).with_suffix("")
        place.mkdir(parents=True, exist_ok=True)
        self.begun(self.external)
        began = time.time()
        gone = start_and_stay(
            self.external.command.words,
            self.external.environment,
            self.streams,
            self.signals,
            mark=self.mark,
            log=place / LOG,
            hang_timeout_s=self.policy.hang_timeout_s,
        )
        self.peak.host_bytes = max(self.peak.host_bytes, gone.peak.host_bytes)
        for word, size in gone.peak.gpu_bytes.items():
            self.peak.gpu_bytes[word] = max(self.peak.gpu_bytes.get(word, 0), size)
        # A process that was killed while it compiled would keep every later start waiting.
        for said in clear(inherited(self.external.environment), since=began):
            self.say(str(said))
        state, verdict = self._judge(gone, place / LOG)
        steps = _PROGRESS.findall(read_tail(place / LOG, _TAIL_BYTES))  # as the trainer's progress bars say them
        no_result = gone.code == 0 and state == "failed"
        self.exit_code = NO_RESULT if no_result else gone.code if gone.code >= 0 else 128 - gone.code
        return Attempt(
            outcome=Outcome(state=state, exit_code=self.exit_code, failure=None, tally=Tally()),
            exit_codes=(gone.code,),
            verdict=verdict,
            last_step=int(steps[-1]) if steps else None,
        )

    def _judge(self, gone: Gone, log: Path) -> tuple[State, Verdict | None]:
        interrupted = gone.asked is not None and gone.code != 0
        if gone.stuck is not None and not interrupted:
            # what was seen from outside, in the words of the catalogue's own hang
            stuck, locks = gone.stuck, find_left_locks(inherited(self.external.environment), ours_since=0.0)
            lines = [Line(source=f"process {pid}", number=None, text=where) for pid, where in stuck.stands]
            hang = replace(
                known_symptom("stuck", KnownConfig()),
                cause=Message("external.stuck", seconds=stuck.silent_s),
                confidence="likely",
                evidence=(*lines, Line(source="stacks", number=None, text=str(stuck.how))),
            )
            if stuck.waits_for_a_build or (locks and not stuck.told):
                hang = blame_build_lock(hang, Message("runs.the-command"), locks)
                hang = replace(hang, kind="environment") if locks else hang  # it would wait again
            return "failed", hang
        failed = gone.code != 0 and not interrupted
        if not failed:
            self.advisor.learn(self.external, gone.peak)
        if interrupted:
            return "interrupted", None
        # what the fixes of a diagnosis should fit
        trainer = "huggingface" if self.external.is_hugging_face and not self.external.files else None
        known: KnownConfig = replace(knobs_of(self.external), trainer=trainer)
        for path in self.external.files:
            with suppress(UserError):
                known = completed(known, read_known_config(path))
        evidence = Evidence(
            logs=(LogSource(name=str(log.relative_to(self.folder)), path=log),),
            exits=(RankExit(rank=None, code=gone.code, at=gone.at),),
            kernel=gone.kernel.lines,
            config=known,
        )
        found = judge(evidence).verdict
        if not failed:  # a model of NaNs is no result, whatever the program thinks of it
            return ("failed" if found is not None and found.kind in NUMBERS else "done"), found
        if found is None:
            said = Message("external.silent-exit", code=gone.code)
            found = Verdict(id="silent-exit", kind="unknown", cause=said, confidence="possible", evidence=(), fixes=())
        return "failed", rule_out_memory(found, gone.kernel)

    def carry_out(self, decision: Decision, verdict: Verdict, records: Sequence[AttemptRecord]) -> Decision:
        if verdict.kind in NUMBERS:
            return stop(Message("external.same-numbers"))
        if decision.action == "smaller plan" and decision.shortfall is not None:
            kept = kept_by(self.external)
            step = self._step(decision.shortfall, verdict, kept)
            if step is None:
                other = without_smaller(verdict, records, self._describe_end())
                return self._again(other) if other.action == "same plan" else other
            edits = config.edits_of(self.external, knobs_of(self.external), step.knobs)
            changes = Listing(step.changed, ";")
            if lost := self._describe_loss(kept):
                return stop(Message("external.may-fit-but", changes=changes, why=lost))
            place = saves_itself(self.external) if kept is None else kept.path
            if step.crosses and place is not None and not (self.external.is_llamafactory and kept and kept.adapter):
                if not self.retry_anyway:
                    return stop(Message("external.may-fit-anew", changes=changes, name=place.name))
                kept, edits = None, replace(edits, trainer={**edits.trainer, "resume_from_checkpoint": None})
            where = self._resume(edits, kept, crosses=step.crosses)
            self.advisor.took(step)
            costs = [Message("external.as-allowed", costs=Listing(step.costs))] if step.costs else []
            return replace(decision, because=_because(step.because, *costs, where), changed=step.changed)
        if decision.action == "wait":
            waited = self.advisor.wait_for_room(self.external, self.signals.have_come)
            decision = replace(decision, action="same plan", wait_s=0.0 if waited else LONGEST_WAIT_S)
        if decision.action == "same plan":
            return self._again(decision)
        return stop(Message("external.make-room")) if decision.action == "make room" else decision

    def _again(self, decision: Decision) -> Decision:
        """The same command, from where it can resume."""
        kept, means = kept_by(self.external), means_of(self.external)
        if lost := self._describe_loss(kept):
            return stop(Message("external.may-pass-but", why=lost))
        if means == "none" and not self.retry_anyway:
            return stop(Message("external.may-pass-unknown"))
        where = self._resume(Edits(), kept)
        return replace(decision, because=_because(decision.because, where))

    def _describe_loss(self, kept: Kept | None) -> Message | None:
        """What a new start would throw away, and how to prevent it; None: nothing, or the user wants it so."""
        if kept is None or means_of(self.external) != "none" or self.retry_anyway:
            return None
        id_ = "external.plain-train" if self.external.script.calls_plain_train else "external.may-not-resume"
        return Message(id_, name=self.external.name, steps=kept.step, path=kept.path)

    def _step(self, shortfall: Shortfall, verdict: Verdict, kept: Kept | None) -> NextConfig | None:
        """The planner's, where it knows the model; else a rung down. Those first that a checkpoint survives."""
        external, now = self.external, knobs_of(self.external)

        def changes(step: NextConfig) -> bool:
            edits = config.edits_of(external, now, step.knobs)
            return bool(edits.trainer or edits.deepspeed or edits.accelerate)

        engines = (True, False) if kept is not None else (False,)
        asked = (self.advisor.smaller(external, shortfall, verdict, same_engine=same) for same in engines)
        found = [step for step in asked if step is not None and changes(step)]
        if not found:
            lower = config.rungs(external, now, self.policy.allow, host=shortfall.where == "host")
            found = list(filter(changes, lower))
        first = next(iter(found), None)
        if kept is None and saves_itself(external) is None:
            return first
        return next((step for step in found if not step.crosses), first)

    def _resume(self, edits: Edits, kept: Kept | None, *, crosses: bool = False) -> Message:
        """Make the next command, with its config written; where it resumes, in words."""
        external, trainer = self.external, dict(edits.trainer)
        means = means_of(external)
        if kept is None or means == "none":
            where = Message("external.begins-again")
            if kept is not None:
                where = Message("external.begins-as-asked", name=external.name, checkpoint=kept.path.name)
            if external.said("resume_from_checkpoint") is not None and "resume_from_checkpoint" not in trainer:
                where = Message("external.from-as-before", name=external.said("resume_from_checkpoint"))
        elif crosses:
            # the adapter goes on in a folder of its own: what lies in the old one belongs to another way to compute
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
            trainer |= made
            where = Message("external.adapter-kept", step=kept.step, folder=trainer["output_dir"])
        elif means == "by itself":
            where = Message("external.finds-itself", name=kept.path.name)
        else:
            trainer["resume_from_checkpoint"] = str(kept.path)
            where = Message("external.goes-on-from", name=kept.path.name)
        if kept is None and means == "by itself":
            where = Message("external.goes-on-itself")
        self.following, files = config.written(external, replace(edits, trainer=trainer))
        self.files += files
        return where

    def _describe_end(self) -> Message:
        said: list[Said] = [*config.would_help(self.external, knobs_of(self.external), self.policy.allow)]
        if (unknown := config.batch_of(self.external).because) and (
            self.external.is_hugging_face or self.external.files
        ):
            said.append(Message("external.batch-left-alone", why=unknown))
            return Message("external.nothing-else", what=Listing(said, ";"))
        if not self.external.files:
            return Message("external.no-config")
        file = self.external.files[0].name
        if said:
            return Message("external.nothing-without-leave", file=file, what=Listing(said, ";"))
        return Message("external.nothing-left", file=file)

    def after_failure(self, failed: AttemptFailed, changed: tuple[Said, ...]) -> None:
        if failed.action == "stop":  # how it ends is said at the end
            return
        self.say(text("external.attempt-failed", number=failed.number, cause=failed.text))
        because: Said = failed.because
        if failed.wait_s:
            because = Message("external.after-wait", because=because, seconds=failed.wait_s)
        if changed:
            self.say(text("external.changes-because", changes=Listing(changed, ";"), because=because))
        else:
            self.say(text("runs.sentence", said=because))

    def before_next(self, number: int, changed: tuple[Said, ...]) -> None:
        self._take()
        self.say(text("external.attempt", number=number, command=self.external.command.line))

    def _take(self) -> None:
        assert self.following is not None, "a decision that is not to stop has made one"
        self.external, self.following = self.following, None


def _because(*reasons: Said) -> Message:
    """Sentences of others lose their full stops."""
    plain = (Message("external.bare", said=said) if isinstance(said, Message) else bare(said) for said in reasons)
    return Message("runs.several", parts=Listing(plain, ";"))


# --- its checkpoints ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    path: Path
    step: int
    max_steps: int | None
    has_optimizer: bool
    adapter: bool  # it holds adapters, and not a whole model


def kept_by(external: ExternalTraining) -> Kept | None:
    """The newest whole checkpoint; None: there is none that is known."""
    folder = output_of(external)
    if folder is None or not folder.is_dir():
        return None
    numbered = [(int(found[1]), path) for path in folder.iterdir() if (found := _FOLDER.search(path.name))]
    for step, path in sorted(numbered, reverse=True):
        kept = _whole(path, step)
        if kept is not None:
            return kept
    return None


def output_of(external: ExternalTraining) -> Path | None:
    named = next((text for name in _PLACES if (text := external.said_text(name)) is not None), None)
    return None if named is None else Path(named).expanduser()


def saves_itself(external: ExternalTraining) -> Path | None:
    """A folder of DeepSpeed's own checkpoints, which only the script knows how to read."""
    folder = output_of(external)
    return folder if folder is not None and (folder / _LATEST).is_file() else None


def means_of(external: ExternalTraining) -> Resumes:
    """How the trainer goes on from a checkpoint. A flag that its script does not hand on tells it nothing."""
    if external.is_llamafactory:
        return "told"
    found = external.script.resumes
    if found == "none" and not external.script.calls_plain_train and external.command.flag(RESUME) is not None:
        return "told"
    return "none" if found == "told" and not external.takes(RESUME) else found


def _whole(path: Path, step: int) -> Kept | None:
    try:
        state = read_json(path / _STATE)
        if state["global_step"] != step:
            return None
        names = {entry.name for entry in path.iterdir()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sharded = path / f"global_step{step}"
    models = [path / name for name in names if name.endswith(".safetensors")]
    packed = [path / name for name in names if name.endswith((".pt", ".bin", ".pth")) and name != "training_args.bin"]
    packed += list(sharded.glob("*.pt"))
    weights = bool(models) or sharded.is_dir() or any(name.endswith(".bin") for name in names - {"training_args.bin"})
    if not weights or not all(map(_is_safetensors, models)) or not all(map(zipfile.is_zipfile, packed)):
        return None
    most = state.get("max_steps")
    return Kept(
        path=path,
        step=step,
        max_steps=most if isinstance(most, int) else None,
        has_optimizer=sharded.is_dir() or "optimizer.pt" in names or "optimizer.bin" in names,
        adapter="adapter_config.json" in names,
    )


def _is_safetensors(path: Path) -> bool:
    """Whether the file is as long as its head says."""
    with suppress(OSError, ValueError, KeyError, TypeError, struct.error, AttributeError, RecursionError):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                return False
            head = parse_json(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__"]
        return bool(path.stat().st_size == 8 + length + max(ends, default=0))
    return False
