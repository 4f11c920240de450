"""Where this rank stands, told at every stage of a step: to the desk as a sign of life, and to the tests' faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tightfit.runs.heartbeat import Heartbeat, Stage
from tightfit.train.events import Events

if TYPE_CHECKING:
    from tightfit.train.faults import Faults


class RankHeartbeat:
    """Says nothing to nobody, unless it is given somebody."""

    def __init__(self, heartbeat: Heartbeat | None = None, faults: Faults | None = None) -> None:
        self._heartbeat, self._faults = heartbeat, faults
        self.stage: Stage = "prepare"
        self.step = 0

    def at(self, stage: Stage, step: int = 0, micro: int = 0, model: Any = None) -> None:
        """This begins now. `step` counts from 1."""
        self.stage, self.step = stage, step
        if self._heartbeat is not None:
            self._heartbeat.at(stage, step, micro)
        if self._faults is not None:
            self._faults.at(stage, step, model)

    def beat(self, last_word: str = "") -> None:
        """The same goes on; or it ends, where this is all that can still be said."""
        if self._heartbeat is not None:
            self._heartbeat.beat(last_word)


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """What a supervisor asks of a worker beyond its orders."""

    heartbeat: RankHeartbeat = field(default_factory=RankHeartbeat)
    skips: frozenset[int] = frozenset()
    """Steps whose samples are left out, from 1."""


class HeartbeatEvents(Events):
    """Whatever is told is a sign of life too, on the ranks as well that tell nobody."""

    heartbeat = RankHeartbeat()

    def write(self, event: str, **fields: Any) -> None:
        self.heartbeat.beat()
        super().write(event, **fields)
