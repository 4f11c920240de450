# ruff: noqa
import torch
import yaml

settings = yaml.safe_load("learning_rate: 1e-4")
torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=settings["learning_rate"])
