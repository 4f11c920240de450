"""What a run has done so far, gathered from its events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from tightfit.runs.events import Checkpointed, Ended, Event, MemoryMark, Pictures, Resumed, Saved, Step

_FIRST = 2
"""Steps that warm up kernels and caches, and say nothing about the pace."""
_RECENT = 4096


@dataclass(slots=True)
class Tally:
    """Changes with every event."""

    last: Step | None = None
    first_loss: float | None = None
    peak_bytes: int | None = None
    marks: list[MemoryMark] = field(default_factory=list)
    saved: Saved | None = None
    resumed: Resumed | None = None
    checkpoint: Checkpointed | None = None
    """The newest that this start has written."""
    pictures: tuple[str, ...] = ()
    """Files with the curves of the run."""
    ended: Ended | None = None
    _steps: int = 0
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _tokens_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, event: Event) -> None:
        if isinstance(event, Step):
            self._add_step(event)
        elif isinstance(event, MemoryMark):
            self.marks = [mark for mark in self.marks if mark.milestone != event.milestone] + [event]
        elif isinstance(event, Saved):
            self.saved = event
        elif isinstance(event, Resumed):
            self.resumed = event
        elif isinstance(event, Checkpointed):
            self.checkpoint = event
        elif isinstance(event, Pictures):
            self.pictures = event.files
        elif isinstance(event, Ended):
            self.ended = event

    def _add_step(self, event: Step) -> None:
        self.last = event
        self._steps += 1
        if self.first_loss is None:
            self.first_loss = event.loss
        self.peak_bytes = max(self.peak_bytes or 0, event.peak_bytes or 0) or None
        if self._steps > _FIRST:
            self._step_s.extend([] if event.step_s is None else [event.step_s])
            self._tokens_per_s.extend([] if event.tokens_per_s is None else [event.tokens_per_s])

    @property
    def began(self) -> bool:
        """Whether a step was made."""
        return self.last is not None

    @property
    def safe_step(self) -> int | None:
        """The step from which another start would go on; None: it would begin anew, or nobody knows."""
        for event in (self.checkpoint, self.resumed):
            if event is not None and event.step is not None:
                return event.step
        return None

    @property
    def step_s(self) -> float | None:
        """Of the steps after the first, in the median."""
        return median(self._step_s) if self._step_s else None

    @property
    def tokens_per_s(self) -> float | None:
        return median(self._tokens_per_s) if self._tokens_per_s else None
