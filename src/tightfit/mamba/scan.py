"""`selective_scan`: one signature, and the path that fits the tensors."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from tightfit.mamba.arguments import Scan, ScanError, check
from tightfit.mamba.chunked import chunked_scan, reference_scan
from tightfit.messages import text

Path = Literal["reference", "chunked", "triton"]

MOST_STATES = 64  # that a program of the GPU's path keeps in registers


def selective_scan(  # noqa: PLR0913 - the official signature
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    path: Path | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba's selective scan, forward and backward; arguments as in mamba-ssm's `selective_scan_fn`.

    u, delta, z: (batch, channels, length); A: (channels, states); B, C: (batch, states, length); D, delta_bias:
    (channels). Beyond the official one: `initial_state` (batch, channels, states) and the last state have gradients,
    and `starts` (batch, length) is true where a document starts, before which nothing is remembered.
    """
    asked = Scan(u, delta, A, _ungroup(B), _ungroup(C), D, z, delta_bias, initial_state, starts, delta_softplus)
    out, last = run(check(asked), path)
    return (out, last) if return_last_state else out


def run(scan: Scan, path: Path | None = None) -> tuple[Tensor, Tensor]:
    """The output and the last state, by that path or the one that fits. Whoever asks for a path by name gets that one
    or ScanError, never another."""
    with torch.autocast(scan.u.device.type, enabled=False):  # which would round the sums of the CPU's path to 16 bits
        path = path or fitting(scan)
        if path == "reference":
            return reference_scan(scan)
        if path == "chunked":
            return chunked_scan(scan)
        if path not in get_args(Path):
            raise ScanError(text("scan.no-path", path=path, known=", ".join(get_args(Path))))
        if scan.sizes[2] > MOST_STATES:
            raise ScanError(text("scan.too-many-states", states=scan.sizes[2], most=MOST_STATES))
        for name in ("u", "A"):
            if getattr(scan, name).dtype == torch.float64:
                raise ScanError(text("scan.triton-fp64", name=name))
        if not has_triton():
            raise ScanError(text("scan.needs-triton"))
        if scan.u.device.type != "cuda":
            raise ScanError(text("scan.triton-needs-gpu", device=scan.u.device))
        from tightfit.mamba.gpu_scan import triton_scan

        return triton_scan(scan)


def fitting(scan: Scan) -> Path:
    """Triton on a GPU; the chunked path elsewhere, and where Triton cannot."""
    device = scan.u.device.type
    if device not in ("cuda", "cpu", "meta"):
        _say(text("scan.slow-device", device=device))
    if device != "cuda" or torch.float64 in (scan.u.dtype, scan.A.dtype):
        return "chunked"
    if not has_triton():
        _say(text("scan.slow-without-triton"))
        return "chunked"
    if scan.sizes[2] > MOST_STATES:
        _say(text("scan.slow-many-states", most=MOST_STATES))
        return "chunked"
    return "triton"


def _ungroup(tensor: Tensor) -> Tensor:
    """The official one takes B and C by groups of channels too; one group is the usual case."""
    one_group = isinstance(tensor, Tensor) and tensor.dim() == 4 and tensor.shape[1] == 1
    return tensor[:, 0] if one_group else tensor


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _say(sentence: str) -> None:
    """Once."""
    warnings.warn(sentence, stacklevel=4)
