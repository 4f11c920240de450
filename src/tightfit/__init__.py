"""tightfit makes large-model training fit the GPUs you have, and stay fitted.

From Python: `tightfit.plan(model="7b_mamba", gpus="6x32GB")` and `tightfit.estimate(…)`; see `api.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightfit.api import estimate as estimate
    from tightfit.api import plan as plan
    from tightfit.job import Job as Job
    from tightfit.job import Machine as Machine

__version__ = "0.1.0"

__all__ = ["Job", "Machine", "__version__", "estimate", "plan"]

_HOMES = {"Job": "tightfit.job", "Machine": "tightfit.job", "estimate": "tightfit.api", "plan": "tightfit.api"}
"""Loaded when first asked for: `tightfit --help` needs none of them."""


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tightfit' has no attribute {name!r}")
