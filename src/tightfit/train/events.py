"""What the worker says while it runs: one JSON object a line in `events.jsonl`, from rank 0 alone.

The desk follows the file, pictures are drawn from it, and a later tool can tell from it what happened. A line is
written whole and at once. A worker that `tightfit train` did not start has no desk that follows it, and prints the
same lines that the desk would show. What ends a rank goes into a file of its own, since any rank may have to say it.

Beside it each rank says where it stands, at every stage of a step: to the desk as a sign of life, and to the tests'
faults. Whatever is told is a sign of life too, on the ranks as well that tell nobody.

TensorBoard files and wandb are asked for by name and never needed. Only the rank that speaks has them.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.messages import Message, Said, as_json, say_why, text
from tightfit.owned import open_own
from tightfit.runs.events import event_of, finite
from tightfit.runs.heartbeat import Heartbeat, Stage
from tightfit.runs.lines import Lines
from tightfit.train.place import Place
from tightfit.types import ConfigError

EVENTS = "events.jsonl"
NEWLINE = b"\n"
FULL = (errno.ENOSPC, errno.EDQUOT)
PROJECT = "tightfit"
GIB = 2**30
VALUES = {
    "step": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "learning_rate": "train/learning_rate",
        "loss_scale": "train/loss_scale",
        "epoch": "train/epoch",
        "tokens_per_s": "pace/tokens_per_s",
        "step_s": "pace/step_s",
        "now_bytes": "memory/now_gib",
        "peak_bytes": "memory/peak_gib",
        "host_bytes": "memory/host_gib",
    },
    "eval": {"loss": "eval/loss", "perplexity": "eval/perplexity"},
}
"""By event: a field → its name for those who watch."""
Sink = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]
"""One of those who watch: takes a step with its values; ends."""


@dataclass
class RankHeartbeat:
    """Says nothing to nobody, unless it is given somebody."""

    heartbeat: Heartbeat | None = None
    faults: Any = None  # the tests' own
    stage: Stage = "prepare"
    step: int = 0

    def at(self, stage: Stage, step: int = 0, micro: int = 0, model: Any = None) -> None:
        """This begins now. `step` counts from 1."""
        self.stage, self.step = stage, step
        if self.heartbeat is not None:
            self.heartbeat.at(stage, step, micro)
        if self.faults is not None:
            self.faults.at(stage, step, model)

    def beat(self, last_word: str = "") -> None:
        """The same goes on; or it ends, where this is all that can still be said."""
        if self.heartbeat is not None:
            self.heartbeat.beat(last_word)


class EventSinks:
    """Passes events on to all who watch; to nobody, where nothing was asked for."""

    def __init__(self, *sinks: Sink, every_steps: int = 1) -> None:
        self._sinks, self._every_steps = sinks, every_steps

    def tell(self, event: str, fields: Mapping[str, Any]) -> None:
        if not self._sinks or event not in VALUES or (event == "step" and fields["step"] % self._every_steps):
            return
        given = {**fields, **(fields.get("memory") or {})}
        values = {
            name: given[field] / (GIB if field.endswith("_bytes") else 1.0)
            for field, name in VALUES[event].items()
            if isinstance(given.get(field), int | float)
        }
        for write, _ in self._sinks:
            write(int(fields["step"]), values)

    def close(self) -> None:
        for _, close in self._sinks:
            close()
        self._sinks = ()


class Events:
    def __init__(
        self, folder: Path, *, speaks: bool, lines: Lines | None = None, heartbeat: RankHeartbeat | None = None
    ) -> None:
        """`lines`: where the events are printed as well; None: whoever follows the file shows them."""
        self._file, self._lines, self._one_at_a_time = None, lines, threading.Lock()
        self.heartbeat = heartbeat or RankHeartbeat()
        self.watcher = EventSinks()
        """Others who are told of steps and evaluations; nobody, unless they are asked for."""
        self.path = folder / EVENTS
        self._waiting, self._begun = b"", False
        """What a full disk did not take yet, and whether it ever took anything."""
        if speaks:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_own(self.path, "ab")
            with self.path.open("rb") as file:  # after a line that its writer did not finish the next would be lost too
                if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != NEWLINE:
                    self._waiting = NEWLINE

    def write(self, event: str, **fields: Any) -> None:
        """One line. Numbers that JSON has no word for become null."""
        self.heartbeat.beat()
        if self._file is None:
            return
        said = finite({"event": event, "at": round(time.time(), 3), **fields})
        line = json.dumps(said, allow_nan=False, default=lambda each: finite(as_json(each)))
        with self._one_at_a_time:
            self._put(line.encode() + NEWLINE)
            if self._lines is not None and (told := event_of(line)) is not None:
                self._lines.show(told)
        self.watcher.tell(event, fields)

    def progress(self, what: Message) -> Callable[..., None]:
        """To tell of long work, at most once a second."""
        last = 0.0

        def tell(done: int, total: int, now: Message = what) -> None:
            nonlocal last
            if time.monotonic() - last >= 1 or done >= total:
                last = time.monotonic()
                self.report(now, done, total)

        return tell

    def report(self, what: Said, done: int, total: int) -> None:
        """For those that say each time what they do."""
        self.write("progress", what=what, done=done, total=total)

    def doing(self, what: Message) -> None:
        """For what has no measure."""
        self.report(what, 0, 1)

    def close(self) -> None:
        self.watcher.close()
        if self._lines is not None:
            self._lines.end()
        if self._file is not None:
            self._put(b"")
            self._file.close()
            if self._waiting:
                said = text("train.events-cut-off", path=self.path, lines=self._waiting.count(NEWLINE))
                print(f"tightfit: {said}", file=sys.stderr)  # noqa: T201

    def _put(self, data: bytes) -> None:
        """A disk that is full for a while, as it may be while a checkpoint is tried, is no reason to stop training: the
        lines go out when there is room again. One that takes not even the first line is the user's to mend."""
        assert self._file is not None
        self._waiting += data
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
                self._begun = True
        except OSError as error:
            if not self._begun or error.errno not in FULL:
                raise


