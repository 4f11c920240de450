# run: deepspeed
# ruff: noqa
import deepspeed
import torch

config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
with engine.no_sync():
    engine.backward(engine(torch.ones(1, 4)).sum())
