"""What compressed messages take: on the network, in memory for good, and in memory while they are made.

How they are made is told in `train/compression.py` and `train/zeropp.py`, which have their constants from here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tightfit.memory import weights as weights_of
from tightfit.memory.operations import FP32
from tightfit.types import Levers, ModelShape, Tensor, Trains

RANK, WORTH = 4, 2  # PowerSGD: columns of P and Q; a matrix that would not shrink so many times goes whole
SIGNED = 2048  # 1-bit Adam: elements that share a magnitude
SIGNED_PIECE = SIGNED * 2**11  # elements that are packed at a time
SKETCHES, SKETCHED = 16, 4096  # sums from which the norm of a mean is estimated: so many of so many numbers
LEVELLED = 256  # ZeRO++: elements of a gradient that share a scale
LEVELLED_PIECE = LEVELLED * 2**14
WEIGHTS_SCALED = 8000  # and of a weight: DeepSpeed's `target_group_size`, about

_SIGNED_BYTES, _LEVELLED_BYTES = 7, 11  # of an element of a piece, while that is packed: counted from the source


class Messages(NamedTuple):
    kept: int  # bytes from the start to the end
    working: int  # bytes while a step's message is made and read, beside the gradients
    sent: int  # bytes of what a rank tells the others, once in each direction
    packed: int  # elements that are approximated


NONE = Messages(0, 0, 0, 0)


def is_worth(rows: int, columns: int) -> bool:
    """Whether P and Q are so much smaller than the matrix."""
    return WORTH * RANK * (rows + columns) < rows * columns


def gradient_messages(shape: ModelShape, levers: Levers, world: int) -> Messages:
    """Of the engine that has everything on every GPU."""
    if levers.compress == "powersgd":
        return _low_rank(shape, levers.frozen_layers, levers.trains)
    if levers.compress == "onebit":
        weights = weights_of.of(shape, levers)
        return _signs(weights.trainable_numel, weights.largest_trainable, world)
    return NONE


@lru_cache(maxsize=128)
def _low_rank(shape: ModelShape, frozen_layers: int, trains: Trains) -> Messages:
    packed = rows = columns = whole = 0
    for tensor in _trained(shape, frozen_layers, trains):
        if len(tensor.shape) > 1 and is_worth(*tensor.shape[-2:]):
            count = tensor.numel // (tensor.shape[-2] * tensor.shape[-1])
            packed, rows, columns = (
                packed + tensor.numel,
                rows + count * tensor.shape[-2],
                columns + count * tensor.shape[-1],
            )
        else:
            whole += tensor.numel
    first = FP32 * (RANK * rows + whole)
    return Messages(
        kept=FP32 * (packed + 2 * RANK * columns), working=first, sent=first + FP32 * RANK * columns, packed=packed
    )


def _signs(numel: int, largest: int, world: int) -> Messages:
    padded = -(-numel // (SIGNED * world)) * SIGNED * world
    message = padded // 8 + FP32 * padded // SIGNED
    piece = min(padded, SIGNED_PIECE)
    roots = (FP32 + 1) * largest  # of one parameter's second moments, and which of them are zero
    signs = (8 + FP32) * SKETCHES * -(-numel // SKETCHED)
    making = 2 * message + _SIGNED_BYTES * piece
    kept = FP32 * (padded + padded // world)
    return Messages(kept=kept, working=max(roots, signs, making), sent=2 * message, packed=numel)


def _trained(shape: ModelShape, frozen_layers: int, trains: Trains) -> list[Tensor]:
    """The tensors that train, where layers do so themselves."""
    layers = [
        tensor
        for index, kind in enumerate(shape.pattern)
        for tensor in shape.blocks[kind].tensors
        if index >= frozen_layers and trains != "embeddings"
    ]
    before = shape.before if trains != "layers" and frozen_layers == 0 else ()
    return [*before, *layers, *(shape.after if trains != "embeddings" else ())]


def weight_bytes(numel: int) -> int:
    """Of weights that travel in 8 bits."""
    return numel + FP32 * numel // WEIGHTS_SCALED


def levelled_bytes(numel: int) -> int:
    """Of gradients that travel in 4 bits."""
    return numel // 2 + FP32 * numel // LEVELLED


def scattering_bytes(bucket: int) -> int:
    """While a bucket of gradients is scattered in 4 bits, beside what it takes to scatter it as it is: packed, as it is
    sent and as it comes, and a piece of it that is being packed."""
    return 2 * levelled_bytes(bucket) + _LEVELLED_BYTES * min(bucket, LEVELLED_PIECE)


def unpacking_bytes(largest: int) -> int:
    """While the largest parameter is put together from 8 bits: as it came, and in fp16."""
    return 3 * largest
