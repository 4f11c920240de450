"""The same job as a plain PyTorch program: one process, one loop, nothing sharded, nothing of our engines.

What it shares with the worker is what defines the job: the data's order and the weights at the start. Everything
else is written out here once more: the mean over a window's tokens, clipping, AdamW, the schedule, fp32 copies of
16-bit weights.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.train.config import WorkerConfig, read_worker_config
from tightfit.train.data.order import Order
from tightfit.train.data.samples import batch, open_samples, prepare
from tightfit.train.data.tokens import load_tokenizer, pad_id
from tightfit.train.scratch import Scratch
from tightfit.train.worker import data_spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def plain_losses(folder: Path) -> list[float]:
    """The loss of every step of the plan in this folder."""
    return [loss for loss, _ in plain_steps(folder)]


def plain_steps(folder: Path) -> list[tuple[float, float]]:
    """Likewise, with the norm of its gradients before they are clipped."""
    torch.set_num_threads(1)
    config = read_worker_config(folder / "worker.json")
    model, trainable = _model(config)
    masters = [param.detach().float().clone() for param in trainable]
    decays = [config.training.weight_decay if param.dim() >= 2 else 0.0 for param in trainable]
    optimizer = torch.optim.AdamW(
        [{"params": [m], "weight_decay": decay} for m, decay in zip(masters, decays, strict=True)], lr=0.0
    )
    found, steps = [], config.training.max_steps or 0
    for step, windows in enumerate(_windows(config, steps)):
        tokens = sum(int((labels[:, 1:] != -100).sum()) for _, labels in windows)
        total = 0.0
        for param in trainable:
            param.grad = None
        for ids, labels in windows:
            logits = model(input_ids=ids, use_cache=False).logits.float()
            flat = logits[:, :-1].reshape(-1, logits.shape[-1])
            loss = functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
            (loss / tokens).backward()
            total += float(loss.detach()) / tokens
        found.append((total, _update(config, step, steps, trainable, masters, optimizer)))
    return found


def _update(config: WorkerConfig, step: int, steps: int, trainable: Any, masters: Any, optimizer: Any) -> float:
    rate, warm = config.training.learning_rate, math.ceil(config.training.warmup * steps)
    done = (step - warm) / (steps - warm)
    now = rate * (step + 1) / warm if step < warm else rate * (1 + math.cos(math.pi * done)) / 2
    for group in optimizer.param_groups:
        group["lr"] = now
    for param, master in zip(trainable, masters, strict=True):
        master.grad = param.grad.float()
    norm = torch.nn.utils.clip_grad_norm_(masters, config.training.clip)
    optimizer.step()
    with torch.no_grad():
        for param, master in zip(trainable, masters, strict=True):
            param.copy_(master)
    return float(norm)


def _model(config: WorkerConfig) -> tuple[Any, list[torch.nn.Parameter]]:
    fields = dict(config.model.config or {})
    hf = AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = DTYPES[config.levers.precision]
    model: Any = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    if config.levers.lora is not None:
        from peft import LoraConfig, get_peft_model

        assert config.adapters is not None
        settings = LoraConfig(
            r=config.levers.lora.rank, lora_alpha=int(config.adapters.alpha), target_modules="all-linear"
        )
        model = get_peft_model(model, settings)
    with torch.device("meta"):
        twin: Any = AutoModelForCausalLM.from_config(hf)
    twin.tie_weights()
    if config.levers.lora is not None:
        twin = get_peft_model(twin, settings, low_cpu_mem_usage=True)
    scratch = Scratch(twin, config.training.seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            drawn = scratch.read(name, tuple(param.shape), 0, param.numel()).view(param.shape)
            param.copy_(drawn.to(dtype))
        for param in model.parameters():
            param.data = param.data.to(dtype)
    model.train()
    return model, [param for param in model.parameters() if param.requires_grad]


def _windows(config: WorkerConfig, steps: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The micro batches of all ranks, one after the other."""
    spec = data_spec(config, "llama")
    tokenizer = load_tokenizer(None, 10**6, trust_remote_code=False)
    cache = config.folder.parent / "plain-cache"
    prepare(spec, tokenizer, cache, lambda *_: None)
    samples = open_samples(spec, tokenizer, cache).train
    order = Order(len(samples), config.effective_batch, config.training.seed)
    size = config.levers.micro_batch
    found = []
    for step in range(steps):
        indices = order.window(step)
        pieces = [indices[at : at + size] for at in range(0, len(indices), size)]
        made = [batch(samples, piece, pad_id(tokenizer), pad_to=None) for piece in pieces]
        found.append([(each.input_ids, each.labels) for each in made])
    return found


def write_examples(path: Path, count: int = 40) -> Path:
    """Questions and answers of very different lengths."""
    lines = []
    for number in range(count):
        words = " ".join(f"word{(number * 7 + at) % 23}" for at in range(1 + (number * 5) % 9))
        lines.append(json.dumps({"instruction": f"Say {number}.", "output": words}))
    path.write_text("\n".join(lines) + "\n")
    return path
