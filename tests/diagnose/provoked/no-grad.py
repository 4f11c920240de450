# ruff: noqa
import torch

model = torch.nn.Linear(4, 4)
for parameter in model.parameters():
    parameter.requires_grad_(False)
loss = model(torch.ones(2, 4)).sum()
loss.backward()
