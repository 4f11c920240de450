# ruff: noqa
import collections

import torch

torch.save({"args": collections.Counter(a=1), "f": print}, "optimizer.pt")
torch.load("optimizer.pt", weights_only=True)  # noqa: TID251
