# ruff: noqa
import torch

model = torch.nn.Linear(4, 4)
(model(torch.full((2, 4), float("inf"))).sum() * 0).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
