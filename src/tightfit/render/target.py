"""What the files are written for: the versions of the tools that will read them, and where they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["deepspeed", "torchrun", "accelerate", "llamafactory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The readers of the files."""

    deepspeed_version: str = "0.19.8"
    """Decides which keys DeepSpeed's JSON may have."""
    transformers_version: str = "5.22.2"
    """Decides how TrainingArguments are spelt."""
    llamafactory_version: str = "0.9.5"
    """Decides keys and the names of chat templates."""
    launcher: Launcher | None = None
    """What `launch.sh` calls; None: `deepspeed` for its own engines, `torchrun` for FSDP2."""
    gpu_ids: tuple[int, ...] | None = None
    """The GPUs of a node to use, by number; None: the first ones."""
    gpus_of_node: int | None = None
    """How many the node has, where `gpu_ids` leaves some to other runs; None: not known."""
    port: int = 29500
    """Where the ranks of one run meet; two runs on one machine need two."""
    hostfile: str | None = None
    """Text of a hostfile (`name slots=8`, a node a line), for several nodes."""
