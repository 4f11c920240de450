# ruff: noqa
import torch

with torch.autograd.set_detect_anomaly(True):
    x = torch.zeros(3, requires_grad=True)
    (torch.sqrt(x) * 0).sum().backward()
