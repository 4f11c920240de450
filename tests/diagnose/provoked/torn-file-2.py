# ruff: noqa
from pathlib import Path

import torch

torch.save({"weight": torch.ones(1000)}, "optimizer.pt")
whole = Path("optimizer.pt").read_bytes()
Path("optimizer.pt").write_bytes(whole[:2000])
torch.load("optimizer.pt")  # noqa: TID251
