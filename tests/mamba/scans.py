"""Random scans, and how far one result is from another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.mamba.arguments import Scan
from tightfit.mamba.scan import Path, run

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    channels: int = 5
    length: int = 37
    states: int = 4


def make(
    shape: Shape, dtype: torch.dtype = torch.float32, *, seed: int = 0, spread: float = 3.0, shift: float = -2.0
) -> dict[str, Tensor]:
    """Inputs as training has them: A from slow to fast, time steps from tiny to large (`spread`, around `shift`)."""
    drawn = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=drawn)

    b, d, length, n = shape.batch, shape.channels, shape.length, shape.states
    rates = torch.arange(1, n + 1, dtype=torch.float32).expand(d, n) * torch.exp(0.3 * normal(d, n))
    wide = {
        "u": normal(b, d, length),
        "delta": normal(b, d, length) * spread + shift,
        "A": -rates,
        "B": normal(b, n, length),
        "C": normal(b, n, length),
        "D": normal(d),
        "z": normal(b, d, length),
        "delta_bias": normal(d),
        "initial_state": normal(b, d, n),
    }
    working = ("u", "delta", "B", "C", "z")
    return {name: tensor.to(dtype) if name in working else tensor for name, tensor in wide.items()}


def results(
    inputs: dict[str, Tensor], path: Path, *, starts: Tensor | None = None, wide: bool = False, softplus: bool = True
) -> dict[str, Tensor]:
    """Output, last state and all gradients of a loss that looks at both; `wide`: from the same inputs in float64."""
    own = {name: tensor.double() if wide else tensor for name, tensor in inputs.items()}
    own = {name: tensor.detach().requires_grad_() for name, tensor in own.items()}
    missing = {name: None for name in NAMES if name not in own}
    out, last = run(Scan(**own, **missing, delta_softplus=softplus, starts=starts), path)
    weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out)
    loss = (out * weights).double().sum() + (last.double() ** 2).sum()
    grads = torch.autograd.grad(loss, list(own.values()))
    return {
        "out": out.detach(),
        "last": last.detach(),
        **{f"d{name}": grad for name, grad in zip(own, grads, strict=True)},
    }


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    expected = expected.double()
    scale = float(expected.norm())
    return float((found.double() - expected).norm()) / (scale or 1.0)
