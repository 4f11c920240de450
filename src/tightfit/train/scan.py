"""Which selective scan Mamba runs on, and in which precision its sensitive numbers are.

Ours is put into Hugging Face's modules by `tightfit.mamba.install`. Hugging Face itself binds the official kernels when
they are installed. Its own fallback adds the bias of the time step in the working precision; here it is added in fp32,
as the kernels and our path do: A, D and that bias decide how long a state lives.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import Any

import torch

from tightfit.mamba.install import install
from tightfit.messages import Message
from tightfit.types import Levers

_MODULES = {
    "mamba": "transformers.models.mamba.modeling_mamba",
    "falcon_mamba": "transformers.models.falcon_mamba.modeling_falcon_mamba",
}


def install_scan(model_type: str, levers: Levers) -> Message | None:
    """Prepare the model's module; what to say where the scan is another than was planned."""
    if model_type not in _MODULES:
        return None
    if levers.scan == "tightfit":
        install()
        return None
    official = importlib.util.find_spec("mamba_ssm") is not None
    module = import_module(_MODULES[model_type])
    if not (official and levers.scan == "official"):
        _wide_time_step(module)
    if levers.scan == "official" and not official:
        return Message("train.no-mamba-ssm")
    return None


def _wide_time_step(module: Any) -> None:
    scan = getattr(module, "mamba_selective_scan", None)
    if scan is None or getattr(scan, "wide", False):
        return

    def wide(hidden_states: torch.Tensor, dt: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return scan(hidden_states, dt.float(), *args, **kwargs)

    wide.wide = True  # type: ignore[attr-defined]
    module.mamba_selective_scan = wide
