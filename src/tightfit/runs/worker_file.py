"""What the desk needs to know of a plan's `worker.json` to start it: how many ranks, where, and what they will hold.

It is read the same way whether it was rendered a moment ago or lies in a folder that `tightfit plan --write` made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tightfit.formats.plan_folder import PLAN_FILES
from tightfit.formats.worker.read import AGAIN, WORKER_FILE, parse_worker
from tightfit.inputs.records import json_text
from tightfit.inputs.spelling import read_text
from tightfit.messages import Message
from tightfit.types import ConfigError, Vendor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFile:
    """A plan as its launcher sees it."""

    model: str
    method: str
    engine: str
    optimizer: str
    offload_optimizer: str
    nodes: int
    gpus_per_node: int
    vendor: Vendor
    folder: str
    """The run's folder, as the file says it."""
    required_bytes: int
    """What a GPU must have free."""
    peak_bytes: int
    host_bytes_per_node: int
    step_s: float
    tokens_per_s: float
    logging_steps: int | None = None
    """Steps between two lines of the log; None: time decides."""
    gpu_memory_bytes: int | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def ram_bytes_per_node(self) -> int:
        """With what stands on the GPUs, where the CPU stands in for them."""
        on_cpu = self.required_bytes * self.gpus_per_node if self.vendor == "cpu" else 0
        return self.host_bytes_per_node + on_cpu


def read_plan_folder(folder: Path) -> dict[str, str]:
    """The files of a written plan, by name."""
    if not (folder / WORKER_FILE).is_file() and (folder / "launch.sh").is_file():
        raise ConfigError(Message("runs.plan-of-other", folder=folder, script=folder / "launch.sh"))
    if not (folder / WORKER_FILE).is_file():
        raise ConfigError(Message("runs.no-worker-file", folder=folder, name=WORKER_FILE))
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name in PLAN_FILES:
            files[path.name] = read_text(path, "the text of a plan")
    return files


def worker_file(text: str, where: str) -> WorkerFile:
    """The text of a worker.json; `where`: what to call it in a sentence."""
    tree = parse_worker(text, where)
    try:
        return _read(tree)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(f"{where} is not whole: {AGAIN}") from None


def placed(text: str, folder: Path) -> str:
    """The same worker.json with another folder for the run."""
    tree = parse_worker(text, WORKER_FILE)
    tree["saving"]["folder"] = str(folder)
    return json_text(tree)


def find_worker_file(plan: Path) -> WorkerFile | None:
    """That of a plan's folder; None: there is none, or none that can be read."""
    try:
        return worker_file(read_text(plan / WORKER_FILE, "JSON"), str(plan / WORKER_FILE))
    except ConfigError:
        return None


def _read(tree: Mapping[str, Any]) -> WorkerFile:
    world, levers, predicted = tree["world"], tree["levers"], tree["predicted"]
    vendor = world["vendor"]
    if vendor not in get_args(Vendor):
        raise ValueError
    return WorkerFile(
        model=_text(tree["model"]["name"]),
        method=_text(levers["method"]),
        engine=_text(levers["engine"]),
        optimizer=_text(levers["optimizer"]),
        offload_optimizer=_text(levers["offload_optimizer"]),
        nodes=_least_one(world["nodes"]),
        gpus_per_node=_least_one(world["gpus_per_node"]),
        vendor=vendor,
        folder=_text(tree["saving"]["folder"]),
        required_bytes=int(_number(predicted["gpu"]["required_bytes"])),
        peak_bytes=int(_number(predicted["gpu"]["peak_bytes"])),
        host_bytes_per_node=int(_number(predicted["host"]["peak_bytes_per_node"])),
        step_s=_number(predicted["step_s"]),
        tokens_per_s=_number(predicted["tokens_per_s"]),
        gpu_memory_bytes=card if type(card := world.get("gpu_memory_bytes")) is int else None,
        logging_steps=None if tree.get("logging_steps") is None else _least_one(tree["logging_steps"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError
    return value


def _least_one(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    return value
