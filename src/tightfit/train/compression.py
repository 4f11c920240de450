"""Gradients that take less of the network: as a few columns (PowerSGD), or as signs (1-bit Adam).

Both send an approximation, keep what it left out, and add that to what comes next (error feedback): what was sent and
what is kept add up to all gradients, so that nothing is lost, only late. Both begin with steps that are exact.

PowerSGD (Vogels et al., 2019) sends a matrix M of gradients as P Qᵀ of rank `RANK`: one step of power iteration from
the last Q, P = M Q, summed over the ranks and made orthonormal, then Q = Mᵀ P, summed likewise. Vectors, and matrices
that would hardly shrink (`is_worth`), go whole, in the same message as all P. Any optimizer works with the result.

1-bit Adam (Tang et al., 2021) lets Adam's second moment stay as it is after the warm-up, so that an update is linear in
the gradients, and sends the first moment: a bit for each element, and for each `BLOCK` the mean magnitude. Every rank
adds up one part of all, from all ranks, and tells its own approximation of the sum to all. As published, a block has
elements of very different size, and one that hardly ever moves, such as those of a rare token, would get the magnitude
of its neighbours. So the first moment is divided by the root of the second one before it is sent, as in the update:
then all elements have about one size. That root is the same on all ranks, and does not change. An element that had no
gradient in the warm-up does not move.

Nobody has the mean of the gradients then, of which the norm is to be clipped. Each rank adds its gradients up to
`SKETCHED` numbers, with signs that are the same on all ranks; the squares of their sums over the ranks are, on average
over the signs, the square of that norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.memory.compressed import RANK, SKETCHED, SKETCHES, is_worth
from tightfit.memory.compressed import SIGNED as BLOCK
from tightfit.memory.compressed import SIGNED_PIECE as PIECE
from tightfit.train.optimizers import BETAS, EPS
from tightfit.train.place import Place, gather_into

WARM_UP: dict[str, float] = {"powersgd": 0.1, "onebit": 0.2}
"""The share of a run's steps that is exact: as torch's and the authors of 1-bit Adam advise."""


def count_warm_up(compress: Literal["powersgd", "onebit"], steps: int) -> int:
    """The exact steps of a run of so many: one at least, from which 1-bit Adam has its second moment."""
    return max(1, math.ceil(WARM_UP[compress] * steps))


class PowerSgd:
    """`error` and `q` are what a checkpoint needs of it."""

    def __init__(self, shapes: Sequence[torch.Size], place: Place, dtype: torch.dtype = torch.float32) -> None:
        self._place, self._sizes = place, [shape.numel() for shape in shapes]
        # Experts lie one behind the other: each is a matrix. Those of one height are made orthonormal together.
        matrices = [number for number, shape in enumerate(shapes) if len(shape) > 1 and is_worth(*shape[-2:])]
        self._matrices = {number: shapes[number][-2:] for number in sorted(matrices, key=lambda n: shapes[n][-2])}
        self._whole = [number for number in range(len(shapes)) if number not in self._matrices]
        self._each = [
            (shape[0], shape[1])
            for number, shape in self._matrices.items()
            for _ in range(self._sizes[number] // shape.numel())
        ]
        self.error = torch.zeros(sum(rows * columns for rows, columns in self._each), dtype=dtype, device=place.device)
        same = torch.Generator().manual_seed(0)  # on every rank
        drawn = torch.randn(sum(columns for _, columns in self._each) * RANK, generator=same, dtype=dtype)
        self._start = drawn.to(place.device)
        self.q = self._start.clone()

    def states(self) -> dict[str, Tensor]:
        return {"powersgd.error": self.error, "powersgd.q": self.q}

    def forget(self) -> None:
        self.error.zero_()
        self.q.copy_(self._start)

    def share(self, flat: Tensor) -> None:
        """Of gradients that lie side by side, the approximate mean over the ranks, in their place."""
        parts = torch.split(flat, self._sizes)
        taken = [each for number, shape in self._matrices.items() for each in parts[number].view(-1, *shape).unbind()]
        errors = _views(self.error, self._each)
        qs = _views(self.q, [(columns, RANK) for _, columns in self._each])
        heights = [(rows, RANK) for rows, _ in self._each]
        whole = [parts[number] for number in self._whole]
        message = flat.new_empty(sum(rows * RANK for rows, _ in heights) + sum(part.numel() for part in whole))
        ps = _views(message, heights)
        if taken:
            torch._foreach_add_(taken, errors)
            torch._foreach_div_(qs, [norm.clamp_min(_TINY) for norm in torch._foreach_norm(qs)])
        for matrix, p, q in zip(taken, ps, qs, strict=True):
            torch.mm(matrix, q, out=p)
        beside = torch.split(message[sum(p.numel() for p in ps) :], [part.numel() for part in whole])
        for part, place in zip(whole, beside, strict=True):
            place.copy_(part)
        self._mean(message)
        for part, place in zip(whole, beside, strict=True):
            part.copy_(place)
        begin = 0
        for rows, same in groupby(rows for rows, _ in heights):
            end = begin + sum(1 for _ in same) * rows * RANK
            orthonormalise(message[begin:end].view(-1, rows, RANK))
            begin = end
        for matrix, p, q in zip(taken, ps, qs, strict=True):
            torch.mm(matrix.t(), p, out=q)
        self._mean(self.q)
        for matrix, p, q, error in zip(taken, ps, qs, errors, strict=True):
            error.copy_(matrix).addmm_(p, q.t(), alpha=-1)
            torch.mm(p, q.t(), out=matrix)
        # Where there was no gradient at all, the next iteration could find none either.
        torch.where(self.q == 0, self._start, self.q, out=self.q)

    def _mean(self, message: Tensor) -> None:
        dist.all_reduce(message)
        message.div_(self._place.world)


_TINY = 1e-30


def orthonormalise(columns_BNR: Tensor) -> None:
    """The columns of each matrix, one after the other; those of zeros stay. Each is freed of those before it twice:
    once leaves what was rounded, and of columns that depend on each other that is all there is."""
    for number in range(columns_BNR.shape[-1]):
        column, before = columns_BNR[:, :, number : number + 1], columns_BNR[:, :, :number]
        for _ in range(2):
            column.sub_(before @ (before.transpose(1, 2) @ column))
            column.div_(column.norm(dim=1, keepdim=True).clamp_min_(_TINY))


def _views(flat: Tensor, shapes: Iterable[tuple[int, int]]) -> list[Tensor]:
    """Matrices one behind the other."""
    found, begin = [], 0
    for rows, columns in shapes:
        found.append(flat[begin : begin + rows * columns].view(rows, columns))
        begin += rows * columns
    return found


class OneBit:
    """`error` is what this rank has not sent yet, `told` what it has not told of its part of the sum; `settled`, on the
    host, how many updates the second moment had when it was frozen, 0: it still changes."""

    def __init__(self, numel: int, place: Place, dtype: torch.dtype = torch.float32) -> None:
        self._numel, self._place = numel, place
        padded = -(-numel // (BLOCK * place.world)) * BLOCK * place.world
        self.error = torch.zeros(padded, dtype=dtype, device=place.device)
        self.told = torch.zeros(padded // place.world, dtype=dtype, device=place.device)
        self.settled = torch.zeros(1)

    def states(self) -> dict[str, Tensor]:
        return {"onebit.error": self.error, "onebit.told": self.told, "onebit.settled": self.settled}

    def forget(self) -> None:
        self.error.zero_()
        self.told.zero_()
        self.settled.zero_()

    def share(self, flat: Tensor) -> None:
        """The approximate mean over the ranks, in its place."""
        world = self._place.world
        self.error[: self._numel].add_(flat)
        bits, sizes = pack(self.error)
        self.error[self._numel :].zero_()
        got_bits, got_sizes = torch.empty_like(bits), torch.empty_like(sizes)
        dist.all_to_all_single(got_bits, bits)
        dist.all_to_all_single(got_sizes, sizes)
        for theirs, magnitudes in zip(got_bits.chunk(world), got_sizes.chunk(world), strict=True):
            add_unpacked(self.told, theirs, magnitudes / world)
        own_bits, own_sizes = pack(self.told)
        gather_into(bits, own_bits)
        gather_into(sizes, own_sizes)
        add_unpacked(flat.zero_(), bits, sizes)

    def measure(self, flat: Tensor, seed: int) -> Tensor:
        """About the norm of the mean over the ranks."""
        rows = -(-flat.numel() // SKETCHED)
        drawn = torch.Generator(flat.device).manual_seed(seed)
        signs = torch.randint(0, 2, (SKETCHES, rows), generator=drawn, device=flat.device).mul_(2).sub_(1)
        signs, full = signs.to(flat.dtype), flat.numel() // SKETCHED
        sketch = signs[:, :full] @ flat[: full * SKETCHED].view(full, SKETCHED)
        if rest := flat.numel() - full * SKETCHED:
            sketch[:, :rest].add_(signs[:, full:] * flat[full * SKETCHED :])
        dist.all_reduce(sketch)
        total: Tensor = sketch.norm() / (self._place.world * math.sqrt(SKETCHES))
        return total


def step_by_signs(optimizer: torch.optim.Optimizer, flat: Tensor, onebit: OneBit) -> None:
    """AdamW's next step, whose second moment stays what it is. `flat`: this rank's own gradients, side by side in the
    order of the optimizer's parameters."""
    beta, second = BETAS
    held = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    parts = torch.split(flat, [param.numel() for _, param in held])
    taken = int(optimizer.state[held[0][1]]["step"])
    settled, begun = 1 - second ** (taken + 1), 1 - beta ** (taken + 1)
    # As if each step had updated it with what it is: whoever goes on with exact steps divides by what belongs to all.
    torch._foreach_mul_([optimizer.state[param]["exp_avg_sq"] for _, param in held], settled / (1 - second**taken))

    def root(param: Tensor) -> Tensor:
        second_moment: Tensor = optimizer.state[param]["exp_avg_sq"]
        return (second_moment / settled).sqrt_().add_(EPS).view(-1)

    for (_, param), part in zip(held, parts, strict=True):
        state = optimizer.state[param]
        part.mul_(1 - beta).add_(state["exp_avg"].view(-1), alpha=beta).div_(root(param))
        part.masked_fill_(state["exp_avg_sq"].view(-1) == 0, 0)
    onebit.share(flat)
    for (group, param), part in zip(held, parts, strict=True):
        state = optimizer.state[param]
        part.masked_fill_(state["exp_avg_sq"].view(-1) == 0, 0)
        torch.mul(part, root(param), out=state["exp_avg"].view(-1))
        param.mul_(1 - group["lr"] * group["weight_decay"]).add_(part.view(param.shape), alpha=-group["lr"] / begun)
        state["step"].add_(1)


