"""The worker, which says how each of its Mamba mixers ran.

    python mixing.py LOG WORKER …

A letter for every call goes into LOG.RANK: f where the mixer was one fused function, u where its modules were called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tightfit.mamba import install
from tightfit.train.__main__ import main


def told(letter: str, function: Callable[..., Any], descriptor: int) -> Callable[..., Any]:
    def tell(*args: Any, **settings: Any) -> Any:
        os.write(descriptor, letter.encode())
        return function(*args, **settings)

    return tell


if __name__ == "__main__":
    log = os.open(f"{sys.argv[1]}.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    install.mamba_mixer = told("f", install.mamba_mixer, log)
    install._unfused = told("u", install._unfused, log)
    main(sys.argv[2:])
