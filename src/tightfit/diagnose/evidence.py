"""What a diagnosis is made from: data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

Trainer = Literal["deepspeed", "accelerate", "llamafactory", "axolotl", "huggingface", "job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """One log. A file is read in pieces, never whole."""

    name: str
    """What to call it in the evidence."""
    path: Path | None = None
    text: str | None = None
    """Instead of a file."""
    rank: int | None = None
    """Whose log it is, where it has one writer."""
    on_read: Callable[[int], None] | None = field(default=None, compare=False, repr=False)
    """Is told how many bytes of the file are behind, for somebody who waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one process ended."""

    rank: int | None
    """None: of the whole command."""
    code: int
    """Negative: the signal that ended it."""
    at: float
    """Seconds, to know which was first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownConfig:
    """What is known of the settings; None: not said."""

    trainer: Trainer | None = None
    file: str | None = None
    stage: int | None = None
    """Of ZeRO."""
    offload_optimizer: str | None = None
    offload_param: str | None = None
    pin_memory: bool | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    sequence: int | None = None
    precision: str | None = None
    """bf16, fp16 or fp32."""
    method: str | None = None
    """full, lora or qlora."""
    checkpointing: bool | None = None
    """Activations are computed again in the backward pass."""
    attention: str | None = None
    loss: str | None = None
    """plain or fused."""
    world: int | None = None
    vocabulary: int | None = None
    vendor: str | None = None
    """nvidia, amd, hygon, ascend or cpu."""


def completed(known: KnownConfig, other: KnownConfig) -> KnownConfig:
    """What the first does not say, the second may."""
    missing = {
        each.name: value
        for each in fields(KnownConfig)
        if getattr(known, each.name) is None and (value := getattr(other, each.name)) is not None
    }
    return replace(known, **missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known about one run."""

    logs: tuple[LogSource, ...]
    exits: tuple[RankExit, ...] = ()
    kernel: tuple[str, ...] = ()
    """Lines of the kernel's log from the time of the run."""
    vocabulary: int | None = None
    config: KnownConfig | None = None
