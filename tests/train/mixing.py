"""A worker that calls `note(LOG)` first says how each of its Mamba mixers ran.

A letter for every call goes into LOG.RANK: f where the mixer was one fused function, u where its modules were called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tightfit.mamba import install


def told(letter: str, function: Callable[..., Any], descriptor: int) -> Callable[..., Any]:
    def tell(*args: Any, **settings: Any) -> Any:
        os.write(descriptor, letter.encode())
        return function(*args, **settings)

    return tell


def note(log: str) -> None:
    descriptor = os.open(f"{log}.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    install.mamba_mixer = told("f", install.mamba_mixer, descriptor)
    install._call_submodules = told("u", install._call_submodules, descriptor)
