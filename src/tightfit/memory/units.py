"""What comes to the GPU together under the streaming engine: a layer. The ends of the model, outside of its layers, are
units as well: they stay on the GPU, but where they train they are updated on the host, and come anew."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tightfit.memory.weights import WIDTH, effective_lora, layer_parameters
from tightfit.types import Levers, Lora, ModelShape, Tensor, Trains

SLOTS = 2  # on the GPU, for layers that stream
GRADS = 2  # likewise for the fp32 gradients of a layer
BUFFERS = 2  # in RAM, for states that rest on an NVMe
LEAVING = 2  # inputs of layers on their way to the host, at most
AHEAD = 2  # likewise on their way back, beside the one that is in use
PIECE = 2**24
"""Elements that are updated as soon as their gradients are there, and that set out for the GPU then: of a large
embedding, which is the last to arrive and the first that the next pass reads, nobody waits for the whole."""


class Unit(NamedTuple):
    """Adapters, which do not stream, are no part of it."""

    numel: int
    bytes: int  # in the working precision, or packed; scales of what is packed stay on the GPU
    trained: int  # elements that the host's optimizer updates: all or none
    tensors: int


class Units(NamedTuple):
    before: Unit  # the embedding, with a head that is tied to it
    layers: tuple[Unit, ...]
    after: Unit  # the final norm, and a head of its own


def units_of(shape: ModelShape, levers: Levers) -> Units:
    lora = effective_lora(levers)
    return _units(shape, levers.method, lora, levers.precision, levers.frozen_layers, levers.trains)


@lru_cache(maxsize=64)
def _units(
    shape: ModelShape, method: str, lora: Lora | None, precision: str, frozen_layers: int, trains: Trains
) -> Units:
    width, base_trains = WIDTH[precision], method == "full" and trains != "embeddings"

    def end(tensors: tuple[Tensor, ...], *, is_trained: bool) -> Unit:
        numel = sum([tensor.numel for tensor in tensors])
        return Unit(numel, numel * width, numel if is_trained else 0, len(tensors))

    kinds = list[Unit]()
    for block in shape.blocks:
        base, _, packed = layer_parameters(block, method, lora)
        size = sum(base) * width + sum(packed) // 2
        kinds.append(Unit(sum(base) + sum(packed), size, sum(base), len(base) + len(packed)))
    return Units(
        end(shape.before, is_trained=method == "full" and trains != "layers" and frozen_layers == 0),
        tuple(
            kinds[kind] if base_trains and index >= frozen_layers else kinds[kind]._replace(trained=0)
            for index, kind in enumerate(shape.pattern)
        ),
        end(shape.after, is_trained=base_trains),
    )


def stays(layer: int, resident: int, layers: int) -> bool:
    """Whether a layer is one of those that stay on the GPU, which are spread evenly over the depth."""
    return (layer + 1) * resident // layers > layer * resident // layers


def count_kept(levers: Levers, trained: int) -> int:
    """Of so many units that train: the lowest, whose states stay in RAM."""
    if levers.offload_optimizer != "nvme":
        return trained
    return min(trained, max(0, levers.buckets.optimizer_buffer_count - BUFFERS))


def waits_for_norm(levers: Levers) -> bool:
    """Whether no step counts before the norm of all gradients is known: they may have to be clipped or, with a loss
    scale that was too high, thrown away."""
    return levers.gradient_clipping or levers.precision == "fp16"


def updates_ahead(levers: Levers) -> bool:
    """Whether units are updated before that all the same, into a second set of states."""
    return levers.update == "ahead" and levers.method == "full" and waits_for_norm(levers)


def has_masters(levers: Levers) -> bool:
    """Whether units that train have fp32 copies."""
    return levers.master_weights and levers.precision != "fp32"


@lru_cache(maxsize=1024)
def layer_bytes(layers: tuple[Unit, ...], resident: int) -> int:
    """Weights of layers on the GPU: those that stay, and slots for the others."""
    held: list[int] = []
    streamed: list[int] = []
    for index, unit in enumerate(layers):
        (held if stays(index, resident, len(layers)) else streamed).append(unit.bytes)
    return sum(held) + min(SLOTS, len(streamed)) * max(streamed, default=0)
