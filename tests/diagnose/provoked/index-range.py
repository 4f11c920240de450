# ruff: noqa
import torch

embedding = torch.nn.Embedding(100, 8)
embedding(torch.tensor([[1, 2, 151643]]))
