# ruff: noqa
import torch

small, large = torch.nn.Linear(4, 4), torch.nn.Linear(4, 8)
large.load_state_dict(small.state_dict())
