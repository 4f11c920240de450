# ruff: noqa
from pathlib import Path

from deepspeed.launcher.runner import fetch_hostfile

Path("hosts").write_text("node-1 slot=8\n")
fetch_hostfile("hosts")
