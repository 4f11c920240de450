"""What a scan is asked for, checked once: each mistake is one sentence that names the argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.messages import text

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NEEDED = ("u", "delta", "A", "B", "C")
OPTIONAL = ("D", "z", "delta_bias", "initial_state", "starts")


class ScanError(ValueError):
    """An argument that no path can work with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """b: batch, d: channels, n: states, l: length."""

    u: Tensor
    """(b, d, l), with any strides; so are delta and z."""
    delta: Tensor
    A: Tensor
    """(d, n), negative for a state that fades."""
    B: Tensor
    """(b, n, l); so is C."""
    C: Tensor
    D: Tensor | None
    """(d)"""
    z: Tensor | None
    delta_bias: Tensor | None
    """(d)"""
    delta_softplus: bool
    initial_state: Tensor | None
    """(b, d, n)"""
    starts: Tensor | None
    """(b, l), true where a document starts."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """b, d, n, l."""
        batch, channels, length = self.u.shape
        return batch, channels, self.A.shape[1], length


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
    initial_state: Tensor


def as_autograd_wants(scan: Scan, grads: Gradients) -> tuple[Tensor | None, ...]:
    """In the order of a scan's inputs, each in the dtype of its own; none for `starts`."""

    def fit(grad: Tensor | None, given: Tensor | None) -> Tensor | None:
        return None if grad is None or given is None else grad.to(given.dtype)

    return (
        fit(grads.u, scan.u), fit(grads.delta, scan.delta), fit(grads.A, scan.A), fit(grads.B, scan.B),
        fit(grads.C, scan.C), fit(grads.D, scan.D), fit(grads.z, scan.z),
        fit(grads.delta_bias, scan.delta_bias), fit(grads.initial_state, scan.initial_state), None,
    )  # fmt: skip


def check(scan: Scan) -> Scan:
    """The same, or ScanError."""
    # Every argument is a tensor, of a dtype that can be computed with, and all are on one device.
    for name in (*NEEDED, *OPTIONAL):
        tensor = getattr(scan, name)
        if tensor is None and name in OPTIONAL:
            continue
        if not isinstance(tensor, Tensor):
            raise ScanError(text("scan.no-tensor", name=name, kind=type(tensor).__name__))
        if name == "starts" and tensor.dtype != torch.bool:
            raise ScanError(text("scan.starts-dtype", dtype=tensor.dtype))
        if name != "starts" and tensor.dtype not in FLOATS:
            raise ScanError(text("scan.scan-dtype", name=name, dtype=tensor.dtype))
        if tensor.device != scan.u.device:
            raise ScanError(text("scan.u-device", name=name, device=tensor.device, other=scan.u.device))
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
    beside = text("scan.beside-u", u=list(scan.u.shape), a=list(scan.A.shape))
    for name, shape in wanted.items():
        tensor = getattr(scan, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ScanError(text("scan.shape", name=name, wanted=list(shape), beside=beside, shape=list(tensor.shape)))
    return scan
