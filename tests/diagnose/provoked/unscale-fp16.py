# ruff: noqa
import torch

model = torch.nn.Linear(4, 4).half()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
scaler.scale(model(torch.ones(2, 4).half()).sum()).backward()
scaler.step(optimizer)
