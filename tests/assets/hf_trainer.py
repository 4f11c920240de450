"""A small Hugging Face Trainer script, as users write them. It runs out of memory where its settings ask for too much.

`--oom_above K`: a step with more than K sequences in a forward pass raises PyTorch's own out-of-memory error.
`--oom_at N`: at that step, and only there. `--die_once FILE`: the first start is killed at `--oom_at`, later ones not.
`--need_stage S`: likewise at `--oom_at`, where the ZeRO stage is below S.
`--wait_at N`: at that step it makes a file `waits`, and waits until there is something in it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# As where they are not installed: the Trainer would import them, for seconds, and use none of them here.
unused = {"bitsandbytes", "datasets", "deepspeed", "pandas", "peft", "sklearn"}
with_deepspeed = "--deepspeed" in sys.argv or "ACCELERATE_USE_DEEPSPEED" in os.environ
sys.modules |= dict.fromkeys(unused - {"deepspeed" if with_deepspeed else ""})

import torch  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

TEXT = (
    "CUDA out of memory. Tried to allocate 1.45 GiB. GPU 0 has a total capacity of 23.64 GiB of which 312.44 MiB is "
    "free. Including non-PyTorch memory, this process has 23.33 GiB memory in use. Of the allocated memory 21.90 GiB "
    "is allocated by PyTorch, and 1.01 GiB is reserved by PyTorch but unallocated."
)


@dataclass
class Faults:
    oom_above: int = 1_000_000
    oom_at: int = 3
    die_once: str = ""
    bug_at: int = 1_000_000
    wait_at: int = 1_000_000
    need_stage: int = 0


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(16) * (index + 1)) % 64
        return {"input_ids": row, "labels": row}


class Faulty(Trainer):
    faults: Faults

    @property
    def stage(self) -> int:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        return 0 if plugin is None else int(plugin.zero_stage)

    def training_step(self, model, inputs, *rest):  # type: ignore[no-untyped-def]
        faults, step = self.faults, self.state.global_step
        if step >= faults.bug_at:
            raise KeyError("labels_of_the_user")
        if step == faults.wait_at:
            waits = Path("waits")
            waits.touch()
            while not waits.read_text(encoding="utf-8"):
                time.sleep(0.1)
        if step == faults.oom_at:
            if inputs["input_ids"].shape[0] > faults.oom_above or self.stage < faults.need_stage:
                raise torch.OutOfMemoryError(TEXT)
            if faults.die_once and not Path(faults.die_once).exists():
                Path(faults.die_once).touch()
                os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(model, inputs, *rest)


def main() -> None:
    faults, args = HfArgumentParser((Faults, TrainingArguments)).parse_args_into_dataclasses()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    trainer = Faulty(model=LlamaForCausalLM(config), args=args, train_dataset=Numbers())
    trainer.faults = faults
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    sys.stdout.write(f"finished at step {trainer.state.global_step}, batch {args.per_device_train_batch_size}\n")


if __name__ == "__main__":
    main()
