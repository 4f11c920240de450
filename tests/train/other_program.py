"""Somebody else's training with DeepSpeed alone: it saves a checkpoint as DeepSpeed does, and trains on.

    python other_program.py PLAN_FOLDER STAGE SAVED_AFTER CHECKPOINT_FOLDER

One process a rank. What it shares with us is what defines the job: weights at the start, samples and their order, and
the schedule; see `plain.py`. Rank 0 writes the losses of all steps to losses.json.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from plain import _model, _windows
from torch.nn import functional

from tightfit.train.config import WorkerConfig, read_worker_config


def main(plan: Path, stage: int, saved_after: int, folder: Path) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute to compile
    deepspeed.init_distributed("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = read_worker_config(plan / "worker.json")
    steps = config.training.max_steps or 0
    if rank:
        torch.distributed.barrier()  # the first one prepares the data for all
    windows = _windows(config, steps)
    if not rank:
        torch.distributed.barrier()
    engine = _engine(config, stage)
    losses = []
    for step, batches in enumerate(windows):
        tokens = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
        (ids, labels) = batches[rank]
        logits = engine(input_ids=ids, use_cache=False).logits.float()
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        loss = functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum") / tokens
        for group in engine.optimizer.param_groups:
            group["lr"] = _rate(config, step, steps)
        engine.backward(loss * world)  # DeepSpeed takes the mean over the ranks
        engine.step()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        losses.append(float(whole))
        if step + 1 == saved_after:
            engine.save_checkpoint(str(folder), client_state={"told": {"by": "another program"}})
    if not rank:
        (folder / "losses.json").write_text(json.dumps(losses))


def _engine(config: WorkerConfig, stage: int) -> Any:
    model, trainable = _model(config)
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.training.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.levers.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.training.clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.levers.precision == "bf16"},
    }
    optimizer = torch.optim.AdamW(groups, lr=config.training.learning_rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def _rate(config: WorkerConfig, step: int, steps: int) -> float:
    rate, warm = config.training.learning_rate, math.ceil(config.training.warmup * steps)
    if step < warm:
        return rate * (step + 1) / warm
    return rate * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
