"""Saving where a run stands, so that nothing is lost, under any engine and number of ranks.

At a step's border every rank hands its parts of the weights, of the fp32 copies and of the moments to a `Writer`, which
puts them at their place in files that hold each parameter once and whole. Then come `state.json` and, when every byte
is on the disk and all ranks agree, the manifest; a rename makes it a checkpoint. Older ones go only after that.

In the background: the parts are copied into a buffer on the host, training goes on, and a thread writes them. The
buffer is made while the first steps run, and stays. Without room for it, training waits until the files are written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from tightfit.messages import Message, Said, message_of
from tightfit.owned import NotOurs
from tightfit.runs import checkpoints, disk
from tightfit.runs.checkpoints import MANIFEST, OPTIMIZER, STATE, Keeping, Manifest, Span, StoredFile, covered, digest
from tightfit.train.engines import MASTER, Engine
from tightfit.train.events import Events
from tightfit.train.place import Place, side_meeting, total
from tightfit.train.saved_model import FileStyle, Names, SaveError, TensorPiece, TensorSet, Writer
from tightfit.train.saved_names import adapter_name
from tightfit.train.shards import outline, plain_name, shards
from tightfit.train.staging import Staging, may_stage

SLACK_BYTES = 64 * 2**20
"""For config, tokenizer, manifest, and what a file system needs for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """How a save went; `problem`: it did not."""

    step: int
    folder: Path
    bytes: int
    seconds: float
    problem: Said | None = None


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How a run saves."""

    keeping: Keeping
    background: bool
    ranks_here: int
    """That share this machine's memory."""
    masters: bool
    """Weights train in 16 bits, and their fp32 copies are worth a file of their own."""


class Saver:
    """Every rank makes the same calls at the same steps."""

    def __init__(self, run: Path, engine: Engine, model: TensorSet, habits: Habits, place: Place) -> None:
        self._run, self._engine, self._model, self._habits, self._place = run, engine, model, habits, place
        self._barrier = side_meeting(place)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[SaveOutcome] | None = None
        self._staging: Staging | None = None
        self._preparing: Future[None] | None = None
        self._refused = False
        self._blocked = 0.0
        self._sets: tuple[TensorSet, ...] | None = None
        self.last: int | None = None
        """The step of the newest checkpoint that stands, as far as this run knows."""

    @property
    def sets(self) -> tuple[TensorSet, ...]:
        if self._sets is None:
            model = replace(self._model, style=replace(self._model.style, beside=None))
            states = state_set(self._engine, self._place, masters=self._habits.masters)
            self._sets = (model,) if states is None else (model, states)
        return self._sets

    def save(self, step: int, state: Mapping[str, Any], events: Events) -> None:
        """Begin a checkpoint, or write it all where there is no room to do so in the background."""
        began = time.monotonic()
        self.wait(events)
        needed = sum(each.total_bytes for each in self.sets) + SLACK_BYTES
        if problem := self._no_room(needed):
            events.write("checkpoint_failed", step=step, text=problem)
            return
        folder = checkpoints.folder_of(self._run, step)
        self.prepare()
        if self._staging is None or self._preparing is None or self._preparing.exception() is not None:
            saved = self._write(folder, step, state, None)
            self._report(saved, events, time.monotonic() - began, background=False)
            return
        held = self._staging.take(self.sets)
        self._writing = self._thread.submit(self._write, folder, step, state, held)
        self._blocked = time.monotonic() - began

    def prepare(self) -> None:
        """Begin to take the memory that saving in the background needs. The optimizer's states must exist."""
        if self._habits.background and self._staging is None and not self._refused:
            # The buffer on the host, if every rank has room for its own.
            staging = Staging(self.sets)
            allowed = may_stage(staging.bytes * self._habits.ranks_here)
            self._staging = staging if total(self._place, float(not allowed)) == 0 else None
            self._refused = self._staging is None
            if self._staging is not None:
                self._preparing = self._thread.submit(self._staging.prepare, self._place.device)

    def poll(self, events: Events) -> None:
        """Say how a save in the background went, once it has."""
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            self._report(writing.result(), events, self._blocked, background=True)

    def wait(self, events: Events) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            self._writing.exception()
            self.poll(events)

    # --- steps -----------------------------------------------------------------------------------

    def _no_room(self, needed: int) -> Message | None:
        """The newest one stays while the next is written, so there must be room for both."""
        where = self._run / checkpoints.CHECKPOINTS  # which may lie on another disk than the rest
        free, unseen = needed, ""
        if self._place.leads:
            try:
                free = disk.room(where)
            except OSError as error:
                unseen = (error.strerror or str(error)).lower()
        short = total(self._place, float(free < needed or bool(unseen))) > 0
        if not short:
            return None
        if unseen:
            return Message("train.checkpoint-disk-unseen", where=where, why=unseen)
        return Message("train.checkpoint-needs-room", needed=needed / 1e9, where=where, free=free / 1e9)

    def _write(
        self, folder: Path, step: int, state: Mapping[str, Any], held: Mapping[str, list[TensorPiece]] | None
    ) -> SaveOutcome:
        """All files, and the checkpoint in its place. Touches nothing of the training's when `held` is there."""
        began = time.monotonic()
        written = 0
        try:
            place = self._place
            writer = Writer(folder, rank=place.rank, world=place.world, barrier=self._barrier, hashes=True)
            for each in self.sets:
                pieces = each.pieces() if held is None else held[each.style.stem]
                written += writer.write(each.names, pieces, each.style)
            writer.commit(self._beside(state), lambda staging, spans: _seal(staging, step, spans))
            if place.leads:
                for old in checkpoints.outdated(self._run, self._habits.keeping, step):
                    with suppress(OSError, NotOurs):  # the new one stands; what holds a user's file stays too
                        checkpoints.remove(old)
        except Exception as error:  # training goes on; whoever follows it is told
            problem = message_of(error) or type(error).__name__
            seconds = time.monotonic() - began
            return SaveOutcome(step=step, folder=folder, bytes=written, seconds=seconds, problem=problem)
        return SaveOutcome(step=step, folder=folder, bytes=written, seconds=time.monotonic() - began)

    def _beside(self, state: Mapping[str, Any]) -> Any:
        def write(staging: Path) -> None:
            if self._model.style.beside is not None:
                self._model.style.beside(staging)
            disk.write_text(staging / STATE, json.dumps(state, indent=1, ensure_ascii=False) + "\n")

        return write

    def _report(self, saved: SaveOutcome, events: Events, blocked_s: float, *, background: bool) -> None:
        if saved.problem is not None:
            events.write("checkpoint_failed", step=saved.step, text=saved.problem)
            return
        self.last = saved.step
        events.write(
            "checkpoint",
            step=saved.step,
            folder=str(saved.folder),
            bytes=saved.bytes,
            seconds=round(saved.seconds, 3),
            blocked_s=round(blocked_s, 3),
            background=background,
        )


