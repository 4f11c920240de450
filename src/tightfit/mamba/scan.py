"""`selective_scan`: one signature, and the path that fits the tensors."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tightfit.mamba import chunked, operators
from tightfit.mamba.arguments import DIFFERENTIABLE, TENSORS, Scan, ScanError, check, make_room
from tightfit.mamba.chunked import reference_scan
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
    path = path or fitting(scan)
    if path == "reference":
        with torch.autocast(scan.u.device.type, enabled=False):  # which would round the sums to 16 bits
            return reference_scan(scan)
    if path not in get_args(Path):
        raise ScanError(text("scan.no-path", path=path, known=", ".join(get_args(Path))))
    if path == "triton":
        _check_triton(scan)
    out, last, _ = _scan(*(getattr(scan, name) for name in TENSORS), scan.delta_softplus, path)
    return out, last


def _check_triton(scan: Scan) -> None:
    if scan.sizes[2] > MOST_STATES:
        raise ScanError(text("scan.too-many-states", states=scan.sizes[2], most=MOST_STATES))
    for name in ("u", "A"):
        if getattr(scan, name).dtype == torch.float64:
            raise ScanError(text("scan.triton-fp64", name=name))
    if not has_triton():
        raise ScanError(text("scan.needs-triton"))
    if scan.u.device.type != "cuda":
        raise ScanError(text("scan.triton-needs-gpu", device=scan.u.device))


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


HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Known beforehand: a compiler that traces the scan cannot look."""


def has_triton() -> bool:
    return HAS_TRITON


@cache
def _say(sentence: str) -> None:
    """Once."""
    warnings.warn(sentence, stacklevel=4)


def _split(given: tuple[Any, ...]) -> tuple[Scan, Any]:
    """The scan, and the module that has both directions of its path."""
    *scan, path = given
    if path == "chunked":
        return Scan(*scan), chunked
    from tightfit.mamba import gpu_scan

    return Scan(*scan), gpu_scan


_ARGUMENTS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
    "Tensor? initial_state, Tensor? starts, bool softplus, str path"
)
_scan = operators.Operator(f"scan({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
_scan_backward = operators.Operator(
    f"scan_backward(Tensor borders, Tensor dout, Tensor? dlast, {_ARGUMENTS}) -> "
    f"({', '.join(['Tensor'] * len(DIFFERENTIABLE))})"
)


@_scan.computes
def run_scan(*given: Any) -> operators.Outputs:
    scan, path = _split(given)
    with torch.autocast(scan.u.device.type, enabled=False):  # which would round the sums of the CPU's path to 16 bits
        found: operators.Outputs = path.run_forward(scan)
    return found


@_scan.shapes
def shape_scan(*given: Any) -> operators.Outputs:
    scan, path = _split(given)
    found: operators.Outputs = path.make_places(scan)
    return found


@_scan_backward.computes
def run_scan_backward(borders: Tensor, dout: Tensor, dlast: Tensor | None, *given: Any) -> operators.Outputs:
    scan, path = _split(given)
    found: operators.Outputs = path.run_backward(scan, borders, dout, dlast).outputs(scan)
    return found


@_scan_backward.shapes
def shape_scan_backward(borders: Tensor, dout: Tensor, dlast: Tensor | None, *given: Any) -> operators.Outputs:
    scan, _ = _split(given)
    return make_room(scan).outputs(scan)


@_scan.keeps
def keep_for_scan(ctx: Any, given: tuple[Any, ...], outputs: operators.Outputs) -> None:
    *tensors, ctx.softplus, ctx.path = given
    ctx.save_for_backward(outputs[2], *tensors)
    ctx.mark_non_differentiable(outputs[2])


@_scan.differentiates
def differentiate_scan(ctx: Any, dout: Tensor | None, dlast: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    borders, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(tensors[0]) if dout is None else dout
    grads = _scan_backward(borders, dout, dlast, *tensors, ctx.softplus, ctx.path)
    found = (grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=False))
    return (*found, None, None, None)
