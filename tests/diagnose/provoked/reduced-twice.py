# run: deepspeed
# ruff: noqa
import deepspeed
import torch
from torch.utils.checkpoint import checkpoint


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=Twice(), config=config)
engine.backward(engine(torch.ones(1, 4, requires_grad=True)).sum())
