"""What a run tells beside its own events: TensorBoard files, and wandb.

Both are asked for by name and never needed. Only the rank that speaks has watchers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.messages import Message
from tightfit.types import ConfigError

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
        why = (error.strerror or str(error)).lower()
        raise ConfigError(Message("train.tensorboard-unwritable", folder=place, why=why)) from None
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
