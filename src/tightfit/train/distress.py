"""Why a rank ends: what its exception and the place where it stood say, as its last words.

What torch and the kernel say in English is read here once, beside the exception itself, whose type and frames say more
than any log does.
"""

from __future__ import annotations

import errno
import time
import traceback

from tightfit.diagnose.oom import read_oom
from tightfit.diagnose.tracebacks import phase_of
from tightfit.diagnose.verdict import OomNumbers
from tightfit.messages import Message, message_of
from tightfit.runs.heartbeat import DISK_FULL, PHASES, Stage
from tightfit.runs.records import BUG, USER, LastWords
from tightfit.types import PhaseName, TightfitError, UserError

FAILED, USER_ERROR, OUT_OF_MEMORY = 1, 2, 3
_PROBE = "/train/probe.py"
_CUDA_OOM = "CUDA error: out of mem"
_IN_A_STEP: tuple[PhaseName, ...] = ("forward", "loss", "backward", "step")


def last_words(error: BaseException, rank: int, stage: Stage, step: int) -> tuple[int, LastWords]:
    """The exit code, and what is left behind; empty words: another rank has said it."""
    at, said, text = time.time(), message_of(error), " ".join(str(error).split())
    kind, code, numbers = BUG, FAILED, OomNumbers()
    if isinstance(error, UserError):
        kind, code = DISK_FULL if is_disk_full(error) else USER, USER_ERROR
    elif isinstance(error, OSError) and is_disk_full(error):
        kind, code = DISK_FULL, USER_ERROR
        said = Message("train.disk-full", where=f" ({error.filename})" if error.filename else "")
    elif type(error).__name__ == "OthersFailed":
        kind, code, said = USER, USER_ERROR, ""
    elif isinstance(error, TightfitError):
        kind = getattr(error, "kind", type(error).__name__.lower())
    elif (where_short := find_shortage(error)) is not None:
        kind, numbers = where_short, read_oom(text).numbers
        text = text.partition(" If reserved but unallocated")[0]
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _CUDA_OOM in text:
            code, said = OUT_OF_MEMORY, text or type(error).__name__
        else:
            said = f"{type(error).__name__}: {text}"
    else:
        said = f"{type(error).__name__}: {text}"
    # The loss is a part of its forward; the worst batch is tried before the first step, and only the frames tell how
    # far it came.
    told, phase = phase_of(traceback.format_tb(error.__traceback__)), PHASES.get(stage)
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    if stage == "init" and any(file.endswith(_PROBE) for file in files):
        phase = told if told in _IN_A_STEP else None
    elif stage == "forward" and told == "loss":
        phase = "loss"
    return code, LastWords(
        rank=rank,
        kind=kind,
        text=said,
        at=at,
        phase=phase,
        step=step or None,
        asked=numbers.asked,
        allocated=numbers.allocated,
        free=numbers.left,
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether it is, or follows from, a disk that takes nothing any more."""
    found = error if isinstance(error, OSError) else error.__cause__
    return isinstance(found, OSError) and found.errno in (errno.ENOSPC, errno.EDQUOT)


def find_shortage(error: BaseException) -> str | None:
    """Whose memory ran out; None: none did."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return "host-oom"
    functions = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    if _CUDA_OOM in text and "pin_memory" in functions:
        return "pinned-memory"
    is_device = type(error).__name__ == "OutOfMemoryError" or "out of memory" in text.lower() or "ALLOC_FAILED" in text
    return "device-oom" if is_device else None
