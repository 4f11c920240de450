"""Whether this machine has the RAM now that layers which stream lock."""

from __future__ import annotations

from tightfit.hardware.machine import free_ram
from tightfit.messages import Message
from tightfit.priced import GIB, amounts
from tightfit.types import STREAM, HardwareError


def check_free_ram(engine: str, needed_bytes: int) -> None:
    """Nothing of what is locked can be swapped out, and what others hold has to be in RAM beside it. So it is what the
    system could give now that must do."""
    free = free_ram()
    if engine == STREAM and free is not None and needed_bytes > free:
        need, there = amounts(needed_bytes, free)
        raise HardwareError(Message("cli.stream-needs-ram", need=need, there=there, size=int(free / GIB)))
