# ruff: noqa
import torch

torch.linalg.svd(torch.ones(4, 4).half())
