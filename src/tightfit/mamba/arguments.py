"""What a scan is asked for, checked once: each mistake is one sentence that names the argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightfit.mamba.operators import Outputs, absent
from tightfit.messages import text

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TENSORS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state", "starts")
NEEDED, DIFFERENTIABLE = TENSORS[:5], TENSORS[:-1]


class ScanError(ValueError):
    """An argument that no path can work with."""


@dataclass(frozen=True, slots=True)
class Scan:
    """b: batch, d: channels, n: states, l: length."""

    u: Tensor  # (b, d, l), with any strides; so are delta and z
    delta: Tensor
    A: Tensor  # (d, n), negative for a state that fades
    B: Tensor  # (b, n, l); so is C
    C: Tensor
    D: Tensor | None = None  # (d)
    z: Tensor | None = None
    delta_bias: Tensor | None = None  # (d)
    initial_state: Tensor | None = None  # (b, d, n)
    starts: Tensor | None = None  # (b, l), true where a document starts
    delta_softplus: bool = False
    log_rates: bool = False  # A is given as the logarithm of -A, as a model keeps it; and so is its gradient

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """b, d, n, l."""
        batch, channels, length = self.u.shape
        return batch, channels, self.A.shape[1], length

    @property
    def wide(self) -> torch.dtype:
        """What it is computed in where that may be fp64."""
        return torch.float64 if torch.float64 in (self.u.dtype, self.A.dtype) else torch.float32

    @property
    def rates(self) -> Tensor:
        """A, as it is computed with."""
        given = self.A.to(self.wide)
        return -torch.exp(given) if self.log_rates else given

    def grad_of_rates(self, found: Tensor, rates: Tensor) -> Tensor:
        """The gradient of what is given as A, from that of the rates."""
        return found * rates if self.log_rates else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Of a scan's inputs. Those that are sums over many numbers are in the precision that they were computed in."""

    u: Tensor
    delta: Tensor
    z: Tensor | None
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None

    def outputs(self, scan: Scan) -> Outputs:
        """As an operator returns them: in the dtypes of what they are gradients of."""
        pairs = ((getattr(scan, name), getattr(self, name)) for name in DIFFERENTIABLE)
        return tuple(absent(scan.u) if given is None or grad is None else grad.to(given.dtype) for given, grad in pairs)


def make_room(scan: Scan) -> Gradients:
    """For all gradients; of those that are sums over many numbers, in the precision that they are computed in."""
    batch, channels, states, length = scan.sizes

    def sums(*shape: int) -> Tensor:
        return scan.u.new_empty(shape, dtype=scan.wide)

    return Gradients(
        u=torch.empty_like(scan.u), delta=torch.empty_like(scan.delta),
        z=None if scan.z is None else torch.empty_like(scan.z), A=sums(channels, states),
        B=scan.B.new_empty(batch, states, length), C=scan.C.new_empty(batch, states, length),
        D=None if scan.D is None else sums(channels), delta_bias=None if scan.delta_bias is None else sums(channels),
        initial_state=sums(batch, channels, states),
    )  # fmt: skip


def check(scan: Scan) -> Scan:
    """The same, or ScanError."""
    given = {name: getattr(scan, name) for name in TENSORS}
    check_tensors(given, NEEDED, "scan.scan-dtype")
    if scan.u.dim() != 3:
        raise ScanError(text("scan.u-shape", shape=list(scan.u.shape)))
    if scan.A.dim() != 2 or scan.A.shape[0] != scan.u.shape[1]:
        raise ScanError(text("scan.a-shape", channels=scan.u.shape[1], shape=list(scan.A.shape)))
    batch, channels, states, length = scan.sizes
    if not all((batch, channels, states, length)):
        raise ScanError(text("scan.empty", u=list(scan.u.shape), a=list(scan.A.shape)))
    wanted = {
        "delta": (batch, channels, length),
        "B": (batch, states, length),
        "C": (batch, states, length),
        "D": (channels,),
        "z": (batch, channels, length),
        "delta_bias": (channels,),
        "initial_state": (batch, channels, states),
        "starts": (batch, length),
    }
    check_shapes(given, wanted, "scan.beside-u", u=scan.u, a=scan.A)
    return scan


def check_tensors(given: Mapping[str, Any], needed: tuple[str, ...], wrong_dtype: str) -> None:
    """Every argument is a tensor, of a dtype that can be computed with, and all are where the first is."""
    first = next(iter(given))
    for name, tensor in given.items():
        if tensor is None and name not in needed:
            continue
        if not isinstance(tensor, Tensor):
            raise ScanError(text("scan.no-tensor", name=name, kind=type(tensor).__name__))
        if name == "starts" and tensor.dtype != torch.bool:
            raise ScanError(text("scan.starts-dtype", dtype=tensor.dtype))
        if name != "starts" and tensor.dtype not in FLOATS:
            raise ScanError(text(wrong_dtype, name=name, dtype=tensor.dtype))
        if tensor.device != given[first].device:
            where = {"device": tensor.device, "first": first, "other": given[first].device}
            raise ScanError(text("scan.device", name=name, **where))


def check_shapes(
    given: Mapping[str, Tensor | None], wanted: Mapping[str, tuple[int, ...]], beside: str, **others: Tensor
) -> None:
    """`beside`: the id of the words for what the shapes follow from, with the shapes of the others."""
    for name, shape in wanted.items():
        tensor = given[name]
        if tensor is not None and tuple(tensor.shape) != shape:
            follows = text(beside, **{each: list(other.shape) for each, other in others.items()})
            raise ScanError(text("scan.shape", name=name, wanted=list(shape), beside=follows, shape=list(tensor.shape)))


def strides(tensor: Tensor | None, count: int = 3) -> tuple[int, ...]:
    """As a kernel takes them, which has them of what is not given too."""
    return (0,) * count if tensor is None else tensor.stride()


def as_bytes(starts: Tensor | None) -> Tensor | None:
    """As kernels read them."""
    return None if starts is None else starts.view(torch.uint8)
