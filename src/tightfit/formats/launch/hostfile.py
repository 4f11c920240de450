"""Hostfiles: the machines of a run, a line each, as DeepSpeed's launcher reads them (`name slots=8`).

DeepSpeed finds a bad line only after the job has been sent off, and its error repeats the whole file. Here a
file is read when the plan is written, and the sentence names the line.
"""

from __future__ import annotations

import re

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
            raise ConfigError(f"line {number} of the hostfile, {shown!r}, is not a node: write `name slots=8`")
        name, slots = found["name"], int(found["slots"])
        if name in hosts:
            raise ConfigError(f"the hostfile names {name} in lines {lines[name]} and {number}: keep one")
        if slots < 1:
            raise ConfigError(f"line {number} of the hostfile gives {name} no slots: write its number of GPUs")
        hosts[name], lines[name] = slots, number
    if not hosts:
        raise ConfigError("the hostfile names no node: write a line `name slots=8` for each")
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
        raise ConfigError(f"the hostfile names {len(hosts)} of the {nodes} nodes that the plan uses: add the others")
    for name, slots in hosts[:nodes]:
        if slots <= max(gpu_ids):
            raise ConfigError(
                f"the hostfile gives {name} {slots} slots and the plan uses GPU {max(gpu_ids)} of each node: "
                f"write slots={max(gpu_ids) + 1}"
            )
    return hosts[:nodes]
