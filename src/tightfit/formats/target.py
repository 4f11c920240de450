"""What the files are written for: the versions of the tools that will read them, and where they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.formats.llamafactory.read import LlamaFactorySettings
from tightfit.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The LLaMA-Factory file that a plan was made from, of which everything is kept that needs no change."""

    name: str
    text: str
    written: Mapping[str, Any]
    """Its keys, as YAML reads them."""
    settings: LlamaFactorySettings
    job: Job
    """What it asks for, before flags."""
    paths: Mapping[str, str]
    """Keys that name what lies on this machine, with the path that leads there from anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The readers of the files."""

    deepspeed_version: str = "0.19.8"
    """Decides which keys DeepSpeed's JSON may have."""
    transformers_version: str = "5.22.2"
    """Decides how TrainingArguments are spelt."""
    llamafactory_version: str = "0.9.5"
    """Decides keys and the names of chat templates."""
    launcher: str | None = None
    """What `launch.sh` calls; None: `deepspeed` for its own engines, `torchrun` for FSDP2."""
    gpu_ids: tuple[int, ...] | None = None
    """The GPUs of a node to use, by number; None: the first ones."""
    gpus_of_node: int | None = None
    """How many the node has, where `gpu_ids` leaves some to other runs; None: not known."""
    port: int = 29500
    """Where the ranks of one run meet; two runs on one machine need two."""
    original: Original | None = None
    """What `llamafactory.yaml` is written from; None: from nothing."""
    hostfile: str | None = None
    """Text of a hostfile (`name slots=8`, a node a line), for several nodes."""