def lines_of(place: Place, predicted_bytes: int, every_steps: int | None = None) -> Lines | None:
    """What is printed by a worker that another launcher started; None: a desk follows the events, or another rank."""
    if not place.leads or place.rehearsal or place.launcher == "tightfit":
        return None

    def show(line: str, style: str) -> None:  # a log has no styles
        encoding = sys.stdout.encoding or "utf-8"
        with suppress(OSError, ValueError):  # nobody reads any more, which is no reason to stop training
            print(line.encode(encoding, "replace").decode(encoding), flush=True)  # noqa: T201

    return Lines(show, predicted_bytes, every_steps=every_steps)


def watchers(
    folder: Path, tensorboard: bool, wandb: bool, facts: Mapping[str, Any], every_steps: int | None = None
) -> EventSinks:
    """Those that were asked for; `facts` about the run are shown beside its curves."""
    makers = [maker for maker, asked in ((_tensorboard, tensorboard), (_wandb, wandb)) if asked]
    return EventSinks(*(make(folder, facts) for make in makers), every_steps=every_steps or 1)


def _tensorboard(folder: Path, facts: Mapping[str, Any]) -> Sink:
    place = folder / "tensorboard"
    try:
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(place))
    except ImportError:
        raise ConfigError(Message("train.needs-tensorboard")) from None
    except OSError as error:
        raise ConfigError(Message("train.tensorboard-unwritable", folder=place, why=say_why(error))) from None
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    writer.add_text("run", f"| fact | value |\n|---|---|\n{rows}")

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(folder: Path, facts: Mapping[str, Any]) -> Sink:
    """wandb reads its own variables: WANDB_MODE=offline keeps everything in the run's folder."""
    try:
        library: Any = import_module("wandb")
    except ImportError:
        raise ConfigError(Message("train.needs-wandb")) from None
    try:
        run = library.init(project=PROJECT, name=folder.name, dir=str(folder), config=dict(facts))
    except Exception as error:  # of many kinds: no key, no network, no right to write
        why = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(Message("train.wandb-failed", why=why)) from None
    return lambda step, values: run.log(values, step=step), run.finish
