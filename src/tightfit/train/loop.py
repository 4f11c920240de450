"""The training itself: windows in, optimizer steps and one event a step out.

A window is `effective_batch` samples, and which ones depends on the step's number alone. Rank and micro batch only
decide who computes which of them, so another number of GPUs or another micro batch trains on the same windows.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tightfit.inputs.records import parse_json
from tightfit.messages import Message
from tightfit.runs.events import MOST_RANKS
from tightfit.train.build import attention_of, layers_of
from tightfit.train.checkpoint import Saver
from tightfit.train.compile import Compiler, fix_width
from tightfit.train.config import WorkerConfig
from tightfit.train.data.order import Order
from tightfit.train.data.samples import IGNORED, Samples, batch, flatten
from tightfit.train.engines import Diverged, Engine, ScaleExhausted, Stepped
from tightfit.train.events import Events
from tightfit.train.optimizers import learning_rate
from tightfit.train.place import Place, gather_messages, read_memory, totals, words
from tightfit.train.stop import Stop
from tightfit.types import Levers, TightfitError

RECENT = 20  # steps that tokens a second and the time left are taken from
SMALLEST_SCALE = 1.0
"""Below it fp16 gradients are made smaller than they are, and still overflow; DeepSpeed gives up there as well."""
SAMPLES = 16  # of a window that are named
TELL_AFTER = 2  # overflows in a row before they are worth a line
Ending = Literal["finished", "timeout", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One rank's part of a window."""

    micro_batches: tuple[Any, ...]  # arrays of sample numbers
    divisor: float  # tokens of the whole window, all ranks', that the loss counts
    tokens: int  # tokens of the whole window
    samples: Any  # the numbers of all its samples


