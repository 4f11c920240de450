"""A small DeepSpeed script, as users write them: its own loop, optimizer and checkpoints.

`--oom_above K`: rank 0 runs out of memory at `--oom_at` where the config asks for a micro batch above K.
`--need_stage S`: likewise where the config's ZeRO stage is below S.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn

TEXT = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 101.44 MiB is "
    "free. Including non-PyTorch memory, this process has 23.33 GiB memory in use. Of the allocated memory 22.90 GiB "
    "is allocated by PyTorch, and 12.01 MiB is reserved by PyTorch but unallocated."
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--save_dir", default="ds_out")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--oom_above", type=int, default=1_000_000)
    parser.add_argument("--need_stage", type=int, default=0)
    parser.add_argument("--oom_at", type=int, default=2)
    args = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute to compile
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)
    done = 0
    if Path(args.save_dir, "latest").exists():
        _, client = engine.load_checkpoint(args.save_dir)
        done = client["done"]
    micro = engine.train_micro_batch_size_per_gpu()
    for step in range(done, args.steps):
        small = micro <= args.oom_above and engine.zero_optimization_stage() >= args.need_stage
        if step == args.oom_at and engine.global_rank == 0 and not small:
            raise torch.OutOfMemoryError(TEXT)
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.ones(micro, 16)).pow(2).mean()
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(args.save_dir, client_state={"done": step + 1})
    if engine.global_rank == 0:
        stage = engine.zero_optimization_stage()
        sys.stdout.write(f"finished: {done} steps before, micro batch {micro}, stage {stage}\n")


if __name__ == "__main__":
    main()
