"""What an optimizer keeps for each element it updates, and what its step allocates in passing."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from tightfit.types import Optimizer

EIGHT_BIT: tuple[Optimizer, ...] = ("adamw8bit", "paged_adamw8bit")  # those whose states have 8 bits an element
BLOCK_8BIT = 256  # bitsandbytes: one fp32 scale for so many 8-bit values of a state
SMALL_8BIT = 4096  # tensors below this size keep 32-bit states (bitsandbytes' `min_8bit_size`)
UNPAGED = 100_000
"""Tensors below this size keep their states on the GPU, also in a paged optimizer (`get_state_buffer`)."""


def state_bytes(optimizer: Optimizer, numel: int, width: int, *, flat: bool) -> int:
    """States of `numel` elements. `flat`: they are one vector, so nothing can be factored."""
    if optimizer == "adamw":
        return 2 * width * numel
    if optimizer in EIGHT_BIT:
        return 2 * numel + 8 * (-(-numel // BLOCK_8BIT)) if numel >= SMALL_8BIT else 8 * numel
    if optimizer == "adafactor":
        return width * numel if flat else 0
    return 0


def flat_states(optimizer: Optimizer, numel: int, width: int) -> int:
    """Those of a rank's flat part of all parameters on the GPU: paged ones may all lie on the host."""
    return 0 if optimizer == "paged_adamw8bit" else state_bytes(optimizer, numel, width, flat=True)


class States(NamedTuple):
    """Bytes of 8-bit states, held parameter by parameter."""

    gpu: int
    paged: int  # in unified memory, which may all lie on the host. The scales never do


@lru_cache(maxsize=512)
def eight_bit_states(optimizer: Optimizer, parameters: tuple[int, ...], world: int) -> States:
    """Of one rank's even part of each parameter: a part that is small has fp32 states, however large the whole is."""
    gpu = paged = 0
    for numel in parameters:
        part = -(-numel // world)
        size = state_bytes(optimizer, part, 4, flat=False)
        leaving = 2 * part if optimizer == "paged_adamw8bit" and part >= UNPAGED else 0
        gpu, paged = gpu + size - leaving, paged + leaving
    return States(gpu, paged)


def factored_bytes(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Adafactor on whole matrices: a row and a column instead of a matrix."""
    return sum(4 * (s[-1] + s[-2]) * prod(s[:-2]) if len(s) >= 2 else 4 * s[0] for s in shapes)


def step_temporary(optimizer: Optimizer, numel: int) -> int:
    """Adafactor's Python step makes the squared gradient, the update and its scaled copy; the others none."""
    return 3 * 4 * numel if optimizer == "adafactor" else 0
