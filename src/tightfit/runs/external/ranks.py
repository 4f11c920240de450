"""How many processes a command starts, and on how many machines: by its launcher's flags, files and variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tightfit.messages import Message
from tightfit.runs.external.config import ExternalTraining
from tightfit.types import ConfigError, Hardware

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_SLOTS = re.compile(r"^\s*([^#\s]\S*)\s+slots\s*=\s*(\d+)", re.MULTILINE)


class RankCount(NamedTuple):
    """Processes, one to a GPU."""

    machines: int
    on_each: int


def ranks_of(external: ExternalTraining, hardware: Hardware, environment: Mapping[str, str]) -> RankCount:
    """What the command starts. `environment`: what it will see."""
    there = visible_gpus(hardware, environment)
    command = external.command
    if command.starter == "llamafactory":
        there = 1 if hardware.gpu.vendor == "cpu" else there
        return RankCount(_count(environment.get("NNODES")) or 1, _count(environment.get("NPROC_PER_NODE")) or there)
    if command.starter == "torchrun":
        word = _launcher_word(external, "nproc_per_node") or environment.get("PET_NPROC_PER_NODE")
        nodes = (_launcher_word(external, "nnodes") or environment.get("PET_NNODES") or "1").partition(":")[0]
        return RankCount(_count(nodes) or 1, there if word in ("gpu", "auto") else _count(word) or 1)
    if command.starter == "deepspeed":
        include = _launcher_word(external, "include", "i")
        if include is not None and ":" in include:
            hosts = [host.partition(":")[2] for host in include.split("@")]
            return RankCount(len(hosts), max(gpus.count(",") + 1 for gpus in hosts))
        slots: list[int] = []  # of each host; empty where the file says nothing
        hostfile = _launcher_word(external, "hostfile", "H")
        if hostfile is not None and Path(hostfile).is_file():
            listed = Path(hostfile).read_text(encoding="utf-8", errors="replace")
            slots = [int(count) for _, count in _SLOTS.findall(listed)]
        machines = _count(_launcher_word(external, "num_nodes")) or len(slots) or 1
        return RankCount(machines, _count(_launcher_word(external, "num_gpus")) or min(slots, default=there))
    if command.starter in ("accelerate", "trl"):
        # `num_processes` counts those of all machines
        said = {}
        for name in ("num_machines", "num_processes"):
            value = _launcher_word(external, name)
            if value is None and external.command.starter == "trl":
                value = external.said(name)
            if value is None and external.accelerate is not None:
                value = external.accelerate.values.get(name)
            said[name] = _count(str(value))
        machines = said["num_machines"] or 1
        return RankCount(machines, max(1, (said["num_processes"] or there * machines) // machines))
    return RankCount(1, 1 if command.starter == "python" else there)


def visible_gpus(hardware: Hardware, environment: Mapping[str, str]) -> int:
    """Of one machine, as many as the variables leave."""
    for name in VISIBLE:
        if name in environment:
            shown = [word for word in environment[name].split(",") if word.strip()]
            if not shown or shown[0].strip() == "-1":
                raise ConfigError(Message("external.hides-gpus", name=name, value=environment[name]))
            return min(len(shown), hardware.gpus_per_node)
    return hardware.gpus_per_node


def _launcher_word(external: ExternalTraining, *names: str) -> str | None:
    flag = external.command.launcher_flag(*names)
    return None if flag is None else flag.value


def _count(word: str | None) -> int | None:
    return int(word) if word is not None and word.isdigit() and int(word) > 0 else None