def pack(values: Tensor) -> tuple[Tensor, Tensor]:
    """Signs, eight in a byte, and the mean magnitude of each block; what they leave out stays in `values`."""
    bits = torch.empty(values.numel() // 8, dtype=torch.uint8, device=values.device)
    sizes = torch.empty(values.numel() // BLOCK, dtype=values.dtype, device=values.device)
    weights = _weights(values.device)
    for begin in range(0, values.numel(), PIECE):
        part = values[begin : begin + PIECE].view(-1, BLOCK)
        is_positive, magnitude = part >= 0, sizes[begin // BLOCK : (begin + PIECE) // BLOCK]
        torch.mean(part.abs(), dim=1, out=magnitude)
        packed = (is_positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        bits[begin // 8 : (begin + PIECE) // 8] = packed
        part.sub_(torch.where(is_positive, magnitude[:, None], -magnitude[:, None]))
    return bits, sizes


def add_unpacked(values: Tensor, bits: Tensor, sizes: Tensor) -> None:
    """To `values`, which may be shorter than what was packed."""
    weights = _weights(bits.device)
    for begin in range(0, values.numel(), PIECE):
        part, packed = values[begin : begin + PIECE], bits[begin // 8 : (begin + PIECE) // 8]
        is_positive = (packed[:, None] & weights).ne(0).view(-1, BLOCK)
        magnitude = sizes[begin // BLOCK : (begin + PIECE) // BLOCK, None]
        part.add_(torch.where(is_positive, magnitude, -magnitude).view(-1)[: part.numel()])


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
