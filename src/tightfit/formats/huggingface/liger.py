"""Liger's kernels, from which other trainers borrow the fused loss: where nobody here ran them.

For which models they fuse it, `inputs/trainers.py` knows.
"""

from __future__ import annotations

from tightfit.formats.launch.environment import HIP
from tightfit.messages import Message
from tightfit.types import Hardware


def unproven(hardware: Hardware) -> Message | None:
    """A sentence where Liger's kernels meet cards on which nobody here ran them; None: they did."""
    if hardware.gpu.vendor not in HIP:
        return None
    return Message("huggingface.liger-unproven", name=hardware.gpu.name)