def _seal(staging: Path, step: int, spans: Mapping[str, Any]) -> None:
    """The manifest: what ranks wrote is hashed already, small files are hashed here."""
    files: dict[str, StoredFile] = {}
    for path in sorted(staging.rglob("*")):
        if path.is_file():
            name, size = path.relative_to(staging).as_posix(), path.stat().st_size
            of_one = tuple(sorted(spans[name], key=lambda span: span.start)) if name in spans else ()
            files[name] = StoredFile(size, of_one or (Span(0, size, digest(path.read_bytes())),))
            if not covered(files[name]):
                raise SaveError(Message("train.bytes-unaccounted", name=name))
    written = datetime.now().astimezone().isoformat(timespec="seconds")
    disk.write_text(staging / MANIFEST, Manifest(step=step, written=written, files=files).text())


# --- what is in it -------------------------------------------------------------------------------


def state_name(path: str) -> str:
    """A parameter's name in the optimizer's files: as the model's files call it, or PEFT's."""
    return adapter_name(path) if ".lora_" in path else plain_name(path)


def state_set(engine: Engine, place: Place, *, masters: bool) -> TensorSet | None:
    """fp32 copies and moments of everything that trains, as `exp_avg/NAME`; None: there are none."""
    shapes = {kind: held for kind, held in engine.shapes().items() if kind != MASTER or masters}
    apart = MASTER in shapes
    if masters and not apart:  # the weights themselves rest in fp32
        trainable = (shard for shard in outline(engine.model, place.rank) if shard.parameter.requires_grad)
        shapes = {MASTER: {shard.path: shard.shape for shard in trainable}, **shapes}
    names: Names = {
        f"{kind}/{state_name(path)}": (shape, torch.float32)
        for kind, held in shapes.items()
        for path, shape in held.items()
    }
    if not names:
        return None

    def pieces() -> Iterator[TensorPiece]:
        if masters and not apart:
            for shard in shards(engine.model, place.rank):
                if shard.parameter.requires_grad:
                    yield TensorPiece(f"{MASTER}/{state_name(shard.path)}", shard.shape, shard.start, shard.tensor)
        for number, state in enumerate(engine.states(write=False)):
            mine = not state.alike or number % place.world == place.rank
            if mine and (masters or state.kind != MASTER):
                yield TensorPiece(f"{state.kind}/{state_name(state.path)}", state.shape, state.start, state.tensor)

    return TensorSet(names=names, pieces=pieces, style=FileStyle(stem=f"{OPTIMIZER}/states"))
