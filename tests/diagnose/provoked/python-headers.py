# ruff: noqa
"""An extension that needs Python's headers, and a compiler that is not told where they are."""

import subprocess
from pathlib import Path

Path("main.c").write_text("#include <Python.h>\nint main(void) { return 0; }\n")
subprocess.check_call(["gcc", "main.c", "-O3", "-shared", "-fPIC", "-o", "cuda_utils.so"])
