"""What a run tells beside its own events: TensorBoard files, and wandb.

Both are asked for by name and never needed. Only the rank that speaks has watchers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tightfit.messages import Message
from tightfit.types import ConfigError

PROJECT = "tightfit"
GIB = 2**30

STEP_VALUES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "epoch": "train/epoch",
    "tokens_per_s": "pace/tokens_per_s",
    "step_s": "pace/step_s",
}
MEMORY_VALUES = {"now_bytes": "memory/now_gib", "peak_bytes": "memory/peak_gib", "host_bytes": "memory/host_gib"}
EVALUATION_VALUES = {"loss": "eval/loss", "perplexity": "eval/perplexity"}
"""A field of an event → its name for those who watch."""


class _Sink(Protocol):
    """One of those who watch."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class EventSinks:
    """Passes events on to all who watch; to nobody, where nothing was asked for."""

    def __init__(self, sinks: Sequence[_Sink] = (), every_steps: int = 1) -> None:
        self._sinks, self._every_steps = tuple(sinks), every_steps

    def step(self, event: Mapping[str, Any]) -> None:
        """The fields of a `step` event."""
        if not self._sinks or int(event["step"]) % self._every_steps:
            return
        sizes = _pick_numbers(event.get("memory") or {}, MEMORY_VALUES)
        values = _pick_numbers(event, STEP_VALUES) | {name: size / GIB for name, size in sizes.items()}
        self._write(event, values)

    def evaluation(self, event: Mapping[str, Any]) -> None:
        """The fields of an `eval` event."""
        if self._sinks:
            self._write(event, _pick_numbers(event, EVALUATION_VALUES))

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def _write(self, event: Mapping[str, Any], values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(int(event["step"]), values)


def watchers(
    folder: Path, tensorboard: bool, wandb: bool, facts: Mapping[str, Any], every_steps: int | None = None
) -> EventSinks:
    """Those that were asked for; `facts` about the run are shown beside its curves."""
    sinks: list[_Sink] = []
    if tensorboard:
        sinks.append(_TensorBoard(folder / "tensorboard", facts))
    if wandb:
        sinks.append(_Wandb(folder, facts))
    return EventSinks(sinks, every_steps or 1)


def _pick_numbers(event: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """The numbers among the fields, under their new names."""
    values = {name: event.get(field) for field, name in names.items()}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, bool)}


class _TensorBoard:
    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        try:
            writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise ConfigError(Message("train.needs-tensorboard")) from None
        try:
            self._writer = writer(str(folder))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ConfigError(Message("train.tensorboard-unwritable", folder=folder, why=why)) from None
        if facts:
            rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
            self._writer.add_text("run", f"| fact | value |\n|---|---|\n{rows}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """wandb reads its own variables: WANDB_MODE=offline keeps everything in the run's folder."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        try:
            library: Any = import_module("wandb")
        except ImportError:
            raise ConfigError(Message("train.needs-wandb")) from None
        try:
            self._run = library.init(project=PROJECT, name=folder.name, dir=str(folder), config=dict(facts))
        except Exception as error:  # of many kinds: no key, no network, no right to write
            why = " ".join(str(error).split())[:300].rstrip(".")
            raise ConfigError(Message("train.wandb-failed", why=why)) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
