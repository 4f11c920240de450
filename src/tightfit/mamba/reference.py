"""The selective scan by its definition, a step at a time: what every other path is held against.

For each channel d and state n, with a time step δ that may get a bias and a softplus first:

    h[t] = exp(δ[t] A) h[t-1] + δ[t] B[t] u[t]          h before the first step is the initial state, or zero
    y[t] = Σₙ C[t] h[t] + D u[t]                        times silu(z[t]), where there is a gate

A step that starts a document forgets what was before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tightfit.mamba.arguments import Scan


def reference_scan(scan: Scan) -> tuple[Tensor, Tensor]:
    """The output, and the state after the last step. In float64 if an input is, else in float32."""
    wide = torch.float64 if torch.float64 in (scan.u.dtype, scan.A.dtype) else torch.float32
    u, delta, A, B, C = (each.to(wide) for each in (scan.u, scan.delta, scan.A, scan.B, scan.C))
    if scan.delta_bias is not None:
        delta = delta + scan.delta_bias.to(wide)[:, None]
    if scan.delta_softplus:
        delta = F.softplus(delta)
    batch, channels, length = u.shape
    h = u.new_zeros(batch, channels, A.shape[1]) if scan.initial_state is None else scan.initial_state.to(wide)
    outputs = []
    for t in range(length):
        if scan.starts is not None:
            h = torch.where(scan.starts[:, t, None, None], torch.zeros_like(h), h)
        step = delta[:, :, t, None]
        h = torch.exp(step * A) * h + step * B[:, None, :, t] * u[:, :, t, None]
        outputs.append((h * C[:, None, :, t]).sum(-1))
    y = torch.stack(outputs, dim=-1)
    if scan.D is not None:
        y = y + scan.D.to(wide)[:, None] * u
    if scan.z is not None:
        y = y * F.silu(scan.z.to(wide))
    return y.to(scan.u.dtype), h
