"""What the files are written for: the versions of the tools that will read them, and where they run."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.formats.llamafactory.read import Original
from tightfit.types import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The readers of the files."""

    deepspeed_version: str = "0.19.8"  # decides which keys DeepSpeed's JSON may have
    transformers_version: str = "5.22.2"  # decides how TrainingArguments are spelt
    llamafactory_version: str = "0.9.5"  # decides keys and the names of chat templates
    launcher: str | None = None  # what `launch.sh` calls; None: `deepspeed` for its own engines, `torchrun` for FSDP2
    cluster: Cluster | None = None  # what will start it, and gets files of its own; None: nobody said
    gpu_ids: tuple[int, ...] | None = None  # the GPUs of a node to use, by number; None: the first ones
    gpus_of_node: int | None = None  # how many the node has, where `gpu_ids` leaves some to other runs; None: not known
    port: int = 29500  # where the ranks of one run meet; two runs on one machine need two
    original: Original | None = None  # what `llamafactory.yaml` is written from; None: from nothing
    hostfile: str | None = None  # text of a hostfile (`name slots=8`, a node a line), for several nodes
