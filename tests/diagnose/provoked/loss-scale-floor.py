# ruff: noqa
import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29880", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed
import torch

config = {
    "train_batch_size": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
for _ in range(8):
    loss = engine(torch.ones(1, 4, dtype=torch.float16)).sum() * float("inf")
    engine.backward(loss)
    engine.step()
