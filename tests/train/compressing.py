"""One rank of four that send each other compressed gradients, in float64, over several steps. Rank 0 prints for each
way how far what was sent, with what is kept, is from the sum of all means; and other figures of each."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.train.compression import RANK, OneBit, PowerSgd, orthonormalise
from tightfit.train.place import Place, gather_into
from tightfit.train.zeropp import LEVELS, Scatter

WORLD, STEPS = 4, 6
SHAPES = [torch.Size(shape) for shape in ((64, 96), (96, 64), (7,), (3, 48, 64), (5, 6), (64, 96))]
TOTAL = sum(shape.numel() for shape in SHAPES)
WIDE = torch.float64


def mean_of(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / WORLD


def gradients(rank: int, step: int) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOTAL, generator=drawn, dtype=WIDE)


def low_rank(place: Place) -> dict[str, float]:
    """Matrices of so few columns arrive whole, in the second step at the latest: and those of zeros as zeros."""
    shapes = [torch.Size((64, 96)), torch.Size((64, 64))]
    drawn = torch.Generator().manual_seed(0)
    left, right = torch.randn(64, RANK, generator=drawn, dtype=WIDE), torch.randn(RANK, 96, generator=drawn, dtype=WIDE)
    once = torch.cat([(left @ right).view(-1) * (1 + place.rank), torch.zeros(64 * 64, dtype=WIDE)])
    power, sent = PowerSgd(shapes, place, WIDE), torch.zeros_like(once)
    for _ in range(2):
        flat = once.clone()
        power.share(flat)
        sent += flat
    wanted = 2 * mean_of(once)
    columns = torch.cat([torch.randn(2, 9, 3, dtype=WIDE), torch.zeros(2, 9, 1, dtype=WIDE)], dim=2)
    columns[:, :, 1] = columns[:, :, 0] * 2  # which leaves nothing but what was rounded
    orthonormalise(columns)
    products = columns.transpose(1, 2) @ columns
    straight = float((products - torch.eye(4, dtype=WIDE) * products).abs().max())
    return {"a few columns": float((sent - wanted).abs().max() / wanted.abs().max()), "not orthogonal": straight}


def telescope(place: Place) -> dict[str, float]:
    power, onebit = PowerSgd(SHAPES, place, WIDE), OneBit(TOTAL, place, WIDE)
    wanted = torch.zeros(TOTAL, dtype=WIDE)
    sent = {"powersgd": torch.zeros_like(wanted), "onebit": torch.zeros_like(wanted)}
    apart = 0.0
    for step in range(STEPS):
        mine = gradients(place.rank, step)
        wanted += mean_of(mine)
        for name, each in (("powersgd", power), ("onebit", onebit)):
            flat = mine.clone()
            each.share(flat)
            sent[name] += flat
            apart = max(apart, float((flat - mean_of(flat)).abs().max()))
    kept = float(mean_of(power.error).abs().sum())
    told = torch.zeros(WORLD * onebit.told.numel(), dtype=WIDE)
    gather_into(told, onebit.told)
    signs = sent["onebit"] + (mean_of(onebit.error) + told)[:TOTAL] - wanted
    whole = wanted - sent["powersgd"]
    parts = torch.split(whole, [shape.numel() for shape in SHAPES])
    order = sorted((0, 1, 3, 5), key=lambda number: SHAPES[number][-2])
    columns = torch.cat([parts[number] for number in order]) - mean_of(power.error)
    norm, estimate = mean_of(mine).norm(), onebit.measure(mine, seed=3)
    return {
        "powersgd": float(columns.abs().max()),
        "powersgd, what goes whole": float(torch.cat([parts[2], parts[4]]).abs().max()),
        "powersgd keeps": kept,
        "onebit": float(signs.abs().max()),
        "onebit keeps": float(onebit.error.abs().sum()),
        "ranks apart": apart,
        "norm": abs(float(estimate / norm) - 1),
    }


def scatter(place: Place) -> dict[str, float]:
    """In one hop and in two: numbers on the levels arrive exactly, others within half a level of each hop."""
    found = {}
    for near in (WORLD, 2):
        share, worst, exact = Scatter(place, near), 0.0, 0.0
        drawn = torch.Generator().manual_seed(place.rank)
        tensors = [torch.randn(size, generator=drawn, dtype=WIDE) for size in (4096, 37, 2, 1000)]
        alike = [torch.full((size,), 3.0, dtype=WIDE) for size in (512, 5)]
        largest = torch.stack([tensor.abs().max() for tensor in tensors]).max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        for tensor, part in zip(tensors, share(tensors), strict=True):
            size = -(-tensor.numel() // WORLD)
            wanted = mean_of(tensor)[place.rank * size : (place.rank + 1) * size]
            assert part.shape == wanted.shape
            worst = max([worst, *((part - wanted).abs() * LEVELS / largest).tolist()])
        exact = max(float((part - 3).abs().max()) for part in share(alike) if part.numel())
        found |= {f"scatter by {near}": worst, f"levels by {near}": exact}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    place = Place(rank=rank, local_rank=rank, world=WORLD, device=torch.device("cpu"), launcher="tests")
    found = {**low_rank(place), **telescope(place), **scatter(place)}
    every: list[dict[str, float]] = [{}] * WORLD
    dist.all_gather_object(every, found)
    if rank == 0:
        sys.stdout.write(json.dumps({name: max(each[name] for each in every) for name in found}) + "\n")
    dist.destroy_process_group()
