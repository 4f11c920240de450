"""The numbers of an out-of-memory message, and what they say about its cause.

PyTorch's wording has changed over the years; all of these are read, for CUDA, HIP, XPU and NPU:

    Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.56 GiB already allocated; 19.75 MiB free;
        14.60 GiB reserved in total by PyTorch)
    Tried to allocate 2.00 GiB. GPU 0 has a total capacty of 23.69 GiB of which 1.20 GiB is free. Process 17 has
        22.48 GiB memory in use. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 1.05 GiB is reserved by
        PyTorch but unallocated.
    … Including non-PyTorch memory, this process has 22.48 GiB memory in use. …

In a container the driver's process numbers are not ours, and the process that failed is listed like a stranger. It is
told by its size: it holds at least what its own allocator has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tightfit.diagnose.catalogue import OomShape
from tightfit.diagnose.verdict import OomNumbers
from tightfit.messages import Message

GIB = 2**30
MIB = 2**20
_UNITS = {"b": 0, "k": 10, "m": 20, "g": 30, "t": 40, "e": 60}
_SIZE = r"(\d{1,15}(?:\.\d{1,6})?) ?(bytes?|[KMGTE]i?B)"
_SAID = {
    "asked": rf"tried to allocate (?:more than )?{_SIZE}",
    "total": rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|; {_SIZE} free",
    "allocated": rf"allocated memory {_SIZE} is allocated by|{_SIZE} already allocated|{_SIZE} allocated by PyTorch",
    "unused": rf"{_SIZE} is reserved by PyTorch but|{_SIZE} cached\)",
    "reserved": rf"{_SIZE} reserved in total",
    "own": rf"this process has {_SIZE} memory in use",
    "allowed": rf"{_SIZE} allowed",
}
_PROCESS = re.compile(rf"(?<!this )process \d+ has {_SIZE} memory in use", re.IGNORECASE)
_LEAST_PIECES = 0.05  # share of a card that lies reserved in pieces before that is called the cause
_MORE, _BESIDE = 1.25, 3 * GIB  # what a process may hold beside its allocator: context, communicators, pools
_WHOLE = 0.98  # share of a card above which a limit is none
_CONTEXT = (100 * MIB, 1500 * MIB)  # what a process without tensors holds


@dataclass(frozen=True, slots=True)
class OomMessage:
    numbers: OomNumbers
    shapes: frozenset[OomShape]
    tokens: int | None = None  # rows of the vocabulary that were asked for, where that is what the number is


def read_oom(text: str, vocabulary: int | None = None, rows: int | None = None) -> OomMessage:
    """The numbers in a message. `rows`: tokens of a micro batch, where that is known."""
    asked, total, free, allocated, unused, reserved, own_said, allowed = (
        _bytes(*filter(None, size.groups())) if (size := re.search(pattern, text, re.IGNORECASE)) else None
        for pattern in _SAID.values()
    )
    if reserved is None and allocated is not None and unused is not None:
        reserved = allocated + unused
    if unused is None and reserved is not None and allocated is not None:
        unused = max(0, reserved - allocated)
    processes = [_bytes(*found) for found in _PROCESS.findall(text)]
    strangers = processes
    if own_said is None and processes and allocated is not None:
        most = (reserved or allocated) * _MORE + _BESIDE
        own = min((size for size in processes if allocated <= size <= most), default=None)
        if own is not None:
            strangers = list(processes)
            strangers.remove(own)
    others: int | None = sum(strangers) if processes or own_said is not None else None
    if others is None and total is not None and free is not None and reserved is not None:
        rest = total - free - reserved
        others = rest if rest > _CONTEXT[1] else 0
    numbers = OomNumbers(
        asked=asked,
        total=total,
        free=free,
        allocated=allocated,
        reserved_unused=unused,
        others=others,
        allowed=allowed if allowed is not None and total and allowed < total * _WHOLE else None,
    )
    tokens = _count_tokens(asked, vocabulary, rows)
    asked, total, others, unused = asked or 0, total or 0, others or 0, unused or 0
    contexts = [size for size in strangers if _CONTEXT[0] <= size <= _CONTEXT[1]]
    is_capped, is_known = numbers.allowed is not None, total > 0
    is_roomy = free is not None and asked > 0 and free >= asked * 1.5 and free - asked > 256 * MIB
    shapes: dict[OomShape, bool] = {
        "others": is_known and others >= max(2 * GIB, total // 10) and (free or 0) + others >= asked,
        "contexts": len(contexts) >= 3,
        "larger": is_known and asked >= total * 0.9,
        "capped": is_capped,
        "fragmented": is_known and unused >= asked > 0 and unused >= total * _LEAST_PIECES,
        "roomy": is_roomy and not is_capped,
        "logits": bool(tokens),
    }
    return OomMessage(numbers, frozenset(name for name, holds in shapes.items() if holds), tokens)


def _count_tokens(asked: int | None, vocabulary: int | None, rows: int | None) -> int | None:
    """How many rows of logits the number is; None: it is something else, or nobody can tell.

    A message has two digits after the point, so that almost any number is close to some number of rows. Only the rows
    of the micro batch, or a round number of them, are more than a coincidence.
    """
    if not asked or not vocabulary or vocabulary < 1000:
        return None
    slack = asked * 0.005 if asked < GIB else 0.006 * GIB
    for width in (4, 2):
        row = vocabulary * width
        if rows:
            near = [count for count in (rows, rows - 1) if count > 0 and abs(asked - count * row) <= slack]
        else:
            count = round(asked / row / 128) * 128
            near = [count] if count >= 256 and abs(asked - count * row) <= min(slack, row * 16) else []
        if near:
            return near[0]
    return None


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 2 ** _UNITS[unit[0].lower()])


def size_words(size: int) -> str:
    """As PyTorch writes it."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def describe_numbers(numbers: OomNumbers) -> Message | None:
    """What the message says, as the end of a sentence; None: it says nothing."""
    if numbers.asked is None:
        return None
    sizes = {
        "asked": numbers.asked,
        "left": numbers.left,
        "whole": numbers.allowed or numbers.total,
        "allocated": numbers.allocated,
        "unused": numbers.reserved_unused or None if numbers.allocated is not None else None,
        "others": numbers.others if numbers.others and numbers.others >= GIB // 2 else None,
    }
    shown = {name: None if size is None else size_words(size) for name, size in sizes.items()}
    return Message("diagnose.oom-numbers", **shown)
