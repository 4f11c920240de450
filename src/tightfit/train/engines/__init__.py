"""The two engines behind one small interface.

An engine takes the skeleton of a model, shards it, and turns micro batches into optimizer steps. What it does not do:
choose anything, read data, write files. The loop calls `forward` and `backward`
for each micro batch of a window, and `step` once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from tightfit.messages import Message
from tightfit.train.build import DTYPES
from tightfit.train.engines.states import Counters, Shapes, State
from tightfit.types import TightfitError


class Diverged(TightfitError):
    """The loss, or the gradients, are no numbers any more."""

    kind: Literal["not-finite", "loss-scale"] = "not-finite"
    """As the last words have it."""


class ScaleExhausted(Diverged):
    """Under fp16 gradients overflow at the smallest loss scale too."""

    kind = "loss-scale"


AGAINST_OVERFLOWS = Message("engine.against-overflows")
"""What helps where no loss scale does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What an optimizer step did."""

    grad_norm: float | None
    """Before clipping; None: nobody measured it."""
    skipped: bool
    """A gradient overflowed, and nothing was updated."""
    loss_scale: float | None
    """fp16's; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldHere:
    """What this rank really holds, to be set against the whole."""

    weight_bytes: int
    """Of parameters, on this rank, at rest."""
    whole_weight_bytes: int
    state_elements: int
    """Of the optimizer's fp32 copies or, without them, of what it works on."""
    trainable_elements: int
    weights_on: str
    """cpu, cuda or nvme."""
    optimizer_on: str
    frozen_in: str
    """The precisions of floating-point weights that do not train, at rest; of 4-bit ones there is none to tell."""
    trained_in: str
    optimizer_in: str
    """Of its fp32 copies or, without them, of what it works on."""
    fair_elements: int | None = None
    """The most of `state_elements` that a rank may have where parameters are not cut evenly; None: an even share."""


def precisions(tensors: Iterable[Tensor]) -> str:
    """Of those with floating-point numbers: bf16, or bf16,fp32."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    found = {each.dtype for each in tensors if each.is_floating_point()}
    return ",".join(sorted(words.get(dtype, str(dtype).removeprefix("torch.")) for dtype in found))


class Engine(Protocol):
    model: Any
    """The model as it was wrapped by adapters and sharded."""

    def forward(self, inputs: dict[str, Tensor], divisor: float) -> Tensor:
        """A micro batch's share of the window's mean loss, times the number of ranks.

        `divisor` is the number of tokens of the window that count.
        """
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """`last`: of the window; what follows is its step."""
        ...

    def step(self, learning_rate: float) -> Stepped: ...

    def forget(self) -> None:
        """Undo what steps at learning rate zero left behind: moments, counters, loss scale."""
        ...

    def train(self, mode: bool) -> None:
        """Training, or evaluation."""
        ...

    def holdings(self) -> HeldHere: ...

    def states(self, *, write: bool) -> Iterator[State]:
        """fp32 copies and moments that this rank holds, each to be done with before the next is asked for.

        `write`: what is written into them stays.
        """
        ...

    def shapes(self) -> Shapes:
        """Which states there are, those of other ranks too."""
        ...

    def counters(self) -> Counters: ...

    def go_on(self, counters: Counters, step: int) -> None:
        """Weights and states were written from outside, as they were after `step` steps."""
        ...
