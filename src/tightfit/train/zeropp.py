"""ZeRO++: weights travel in 8 bits to where they are needed, gradients in 4 bits to where they are added up.

The weights are DeepSpeed's own work (`zero_quantized_weights`); what it quantises with is a CUDA extension, or on a
machine that cannot compile it the same arithmetic in torch, which DeepSpeed has for another maker's cards.

The gradients are ours. DeepSpeed's `zero_quantized_gradients` (0.19.8) works between nodes alone, reads bf16 numbers as
if they were fp16, adds up the GPUs of a node where it should take their mean, so that a matrix counts for as many times
what a vector does, and rounds towards zero: on two nodes of two, gradients came out 1.49 times as large as they are.
Here blocks of `BLOCK` elements share a scale, and are rounded to the nearest of 15 levels. As in ZeRO++ they go in two
hops, so that the network between nodes carries each element once: to the GPU of the same node that has the same number
as the one they are for, which takes the mean, and from there to that one. Without error feedback, as published.
"""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.memory.compressed import LEVELLED as BLOCK
from tightfit.memory.compressed import LEVELLED_PIECE as PIECE
from tightfit.messages import Message
from tightfit.train.place import Place
from tightfit.types import ConfigError

LEVELS = 7  # on either side of zero


def compress_deepspeed(place: Place, gpus_per_node: int) -> None:
    """Have ZeRO-3 gather weights and scatter gradients so, in this process."""
    if not (place.on_gpu and shutil.which("nvcc")):
        try:
            written_in_torch: Any = import_module("deepspeed.ops.op_builder.npu.quantizer").NPUQuantizer
        except ImportError:
            raise ConfigError(Message("engine.no-quantizer")) from None

        class Flat(written_in_torch):  # type: ignore[misc]
            """With scales of one dimension, as the buffer that they are gathered in: gloo minds, NCCL does not."""

            @staticmethod
            def quantize(*words: Any) -> tuple[Tensor, Tensor]:
                codes, scales = written_in_torch.quantize(*words)
                return codes, scales.view(-1)

        partitioning: Any = import_module("deepspeed.runtime.zero.partition_parameters")
        partitioning.CUDAQuantizer.quantizer_cuda_module = Flat
    stage3: Any = import_module("deepspeed.runtime.zero.stage3")
    stage3.reduce_scatter_coalesced = Scatter(place, gpus_per_node)


class Scatter:
    """In place of DeepSpeed's `reduce_scatter_coalesced`."""

    def __init__(self, place: Place, gpus_per_node: int) -> None:
        self._place = place
        self._near = gpus_per_node if place.world % gpus_per_node == 0 else place.world
        self._nodes = place.world // self._near
        self._within = self._between = None
        if self._nodes > 1:
            for first in range(0, place.world, self._near):
                group = dist.new_group(list(range(first, first + self._near)))
                self._within = group if first <= place.rank < first + self._near else self._within
            for number in range(self._near):
                group = dist.new_group(list(range(number, place.world, self._near)))
                self._between = group if place.rank % self._near == number else self._between

    @torch.no_grad()
    def __call__(self, tensors: list[Tensor], group: Any = None) -> list[Tensor]:
        """Of each, this rank's part of the mean over the ranks: equal parts, the last ones shorter."""
        world, rank = self._place.world, self._place.rank
        sizes = [-(-tensor.numel() // world) for tensor in tensors]
        padded = -(-sum(sizes) // BLOCK) * BLOCK
        # What is for the GPUs of one number, on each node, lies together: the one of this node gets it.
        rows = tensors[0].new_zeros(world, padded)
        order = [number % self._near * self._nodes + number // self._near for number in range(world)]
        begin = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            for number, part in zip(order, torch.split(tensor.reshape(-1), size), strict=False):
                rows[number, begin : begin + part.numel()].copy_(part)
            begin += size
        mean = exchange_mean(rows.view(self._near, -1), self._within)
        if self._nodes > 1:
            mean = exchange_mean(mean.view(self._nodes, padded), self._between)
        return [
            part[: max(0, min(size, tensor.numel() - rank * size))]
            for part, size, tensor in zip(
                torch.split(mean, [*sizes, padded - sum(sizes)]), sizes, tensors, strict=False
            )
        ]


def exchange_mean(rows: Tensor, group: Any) -> Tensor:
    """Each rank of the group sends one row to each; the mean of those that it got, in the same precision."""
    codes, scales = pack(rows.view(-1))
    got_codes, got_scales = torch.empty_like(codes), torch.empty_like(scales)
    dist.all_to_all_single(got_codes, codes, group=group)
    dist.all_to_all_single(got_scales, scales, group=group)
    mean = torch.zeros(rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    for theirs, sizes in zip(got_codes.chunk(len(rows)), got_scales.chunk(len(rows)), strict=True):
        add_unpacked(mean, theirs, sizes / len(rows))
    return mean.to(rows.dtype)


def pack(values: Tensor) -> tuple[Tensor, Tensor]:
    """Two elements in a byte, and a scale for each block: whole blocks of them. What is not finite stays so."""
    codes = torch.empty(values.numel() // 2, dtype=torch.uint8, device=values.device)
    wide = torch.promote_types(values.dtype, torch.float32)
    scales = torch.empty(values.numel() // BLOCK, dtype=wide, device=values.device)
    for begin in range(0, values.numel(), PIECE):
        part = values[begin : begin + PIECE].view(-1, BLOCK).to(wide)
        scale = scales[begin // BLOCK : (begin + PIECE) // BLOCK]
        torch.amax(part.abs(), dim=1, out=scale)
        scale.div_(LEVELS)
        levels = (part / scale.clamp_min(torch.finfo(wide).tiny)[:, None]).round_().nan_to_num_()
        pairs = levels.add_(LEVELS).to(torch.uint8).view(-1, 2)
        codes[begin // 2 : (begin + PIECE) // 2] = pairs[:, 0] | pairs[:, 1] << 4
    return codes, scales


def add_unpacked(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    for begin in range(0, values.numel(), PIECE):
        packed = codes[begin // 2 : (begin + PIECE) // 2]
        levels = torch.stack((packed & 15, packed >> 4), dim=1).view(-1, BLOCK).to(values.dtype).sub_(LEVELS)
        part = values[begin : begin + PIECE].view(-1, BLOCK)
        part.addcmul_(levels, scales[begin // BLOCK : (begin + PIECE) // BLOCK, None].expand_as(levels))
