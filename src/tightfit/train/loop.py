"""The training itself: windows in, optimizer steps and one event a step out."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import torch

from tightfit.train.config import WorkerConfig
from tightfit.train.data import Samples
from tightfit.train.engines import Diverged, Engine, Stepped
from tightfit.train.evaluate import evaluate
from tightfit.train.events import Events
from tightfit.train.meter import Meter
from tightfit.train.optimizers import learning_rate
from tightfit.train.overflow import OverflowWatch
from tightfit.train.place import Place, total
from tightfit.train.windows import Window, Windows

RECENT = 20
"""Steps that tokens a second and the time left are taken from."""

SMALLEST_SCALE = 1.0
"""Below it fp16 gradients are made smaller than they are, and still overflow; DeepSpeed gives up there as well."""

Ending = Literal["finished", "timeout"]


@dataclass(kw_only=True)
class Loop:
    config: WorkerConfig
    engine: Engine
    windows: Windows
    held: tuple[Samples, Windows] | None
    events: Events
    meter: Meter
    place: Place
    samples: int
    steps: int
    began: float = field(default_factory=time.monotonic)
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float | None = None
    first_loss: float | None = None
    tokens_per_s: float | None = None

    def run(self, first: int = 0) -> Ending:
        """Steps `first` to the last one."""
        overflow = OverflowWatch(self.engine.model, self.events)
        recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        for step in range(first, self.steps):
            began = time.monotonic()
            window = self.windows.window(step)
            rate = learning_rate(self.config.training, step, self.steps)
            share = self._accumulate(window)
            stepped = self.engine.step(rate)
            # In a rehearsal the other ranks' shares are missing, and this rank's stands for all of them.
            loss = total(self.place, float(share)) / (1 if self.place.rehearsal else self.place.world)
            seconds = time.monotonic() - began
            recent.append((window.tokens, seconds))
            self.step_seconds.append(seconds)
            self._tell(step, loss, rate, stepped, recent)
            overflow.stepped(step + 1, stepped.skipped, stepped.loss_scale)
            self._check(step, loss, stepped, window)
            self._evaluate(step)
            if self._out_of_time():
                return "timeout"
        return "finished"

    def _accumulate(self, window: Window) -> torch.Tensor:
        added = torch.zeros((), dtype=torch.float32, device=self.place.device)
        last = len(window.micro_batches) - 1
        for number, inputs in enumerate(self.windows.inputs(window)):
            loss = self.engine.forward(inputs, window.divisor)
            self.engine.backward(loss, last=number == last)
            added += loss.detach()
        return added

    def _tell(self, step: int, loss: float, rate: float, stepped: Stepped, recent: deque[tuple[int, float]]) -> None:
        reading = self.meter.read()
        tokens, seconds = sum(each for each, _ in recent), sum(each for _, each in recent)
        self.tokens_per_s = tokens / seconds if seconds else None
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
            step_s=round(recent[-1][1], 6),
            seconds_left=(self.steps - step - 1) * seconds / len(recent),
            epoch=round((step + 1) * self.config.effective_batch / max(1, self.samples), 6),
            memory={
                "now_bytes": reading.now_bytes,
                "peak_bytes": reading.peak_bytes,
                "host_bytes": reading.host_bytes,
            },
            loss_scale=stepped.loss_scale,
            skipped=stepped.skipped,
        )

    def _check(self, step: int, loss: float, stepped: Stepped, window: Window) -> None:
        """A loss that is no number will not become one again; under fp16 an overflow of the loss is only skipped."""
        if stepped.skipped and stepped.loss_scale is not None and stepped.loss_scale < SMALLEST_SCALE:
            raise Diverged(
                f"step {step + 1} overflowed at a loss scale of {stepped.loss_scale:g}, so the scale is not why: "
                "use precision bf16 or fp32, or lower the learning rate"
            )
        if math.isfinite(loss) or (stepped.skipped and stepped.loss_scale is not None):
            return
        ids = ", ".join(str(int(number)) for number in window.samples[:16])
        raise Diverged(
            f"the loss of step {step + 1} is {loss}: lower the learning rate, or look at samples {ids} of the data"
        )

    def _evaluate(self, step: int) -> None:
        every = self.config.evaluation_steps
        last = step + 1 == self.steps
        if self.held is None or not (last or (every is not None and (step + 1) % every == 0)):
            return
        samples, windows = self.held
        began = time.monotonic()
        loss = evaluate(self.engine, samples, windows, self.config.levers.micro_batch, self.place)
        self.events.write(
            "eval",
            step=step + 1,
            loss=loss,
            perplexity=math.exp(loss) if loss < 700 else None,
            samples=len(samples),
            seconds=round(time.monotonic() - began, 3),
        )

    def _out_of_time(self) -> bool:
        limit = self.config.timeout_s
        if limit is None:
            return False
        late = float(time.monotonic() - self.began >= limit)
        return total(self.place, late) > 0  # one clock decides for all