class Windows:
    """The next one can be made ahead, while the device still works on the last. Its tensors wait in the host's memory,
    and only those of its first micro batch: the others are made while the device has work."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        levers: Levers,
        place: Place,
        pad_id: int,
        compiler: Compiler | None = None,
    ) -> None:
        self.samples, self._order, self._levers, self._place, self._pad = samples, order, levers, place, pad_id
        self._ahead: tuple[int, Window, dict[str, Tensor]] | None = None
        # The kernel that runs, not the one that was asked for: sdpa would pay for a long row with the square of it.
        self._one_row = attention_of(levers, place.on_gpu)[0] == "flash"
        self._compiler = compiler
        # Ranks that share sequences or layers are neighbours, and read the same samples; so do ranks with other layers.
        self.readers = levers.data_ranks(place.world)
        self.number = place.rank % levers.stage_ranks(place.world) // levers.row_parts  # of this one among them

    def window(self, step: int) -> Window:
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1]
        return self.of(self._order.window(step))

    def make_ahead(self, step: int) -> None:
        window = self.window(step)
        self._ahead = step, window, self._on_host(window.micro_batches[0])

    def of(self, indices: Any) -> Window:
        """The window of these samples, in this order."""
        micro, number = self._levers.micro_batch, self.number
        begins = range(number * micro, len(indices) + number * micro, micro * self.readers)
        return Window(
            micro_batches=tuple(indices[begin : begin + micro] for begin in begins),
            divisor=float(max(1, int(self.samples.loss_tokens[indices].sum()))),
            tokens=int(self.samples.lengths[indices].sum()),
            samples=indices,
        )

    def inputs(self, window: Window) -> Iterator[dict[str, Tensor]]:
        """The tensors of each micro batch, on the device."""
        ahead, self._ahead = self._ahead, None
        for number, indices in enumerate(window.micro_batches):
            if number == 0 and ahead is not None and ahead[1] is window:
                yield self._on_device(ahead[2])
                del ahead
            else:
                yield self.tensors(indices)

    def tensors(self, indices: Any, unheard: Any = None) -> dict[str, Tensor]:
        """`unheard`: which of the rows do not count in the loss."""
        return self._on_device(self._on_host(indices, unheard))

    def _on_host(self, indices: Any, unheard: Any = None) -> dict[str, Tensor]:
        """With `position_ids` where a row holds more than one document: see `documents.py`."""
        # Compiled code is made for each length that it meets. All stages of a pipeline have to agree on it.
        is_compiled = self._compiler is not None and self._compiler.is_at_work
        if self._levers.pipeline_parallel > 1:
            is_compiled = self._levers.compile == "layers"
        longest = int(self.samples.lengths[indices].max()) if is_compiled else 0
        width = fix_width(longest, self.samples.sequence) if longest else None
        made = batch(self.samples, indices, self._pad, pad_to=width, parts=self._levers.row_parts)
        if unheard is not None:
            made.labels[torch.as_tensor(unheard)] = IGNORED
        if made.position_ids is not None and self._one_row:
            made = flatten(made)  # transformers sees the borders of packed documents in a single row only
        tensors = {"input_ids": made.input_ids, "labels": made.labels}
        if made.position_ids is not None and not made.position_ids[:, 1:].all():
            tensors["position_ids"] = made.position_ids
        return {name: each.pin_memory() for name, each in tensors.items()} if self._place.on_gpu else tensors

    def _on_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.to(self._place.device, non_blocking=True) for name, each in tensors.items()}


class NotSaved(TightfitError):
    """The run was asked to stop, and where it stood is lost."""


class Votes(NamedTuple):
    """What ranks agree on after each step, in one message."""

    loss: float
    asked: float  # ranks that were asked to stop
    late: float  # ranks whose clocks say that the time is over
    due: float  # whether rank 0's clock wants a checkpoint
    compiled_s: float  # what went into compiling in this step, on all ranks
    untold: float  # what ranks have said of compiling, which only rank 0's events hold


@dataclass(kw_only=True)
class Loop:
    config: WorkerConfig
    engine: Engine
    windows: Windows
    held: Windows | None
    events: Events
    place: Place
    steps: int
    stop: Stop
    saver: Saver | None  # None: nothing is saved on the way
    standing: Callable[[int], dict[str, Any]]  # what a checkpoint says of the run after so many steps
    skips: frozenset[int] = frozenset()  # steps whose samples are left out, from 1
    compiler: Compiler | None = None  # None: layers run as they are written
    began: float = field(default_factory=time.monotonic)
    saved_at: float = field(default_factory=time.monotonic)
    made: int = 0  # steps
    step_seconds: list[float] = field(default_factory=list)  # of those in which nothing was compiled
    last_loss: float | None = None
    first_loss: float | None = None
    tokens_per_s: float | None = None
    rank_bytes: list[int] = field(
        default_factory=list
    )  # what each rank held in the last step; empty: there is only one

    def run(self, first: int = 0) -> Ending:
        """Steps `first` to the last one."""
        gather = None if self.engine.runs_in_step else partial(words, self.place)
        overflow = OverflowWatch(self.engine.model, self.events, gather)
        recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        if first:
            self._evaluate(first - 1)  # which came after the checkpoint, and may not have been done
        self._take_compile_s()  # the probe's
        for step in range(first, self.steps):
            began = time.monotonic()
            seed_step(self.config.training.seed, step, self.place)
            window = self.windows.window(step)
            if step + 1 in self.skips:
                # It ruined the training, and the user allowed to skip it. The schedule goes on regardless.
                self.events.write("warning", text=Message("train.step-skipped", step=step + 1, ids=_name(window)))
                if (ending := self._save(step + 1, self._agree(0.0))) is not None:
                    return ending
                self._evaluate(step)
                continue
            rate, heartbeat = learning_rate(self.config.training, step, self.steps), self.events.heartbeat
            self.engine.expect_rate(rate)
            added = self._accumulate(step, window)
            heartbeat.at("step", step + 1)
            launched = self.engine.step(rate)
            # The host does what it can before it waits: what comes after that keeps the device waiting.
            reading = read_memory(self.place)
            if step + 1 < self.steps and step + 2 not in self.skips:
                self.windows.make_ahead(step + 1)
            share, stepped = launched.read(added)
            heartbeat.at("vote", step + 1)
            votes = self._agree(share, reading.host_bytes if reading.peak_bytes is None else reading.peak_bytes)
            # In a rehearsal the other ranks' shares are missing, and this rank's stands for all of them.
            ranks = self.config.levers.stage_ranks(self.place.world)  # of other stages the shares are zero
            loss = votes.loss / (1 if self.place.rehearsal else ranks)
            seconds = time.monotonic() - began
            self.made += 1
            if not votes.compiled_s:  # or it says nothing about the steps to come
                recent.append((window.tokens, seconds))
                self.step_seconds.append(seconds)
            tokens, spent = sum(each for each, _ in recent), sum(each for _, each in recent)
            self.tokens_per_s = tokens / spent if spent else None
            self.last_loss = loss
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.events.write(
                "step",
                step=step + 1,
                steps=self.steps,
                loss=loss,
                grad_norm=stepped.grad_norm,
                learning_rate=rate,
                tokens_per_s=self.tokens_per_s,
                step_s=round(seconds, 6),
                **({"compiled": True} if votes.compiled_s else {}),
                tokens=window.tokens,
                seconds_left=(self.steps - step - 1) * spent / len(recent) if recent else None,
                epoch=round((step + 1) * self.config.effective_batch / max(1, len(self.windows.samples)), 6),
                memory={name: getattr(reading, name) for name in ("now_bytes", "peak_bytes", "host_bytes")}
                | ({"ranks": self.rank_bytes} if self.rank_bytes else {}),
                **({} if reading.alloc_retries is None else {"alloc_retries": reading.alloc_retries}),
                loss_scale=stepped.loss_scale,
                skipped=stepped.skipped,
            )
            for sentence in self.engine.take_said():
                self.events.write("warning", text=sentence)
            overflow.after_step(step + 1, stepped.skipped, stepped.loss_scale)
            self._check(step, loss, stepped, window)
            if (ending := self._save(step + 1, votes)) is not None:
                return ending
            self._evaluate(step)
        return "finished"

    def _agree(self, share: float, held_bytes: int = 0) -> Votes:
        """`held_bytes`: what this rank holds, of which rank 0 tells for all."""
        limit, minutes, now = self.config.timeout_s, self.config.saving.every_minutes, time.monotonic()
        late = limit is not None and now - self.began >= limit
        due = self.place.leads and minutes is not None and now - self.saved_at >= 60 * minutes
        untold = 0 if self.compiler is None else self.compiler.untold
        own = Votes(share, float(self.stop.is_asked), float(late), float(due), self._take_compile_s(), float(untold))
        told = 0 if self.place.is_alone or self.place.world > MOST_RANKS else self.place.world
        found = totals(self.place, *own, *(held_bytes * (rank == self.place.rank) for rank in range(told)))
        votes, self.rank_bytes = Votes(*found[: len(own)]), [int(held) for held in found[len(own) :]]
        if votes.untold:
            said = [] if self.compiler is None else self.compiler.take_said()
            for ranks, sentence in gather_messages(self.place, said):
                if 0 not in ranks:  # which has said it when it was so
                    self.events.write("warning", text=sentence)
        return votes

    def _take_compile_s(self) -> float:
        """What this rank has compiled for since this was last asked."""
        return 0.0 if self.compiler is None else self.compiler.take_seconds()

    def _save(self, done: int, votes: Votes) -> Ending | None:
        """A checkpoint where one is due; how the run ends, if it does."""
        ending: Ending | None = None
        if done < self.steps:  # or nothing is left to be done later
            ending = "stopped" if votes.asked else "timeout" if votes.late else None
        if self.saver is None:
            return ending
        self.saver.prepare()
        self.saver.poll(self.events)
        every = self.config.saving.every_steps
        if ending is not None:
            why = self.stop.why or (Message("train.other-rank-asked") if votes.asked else Message("train.time-over"))
            if votes.asked and self.place.launcher == "tightfit":
                why = Message("train.as-asked")  # its signal is not the one that the user sent
            self.events.write("stopping", text=Message("train.stopping", why=why, done=done, steps=self.steps))
        if ending is not None or done == self.steps or votes.due or (every is not None and done % every == 0):
            self.events.heartbeat.at("save", done)
            self.saved_at = time.monotonic()
            self.saver.save(done, self.standing(done), self.events)
        if ending is not None:
            self.saver.wait(self.events)
            if self.saver.last != done:
                raise NotSaved(Message("train.not-saved", done=done))
        return ending

    def _accumulate(self, step: int, window: Window) -> torch.Tensor:
        """This rank's share of the window's loss."""
        heartbeat, model = self.events.heartbeat, self.engine.model

        def watch(what: Literal["forward", "backward", "done"], number: int) -> None:
            if what != "done":
                heartbeat.at(what, step + 1, number, model if what == "forward" else None)

        inputs, count = self.windows.inputs(window), len(window.micro_batches)
        return self.engine.accumulate(inputs, count, window.divisor, watch)

    def _check(self, step: int, loss: float, stepped: Stepped, window: Window) -> None:
        """A loss that is no number will not become one again; under fp16 an overflow of the loss is only skipped."""
        if stepped.skipped and stepped.loss_scale is not None and stepped.loss_scale < SMALLEST_SCALE:
            said = {"step": step + 1, "scale": stepped.loss_scale, "advice": ScaleExhausted.advice}
            raise ScaleExhausted(Message("train.scale-exhausted", **said))
        if not math.isfinite(loss) and not (stepped.skipped and stepped.loss_scale is not None):
            what = Message("train.bad-loss", step=step + 1, loss=str(loss))
        elif stepped.skipped or stepped.grad_norm is None or math.isfinite(stepped.grad_norm):
            return
        else:  # and the weights with them
            what = Message("train.bad-gradients", step=step + 1, norm=str(stepped.grad_norm))
        raise Diverged(Message("train.diverged", what=what, ids=_name(window)))

    def _evaluate(self, step: int) -> None:
        """The mean loss of a token of what was held back. Every rank makes the same number of passes, for sharded
        weights are gathered by all."""
        every = self.config.evaluation.every_steps
        is_due = step + 1 == self.steps or (every is not None and (step + 1) % every == 0)
        if self.held is None or not is_due:
            return
        samples = self.held.samples
        micro, held = self.config.levers.micro_batch, self.held
        begins = range(0, len(samples), micro * held.readers)

        def inputs() -> Iterator[dict[str, Tensor]]:
            for begin in begins:
                indices = np.arange(micro) + begin + held.number * micro
                yield held.tensors(np.minimum(indices, len(samples) - 1), unheard=indices >= len(samples))

        self.events.heartbeat.at("eval", step + 1)
        began = time.monotonic()
        self.engine.train(False)
        with torch.no_grad():
            added = self.engine.evaluate(inputs(), len(begins))
        self.engine.train(True)
        self._take_compile_s()  # which belongs to no step
        ranks, tokens = self.config.levers.stage_ranks(self.place.world), max(1, int(samples.loss_tokens.sum()))
        loss = totals(self.place, float(added) / ranks)[0] / tokens
        self.events.write(
            "eval",
            step=step + 1,
            loss=loss,
            perplexity=math.exp(loss) if loss < 700 else None,
            samples=len(samples),
            seconds=round(time.monotonic() - began, 3),
        )


class OverflowWatch:
    """fp16 overflows: how many in a row, and which layer began. A skipped step now and then is how a dynamic loss scale
    finds its level. A streak is trouble, and its cause is a layer: so after an overflow the next window is watched,
    layer by layer, and the first one whose output or whose gradient is not finite is named."""

    def __init__(self, model: nn.Module, events: Events, gather: Callable[[str], list[str]] | None = None) -> None:
        """`gather`: hands out what every rank says, low layers first; None: every rank has all layers."""
        names = {module: name for name, module in model.named_modules()}
        self._layers = [(names[layer], layer) for layer in layers_of(model)]
        self._events, self._gather = events, gather
        self._hooks: list[Any] = []
        self._seen: dict[str, str] = {}  # forward, backward → the layer that began
        self.streak = 0

    def after_step(self, step: int, skipped: bool, loss_scale: float | None) -> None:
        self.streak = self.streak + 1 if skipped else 0
        if self.streak >= TELL_AFTER:
            if self._gather is not None:  # a forward pass begins at the bottom, and a backward pass at the top
                told = [parse_json(each) for each in self._gather(json.dumps(self._seen))]
                orders = {"forward": told[::-1], "backward": told}
                self._seen = {where: each[where] for where, ranks in orders.items() for each in ranks if where in each}
            where = next((each for each in ("forward", "backward") if each in self._seen), None)
            self._events.write(
                "overflow",
                step=step,
                streak=self.streak,
                loss_scale=loss_scale,
                layer=self._seen.get(where or ""),
                where=where,
            )
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if skipped:
            self._seen = {}
            self._hooks = [layer.register_forward_hook(partial(self._look, name)) for name, layer in self._layers]

    def _look(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            self._note("forward", name, first)
            if first.requires_grad:
                # Backwards runs from the top: the first that is seen is the one that began.
                first.register_hook(partial(self._note, "backward", name))  # type: ignore[no-untyped-call]

    def _note(self, where: str, name: str, values: Tensor) -> None:
        # Without a copy of all, as `isfinite` makes: this happens where memory is at its peak. NaN if one of them is.
        if where not in self._seen and not all(map(torch.isfinite, torch.aminmax(values))):
            self._seen[where] = name


def _name(window: Window) -> str:
    return ", ".join(str(int(number)) for number in window.samples[:SAMPLES])


def seed_step(seed: int, step: int, place: Place) -> None:
    """Dropout differs from rank to rank and from step to step, and not from run to run: a run that was interrupted
    draws the same numbers as one that was not."""
    drawn = hashlib.sha256(f"{seed}/{step}/{place.rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(drawn[:8], "little", signed=True))
