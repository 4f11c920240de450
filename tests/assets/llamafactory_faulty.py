"""LLaMA-Factory itself, where only a 4-bit model has room: all others run out of memory at the third step."""

from __future__ import annotations

import sys

import torch
from llamafactory.cli import main
from transformers import Trainer

TEXT = (
    "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 23.98 GiB of which 0 bytes is "
    "free. Of the allocated memory 23.10 GiB is allocated by PyTorch, and 1.01 MiB is reserved by PyTorch but "
    "unallocated."
)
_step = Trainer.training_step


def faulty(self, model, inputs, *rest):  # type: ignore[no-untyped-def]
    quantised = any("4bit" in type(module).__name__.lower() for module in model.modules())
    if self.state.global_step == 3 and not quantised:
        raise torch.OutOfMemoryError(TEXT)
    return _step(self, model, inputs, *rest)


Trainer.training_step = faulty
sys.exit(main())
