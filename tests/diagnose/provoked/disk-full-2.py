# ruff: noqa
from pathlib import Path

with Path("/dev/full").open("w") as file:
    file.write("x" * 100_000)
