# ruff: noqa
import torch

torch.nn.Linear(64, 8)(torch.ones(2, 32))
