# ruff: noqa
import torch
from torch.utils.checkpoint import checkpoint

calls = []


def block(x):
    calls.append(1)
    return torch.nn.functional.linear(x, weight[: 4 if len(calls) == 1 else 3]).sum().exp()


weight = torch.randn(4, 4, requires_grad=True)
checkpoint(block, torch.randn(2, 4, requires_grad=True), use_reentrant=False).backward()
