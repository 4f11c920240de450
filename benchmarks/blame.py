"""Who held the memory at its highest: the allocator's own history, replayed.

`start()` before the first allocation, `history()` afterwards. C++ frames name the operation and autograd's node where
no line of Python runs, which is most of a backward pass.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import Any

GIB = 2**30
_OPERATION = re.compile(r"at::_ops::(\w+)::|4_ops\d+([a-z_]\w*?)(?:4call|10redispatch)")
_NODE = re.compile(r"(\w*Backward\w*?)(?:::|5apply)")


def start() -> None:
    """Record every allocation with its stack. The names of C++ functions are looked up the quick way."""
    os.environ["TORCH_SYMBOLIZE_MODE"] = "dladdr"
    import torch

    torch.cuda.memory._record_memory_history(max_entries=4_000_000, stacks="all", context="alloc")


def history() -> list[dict[str, Any]]:
    import torch

    events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return events


def holders(events: list[dict[str, Any]], first: int, last: int | None = None, top: int = 45) -> list[list[Any]]:
    """The live blocks at the highest point of events[first:last], GiB, count and source; their total stands first."""
    at = total = best = 0
    live: dict[int, int] = {}
    for index, event in enumerate(events[:last]):
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
            total += event["size"]
            if index >= first and total > best:
                best, at = total, index
        elif event["action"] == "free_requested":  # where `memory_allocated` falls
            total -= live.pop(event["addr"], 0)
    blocks: dict[int, dict[str, Any]] = {}
    for event in events[: at + 1]:
        if event["action"] == "alloc":
            blocks[event["addr"]] = event
        elif event["action"] == "free_requested":
            blocks.pop(event["addr"], None)
    groups: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for event in blocks.values():
        group = groups[f"{event['size']} {source(event.get('frames', []))}"]
        group[0] += event["size"]
        group[1] += 1
    rows = sorted(([round(size / GIB, 5), count, where] for where, (size, count) in groups.items()), reverse=True)
    here = source(events[at].get("frames", [])) if events else ""
    return [[round(best / GIB, 4), at, f"total, at {here}"], *rows[:top]]


def source(frames: list[dict[str, Any]]) -> str:
    """The operation, autograd's node, and the innermost lines of Python that are not torch's own plumbing."""
    operation = node = ""
    lines: list[str] = []
    for frame in frames:
        path, name = frame["filename"], frame["name"]
        if path.endswith(".py"):
            if "/torch/" in path and not any(part in path for part in ("optim", "fsdp", "checkpoint.py")):
                continue
            if len(lines) < 3:
                lines.append(f"{'/'.join(path.split('/')[-2:])}:{frame['line']}:{name}")
            continue
        found = _OPERATION.search(name)
        if found:  # the outermost: `linear` rather than `empty`
            operation = found[1] or found[2]
        found = None if node else _NODE.search(name)
        if found:
            node = found[1]
    return " < ".join([*[word for word in (operation, node) if word], *lines])
