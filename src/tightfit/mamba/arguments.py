"""What a scan is asked for, checked once: each mistake is one sentence that names the argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


def checked(scan: Scan) -> Scan:
    """The same, or ScanError."""
    if scan.u.dim() != 3:
        raise ScanError(f"u must be (batch, channels, length), not {list(scan.u.shape)}")
    if scan.A.dim() != 2 or scan.A.shape[0] != scan.u.shape[1]:
        raise ScanError(f"A must be ({scan.u.shape[1]} channels, states), not {list(scan.A.shape)}")
    batch, channels, states, length = scan.sizes
    if not all((batch, channels, states, length)):
        raise ScanError(f"u {list(scan.u.shape)} with A {list(scan.A.shape)} is empty: there is nothing to scan")
    wanted = {
        "delta": (scan.delta, (batch, channels, length)),
        "B": (scan.B, (batch, states, length)),
        "C": (scan.C, (batch, states, length)),
        "D": (scan.D, (channels,)),
        "z": (scan.z, (batch, channels, length)),
        "delta_bias": (scan.delta_bias, (channels,)),
        "initial_state": (scan.initial_state, (batch, channels, states)),
        "starts": (scan.starts, (batch, length)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ScanError(f"{name} must be {list(shape)} beside u {list(scan.u.shape)}, not {list(tensor.shape)}")
        if tensor is not None and tensor.device != scan.u.device:
            raise ScanError(f"{name} is on {tensor.device} and u on {scan.u.device}: put them on one device")
    for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"):
        tensor = getattr(scan, name)
        if tensor is not None and tensor.dtype not in FLOATS:
            raise ScanError(f"{name} is {tensor.dtype}: the scan takes bf16, fp16, fp32 and fp64")
    if scan.starts is not None and scan.starts.dtype != torch.bool:
        raise ScanError(f"starts must be bool, true where a document starts, not {scan.starts.dtype}")
    return scan
