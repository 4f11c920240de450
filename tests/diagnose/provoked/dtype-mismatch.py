# ruff: noqa
import torch

layer = torch.nn.Linear(8, 8).to(torch.bfloat16)
layer(torch.ones(2, 8))
