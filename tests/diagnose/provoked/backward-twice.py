# ruff: noqa
import torch

weight = torch.ones(4, requires_grad=True)
loss = (weight * weight).sum()
loss.backward()
loss.backward()
