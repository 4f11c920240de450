"""What a scan is asked for, checked once: each mistake is one sentence that names the argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def fitted(grad: Tensor | None, given: Tensor | None) -> Tensor | None:
        return None if grad is None or given is None else grad.to(given.dtype)

    return (
        fitted(grads.u, scan.u), fitted(grads.delta, scan.delta), fitted(grads.A, scan.A), fitted(grads.B, scan.B),
        fitted(grads.C, scan.C), fitted(grads.D, scan.D), fitted(grads.z, scan.z),
        fitted(grads.delta_bias, scan.delta_bias), fitted(grads.initial_state, scan.initial_state), None,
    )  # fmt: skip


def checked(scan: Scan) -> Scan:
    """The same, or ScanError."""
    _check_kinds(scan)
    if scan.u.dim() != 3:
        raise ScanError(f"u must be (batch, channels, length), not {list(scan.u.shape)}")
    if scan.A.dim() != 2 or scan.A.shape[0] != scan.u.shape[1]:
        raise ScanError(f"A must be ({scan.u.shape[1]} channels, states), not {list(scan.A.shape)}")
    batch, channels, states, length = scan.sizes
    if not all((batch, channels, states, length)):
        raise ScanError(f"u {list(scan.u.shape)} with A {list(scan.A.shape)} is empty: there is nothing to scan")
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
    beside = f"beside u {list(scan.u.shape)} and A {list(scan.A.shape)}"
    for name, shape in wanted.items():
        tensor = getattr(scan, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ScanError(f"{name} must be {list(shape)} {beside}, not {list(tensor.shape)}")
    return scan


def _check_kinds(scan: Scan) -> None:
    """Every argument is a tensor, of a dtype that can be computed with, and all are on one device."""
    for name in (*NEEDED, *OPTIONAL):
        tensor = getattr(scan, name)
        if tensor is None and name in OPTIONAL:
            continue
        if not isinstance(tensor, Tensor):
            raise ScanError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if name == "starts" and tensor.dtype != torch.bool:
            raise ScanError(f"starts must be bool, true where a document starts, not {tensor.dtype}")
        if name != "starts" and tensor.dtype not in FLOATS:
            raise ScanError(f"{name} is {tensor.dtype}: the scan takes bf16, fp16, fp32 and fp64")
        if tensor.device != scan.u.device:
            raise ScanError(f"{name} is on {tensor.device} and u on {scan.u.device}: put them on one device")
