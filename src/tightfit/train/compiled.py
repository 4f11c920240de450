"""What DeepSpeed compiles the first time it is used: said while it lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tightfit.messages import Message
from tightfit.runs.build_lock import LOCK


def extensions_folder() -> Path:
    """The folder with a folder for each part."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("deepspeed_shm_comm", False)).parent


USUALLY = {"deepspeed_shm_comm": (1, 1), "cpu_adam": (1, 2), "async_io": (2, 2), "fused_adam": (1, 2)}
"""Minutes on two free cores, at least and at most, by the folder of the part."""
LOOK_S = 1.0


def find_compiling(folder: Path) -> tuple[float, str] | None:
    """Since when and which part is compiled, by whichever process, the longest; one that is only looked up is there."""
    found = []
    for lock in folder.glob(f"*/{LOCK}"):
        part = lock.parent
        with suppress(OSError):  # it was done just now
            if not (part / f"{part.name}.so").exists():
                found.append((lock.stat().st_mtime, part.name))
    return min(found, default=None)


@contextmanager
def report_meanwhile(what: Message, tell: Callable[[Message], None]) -> Iterator[None]:
    """Say what is done in the block, and while DeepSpeed compiles for it, which part and since when.

    Each is said once: nobody may take this for a sign of life of a process that waits for a lock without end.
    """
    folder, done = extensions_folder(), threading.Event()

    def look() -> None:
        said = None
        while not done.wait(LOOK_S):
            now = find_compiling(folder)
            if now != said and now is None:
                tell(what)
            elif now is not None and now != said:
                since, part = now
                least, most = USUALLY.get(part, (0, 0))
                usually = Message("train.minutes", minutes=most) if most else Message("train.a-few-min")
                if least < most:
                    usually = Message("train.minutes-to", least=least, most=most)
                at = time.strftime("%H:%M", time.localtime(since))
                tell(Message("train.compiling", part=part, at=at, usually=usually))
            said = now

    tell(what)
    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()
