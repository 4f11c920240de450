"""What a config says of how a training is computed, whosever it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownConfig:
    """What is known of the settings; None: not said."""

    trainer: str | None = None  # whose config it is: the name of a dialect, or of a trainer whose files are not read
    file: str | None = None
    stage: int | None = None  # of ZeRO
    offload_optimizer: str | None = None
    offload_param: str | None = None
    pin_memory: bool | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    sequence: int | None = None
    precision: str | None = None  # bf16, fp16 or fp32
    method: str | None = None  # full, lora or qlora
    checkpointing: bool | None = None  # activations are computed again in the backward pass
    attention: str | None = None
    loss: str | None = None  # plain or fused
    world: int | None = None
    vocabulary: int | None = None
    vendor: str | None = None  # nvidia, amd, hygon, ascend or cpu


def completed(known: KnownConfig, other: KnownConfig) -> KnownConfig:
    """What the first does not say, the second may."""
    missing = {
        each.name: value
        for each in fields(KnownConfig)
        if getattr(known, each.name) is None and (value := getattr(other, each.name)) is not None
    }
    return replace(known, **missing)


def block_in(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The block under a key; empty: there is none."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def whole(value: object) -> int | None:
    """A whole number; None: anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def word(value: object) -> str | None:
    """A word, in small letters; None: `auto`, which says nothing, and anything else."""
    return value.lower() if isinstance(value, str) and value.lower() != "auto" else None
