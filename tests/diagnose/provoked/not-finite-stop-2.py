# ruff: noqa
import torch

torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)
