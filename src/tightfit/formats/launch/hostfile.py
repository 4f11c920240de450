"""Hostfiles: the machines of a run, a line each, as DeepSpeed's launcher reads them (`name slots=8`).

DeepSpeed finds a bad line only after the job has been sent off, and its error repeats the whole file. Here a
file is read when the plan is written, and the sentence names the line.
"""

from __future__ import annotations

import re

from tightfit.messages import Message
from tightfit.types import ConfigError

_NODE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)\s+slots=(?P<slots>[0-9]{1,6})(\s+#.*)?")


def parse_hostfile(text: str) -> tuple[tuple[str, int], ...]:
    """Each node with its number of GPUs, in the order of the file."""
    hosts: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        found = _NODE.fullmatch(line)
        if not found:
            shown = line if len(line) <= 40 else line[:37] + "…"
            raise ConfigError(Message("launch.not-a-node", number=number, shown=repr(shown)))
        name, slots = found["name"], int(found["slots"])
        if name in hosts:
            raise ConfigError(Message("launch.node-twice", name=name, first=lines[name], second=number))
        if slots < 1:
            raise ConfigError(Message("launch.no-slots", number=number, name=name))
        hosts[name], lines[name] = slots, number
    if not hosts:
        raise ConfigError(Message("launch.no-node"))
    return tuple(hosts.items())


def hostfile_text(hosts: tuple[tuple[str, int], ...]) -> str:
    """The file that gives these nodes."""
    return "".join(f"{name} slots={slots}\n" for name, slots in hosts)


def hosts_for(text: str | None, nodes: int, gpu_ids: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """The nodes that a run on `nodes` machines uses, those GPUs of each; without a hostfile, names to be replaced."""
    if text is None:
        return tuple((f"node-{number}", max(gpu_ids) + 1) for number in range(1, nodes + 1))
    hosts = parse_hostfile(text)
    if len(hosts) < nodes:
        raise ConfigError(Message("launch.too-few-nodes", count=len(hosts), nodes=nodes))
    for name, slots in hosts[:nodes]:
        last = max(gpu_ids)
        if slots <= last:
            raise ConfigError(Message("launch.too-few-slots", name=name, slots=slots, last=last, needed=last + 1))
    return hosts[:nodes]
