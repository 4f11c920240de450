"""The optimizer's side of a unit of the streaming engine: fp32 copies and moments on the host, and AdamW over them.

Everything that trains in a unit lies flat, one parameter after the other. An update walks over it in pieces that fit in
the processor's caches, so that what follows the fused kernel (rounding to the working precision) finds the new
weights there: at the rate of the host's memory each byte is read once and written once.

Ranges begin at multiples of `BLOCK` elements and end there too, or where the unit ends. Torch's kernel computes the
last few elements of what it is given in another way than the vectors before them, with other roundings; where pieces
and ranges keep to blocks, only a unit's last few elements are of that kind, whoever updates which range. For the same
reason weight decay, of which a unit has several, is applied before the kernel: the product is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tightfit.train.engines import MASTER, moments
from tightfit.train.optimizers import BETAS, BLOCK, EPS

PIECE = BLOCK * 2**12  # elements that are updated at a time


class HostStates:
    """fp32 copies and moments of one unit's trained elements, flat, on the host, and their update."""

    def __init__(
        self, decays: Sequence[tuple[int, float]], states: str, *, master: bool, allocate: Callable[[int], Tensor]
    ) -> None:
        """`decays`: consecutive segments of the unit, elements and weight decay of each; `allocate` gives so many bytes
        of host memory. Without `master`, the weights themselves are what is updated."""
        assert states == "fp32"
        self._decays = tuple(decays)
        self.elements = sum(count for count, _ in self._decays)
        self.kinds = ((MASTER,) if master else ()) + moments("adamw")
        self._held = {kind: allocate(4 * self.elements).view(torch.float32) for kind in self.kinds}

    def start(self, weights: Tensor) -> None:
        """Copies of the unit's weights, and moments as before the first step."""
        if MASTER in self._held:
            self._held[MASTER].copy_(weights)
        self.forget()

    @torch.no_grad()
    def update(
        self,
        gradients: Tensor,
        weights: Tensor,
        *,
        rate: float,
        step: int,
        factor: float,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        """Step number `step`, from 1, of elements `begin` to `end`, by `gradients` times `factor`, which clipping and
        the loss scale make; the new weights are written to `weights`. Both tensors are the whole unit's."""
        end = self.elements if end is None else end
        if begin % BLOCK or (end % BLOCK and end != self.elements):
            raise ValueError(f"elements {begin} to {end} are no whole blocks of {BLOCK}")
        (beta1, beta2), count = BETAS, torch.tensor(float(step))
        scaled = torch.empty(min(PIECE, end - begin))
        for at in range(begin, end, PIECE):
            piece = slice(at, min(at + PIECE, end))
            gradient = gradients[piece]
            if factor != 1.0:
                gradient = torch.mul(gradient, factor, out=scaled[: gradient.numel()])
            updated = self._held.get(MASTER, weights)
            for first, last, decay in self._segments(piece):
                if decay:
                    updated[first:last].mul_(1 - rate * decay)
            first_moment, second_moment = (self._held[kind][piece] for kind in moments("adamw"))
            torch._fused_adamw_(
                [updated[piece]], [gradient], [first_moment], [second_moment], [], [count],
                lr=rate, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=EPS, amsgrad=False, maximize=False,
            )  # fmt: skip
            if updated is not weights:
                weights[piece].copy_(updated[piece])

    def _segments(self, piece: slice) -> Iterator[tuple[int, int, float]]:
        """Those of the unit's segments that a piece overlaps, cut to it."""
        start = 0
        for count, decay in self._decays:
            first, last = max(start, piece.start), min(start + count, piece.stop)
            if first < last:
                yield first, last, decay
            start += count

    def read(self, kind: str, begin: int, end: int) -> Tensor:
        """Elements `begin` to `end` of one of `kinds`, in fp32."""
        return self._held[kind][begin:end].clone()

    def write(self, kind: str, begin: int, values: Tensor) -> None:
        """Put `values` in place from element `begin` on."""
        self._held[kind][begin : begin + values.numel()].copy_(values.view(-1))

    def forget(self) -> None:
        """Moments as before the first step."""
        for kind in moments("adamw"):
            self._held[kind].zero_()
