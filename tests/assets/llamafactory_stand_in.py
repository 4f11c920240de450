"""Stands in for `llamafactory-cli` on a machine without GPUs: reads its YAML, and fails as a full DCU does.

The text of the failure is that of note 003's users. What has room is decided by the config alone: 4-bit weights, or
sequences of 256 tokens at the most.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

TEXT = """Traceback (most recent call last):
  File "/opt/llamafactory/train/sft/workflow.py", line 98, in run_sft
    train_result = trainer.train(resume_from_checkpoint=None)
  File "/opt/transformers/trainer.py", line 3712, in training_step
    self.accelerator.backward(loss, **kwargs)
torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.45 GiB. GPU 0 has a total capacity of 63.98 GiB of \
which 1.02 GiB is free. Of the allocated memory 61.10 GiB is allocated by PyTorch, and 300.01 MiB is reserved by \
PyTorch but unallocated."""


def main() -> int:
    values = yaml.safe_load(Path(sys.argv[2]).read_text(encoding="utf-8"))
    if values.get("quantization_bit") != 4 and values["cutoff_len"] > 256:
        sys.stderr.write(f"{TEXT}\n")
        return 1
    sys.stdout.write(f"trained with {sys.argv[2]}\n")
    return 0


sys.exit(main())
