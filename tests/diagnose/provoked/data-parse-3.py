# ruff: noqa
from pathlib import Path

Path("train.txt").write_bytes("größer".encode("latin-1"))
Path("train.txt").read_text(encoding="utf-8")
