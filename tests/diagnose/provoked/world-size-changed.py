# run: deepspeed-then-one
# ruff: noqa
import os

import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}
torch.manual_seed(0)
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
engine.step()
if os.environ["WORLD_SIZE"] == "2":
    engine.save_checkpoint("checkpoint")
else:
    engine.load_checkpoint("checkpoint")
