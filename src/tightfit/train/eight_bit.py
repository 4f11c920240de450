"""The states of an 8-bit optimizer as fp32 numbers, and back.

bitsandbytes keeps a state as one byte an element, an index into a map of 256 numbers between -1 and 1, and one fp32
scale for each block of elements: a value is its number times its block's scale. To quantise, the scale is the block's
largest magnitude and each element takes the nearest number.

That alone is no exact inverse. The signed map has 1 and no -1: where the largest element is negative its number is
about -0.993, so the values read back have a smaller magnitude, and a scale taken from them would be too small. Such a
block is recognised: if the scale that this end of the map implies gives every value back bit for bit, it is the one
the values were made with. Values then survive any number of round trips, as long as the blocks are the same; the next
step sees nothing else of a state. A parameter with few elements has plain fp32 states, which are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale: a constant of bitsandbytes' optimizers, which they do not keep with a state."""
PIECE = BLOCK * 2**13  # elements that are converted at a time

Which = Literal[1, 2]  # the first or the second moment


def is_eight_bit(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's states have 8 bits; small parameters' have 32, and are `state1` and `state2` as well."""
    return "qmap1" in state


def read_8bit(state: Mapping[str, Any], which: Which, start: int = 0, stop: int | None = None) -> Tensor:
    """The elements from `start` up to `stop` of a moment, flat, in fp32, where the parameter is."""
    codes: Tensor = state[f"state{which}"].view(-1)
    stop = codes.numel() if stop is None else stop
    if not is_eight_bit(state):
        return codes[start:stop].clone()
    numbers, scales = state[f"qmap{which}"], state[f"absmax{which}"]
    made = torch.empty(stop - start, dtype=torch.float32, device=scales.device)
    for at in range(start, stop, PIECE):
        end = min(at + PIECE, stop)
        picked = numbers[codes[at:end].to(scales.device, torch.int32)]
        blocks = torch.arange(at, end, device=scales.device) // BLOCK
        torch.mul(picked, scales[blocks], out=made[at - start : end - start])
    return made


def write_8bit(state: Mapping[str, Any], which: Which, values: Tensor, start: int = 0) -> None:
    """Put `values` in place from element `start` on; whole blocks of them, or up to the end."""
    codes: Tensor = state[f"state{which}"].view(-1)
    values = values.reshape(-1)
    stop = start + values.numel()
    if not is_eight_bit(state):
        codes[start:stop].copy_(values)
        return
    if start % BLOCK or (stop % BLOCK and stop != codes.numel()):
        raise ValueError(f"elements {start} to {stop} are no whole blocks of {BLOCK}")
    numbers, scales = state[f"qmap{which}"], state[f"absmax{which}"]
    for at in range(start, stop, PIECE):
        end = min(at + PIECE, stop)
        piece = values[at - start : end - start].to(scales.device, torch.float32)
        piece = torch.nn.functional.pad(piece, (0, -piece.numel() % BLOCK)).view(-1, BLOCK)
        found, scale = quantise(piece, numbers)
        codes[at:end].copy_(found.view(-1)[: end - at])
        scales[at // BLOCK : -(-end // BLOCK)].copy_(scale)


def quantise(blocks: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Indices into the map and scales of blocks, a row each."""
    scales = blocks.abs().amax(dim=1)
    codes = _nearest(blocks, scales, numbers)
    if numbers[0] < 0:
        lost = (_values(codes, scales, numbers) != blocks).any(dim=1) & (blocks.amin(dim=1) == -scales)
        rows = lost.nonzero().view(-1)
        # A scale that the most negative element implies, wherever that gives every value back.
        implied = scales[rows] / -numbers[0]
        up, down = torch.full_like(implied, torch.inf), torch.zeros_like(implied)
        above, below = torch.nextafter(implied, up), torch.nextafter(implied, down)
        for guess in (implied, above, below, torch.nextafter(above, up), torch.nextafter(below, down)):
            found = _nearest(blocks[rows], guess, numbers)
            exact = (_values(found, guess, numbers) == blocks[rows]).all(dim=1)
            codes[rows[exact]], scales[rows[exact]] = found[exact], guess[exact]
    codes[scales == 0] = 0  # as bitsandbytes makes them
    return codes, scales


def _nearest(blocks: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    middles = (numbers[1:].double() + numbers[:-1].double()) / 2
    scaled = blocks / torch.where(scales > 0, scales, 1)[:, None]
    return torch.bucketize(scaled, middles.float(), out_int32=True)


def _values(codes: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    return numbers[codes] * scales[:, None]
