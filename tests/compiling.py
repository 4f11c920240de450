"""What DeepSpeed compiles when it is first used: for tests before anybody is timed, and by one process for all."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}


@functools.cache
def compile_part(name: str) -> None:
    """Unless it is there. Whoever comes meanwhile waits, however long it takes."""
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    built = folder / name / f"{name}.so"
    if built.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            code = "import sys; from deepspeed.accelerator import get_accelerator as here; "
            code += "builder = here().create_op_builder(sys.argv[1]); builder and builder.load(verbose=False)"
            # Where it cannot be built, the tests that need it say so better.
            subprocess.run([sys.executable, "-c", code, BUILDERS[name]], check=False, capture_output=True)
