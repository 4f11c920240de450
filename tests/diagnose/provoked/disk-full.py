# ruff: noqa
import torch

torch.save({"weights": torch.ones(1_000_000)}, "/dev/full")
