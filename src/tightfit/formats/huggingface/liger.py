"""Liger's kernels, from which other trainers borrow the fused loss: where nobody here ran them.

For which models they fuse it, `inputs/trainers.py` knows.
"""

from __future__ import annotations

from tightfit.formats.launch.environment import HIP
from tightfit.types import Hardware


def unproven(hardware: Hardware) -> str:
    """A sentence where Liger's kernels meet cards on which nobody here ran them; empty: they did."""
    if hardware.gpu.vendor not in HIP:
        return ""
    return f"Liger's kernels are Triton's, and on the {hardware.gpu.name} we never ran them"
