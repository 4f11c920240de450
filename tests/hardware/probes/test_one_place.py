"""Each maker's tool is asked in one file: what it is asked, and how, is changed there alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tightfit

PACKAGE = Path(tightfit.__file__).parent


@pytest.mark.parametrize(
    ("command_line", "files"),
    [
        (r"--query-gpu|--query-compute-apps|\"topo\"|-lms", {"probes/nvidia.py"}),
        (r"--showproductname|--showmeminfo|--showpids|--showtopotype", {"probes/rocm_smi.py"}),
        (r"\"(metric|static|process)\", \"--", {"probes/amd_smi.py"}),
        (r"\"pynvml\"", {"probes/libraries.py", "child.py"}),
        (r"/opt/rocm/bin|/opt/hyhal|wsl/lib", {"probes/tools.py"}),
        (r"torch\.cuda\.device_count\(\)", {"child.py"}),
    ],
)
def test_what_a_tool_is_asked_stands_in_one_file(command_line: str, files: set[str]) -> None:
    desk = (
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("train", "mamba", "measure")
    )
    found = {path for path in desk if re.search(command_line, path.read_text(encoding="utf-8"))}
    assert found == {PACKAGE / "hardware" / name for name in files}
